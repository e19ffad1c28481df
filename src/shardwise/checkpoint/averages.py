"""Averages: the tensors of several checkpoints, of any formats, as one checkpoint of their weighted means.

    names, shapes, dtypes    of each, as a conversion has them  ->  all differences at once
    integers, truth values   read and compared                  ->  all that differ at once
    floats                   in windows: (w1 x1 + w2 x2 + ...) / (w1 + w2 + ...)

The sum is taken from left to right in one declared dtype, which rounds each product and each sum. Its quotient is
rounded once more, to the dtype of the tensor. So it has the bits of the plain loop.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import torch

from shardwise.checkpoint.comparison import compared
from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.conversion import MAX_SHARD_BYTES, Conversion, check_arguments
from shardwise.checkpoint.destinations import Progress
from shardwise.checkpoint.model_files import ConfigPath, as_extra
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.reading import DataFiles, GrowingBuffer
from shardwise.checkpoint.stores import Address, Store, store_of
from shardwise.checkpoint.windows import WINDOW_BYTES, Read
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError, few_of
from shardwise.moving.copies import put
from shardwise.plan.dtypes import COMPUTE_DTYPES, is_complex, promote
from shardwise.plan.names import meant_by, nearest
from shardwise.rewrite.sections import uncollected
from shardwise.space import Piece

Accumulate = Literal["float64", "float32"]
"""The dtype of sums; those of complex numbers have two such parts."""

_AT_ONCE: Final = 1 << 18
"""Elements that are multiplied and added while they are in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageReport:
    """What was averaged."""

    sources: tuple[str, ...]
    """Paths or addresses, in the order of the sum."""
    weights: tuple[float, ...]
    """Of each source, as they were given; 1 each where none were."""
    accumulate: Accumulate
    destination: str
    """Path or address of the folder of the save, or of the Hugging Face files."""
    num_tensors: int
    """That were written."""
    num_averaged: int
    """Of these, tensors of floats or complex numbers."""
    num_equal: int
    """Of these, others, which are equal in all sources."""
    from_first: tuple[str, ...]
    """Those that differ and were taken from the first source, because they were named."""
    num_bytes: int
    """Bytes of the tensors that were written."""
    read_bytes: int
    """Bytes of data files that were read to write them."""
    verified: bool
    """Whether all bytes of all sources were compared with checksums, which only saves of ours are."""
    left_out: tuple[str, ...] = ()
    """Tensors of the first source that are not the model's, where only the model was averaged."""
    files: tuple[str, ...] = ()
    """Other files of the destination, or files that the save keeps."""
    missing: tuple[str, ...] = ()
    """Files without which `from_pretrained` does not load what was written."""
    notes: tuple[str, ...] = ()
    """What of the sources is not averaged, or is a guess: see `Contents.notes`."""


