"""The figures of a step, its loss and its norm: made of what every rank gives, before any of them updates.

    CPU       given   | loss 8 | squares 8 |                             in the message that closes the step
                      | kinds | shares |                                 also, of other entries of losses
                      | (number 8, norm 8) ..                            also, where gradients are whole

    device    given   | losses | norm | weights | digests | entries |    one all-gather behind the kernels of backward
              table   | rank 0's | rank 1's | .. | norm of all |
                          |                        +--> factor of the clip; whether to skip, for the optimizer
                          +--> a copy for the host, on its way:  loss, norm, skipped, when somebody looks

    weights   of microbatches, where `loss_weight` made them on the device
    digests   of the batch, where it is on the device and ranks along pp or tp share it

On a device the host waits for none of it: it goes on with the update, which the device carries out or leaves out. The
table is the same on all ranks, so that they clip and skip alike, and the host computes from it as it does on the CPU.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import understood
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.forward.kept_numbers import KeptNumbers, divide_on_device
from shardwise.engine.step.channels import RankGroups
from shardwise.engine.step.exchange import (
    Weighting,
    check_weighting,
    numbers_in,
    refuse_different_batches,
    sum_of_losses,
)
from shardwise.engine.step.loss_entries import LossEntries, kinds_of_ranks, names_in, sums_of_entries
from shardwise.engine.step.norm import (
    clip,
    divide_and_square,
    norm_of,
    norm_on_device,
    norms_of,
    squares_of_atoms,
    total_of_each,
    total_of_norms,
)
from shardwise.engine.step.norm_parts import Key, NormParts

_PURPOSE = "losses and norms"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What the figures of a step are made of on one rank."""

    losses: Sequence[MicrobatchLoss]
    """Of each microbatch."""
    weighting: Weighting
    weights: torch.Tensor | None
    """Of each microbatch, where the weights are on the device."""
    digests: Mapping[str, torch.Tensor]
    """Of the entries of the batch that are on the device, where ranks share it."""
    runs: Sequence[tuple[torch.Tensor, bool]]
    """The owned sums of gradients, flat, as few as follow each other in memory, and whether this rank counts each in
    the norm."""
    parts: Sequence[torch.Tensor]
    """The flat memory in which they are."""
    divisor: int
    """What makes the sums means; 1 where they are means already."""
    scale: torch.Tensor | None
    """What losses were multiplied by, and gradients are divided by in addition."""
    norms: NormParts | None
    """The parts whose norms are asked for."""
    marked: Sequence[tuple[torch.Tensor, int]]
    """With `norms`: the owned sums as its runs, each with its atom."""
    used: Mapping[int, torch.Tensor]
    """Where each gradient is whole on one rank: those that one process would have, by the number of the parameter in
    the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the figures of all steps of a rank have in common."""

    world: Channel
    data_rank: int
    ranks: RankGroups
    are_whole: bool
    """Whether each gradient is whole on one rank: the norm is then that of one process in every bit."""
    dtypes: Sequence[torch.dtype]
    """Of the gradients of all parameters in the model."""
    norm_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFigures:
    """Loss and norm of a step, the same on every rank, which the host has computed."""

    loss: float
    """The weighted mean. On a device raises as `check` does."""
    weight: float
    """The sum of all weights."""
    grad_norm: float
    """Of the mean gradient; nan where it is not finite."""
    norms: Mapping[Key, float]
    """Of the parts that were asked for, as `grad_norm`."""
    norm_dtype: torch.dtype
    kept: KeptNumbers
    others: Mapping[str, float] = field(default_factory=dict)
    """The weighted means of what the loss function gives besides the loss."""
    is_known = True
    """Whether the host has them. Else to read a number waits for the device."""
    may_be_refused = False
    """Whether `check` can raise."""
    found_inf = None
    """On a device: 1 if the step must be skipped, else 0. Optimizers that skip there ask for it in this form."""

    @property
    def is_finite(self) -> bool:
        """Whether the norm is."""
        return math.isfinite(self.grad_norm)

    def check(self) -> None:
        """Raise MismatchError for ranks along tp with unlike losses or batches, and BatchError for weights.

        On the host that was done when they were made.
        """

    def clip(self, parts: Sequence[torch.Tensor], max_norm: float, key: Key | None = None) -> None:
        """Scale gradients, in the flat memory that has them, so that the norm is at most `max_norm`.

        key: of the part whose norm it is; None: of all.
        """
        norm = torch.tensor(self.grad_norm if key is None else self.norms[key], dtype=self.norm_dtype)
        clip(parts, norm, max_norm, self.kept)


