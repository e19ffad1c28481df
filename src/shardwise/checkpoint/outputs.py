"""Outputs: the tensors that a conversion writes, those of a checkpoint as they are or what a rewrite makes of them."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from shardwise.checkpoint.comparison import joined_numbers
from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor, is_model_name
from shardwise.checkpoint.model_files import parameters_of
from shardwise.checkpoint.reading import DataFiles, GrowingBuffer
from shardwise.checkpoint.renamed_settings import names_state
from shardwise.checkpoint.rewritten import RewrittenContents, kept_in, metas_of_contents, rewritten_contents
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.windows import (
    LARGE_WINDOW_BYTES,
    WINDOW_BYTES,
    PieceReader,
    Read,
    check_whole,
    pieces_in_windows,
)
from shardwise.errors import CheckpointError, RewriteError
from shardwise.plan.dtypes import COMPUTE_DTYPES, itemsize_bytes
from shardwise.plan.names import plain_names
from shardwise.plan.saved_settings import CONFIG
from shardwise.rewrite import Checked, Rewrite
from shardwise.rewrite.spelling import quoted
from shardwise.rewrite.strided_views import fill_of
from shardwise.space import Piece

_MANY_VIEWS = 64
"""A tensor of more views of its sources takes long to be cut across them."""

_GRAINS = 8
"""A window has room for so many grains at least: what is left of it is little."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is written of a checkpoint."""

    contents: Contents
    """The checkpoint as it is, or what a rewrite makes of it; maybe more than is written."""
    tensors: Mapping[str, StoredTensor]
    """By name, in the order in which they are written. Their pieces are the places of their elements in the checkpoint,
    in this order, maybe under another name and in another dtype. Outputs that are put together have none.
    """
    groups: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are best read together: each with the first output of its group. Others can be cut anywhere."""

    @cached_property
    def checked(self) -> Checked | None:
        """The rewrite that makes them; None: they are as they are stored."""
        return self.contents.effects.checked

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other names of outputs (ties)."""
        return {alias: name for alias, name in self.contents.aliases.items() if name in self.tensors}

    @property
    def num_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def main_dtype(self) -> str | None:
        """The dtype of most floats; None where there are none."""
        # By elements, not by tensors: a model may have many small norms in float32 and a few large matrices in
        # bfloat16.
        sizes: Counter[str] = Counter()
        for each in self.tensors.values():
            if each.dtype in COMPUTE_DTYPES:
                sizes[each.dtype] += math.prod(each.shape)
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)

    def check_agreement(self, store: Store) -> None:
        """Raise CheckpointError where one number is made of several that are not equal to the bit: reads these."""
        if not (joined := self.contents.effects.joined):
            return
        # Only those that are written: an export of the model need not refuse because of optimizer state.
        used = {each for name in self.tensors for each in sources_of(self.checked, name)}
        groups = [group for group in joined if not used.isdisjoint(group)]
        if findings := joined_numbers(DataFiles(store), self.contents, groups).findings():
            raise CheckpointError(*findings, about=f"{self.contents.location} does not fit the rewrite")

    def unchanged(self, name: str) -> str | None:
        """The tensor of the checkpoint that an output is, in the same order and dtype; None where it is made."""
        source = _unchanged_source(self.checked, name)
        is_same = source is not None and self.contents.stored.tensors[source].dtype == self.tensors[name].dtype
        return source if is_same else None

    def reader(self, files: DataFiles, window: GrowingBuffer | None = None) -> Read:
        """Reads any pieces of the outputs, out of the files of the checkpoint. window: see `PieceReader`."""
        plain = PieceReader(files, self.contents, window=window).read
        if self.checked is None or not self.checked.quantises:
            return plain
        from shardwise.checkpoint.block_scales import quantising  # the core works without it

        return quantising(self.checked, plain, PieceReader(files, self.contents).read)

    def windows(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Cut pieces of outputs into parts that are read at a time, in order.

        Windows are of WINDOW_BYTES. Outputs that need the same elements of the checkpoint, or need them in another
        order, share a window up to LARGE_WINDOW_BYTES: else its blocks would be read once per window.
        """
        if self.checked is None:
            yield from _cut(pieces)
            return
        window: list[Piece] = []
        num_bytes = 0
        for unit in self._units(pieces):
            more = sum(each.num_elements * itemsize_bytes(each.dtype) for each in unit)
            if window and num_bytes + more > WINDOW_BYTES:
                yield window
                window, num_bytes = [], 0
            window += unit
            num_bytes += more
        if window:
            yield window

    def _units(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Parts of pieces in one window."""
        for _, group in groupby(pieces, lambda piece: self.groups.get(piece.name, piece.name)):
            together = list(group)
            if together[0].name in self.groups:
                yield from _cut(together, max_bytes=LARGE_WINDOW_BYTES)
            else:
                yield from _cut(together)


def _cut(pieces: Sequence[Piece], *, max_bytes: int | None = None) -> Iterator[list[Piece]]:
    grains = [_grain(piece, (max_bytes or WINDOW_BYTES) // _GRAINS) for piece in pieces]
    return pieces_in_windows(pieces, max_bytes=max_bytes, grains=grains)


def _grain(piece: Piece, max_bytes: int) -> int:
    """Elements of a piece after whose multiples it is best cut: as many as fit in `max_bytes` of its last dims.

    So parts are boxes, which are planned at once, and not a part of a row, rows, and a part of another.
    """
    grain = 1
    room = max_bytes // itemsize_bytes(piece.dtype)
    for size in reversed(piece.shape[1:]):
        if grain * size > room:
            break
        grain *= size
    return grain if grain and not piece.elements.start % grain else 1


def model_of(contents: Contents) -> Contents:
    """What of a checkpoint belongs to the model."""
    tensors = {name: each for name, each in contents.tensors.items() if is_model_name(name, contents.format)}
    aliases = {alias: name for alias, name in contents.aliases.items() if name in tensors}
    return replace(contents, tensors=tensors, aliases=aliases)


def without_wrappers(model: Contents) -> Rewrite | None:
    """A rewrite to the names that the model has without wrappers around its modules; None where it has no other."""
    plain = plain_names([*model.tensors, *model.aliases])
    return Rewrite([f"{quoted(name)} -> {quoted(each)}" for name, each in plain.items()]) if plain else None


def sources_of(checked: Checked | None, name: str) -> Collection[str]:
    """The stored tensors that a tensor is made of, by a rewrite or as it is."""
    return (name,) if checked is None else checked.sources_of(name)


def made_of(contents: Contents, rewrite: Rewrite, config: Any, *, model_only: bool) -> RewrittenContents:
    """Apply a rewrite to a checkpoint that is converted.

    config: the configuration of the model, or None; parameters that the rewrite lacks are looked up there.
    model_only: what is not the model's is left out, unless the rewrite names it, and settings are left out.
    Raises RewriteError with every finding, and CheckpointError for settings.
    """
    if lacking := rewrite.parameters_needed - rewrite.parameters.keys():
        found = parameters_of(config, lacking)
        if unknown := sorted(lacking - found.keys()):
            has = f"and {contents.location} has no {CONFIG} that says them"
            where = has if config is None else f"which {CONFIG} does not say"
            raise RewriteError(
                f"the rewrite needs {', '.join(unknown)}, {where}; give them: Rewrite(..., parameters={{...}}), or on "
                f"the command line {' '.join(f'--parameter {name}=...' for name in unknown)}, or a {CONFIG} that does "
                "(--config)"
            )
        rewrite = rewrite.with_parameters(found)
    # A rewrite that names optimizer state means it; then all of the source is there for it.
    if model_only and not names_state(rewrite):
        contents = model_of(contents)
    # Files of a model alone have no optimizers, so that the settings of these need not fit.
    view = rewritten_contents(contents, rewrite, settings={} if model_only else None)
    if kept := [*sorted(view.checked.added), *(f"elements of {name}" for name in kept_in(view.checked))]:
        raise CheckpointError(
            f"the rewrite adds {', '.join(kept)}, which keep the values of the state that is loaded "
            "into. A conversion has no such state: leave these statements (`_ -> ...`, fill='kept') out, or load with "
            "this rewrite"
        )
    if view.unfit:
        raise CheckpointError(*view.unfit, about=f"the rewrite does not fit the optimizers of {contents.location}")
    return view


def way_back_of(made: Contents, written: Contents) -> Contents:
    """What was written of contents, as the inverse of the rewrite that has made these leads back from it."""
    if (checked := made.effects.checked) is None:
        return written
    # A certificate says what does not come back, so that the way back must not refuse it.
    inverse = checked.inverse(lossy="allow")
    return rewritten_contents(written, inverse, recorded=metas_of_contents(made.stored), settings={})


def outputs_of(contents: Contents, *, model_only: bool = False) -> Outputs:
    """What is written of a checkpoint, as it is or as a rewrite makes it.

    model_only: outputs that are not the model's are left out. What it adds (`_ -> b`) has no elements, and is left out.
    Raises CheckpointError for stored pieces that do not make up what is needed.
    """
    stored, checked = contents.stored, contents.effects.checked
    if checked is None:
        check_whole(contents, contents.tensors.values())
        return Outputs(contents=contents, tensors=contents.tensors)
    made = {
        name: tensor
        for name, tensor in contents.tensors.items()
        if not model_only or is_model_name(name, stored.format)
    }
    sources = {name: sorted(checked.sources_of(name)) for name in made}
    # Only of what is written: a checkpoint without all of its optimizer state can still become a model.
    needed = dict.fromkeys(each for found in sources.values() for each in found)
    check_whole(stored, (stored.tensors[name] for name in needed))
    groups = _groups(sources)
    sizes = Counter(groups.values())
    turn = {group: turn for turn, group in enumerate(dict.fromkeys(groups.values()))}
    return Outputs(
        contents=contents,
        tensors={
            name: _with_pieces(contents, checked, name) for name in sorted(made, key=lambda each: turn[groups[each]])
        },
        # Who is alone in its group and read in order can be cut anywhere. Others are read as wholes, as far as a
        # window goes, for each part would read the same blocks again.
        groups={
            name: group
            for name, group in groups.items()
            # What is quantised is read block by block in any case.
            if checked.quantised(name) is None and (sizes[group] > 1 or not _is_cheap_to_cut(checked, name))
        },
    )


def _with_pieces(contents: Contents, checked: Checked, name: str) -> StoredTensor:
    """An output, with its pieces where the checkpoint has its elements in this order."""
    output, source = contents.tensors[name], _unchanged_source(checked, name)
    if source is None:
        return output
    whole = output.whole
    pieces = tuple(
        StoredPiece(
            piece=replace(whole, offset=each.piece.offset, shape=each.piece.shape, run=each.piece.run),
            file=each.file,
            start=each.start,
            # Those of the source are of other blocks, or of the elements before a cast; what is written has its own.
            checksums=None,
        )
        for each in contents.stored.tensors[source].pieces
    )
    return replace(output, pieces=pieces)


def _unchanged_source(checked: Checked | None, name: str) -> str | None:
    """The source whose elements an output has, in the same shape and order, maybe in another dtype; or None."""
    if checked is None or checked.is_scales(name):
        return name if checked is None else None
    value = checked.value(name)
    return next((each for each in checked.sources_of(name) if value.is_identity_of(each, checked.sources[each])), None)


def _is_cheap_to_cut(checked: Checked, name: str) -> bool:
    """Whether an output can be read in parts, first elements first, without reading parts of its sources again.

    So it is where elements come in the order that they have in the sources, and each stretch of a source is used once.
    It is not where every part would have something of very many sources, which it takes long to find.
    """
    value = checked.value(name)
    if len(value.views) > _MANY_VIEWS and any(view.shape[1:] != value.shape[1:] for view in value.views):
        return False
    reaches: dict[str, list[tuple[int, int]]] = {}
    for view in value.views:
        if fill_of(view.source) is not None:
            continue
        steps = [(stride, size) for stride, size in zip(view.strides, view.shape, strict=True) if size > 1]
        if steps != sorted(steps, reverse=True):
            return False
        stop = view.base + 1 + sum((size - 1) * stride for stride, size in steps)
        reaches.setdefault(view.source, []).append((view.base, stop))
    return all(stop <= start for each in reaches.values() for (_, stop), (start, _) in pairwise(sorted(each)))


def _groups(sources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """For every output one that stands for all that common sources connect with it."""
    leaders: dict[str, str] = {}

    def leader(name: str) -> str:
        while leaders[name] != name:
            leaders[name] = name = leaders[leaders[name]]
        return name

    # Union-find: outputs that share a source come together, and so do those that share one with either.
    users: dict[str, str] = {}
    for name, found in sources.items():
        leaders[name] = name
        for source in found:
            leaders[leader(name)] = leader(users.setdefault(source, name))
    return {name: leader(name) for name in leaders}
