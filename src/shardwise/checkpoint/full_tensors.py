"""Full tensors: one after the other out of what all ranks hold, on every rank or on one, in bounded memory.

Ranks go on in step, a batch of tensors at a time: small ones together, a large one alone, a window of it after the
other. At the beginning of a batch each says whether it goes on, so that one that has left is known to all.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from shardwise.checkpoint.assignment import distinct
from shardwise.checkpoint.held import Held, hold
from shardwise.checkpoint.rewrite_agreement import StateRewriting
from shardwise.checkpoint.sharing import merge_ties
from shardwise.checkpoint.states import Ordered, State, wrong_rewrite
from shardwise.checkpoint.streaming import WindowFiller
from shardwise.checkpoint.windows import WINDOW_BYTES, part_of_piece, windows
from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.comm.processes import channel_of, given_or_default
from shardwise.errors import CheckpointError, MismatchError, ShardwiseError
from shardwise.moving.piece_texts import Gathering, pack_pieces, unpack_alike
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import is_state_name
from shardwise.rewrite import Rewrite
from shardwise.space import Piece, check_cover

__all__ = ["full"]

Receivers = Literal["all"] | int
"""All ranks, or one."""

_PURPOSE = "full tensors"

_GOING_ON, _LEAVING = b"", b"leaving"


def full(
    state: State,
    rewrite: Rewrite | None = None,
    *,
    channel: Channel | None = None,
    to: Receivers = "all",
    optimizer: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `state` as a whole on the CPU, with its name, one after the other.

    state: as for `save`; ranks hold it together. rewrite: from its names and shapes to those that are wanted.
    channel: the ranks that hold it; all of them call this, and go through all of the iterator. Default: that of an
        engine, else see `default_channel`.
    to: "all", or the rank that gets the tensors. The iterators of the other ranks give nothing; to go through them is
        to take part: `for name, tensor in sw.full(engine, to=0): ...` is the same program on all ranks.
    optimizer: also the state of optimizers, and masters; without it tensors are the model's, as it computes with them.

    Names come in the model's order where the state knows it, else in the order in which ranks hold them; tied tensors
    under each of their names. In memory there is one tensor (or small ones of 8 MiB together) and as much as 8 MiB of
    messages each way, beside what the caller keeps; tensors are the caller's own. Nothing happens before the first
    is asked for, and the state may not change before the last was given.
    A rank that stops early (`break`) tells the others, which raise CheckpointError unless they stop at the same place.
    Raises RewriteError, CheckpointError or MismatchError, the same on all ranks, before the first tensor.
    """
    with given_or_default(channel or channel_of(state), "full tensors") as used:
        supply = _agree(used, state, rewrite, to, optimizer=optimizer)
        batches = list(supply.batches())
        for number, batch in enumerate(batches):
            if number:
                _go_on(used)
            tensors = supply.gather(batch)
            try:
                yield from _handed_out(batch, tensors)
            except GeneratorExit:  # the caller has stopped
                if number + 1 < len(batches):
                    _leave(used)
                return


Entry = tuple[str, Piece]
"""A name, and the whole tensor that it stands for: of ties several names stand for one."""