@uncollected()
def average(
    sources: Sequence[Address],
    destination: Address,
    *,
    weights: Sequence[float] | None = None,
    accumulate: Accumulate = "float64",
    to: Literal["whole", "hf"] = "whole",
    dtype: str | None = None,
    optimizer: bool = False,
    from_first: Collection[str] = (),
    config: ConfigPath = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> AverageReport:
    """Write the weighted mean of checkpoints, of any formats that `open` reads, to `destination`.

    sources: two or more. Of a folder of saves the newest counts; name the folder of a save to mean another one. All
        have the same names, shapes and dtypes.
    weights: one for each, any finite numbers whose sum is not 0; the default is 1 each.
    accumulate: the dtype in which `(w1 x1 + w2 x2 + ...) / (w1 + w2 + ...)` is computed, from left to right. The result
        is rounded once to the dtype of the tensor.
    to: "whole", a save of ours, or "hf", a folder of Hugging Face files; see `convert`.
    dtype: of the floats in "hf": masters are averaged where there are some, as for `export_hf`.
    optimizer: average the state of optimizers too (only into a save). Their settings are those of the first source.
    from_first: names or globs of tensors of integers, truth values or narrow floats that may differ: the first source
        has what is written. Others of these kinds have to be equal to the bit.
    config, max_shard_bytes: see `convert`.

    Memory stays below 128 MiB plus names and plans, whatever the number of sources. The save has no step. Its extra
    says of what it is the average, under "average"; that of the sources is left out, but for the files of the model.
    Raises CheckpointError with all differences at once, and for damage and what cannot be written.
    """
    _check(sources, weights, accumulate, to, dtype, from_first)
    check_arguments(config=config, max_shard_bytes=max_shard_bytes, flags={"optimizer": optimizer})
    if optimizer and to == "hf":
        raise CheckpointError(
            "optimizer=True (--optimizer) was asked for files of Hugging Face, which hold no such state"
        )
    stores = [store_of(each) for each in sources]
    # Files of Hugging Face hold the model alone: what is averaged without optimizers is what they would hold.
    conversions = [
        Conversion.of(store, None, to="whole" if optimizer else "hf", config=config, dtype=dtype) for store in stores
    ]
    first = conversions[0]
    places = [each.contents.location for each in conversions]
    rule = _AveragingRule(tuple(map(float, weights or [1] * len(stores))), torch_dtype(accumulate))
    averaged = _AveragedOutputs.of(stores, [each.outputs for each in conversions], rule)
    if narrower := [name for name in averaged.means if not _holds(accumulate, averaged.tensors[name].dtype)]:
        raise CheckpointError(
            f"accumulate is {accumulate}, to which {few_of(narrower, quotes=False)} would be rounded before the sum; "
            "give float64"
        )
    taken = averaged.compare(from_first)
    record = {"sources": places, "weights": list(rule.weights), "accumulate": accumulate}
    contents = replace(
        first.outputs.contents,
        step=None,
        layout=f"average of {len(stores)} checkpoints",
        extra={"average": record, **as_extra(first.files.kept)},
        settings=first.outputs.contents.settings if optimizer else {},
    )
    conversion = replace(first, outputs=replace(averaged, contents=contents))
    made = conversion.write(destination, to, max_shard_bytes=max_shard_bytes, certify=False, progress=progress)
    return AverageReport(
        sources=tuple(places),
        weights=rule.weights,
        accumulate=accumulate,
        destination=made.destination,
        num_tensors=made.num_tensors,
        num_averaged=len(averaged.means),
        num_equal=made.num_tensors - len(averaged.means) - len(taken),
        from_first=taken,
        num_bytes=made.num_bytes,
        read_bytes=made.read_bytes,
        verified=all(each.contents.verifiable for each in conversions),
        left_out=made.left_out,
        files=made.files,
        missing=made.missing,
        notes=tuple(dict.fromkeys(note for each in conversions for note in each.contents.notes)),
    )


def _check(
    sources: object, weights: object, accumulate: object, to: object, dtype: str | None, from_first: object
) -> None:
    """Raise CheckpointError, with all that is wrong, for arguments that cannot be."""
    problems = []
    if isinstance(sources, str) or not isinstance(sources, Sequence) or len(sources) < 2:
        problems.append(f"an average is of two checkpoints or more, given as a list, not {sources!r:.100}")
    elif weights is not None:
        if not isinstance(weights, Sequence) or not all(_is_finite(each) for each in weights):
            problems.append(f"weights are finite numbers, one for each checkpoint, not {weights!r:.100}")
        elif len(weights) != len(sources):
            problems.append(f"{len(weights)} weights were given for {len(sources)} checkpoints; give one for each")
        elif not sum(map(float, weights)):
            problems.append(f"the weights {list(weights)} have the sum 0, by which nothing can be divided")
    if accumulate not in get_args(Accumulate):
        problems.append(f"accumulate is {accumulate!r}; sums are taken in {' or '.join(get_args(Accumulate))}")
    if to not in ("whole", "hf"):
        problems.append(f"an average goes to 'whole', a save, or 'hf', files of Hugging Face, and not to {to!r}")
    if dtype is not None and to != "hf":
        problems.append(f"dtype={dtype!r} (--dtype) is for files of Hugging Face (hf); a save keeps the dtypes")
    if isinstance(from_first, str) or not isinstance(from_first, Collection):
        problems.append(f"from_first is a list of names or globs, not {from_first!r:.100}")
    if problems:
        raise CheckpointError(*problems)


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def _holds(accumulate: str, dtype: str) -> bool:
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    return promote(accumulate, real) == accumulate


@dataclass(frozen=True, slots=True)
class _AveragingRule:
    weights: tuple[float, ...]
    accumulate: torch.dtype

    def dtype_of(self, dtype: str) -> torch.dtype:
        """In which the elements of a tensor are added."""
        return self.accumulate.to_complex() if is_complex(dtype) else self.accumulate

    def add(self, sums: torch.Tensor, elements: torch.Tensor, at: int) -> None:
        """Add what source `at` has, flat, to the sums; the first of them is written over what there was."""
        for start in range(0, len(elements), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(elements))
            product = elements[start:stop].to(sums.dtype)
            # A product and a sum, each rounded: one instruction for both would round once, and give other bits.
            product = product.mul_(self.weights[at]) if self.weights[at] != 1 else product
            if at:
                sums[start:stop].add_(product)
            else:
                sums[start:stop].copy_(product)

    def mean(self, sums: torch.Tensor, target: torch.Tensor) -> None:
        """Round the sums, divided, to the target."""
        for start in range(0, len(sums), _AT_ONCE):
            part = sums[start : start + _AT_ONCE]
            target[start : start + _AT_ONCE].copy_(part.div_(sum(self.weights)))


@dataclass(frozen=True, kw_only=True)
class _AveragedOutputs(Outputs):
    """What is written of several checkpoints: the tensors of the first, with means for elements."""

    stores: Sequence[Store]
    sides: Sequence[Outputs]
    rule: _AveragingRule
    means: frozenset[str] = field(default_factory=frozenset)
    """Tensors that are averaged. Of others the first checkpoint's are written."""
    sums: GrowingBuffer = field(default_factory=GrowingBuffer)
    """Memory of sums, for readers that read one after the other."""

    @classmethod
    def of(cls, stores: Sequence[Store], sides: Sequence[Outputs], rule: _AveragingRule) -> "_AveragedOutputs":
        """Raises CheckpointError with all differences in names, shapes and dtypes."""
        first = sides[0]
        if findings := [each for other in sides[1:] for each in _differences(first, other)]:
            raise CheckpointError(*findings, about="these checkpoints cannot be averaged")
        return cls(
            contents=first.contents,
            tensors=first.tensors,
            groups=first.groups,
            stores=stores,
            sides=sides,
            rule=rule,
            # Others are compared.
            means=frozenset(
                name
                for name, tensor in first.tensors.items()
                if tensor.dtype in COMPUTE_DTYPES or tensor.dtype in ("complex64", "complex128")
            ),
        )

    def reader(self, files: DataFiles, window: GrowingBuffer | None = None) -> Read:
        """Reads means, out of all checkpoints one after the other."""
        # One window for all sources, and one memory to read into: each is added before the next is read.
        window, buffer = window or GrowingBuffer(WINDOW_BYTES), GrowingBuffer(WINDOW_BYTES)
        of_sides = [files]
        for store in self.stores[1:]:
            of_sides.append(DataFiles(store, turns_with=of_sides[-1]))
        readers = [side.reader(each, window) for side, each in zip(self.sides, of_sides, strict=True)]

        def read(pieces: Sequence[Piece]) -> list[torch.Tensor]:
            means = [each for each in pieces if each.name in self.means]
            room = buffer.parts([(each.num_elements, torch_dtype(each.dtype)) for each in pieces])
            room_of_sums = self.sums.parts([(each.num_elements, self.rule.dtype_of(each.dtype)) for each in means])
            parts, sums = dict(zip(pieces, room, strict=True)), dict(zip(means, room_of_sums, strict=True))
            for at, (reader, side) in enumerate(zip(readers, self.sides, strict=True)):
                wanted = pieces if at == 0 else means
                for piece, elements in zip(wanted, reader([_in(side, each) for each in wanted]), strict=True):
                    if piece.name in self.means:
                        self.rule.add(sums[piece], elements, at)
                    else:
                        put(parts[piece], elements)
            for each in of_sides[1:]:  # those of the first count for all
                files.read_bytes, each.read_bytes = files.read_bytes + each.read_bytes, 0
            for piece in means:
                self.rule.mean(sums[piece], parts[piece])
            return [parts[piece] for piece in pieces]

        return read

    def compare(self, from_first: Collection[str]) -> tuple[str, ...]:
        """Compare what is not averaged. Returns the names of what differs and may.

        Raises CheckpointError with all that differs and may not, and for names and globs that mean nothing.
        """
        others = {name: tensor for name, tensor in self.tensors.items() if name not in self.means}
        may_differ: set[str] = set()
        for pattern in from_first:
            meant = meant_by(pattern, list(others))
            if not meant:
                near = nearest(pattern, list(others))
                hint = f"the nearest is {near}" if near else "there are none"
                raise CheckpointError(
                    f"from_first={pattern!r} (--from-first) means none of the {len(others)} tensors of integers, truth "
                    f"values or narrow floats; {hint}"
                )
            may_differ.update(meant)
        differing: dict[str, list[str]] = {}
        if others:
            for at, side in enumerate(self.sides[1:], 1):
                for name in self._unequal(others, at):
                    differing.setdefault(name, []).append(side.contents.location)
        findings = [
            f"{name} ({others[name].dtype}) in {', '.join(where)} is not as in {self.sides[0].contents.location}"
            for name, where in differing.items()
            if name not in may_differ
        ]
        if findings:
            advice = (
                "only floats of 16 bits and more are averaged. Take others from the first checkpoint by "
                "from_first=[...] (--from-first NAME), and dequantise narrow floats before"
            )
            raise CheckpointError(*findings, advice, about="these checkpoints cannot be averaged")
        return tuple(differing)

    def _unequal(self, tensors: Mapping[str, StoredTensor], at: int) -> list[str]:
        files = DataFiles(self.stores[0])
        others = DataFiles(self.stores[at], turns_with=files)
        readers = self.sides[0].reader(files), self.sides[at].reader(others)
        pairs = {name: (each.whole, _in(self.sides[at], each.whole)) for name, each in tensors.items()}
        return list(compared(pairs, *readers))


def _in(side: Outputs, piece: Piece) -> Piece:
    """A piece under the name that its tensor has in another checkpoint, where it may be tied to another one."""
    return replace(piece, name=side.aliases.get(piece.name, piece.name))


def _differences(first: Outputs, other: Outputs) -> Iterator[str]:
    """What of the names, shapes and dtypes of a checkpoint is not as in the first one."""
    here, there = first.contents.location, other.contents.location
    met: dict[str, str] = {}
    for name, tensor in first.tensors.items():
        stored = other.aliases.get(name, name)
        found = other.tensors.get(stored)
        if found is None:
            yield f"{name} is in {here} and not in {there}"
        elif stored in met:
            yield f"{name} and {met[stored]} are two tensors in {here}, and tied in {there}"
        elif found.shape != tensor.shape:
            yield f"{name} has shape {list(tensor.shape)} in {here} and {list(found.shape)} in {there}"
        elif found.dtype != tensor.dtype:
            yield f"{name} has dtype {tensor.dtype} in {here} and {found.dtype} in {there}"
        met.setdefault(stored, name)
    for name in other.tensors:
        if name not in met and name in first.aliases:
            yield f"{name} and {first.aliases[name]} are tied in {here}, and two tensors in {there}"
        elif name not in met:
            yield f"{name} is in {there} and not in {here}"
