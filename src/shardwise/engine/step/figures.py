"""The figures of a step, its loss and its norm: made of what every rank gives, before any of them updates.

    row of a rank    | losses | norms | weights | digests |    float64; rows of all ranks are equally long
    table            | row of rank 0 | row of rank 1 | .. | norm of all | norms of parts | scale of losses |
                                          |                  +--> factor of the clip; whether to skip
                                          +--> loss, norm, skipped, for the host

    weights    of microbatches, where `loss_weight` made them on the device
    digests    of the batch, where it is on the device and ranks along pp or tp share it

The table is the same on all ranks, so that they clip and skip alike. How it travels, and when the host may look:

    CPU        in the message that closes the step; at once
    device     by one all-gather behind the kernels of backward; when a copy for the host has come. The host goes on
               with the update meanwhile, which the device carries out or leaves out
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat, starmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.comm.agreement import understood_runs
from shardwise.comm.rank_values import RankValues
from shardwise.engine.step.channels import EngineChannels
from shardwise.engine.step.exchange import Numbers, Weighting, refuse_different_batches
from shardwise.engine.step.loss_entries import LossEntries, kinds_of_ranks, names_in, rows_in, sums_of_shares
from shardwise.engine.step.norm import (
    Key,
    NormParts,
    alike,
    clip,
    norm_dtype,
    norm_of,
    norm_on_device,
    norms_of,
    squares_of_atoms,
    total_of_norms,
)
from shardwise.engine.zero.grad_buffers import KeptNumbers, divide_on_device

_PURPOSE = "losses and norms"


class Divisors(NamedTuple):
    """What makes means of sums of gradients."""

    number: int
    """1 where they are means already."""
    scale: torch.Tensor | None
    """What losses were multiplied by, and gradients are divided by in addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What the figures of a step are made of on one rank."""

    losses: LossEntries
    weights: torch.Tensor | None
    """Of each microbatch, where the weights are on the device."""
    digests: Mapping[str, torch.Tensor]
    """Of the entries of the batch that are on the device, where ranks share it."""
    runs: Sequence[tuple[torch.Tensor, int]]
    """The owned sums of gradients, flat, as few as follow each other in memory; each with its atom in `norms` (without
    these there is one), or ~atom where another rank counts it in the norm."""
    parts: Sequence[torch.Tensor]
    """The flat memory in which they are."""
    divisors: Divisors
    """What makes the sums means."""
    norms: NormParts | None
    """The parts whose norms are asked for."""
    used: Mapping[int, torch.Tensor]
    """Where each gradient is whole on one rank: those that one process would have, by the number of the parameter in
    the model."""

    @property
    def num_atoms(self) -> int:
        """Of the gradients of all ranks."""
        return 1 if self.norms is None else self.norms.num_atoms


_NormAndParts: TypeAlias = tuple[torch.Tensor, dict[Key, torch.Tensor]]
"""The norm of all gradients, and those of the parts that are asked for; in `norm_dtype`."""


class _Columns(NamedTuple):
    """Where in the row of a rank what is."""

    losses: slice
    """So many of the loss, and then so many of each name."""
    norms: slice
    """Of atoms, on the host their squares; or of parameters, where gradients are whole."""
    weights: slice
    digests: slice
    names: Sequence[str]
    num_losses: int
    """One for each microbatch; on the host their share of the mean."""


class FigureMaking:
    """How the ranks make the figures of their steps."""

    def __init__(self, channels: EngineChannels, dtypes: tuple[torch.dtype, ...]) -> None:
        """dtypes: of the gradients of all parameters in the model."""
        self._channels, self._dtypes, self._norm_dtype = channels, dtypes, norm_dtype(dtypes)
        self._is_host = channels.world.device.type == "cpu"
        self._kept = KeptNumbers(channels.world.device)
        # The norm is then that of one process in every bit.
        self._are_whole = channels.have_whole_gradients
        self._sends_norms = self._are_whole and channels.world.size > 1

    def given(self, own: RankFigures) -> list[bytes]:
        """Divide the gradients; what this rank says in the message that closes the step, in as many parts as all."""
        numbers = [len(own.digests), *(own.used if self._sends_norms else ())]
        said = [struct.pack(f"<{len(numbers)}q", *numbers), own.losses.packed_kinds()]
        if not self._is_host:
            # The row follows, when all hosts know how long it is.
            divide_on_device(own.parts, *own.divisors, self._kept)
            return said
        # One division for both: powers of two cost no rounding.
        number, scale = own.divisors
        divisor = number if scale is None else number * float(scale)
        # Where gradients are whole the norm is made of those of parameters: nobody asks for squares.
        runs = [(run, ~0) for run, _ in own.runs] if self._are_whole else own.runs
        norms = squares_of_atoms(runs, divisor, self._channels.world.device, num_atoms=own.num_atoms)
        if self._are_whole:
            found = self._norms_of_used(own) if self._sends_norms else {}
            norms = [float(found[at]) for at in own.used] if found else []
        # A share is as short for many microbatches as for one. It is rounded once, which kernels do not.
        row = [*own.losses.shares(), *norms]
        return [*said, struct.pack(f"<{len(row)}d", *row)]

    def made(self, own: RankFigures, answers: Sequence[RankValues]) -> "Figures":
        """From what all ranks said, by parts. All of them call it together."""
        world = self._channels.world
        told = understood_runs(answers[0], self._counts_in, purpose=_PURPOSE)
        kinds = kinds_of_ranks(answers[1], purpose=_PURPOSE)
        most = own.losses.weighting.table.shape[1]
        names, num_losses = names_in(kinds), 1 if self._is_host else most
        sizes = [
            (1 + len(names)) * num_losses,
            max(self._num_norms(own, numbers) for (_, numbers), _ in told),
            0 if own.weights is None else most,
            max(num_digests for (num_digests, _), _ in told),
        ]
        losses, norms, weights, digests = starmap(slice, pairwise(accumulate(sizes, initial=0)))
        columns = _Columns(losses, norms, weights, digests, names, num_losses)
        num_parts = 0 if own.norms is None else len(own.norms.numbers)
        lengths = [len(kinds) * sum(sizes), 1 + num_parts, int(own.losses.scale is not None)]
        # In float64, which holds any loss, norm and scale exactly.
        table = self._kept.place("table", sum(lengths), dtype=torch.float64)
        given, made, scale = table.split(lengths)
        if own.losses.scale is not None:
            scale.copy_(own.losses.scale)
        rows = given.view(len(kinds), sum(sizes))
        if self._is_host:
            counts = [*chain.from_iterable(repeat(self._num_norms(own, each), count) for (_, each), count in told)]
            rows.numpy()[:] = rows_in(answers[2], kinds, counts, purpose=_PURPOSE)
        else:
            self._fill(rows[world.rank], own, columns)
            if world.size > 1:
                world.all_gather(given, rows[world.rank], purpose=_PURPOSE).wait()
        if self._are_whole:
            numbers = chain.from_iterable(repeat(each, count) for (_, each), count in told)
            norm, parts = self._norms_of_numbers(own, numbers, rows[:, columns.norms])
            torch.stack([norm, *parts.values()], out=made)
        else:
            norm, parts = self._norms_of_atoms(own, rows[:, columns.norms], made)
        found = self._norm_or_nan(norm, own, rows, columns)
        return Figures(self._channels, own, columns, table, found, parts, self._kept)

    def _num_norms(self, own: RankFigures, numbers: Sequence[int]) -> int:
        """How many a rank gives that has gradients of parameters with these numbers."""
        return len(numbers) if self._sends_norms else 0 if self._are_whole else own.num_atoms

    def _counts_in(self, packed: bytes) -> tuple[int, list[int]]:
        """How many digests a rank has, and the parameters that it has norms for."""
        num_digests, *numbers = struct.unpack(f"<{len(packed) // 8}q", packed)
        if num_digests < 0:
            raise ValueError(f"{num_digests} digests")
        for number in numbers:
            if not 0 <= number < len(self._dtypes):
                raise ValueError(f"parameter {number} of {len(self._dtypes)}")
        return num_digests, numbers

    def _fill(self, row: torch.Tensor, own: RankFigures, columns: _Columns) -> None:
        """Write what this rank gives on a device, where the host waits for none of it."""
        values = own.losses.values()
        norms, digests = row[columns.norms], row[columns.digests]
        weights = () if own.weights is None else own.weights
        given = [sum(map(len, values)), self._num_norms(own, list(own.used)), len(weights), len(own.digests)]
        if sum(given) < len(row):  # another rank gives more
            row.zero_()
        for each, out in zip(values, row[columns.losses].view(-1, columns.num_losses), strict=False):
            if each:
                torch.stack(each, out=out[: len(each)])
        if self._sends_norms and own.used:
            found = self._norms_of_used(own)
            torch.stack([found[at] for at in own.used], out=norms[: len(found)])
        elif not self._are_whole:
            for atom, out in enumerate(norms.unbind()):
                runs = [run for run, at in own.runs if at == atom]
                norm_on_device(runs, self._kept, out=out, of=f" of atom {atom}")
        if own.weights is not None:
            row[columns.weights][: len(weights)].copy_(own.weights)
        if own.digests:
            bits = digests.view(torch.int64)[: len(own.digests)]  # which copies keep
            torch.stack(list(own.digests.values()), out=bits)

    def _norms_of_used(self, own: RankFigures) -> dict[int, torch.Tensor]:
        return norms_of(own.used, alike(tuple(own.used), self._dtypes, self._kept.device))

    def _norms_of_numbers(
        self, own: RankFigures, numbers: Iterable[Sequence[int]], columns: torch.Tensor
    ) -> _NormAndParts:
        """Each gradient is whole on one rank. numbers: of the parameters of each rank, whose norms `columns` has."""
        if self._sends_norms:
            # With the host as numbers: 2,000 tensors would cost it more than all the rest of the step's end.
            rows = columns.tolist() if self._is_host else [row.unbind() for row in columns.unbind()]
            norms = {
                at: norm
                for of_rank, row in zip(numbers, rows, strict=True)
                for at, norm in zip(of_rank, row, strict=False)
            }
        else:
            norms = self._norms_of_used(own)
        dtypes, of_parts = self._dtypes, {} if own.norms is None else own.norms.numbers
        order = [at for group in alike(tuple(sorted(norms)), dtypes, self._kept.device) for at in group]

        def total(numbers: Iterable[int], of: str) -> torch.Tensor:
            found = total_of_norms({at: norms[at] for at in numbers}, self._kept, dtypes=dtypes, of=of)
            return self._in_norm_dtype(found, of)

        parts = {key: total((at for at in order if at in held), f" of {key}") for key, held in of_parts.items()}
        return total(order, ""), parts

    def _norms_of_atoms(self, own: RankFigures, columns: torch.Tensor, made: torch.Tensor) -> _NormAndParts:
        """Gradients are in parts on several ranks; columns: what all ranks give for each atom. made: gets the norms."""
        dtype, atoms_of = self._norm_dtype, {} if own.norms is None else own.norms.atoms
        if self._is_host:
            # Exact sums make it the same for every partition.
            squares = columns.numpy()
            of_parts = {key: norm_of(squares[:, [*atoms]].reshape(-1), dtype) for key, atoms in atoms_of.items()}
            parts = {key: torch.tensor(norm, dtype=dtype) for key, norm in of_parts.items()}
            norm = torch.tensor(norm_of(squares.reshape(-1), dtype), dtype=dtype)
            torch.stack([norm, *parts.values()], out=made)
            return norm, parts

        def total(columns: torch.Tensor, out: torch.Tensor, of: str) -> torch.Tensor:
            # Straight to its place: the host rounds it to the dtype of norms, as `_in_norm_dtype` does.
            return self._in_norm_dtype(torch.linalg.vector_norm(columns, out=out), of)

        of_atom = columns.unbind(1)
        # A part without atoms has the norm of nothing, which is 0.
        parts = {
            key: total(torch.stack([of_atom[at] for at in atoms]) if atoms else columns[:0], out, f" of {key}")
            for (key, atoms), out in zip(atoms_of.items(), made[1:], strict=True)
        }
        return total(columns, made[0], ""), parts

    def _in_norm_dtype(self, norm: torch.Tensor, of: str) -> torch.Tensor:
        dtype = self._norm_dtype
        return norm if norm.dtype == dtype else self._kept.place(f"norm{of} in its dtype", dtype=dtype).copy_(norm)

    def _norm_or_nan(self, norm: torch.Tensor, own: RankFigures, rows: torch.Tensor, columns: _Columns) -> torch.Tensor:
        """The norm; nan where it is not finite, or where ranks have unlike batches."""
        # Times zero, it is zero where it is finite and nan elsewhere: so the sum is the norm, or nan.
        kept, found = self._kept, torch.add(norm, norm, alpha=0, out=self._kept.place("norm or nan", dtype=norm.dtype))
        if own.digests:
            mine = rows[:, columns.digests].view(torch.int64)
            place = kept.place("digests of the first", *mine.shape, dtype=torch.int64)
            firsts = torch.index_select(mine, 0, self._first_index, out=place)
            differ = torch.ne(mine, firsts, out=kept.place("digests that differ", *mine.shape, dtype=torch.bool))
            found.masked_fill_(torch.any(differ, out=kept.place("any differs", dtype=torch.bool)), math.nan)
        return found

    @cached_property
    def _first_index(self) -> torch.Tensor:
        return torch.tensor(self._channels.ranks.first_of, device=self._kept.device)


class HostCopy:
    """A copy of numbers for the host, which does not wait for a device."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._has_come = numbers.device.type == "cpu"
        # It begins here, so that a look waits for what was before it on the device, and not for what comes after.
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=not self._has_come)
        self._copy.copy_(numbers, non_blocking=True)
        if not self._has_come:
            self._mark = torch.accelerator.current_stream(numbers.device).record_event()

    @property
    def has_come(self) -> bool:
        """Whether `values` would return at once."""
        self._has_come = self._has_come or bool(self._mark.query())
        return self._has_come

    def values(self) -> Numbers:
        """The numbers, which are waited for."""
        if not self._has_come:
            self._mark.synchronize()
            self._has_come = True
        values: Numbers = self._copy.numpy()
        return values