_NormAndParts: TypeAlias = tuple[torch.Tensor, dict[Key, torch.Tensor]]
"""The norm of all gradients, and those of the parts that are asked for."""


class _Making:
    """What is made alike on the host and on a device, where each gradient is whole on one rank."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._kept = KeptNumbers(around.world.device)

    @property
    def _sends_norms(self) -> bool:
        return self._around.are_whole and self._around.world.size > 1

    def _norms_of_one(self, own: RankFigures) -> _NormAndParts:
        """All gradients are on this rank."""
        numbers = list(own.used)
        norms = {numbers[at]: norm for at, norm in norms_of(list(own.used.values())).items()}
        return self._norm_and_parts(own, norms, total_of_each)

    def _norms_of_numbers(self, own: RankFigures, norms: Mapping[int, torch.Tensor]) -> _NormAndParts:
        """norms: of the parameters of all ranks, by number, in float64."""
        return self._norm_and_parts(own, norms, partial(total_of_norms, dtypes=self._around.dtypes))

    def _norm_and_parts(
        self, own: RankFigures, norms: Mapping[int, torch.Tensor], total: Callable[..., torch.Tensor]
    ) -> _NormAndParts:
        parts = {
            key: total({at: norm for at, norm in norms.items() if at in numbers}, self._kept, of=f" of {key}")
            for key, numbers in (own.norms.numbers.items() if own.norms is not None else ())
        }
        return total(norms, self._kept), parts


class MadeOnHost(_Making):
    """Figures of ranks on CPUs, in one message with what else they agree on."""

    def given(self, own: RankFigures) -> list[bytes]:
        """Divide the gradients; what this rank says in the message that closes the step, in as many parts as all."""
        around = self._around
        # One division for both: powers of two cost no rounding.
        divisor = own.divisor if own.scale is None else own.divisor * float(own.scale)
        # Where gradients are whole the norm is made of those of parameters: nobody asks for squares.
        if around.are_whole or own.norms is None:
            runs = [(each, False) for each, _ in own.runs] if around.are_whole else own.runs
            squares = [divide_and_square(runs, divisor, around.world.device)]
        else:
            squares = squares_of_atoms(own.marked, divisor, around.world.device, num_atoms=own.norms.num_atoms)
        found = norms_of(list(own.used.values())) if self._sends_norms else {}
        # One copy to the host for all norms. float64 holds any float32 norm exactly, for the way through the message.
        norms = torch.stack([found[at].double() for at in range(len(found))]).tolist() if found else []
        values = torch.stack([each.loss.double() for each in own.losses]).tolist() if own.losses else []
        entries = LossEntries(own.losses, own.weighting, around.data_rank)
        loss = own.weighting.share_of_mean(values, around.data_rank)
        pairs = (struct.pack("<qd", *each) for each in zip(own.used, norms, strict=False))
        said = [struct.pack(f"<{1 + len(squares)}d", loss, *squares), entries.packed_kinds(), entries.packed_shares()]
        return [*said, *([b"".join(pairs)] if around.are_whole else [])]

    def made(self, own: RankFigures, answers: Sequence[RankValues]) -> KnownFigures:
        """From what all ranks said, by parts. All of them call it together."""
        around = self._around
        has_atoms = own.norms is not None and not around.are_whole
        num_atoms = own.norms.num_atoms if own.norms is not None and has_atoms else 1
        shares, *squares = numbers_in(answers[0], 1 + num_atoms, purpose=_PURPOSE)
        loss = sum_of_losses(shares, around.ranks.alike_index, is_exact=True)
        kinds, given = answers[1:3]
        others = sums_of_entries(kinds, given, around.ranks.alike_index, is_exact=True, purpose=_PURPOSE)
        if around.are_whole:
            if around.world.size == 1:
                total, of_parts = self._norms_of_one(own)
            else:
                pairs = [pair for each in understood(answers[3], self._norms_in, purpose=_PURPOSE) for pair in each]
                found = torch.tensor([norm for _, norm in pairs], dtype=torch.float64).unbind()
                norms = dict(zip((number for number, _ in pairs), found, strict=True))
                total, of_parts = self._norms_of_numbers(own, norms)
            norm = _or_nan(float(total))
            parts = {key: _or_nan(float(each)) for key, each in of_parts.items()}
        else:
            norm = norm_of(np.concatenate(squares), around.norm_dtype)
            parts = {
                key: norm_of([square for at in atoms for square in squares[at]], around.norm_dtype)
                for key, atoms in (own.norms.atoms.items() if own.norms is not None else ())
            }
        return KnownFigures(
            loss=loss,
            weight=own.weighting.total,
            grad_norm=norm,
            norms=parts,
            norm_dtype=around.norm_dtype,
            kept=self._kept,
            others=others,
        )

    def _norms_in(self, packed: bytes) -> list[tuple[int, float]]:
        return [(_known(number, self._around), norm) for number, norm in struct.iter_unpack("<qd", packed)]


def _known(number: int, around: "Surroundings") -> int:
    """The number of a parameter. Raises ValueError for one that there is not."""
    if not 0 <= number < len(around.dtypes):
        raise ValueError(f"parameter {number} of {len(around.dtypes)}")
    return number


def _or_nan(norm: float) -> float:
    return norm if math.isfinite(norm) else math.nan


class MadeOnDevice(_Making):
    """Figures that stay on the device until somebody looks."""

    def given(self, own: RankFigures) -> list[bytes]:
        """See `MadeOnHost`. Only what the hosts have to know to bring the norms of parameters together."""
        divide_on_device(own.parts, own.divisor, own.scale, self._kept)
        numbers = [len(own.digests), *(own.used if self._sends_norms else ())]
        return [
            struct.pack(f"<{len(numbers)}q", *numbers),
            LossEntries(own.losses, own.weighting, self._around.data_rank).packed_kinds(),
        ]

    def made(self, own: RankFigures, answers: Sequence[RankValues]) -> "DeviceFigures":
        """From what all ranks said, by parts. All of them call it together."""
        around, world = self._around, self._around.world
        used, said = answers
        kinds = kinds_of_ranks(said, purpose=_PURPOSE)
        told = understood(used, self._counts_in, purpose=_PURPOSE)
        num_atoms, num_parts = (1, 0) if own.norms is None else (own.norms.num_atoms, len(own.norms.numbers))
        names = names_in(kinds)
        num_losses = own.weighting.counts[[*around.ranks.data_ranks]].tolist()
        places = _Places(
            sizes=[
                (
                    count,
                    len(numbers) if self._sends_norms else 0 if around.are_whole else num_atoms,
                    0 if own.weights is None else count,
                    num_digests,
                    count * len(names) if given else 0,
                )
                for count, (num_digests, numbers), given in zip(num_losses, told, kinds, strict=True)
            ],
            has_weights=own.weights is not None,
            names=names,
        )
        # In float64, which holds any loss and any norm exactly.
        table = self._kept.place("table", places.total + 1 + num_parts, dtype=torch.float64)
        if world.size == 1:
            norm, parts = self._norms_of_one(own)
            weights = () if own.weights is None else own.weights.unbind()
            entries = LossEntries(own.losses, own.weighting, around.data_rank).on_device(world.device)
            losses = [each.loss for each in own.losses]
            torch.stack([*losses, *weights, *entries, norm], out=table[: places.total + 1])
        else:
            row = self._row(own, places.sizes[world.rank])
            world.all_gather(table[: places.total], row, counts=places.counts, purpose="losses and norms").wait()
            if around.are_whole:
                norms = {
                    number: norm
                    for rank, (_, numbers) in enumerate(told)
                    for number, norm in zip(numbers, table[places.of(_NORMS, rank)].unbind(), strict=True)
                }
                norm, parts = self._norms_of_numbers(own, norms)
                table[places.total].copy_(norm)
            else:
                norm, parts = self._norms_of_atoms(own, places, table)
        parts = {key: self._in_norm_dtype(each, f"norm of {key} in its dtype") for key, each in parts.items()}
        for at, each in enumerate(parts.values()):
            table[places.total + 1 + at].copy_(each)
        norm = self._in_norm_dtype(norm, "norm in its dtype")
        return DeviceFigures(self._around, own, places, table, norm, parts, self._kept)

    def _norms_of_atoms(self, own: RankFigures, places: "_Places", table: torch.Tensor) -> _NormAndParts:
        """Gradients are in parts on several ranks."""
        # A rank gives one norm of each atom, mostly in rows that are alike.
        size = self._around.world.size
        if len(set(places.counts)) == 1:
            columns = table[: places.total].view(size, -1)[:, places.of(_NORMS, 0)]
        else:
            columns = torch.stack([table[places.of(_NORMS, rank)] for rank in range(size)])

        parts: dict[Key, torch.Tensor] = {}
        for key, atoms in own.norms.atoms.items() if own.norms is not None else ():
            parts[key] = place = self._kept.place(f"norm of {key}", dtype=torch.float64)
            if atoms:
                torch.linalg.vector_norm(torch.stack([columns[:, at] for at in atoms]), out=place)
            else:
                place.zero_()
        return torch.linalg.vector_norm(columns, out=table[places.total]), parts

    def _in_norm_dtype(self, norm: torch.Tensor, name: str) -> torch.Tensor:
        dtype = self._around.norm_dtype
        return norm if norm.dtype == dtype else self._kept.place(name, dtype=dtype).copy_(norm)

    def _counts_in(self, packed: bytes) -> tuple[int, list[int]]:
        """How many digests a rank has, and the parameters that it has norms for."""
        num_digests, *numbers = struct.unpack(f"<{len(packed) // 8}q", packed)
        if num_digests < 0:
            raise ValueError(f"{num_digests} digests")
        return num_digests, [_known(each, self._around) for each in numbers]

    def _row(self, own: RankFigures, sizes: Sequence[int]) -> torch.Tensor:
        """What this rank gives. `sizes`: see `_Places`."""
        entries = LossEntries(own.losses, own.weighting, self._around.data_rank).on_device(self._around.world.device)
        num_losses, num_norms, _, num_digests, _ = sizes
        row = self._kept.place("row", sum(sizes), dtype=torch.float64)
        losses, norms, weights, digests, others = row.split(sizes)
        own_losses = [each.loss for each in own.losses]
        if self._sends_norms:
            found = torch._foreach_norm(list(own.used.values())) if num_norms else ()
            if num_losses + num_norms:
                torch.stack([*own_losses, *found], out=row[: num_losses + num_norms])
        else:
            if num_losses:
                torch.stack(own_losses, out=losses)
            if num_norms and own.norms is None:
                norm_on_device([run for run, counts in own.runs if counts], self._kept, out=norms[0])
            elif num_norms:
                for atom, out in enumerate(norms.unbind()):
                    runs = [run for run, at in own.marked if at == atom]
                    norm_on_device(runs, self._kept, out=out, of=f" of atom {atom}")
        if own.weights is not None:
            weights.copy_(own.weights)
        if num_digests:
            torch.stack(list(own.digests.values()), out=digests.view(torch.int64))  # their bits, which copies keep
        if entries:
            torch.stack(entries, out=others)
        return row


class HostCopy:
    """A copy of numbers on a device for the host, which it does not wait for."""

    def __init__(self, numbers: torch.Tensor) -> None:
        # It begins here, so that a look waits for what was before it on the device, and not for what comes after.
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._mark = torch.accelerator.current_stream(numbers.device).record_event()
        self._has_come = False

    @property
    def has_come(self) -> bool:
        """Whether `values` would return at once."""
        self._has_come = self._has_come or bool(self._mark.query())
        return self._has_come

    def values(self) -> list[float]:
        """The numbers, which are waited for."""
        if not self._has_come:
            self._mark.synchronize()
        values: list[float] = self._copy.tolist()
        return values


_LOSSES, _NORMS, _WEIGHTS, _DIGESTS, _ENTRIES = range(5)


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where in the table what is: of each rank losses, norms, weights, digests, entries, in this order."""

    sizes: Sequence[Sequence[int]]
    """Of each rank: how many of each."""
    has_weights: bool
    names: Sequence[str]
    """Of other entries of losses."""

    @cached_property
    def counts(self) -> list[int]:
        """How much each rank gives."""
        return [*map(sum, self.sizes)]

    @cached_property
    def _starts(self) -> list[int]:
        return [*accumulate(self.counts, initial=0)]

    @property
    def total(self) -> int:
        """How much all ranks give; the norm of all is behind it, and then those of parts."""
        return self._starts[-1]

    def of(self, kind: int, rank: int) -> slice:
        """Those of one kind of a rank."""
        start = self._starts[rank] + sum(self.sizes[rank][:kind])
        return slice(start, start + self.sizes[rank][kind])

    def entries(self, name: int, rank: int) -> slice:
        """Those of a rank of the name with this number."""
        place = self.of(_ENTRIES, rank)
        count = (place.stop - place.start) // len(self.names)
        return slice(place.start + name * count, place.start + (name + 1) * count)