def _handed_out(batch: Sequence[Entry], tensors: dict[Piece, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch; none is kept here once it was given for the last time."""
    last = {whole: at for at, (_, whole) in enumerate(batch)}
    for at, (name, whole) in enumerate(batch):
        if tensors:
            yield name, tensors.pop(whole) if last[whole] == at else tensors[whole]


def _go_on(channel: Channel) -> None:
    """Raise CheckpointError where another rank does not."""
    answers = channel.exchange(_GOING_ON, purpose=_PURPOSE)
    if left := [rank for rank, answer in enumerate(answers) if answer == _LEAVING]:
        raise CheckpointError(
            f"rank {left[0]} stopped taking full tensors before the last, and this rank goes on; go through all of "
            "sw.full on every rank, or stop at the same tensor"
        )


def _leave(channel: Channel) -> None:
    """Tell the others. Those that have ended, or are lost, need not know."""
    with contextlib.suppress(ShardwiseError):
        channel.exchange(_LEAVING, purpose=_PURPOSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supply:
    """Tensors that ranks hold together, and who gets them."""

    entries: Sequence[Entry]
    filler: WindowFiller
    num_ranks: int
    receivers: frozenset[int]
    is_receiver: bool
    """Whether this rank is one."""

    def batches(self) -> Iterator[list[Entry]]:
        """The entries in batches that are gathered together."""
        batch: list[Entry] = []
        room = WINDOW_BYTES
        taken: set[Piece] = set()
        for name, whole in self.entries:
            num_bytes = 0 if whole in taken else whole.num_elements * itemsize_bytes(whole.dtype)
            if batch and num_bytes > room:
                yield batch
                batch, room, taken = [], WINDOW_BYTES, set()
            batch.append((name, whole))
            taken.add(whole)
            room -= num_bytes
        if batch:
            yield batch

    @torch.no_grad()
    def gather(self, batch: Sequence[Entry]) -> dict[Piece, torch.Tensor]:
        """The tensors of a batch on the ranks that get them; nothing on the others, which help."""
        wholes = list(dict.fromkeys(whole for _, whole in batch))
        tensors: dict[Piece, torch.Tensor] = {}
        if self.is_receiver:
            tensors = {each: torch.empty(each.global_shape, dtype=torch_dtype(each.dtype)) for each in wholes}
        for window in windows((each.num_elements, itemsize_bytes(each.dtype)) for each in wholes):
            parts = {part_of_piece(wholes[at], start, stop): (wholes[at], start, stop) for at, start, stop in window}
            targets = {
                part: tensors[whole].view(-1)[start:stop] for part, (whole, start, stop) in parts.items() if tensors
            }
            wanted = [list(parts) if rank in self.receivers else [] for rank in range(self.num_ranks)]
            self.filler.fill(wanted, targets)
        return tensors


def _agree(channel: Channel, state: State, rewrite: Rewrite | None, to: Receivers, *, optimizer: bool) -> _Supply:
    """What all ranks hold, and what is to be given; raises the same error on all ranks."""
    with Gathering("pieces, ties and names of full tensors").agreed(channel) as gathered:
        _check(channel, rewrite, to, optimizer=optimizer)
        held = _without_state(hold(state)) if not optimizer else hold(state)
        request = f"rewrite={None if rewrite is None else str(rewrite)!r}, to={to!r}, optimizer={optimizer!r}"
        facts_here = json.dumps([held.aliases, _order(state)]).encode()
        gathered.own = [request.encode(), pack_pieces(list(held.tensors)), facts_here]
    requests, pieces, facts = gathered.texts
    if different := [rank for rank, each in enumerate(requests) if each != requests[0]]:
        raise MismatchError(
            f"rank {different[0]} asks for full tensors with {requests[different[0]].decode()}, but rank 0 with "
            f"{requests[0].decode()}; make the same call on all ranks"
        )
    known = [json.loads(each) for each in facts]
    order = list(dict.fromkeys(name for _, names in known for name in names))
    ties = [aliases for aliases, _ in known]
    if rewrite is not None:
        became = StateRewriting(rewrite).apply(channel, held, pieces, ties, order)
        held, pieces, ties = became.held, became.texts, [became.held.aliases] * channel.size
        order = list(became.checked.outputs)
    pieces_of = unpack_alike(pieces, pack_pieces(list(held.tensors)), list(held.tensors))
    aliases = merge_ties(ties, [pieces_of[text] for text in pieces])
    holders = distinct([[each for each in pieces_of[text] if each.name not in aliases] for text in pieces])
    if findings := check_cover(holders):
        raise CheckpointError(*(f"the ranks together do not hold whole tensors: {each}" for each in findings))
    receivers = frozenset(range(channel.size) if to == "all" else [to])
    return _Supply(
        entries=_entries(holders, aliases, order),
        filler=WindowFiller(channel, holders, held),
        num_ranks=channel.size,
        receivers=receivers,
        is_receiver=channel.rank in receivers,
    )


def _check(channel: Channel, rewrite: Rewrite | None, to: Receivers, *, optimizer: bool) -> None:
    """Raise CheckpointError for arguments that cannot be."""
    problems = wrong_rewrite(rewrite)
    if type(optimizer) is not bool:
        problems.append(f"optimizer is {optimizer!r}; give True or False")
    if problems:
        raise CheckpointError(*problems)
    if to != "all" and not (type(to) is int and 0 <= to < channel.size):
        raise CheckpointError(f'to is {to!r}; give "all", or one of the ranks 0 to {channel.size - 1}')


def _without_state(held: Held) -> Held:
    """The model's tensors alone."""
    tensors = {piece: tensor for piece, tensor in held.tensors.items() if not is_state_name(piece.name)}
    return replace(held, tensors=tensors)


def _order(state: State) -> list[str]:
    """Names in the order that the state has for them."""
    if isinstance(state, Ordered):
        return list(state.names())
    return [key for key in state if isinstance(key, str)] if isinstance(state, Mapping) else []


def _entries(holders: Iterable[Piece], aliases: Mapping[str, str], order: Iterable[str]) -> list[Entry]:
    """All names with their tensors: first those in `order`, then the others; ties that it does not have go together."""
    wholes = {
        name: Piece(name=name, dtype=dtype, global_shape=shape)
        for name, dtype, shape in dict.fromkeys((each.name, each.dtype, each.global_shape) for each in holders)
    }
    tied: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        tied.setdefault(name, []).append(alias)
    ordered = list(order)
    placed = set(ordered)
    found: dict[str, None] = {}
    for name in [*ordered, *wholes]:
        found |= dict.fromkeys([name, *(alias for alias in tied.get(name, ()) if alias not in placed)])
    named = ((name, wholes.get(aliases.get(name, name))) for name in found)
    return [(name, whole) for name, whole in named if whole is not None]