class Figures:
    """Loss and norm of a step, the same on every rank: with the host at once, from a device when they have come."""

    def __init__(
        self,
        channels: EngineChannels,
        own: RankFigures,
        columns: _Columns,
        table: torch.Tensor,
        norm: torch.Tensor,
        parts: Mapping[Key, torch.Tensor],
        kept: KeptNumbers,
    ) -> None:
        """table: the rows of all ranks, their norm, those of `parts`, and a scale. norm: from `_norm_or_nan`.

        All of them are `kept`, and hold until the next step; what is asked later is in the copy for the host.
        """
        self._ranks, self._is_host = channels.ranks, channels.world.device.type == "cpu"
        self._given_weighting, self._has_weights = own.losses.weighting, own.weights is not None
        self._entries = list(own.digests)
        self._columns = columns
        self._norm, self._parts = norm, parts
        self._kept = kept
        self.found_inf: torch.Tensor | None = None
        """On a device: 1 if the step must be skipped, else 0. Optimizers that skip there ask for it in this form."""
        if not self._is_host:
            # Only nan is unlike itself.
            self.found_inf = torch.ne(norm, norm, out=kept.place("found_inf", dtype=torch.float32))
        self._copy = HostCopy(table)
        self._num_given = len(table) - 1 - len(parts) - (own.losses.scale is not None)
        if self._is_host:
            self.check()

    @property
    def is_known(self) -> bool:
        """Whether the host has them. Else to read a number waits for the device."""
        return self._copy.has_come

    @property
    def may_be_refused(self) -> bool:
        """Whether `check` can raise, which on the host it has done by now."""
        if self._is_host:
            return False
        return self._has_weights or bool(self._entries) or self._ranks.alike.shape[1] > 1

    def check(self) -> None:
        """Raise MismatchError for ranks along tp with unlike losses or batches, and BatchError for weights."""
        _ = self._means

    @property
    def loss(self) -> float:
        """The weighted mean. Raises as `check` does."""
        return self._means["loss"]

    @property
    def others(self) -> dict[str, float]:
        """The weighted means of what the loss function gives besides the loss."""
        return {name: self._means[name] for name in self._columns.names}

    @property
    def weight(self) -> float:
        """The sum of all weights."""
        return self._weighting.total

    @property
    def grad_norm(self) -> float:
        """Of the mean gradient; nan where it is not finite."""
        return self._norms[0]

    @property
    def norms(self) -> Mapping[Key, float]:
        """Of the parts that were asked for, as `grad_norm`."""
        return dict(zip(self._parts, self._norms[1:], strict=True))

    @property
    def loss_scale(self) -> float:
        """What losses were multiplied by, where the host did not know it."""
        return float(self._copy.values()[-1])

    @property
    def is_finite(self) -> bool:
        """Whether the norm is, and the batch that of the other ranks."""
        return math.isfinite(self.grad_norm) and not self._different

    def clip(self, parts: Sequence[torch.Tensor], max_norm: float, key: Key | None = None) -> None:
        """Scale gradients, in the flat memory that has them, so that the norm is at most `max_norm`.

        key: of the part whose norm it is; None: of all.
        """
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
    def _rows(self) -> Numbers:
        return self._copy.values()[: self._num_given].reshape(-1, self._columns.digests.stop)

    @cached_property
    def _norms(self) -> list[float]:
        made = torch.from_numpy(self._copy.values()[self._num_given :][: 1 + len(self._parts)]).to(self._norm.dtype)
        return [norm if math.isfinite(norm) else math.nan for norm in made.tolist()]

    @cached_property
    def _weighting(self) -> Weighting:
        if not self._has_weights:
            return self._given_weighting
        of_ranks = self._rows[self._ranks.speakers]
        weighting = replace(self._given_weighting, table=of_ranks[:, self._columns.weights], is_known=True)
        weighting.check()
        return weighting

    @cached_property
    def _means(self) -> dict[str, float]:
        self._check_batches()
        num_kinds = 1 + len(self._columns.names)
        losses = self._rows[:, self._columns.losses].reshape(-1, num_kinds, self._columns.num_losses)
        shares = losses[:, :, 0]
        if not self._is_host:
            weighting, data_ranks = self._weighting, self._ranks.data_ranks
            of_kinds = [weighting.shares_of_mean(losses[:, at], data_ranks) for at in range(num_kinds)]
            shares = np.array(of_kinds).T
        # Kernels on devices add in any order.
        return sums_of_shares(shares, self._columns.names, self._ranks.alike, is_exact=self._is_host)

    @property
    def _digests(self) -> npt.NDArray[np.int64]:
        # As integers: a digest may be the bits of a nan, which is unlike itself.
        return self._rows.view(np.int64)[:, self._columns.digests]

    @cached_property
    def _different(self) -> bool:
        """Whether a rank has another batch than the first one that has to have the same."""
        return bool(self._entries) and not np.array_equal(self._digests, self._digests[self._ranks.first_of])

    def _check_batches(self) -> None:
        if self._different:
            lines_of = [
                [
                    f"{name!r} with digest {digest.tobytes().hex()}"
                    for name, digest in zip(self._entries, each, strict=True)
                ]
                for each in self._digests
            ]
            refuse_different_batches(lines_of, self._ranks.first_of)