class DeviceFigures:
    """Figures on the device, with a copy on its way to the host."""

    def __init__(
        self,
        around: Surroundings,
        own: RankFigures,
        places: _Places,
        table: torch.Tensor,
        norm: torch.Tensor,
        parts: Mapping[Key, torch.Tensor],
        kept: KeptNumbers,
    ) -> None:
        """table: what all ranks gave, behind it the norm and those of `parts`.

        All of them are `kept`, and hold until the next step; what is asked later is in the copy for the host.
        """
        self._kept = kept
        self._around = around
        self._given_weighting = own.weighting
        self._entries = list(own.digests)
        self._places = places
        self._parts = parts
        # Times zero, it is zero where it is finite and nan elsewhere: so the sum is the norm, or nan.
        self._norm = torch.add(norm, norm, alpha=0, out=kept.place("norm or nan", dtype=norm.dtype))
        if self._entries:
            others = [rank for rank, first in enumerate(around.ranks.first_of) if rank != first]
            mine = self._digests_on_device("digests", others, table)
            firsts = self._digests_on_device(
                "digests of the first", [around.ranks.first_of[rank] for rank in others], table
            )
            differ = torch.ne(mine, firsts, out=kept.place("digests that differ", len(mine), dtype=torch.bool))
            self._norm.masked_fill_(torch.any(differ, out=kept.place("any differs", dtype=torch.bool)), math.nan)
        # Only nan is unlike itself.
        self.found_inf = torch.ne(self._norm, self._norm, out=kept.place("found_inf", dtype=torch.float32))
        self._copy = HostCopy(table)

    @property
    def is_known(self) -> bool:
        """See `KnownFigures`."""
        return self._copy.has_come

    @property
    def may_be_refused(self) -> bool:
        """See `KnownFigures`."""
        return self._places.has_weights or bool(self._entries) or self._around.ranks.alike_index.shape[1] > 1

    @property
    def loss(self) -> float:
        """See `KnownFigures`."""
        self._check_batches()
        return self._mean_of(partial(self._places.of, _LOSSES))

    @property
    def others(self) -> dict[str, float]:
        """See `KnownFigures`."""
        places = self._places
        return {name: self._mean_of(partial(places.entries, at)) for at, name in enumerate(places.names)}

    def _mean_of(self, place_of: Callable[[int], slice]) -> float:
        """The weighted mean of numbers that each rank has for its microbatches; none where it computed nothing."""
        shares = [
            self._weighting.share_of_mean(values, data_rank) if (values := self._values[place_of(rank)]) else 0.0
            for rank, data_rank in enumerate(self._around.ranks.data_ranks)
        ]
        return sum_of_losses(shares, self._around.ranks.alike_index, is_exact=False)

    @property
    def weight(self) -> float:
        """See `KnownFigures`."""
        return self._weighting.total

    @property
    def grad_norm(self) -> float:
        """See `KnownFigures`."""
        return self._norm_at(self._places.total)

    @property
    def norms(self) -> Mapping[Key, float]:
        """See `KnownFigures`."""
        return {key: self._norm_at(self._places.total + 1 + at) for at, key in enumerate(self._parts)}

    def _norm_at(self, place: int) -> float:
        return _or_nan(float(torch.tensor(self._values[place], dtype=self._around.norm_dtype)))

    @property
    def is_finite(self) -> bool:
        """See `KnownFigures`."""
        return math.isfinite(self.grad_norm) and not self._different

    def check(self) -> None:
        """See `KnownFigures`."""
        _ = self.loss

    def clip(self, parts: Sequence[torch.Tensor], max_norm: float, key: Key | None = None) -> None:
        """See `KnownFigures`."""
        norm, kept = self._norm, self._kept
        if parts and parts[0].device != norm.device:  # in the memory of the host, which knows the norms by then
            norm = torch.tensor(self.grad_norm if key is None else self.norms[key], dtype=norm.dtype)
            kept = KeptNumbers(norm.device)
        elif key is not None:
            # And nan where the norm of all is: then nothing is scaled.
            place = self._kept.place(f"norm of {key} or nan", dtype=norm.dtype)
            norm = torch.add(self._parts[key], norm, alpha=0, out=place)
        clip(parts, norm, max_norm, kept)

    @cached_property
    def _values(self) -> list[float]:
        return self._copy.values()

    @cached_property
    def _weighting(self) -> Weighting:
        if not self._places.has_weights:
            return self._given_weighting
        ranks = self._around.ranks.speakers
        weighting = Weighting.of([self._values[self._places.of(_WEIGHTS, rank)] for rank in ranks])
        check_weighting(weighting)
        return weighting

    @property
    def _different(self) -> list[int]:
        """The ranks whose batch is not that of the first one that has to have the same."""
        digests = [self._digests_of(rank) for rank in range(self._around.world.size)]
        return [rank for rank, first in enumerate(self._around.ranks.first_of) if digests[rank] != digests[first]]

    def _check_batches(self) -> None:
        if self._different:
            lines_of = [
                [f"{name!r} with digest {digest}" for name, digest in zip(self._entries, each, strict=True)]
                for each in map(self._digests_of, range(self._around.world.size))
            ]
            refuse_different_batches(lines_of, self._around.ranks.first_of)

    def _digests_on_device(self, name: str, ranks: Sequence[int], table: torch.Tensor) -> torch.Tensor:
        given = [table[self._places.of(_DIGESTS, rank)] for rank in ranks]
        if len(given) == 1:
            return given[0].view(torch.int64)
        place = self._kept.place(name, sum(map(len, given)), dtype=torch.float64)
        return torch.cat(given, out=place).view(torch.int64)

    def _digests_of(self, rank: int) -> list[str]:
        # As bytes: a digest may be the bits of a nan, which is unlike itself.
        return [struct.pack("<d", value).hex() for value in self._values[self._places.of(_DIGESTS, rank)]]


Figures: TypeAlias = KnownFigures | DeviceFigures


def figures_making(around: Surroundings) -> MadeOnHost | MadeOnDevice:
    """How the ranks make the figures of their steps, on their device."""
    return MadeOnHost(around) if around.world.device.type == "cpu" else MadeOnDevice(around)
