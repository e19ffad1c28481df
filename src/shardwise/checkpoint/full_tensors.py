"""Full tensors: what ranks hold in pieces becomes whole tensors, in files (`layout="whole"`) or in memory (`sw.full`).

A window is up to 8 MiB of whole tensors. Each rank fills one window at a time, and all ranks go on in step::

                rank 0                         rank 1
    holds       w[:, 0:64]                     w[:, 64:128]
    fills       w[0:512]                       w[512:1024]           the windows of this step
    message     --- w[512:1024, 0:64] --->     <--- w[0:512, 64:128] ---
    then        writes or keeps its window     writes or keeps its window

A rank has its window in memory, and one message each way, each at most as large as a window.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch

from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.holdings import Holdings, RankFacts, compared_replicas, facts_of, without_state
from shardwise.checkpoint.safetensors_files import Sink
from shardwise.checkpoint.state_pieces import Held, hold
from shardwise.checkpoint.states import State, wrong_rewrite
from shardwise.checkpoint.windows import WINDOW_BYTES, part_of_piece, pieces_in_windows, windows
from shardwise.comm import Channel
from shardwise.comm.digests import checksum
from shardwise.comm.given_channel import channel_of, given_or_default
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError, MismatchError, ShardwiseError, few_of
from shardwise.moving.copies import part_of, put
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.moving.piece_exchange import AT_ONCE_BYTES, Gathering
from shardwise.moving.queued_copies import QueuedCopies
from shardwise.moving.replica_samples import compare_samples, samples_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.rewrite import Rewrite
from shardwise.routes.holders import Holders, holders_by_tensor, shared_pieces
from shardwise.space import Move, Piece, check_cover, moves


class WindowFiller:
    """Fills windows of whole tensors, window after window, out of the pieces that ranks hold."""

    def __init__(self, channel: Channel, holders: Mapping[str, Holders], held: Held) -> None:
        """holders: who holds what of each tensor. held: what this rank has."""
        self._channel = channel
        self._holders = holders
        self._targets: Mapping[Piece, torch.Tensor] = {}
        self._in_room = False
        self._copies = QueuedCopies(channel.device)
        self._window = torch.empty(0, dtype=torch.uint8)
        self._mover: Mover[Piece, Piece] = Mover(
            channel,
            take=held.parts_of,
            put=self._put,
            # Windows are in CPU memory: messages are put together and taken apart there. Where NCCL carries them, each
            # crosses to the GPU in one copy, not element by element.
            packs_on=torch.device("cpu"),
            copies=self._copies,
            purpose="window of whole tensors",
        )

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory for a window, which takes it over from the one before."""
        if len(self._window) < num_bytes:
            self._window = self._copies.room(num_bytes)
        return self._window[:num_bytes]

    def fill(
        self, windows: Sequence[Sequence[Piece]], targets: Mapping[Piece, torch.Tensor], *, in_room: bool = False
    ) -> None:
        """Fill the pieces of this rank's window, which are flat `targets`; all ranks help each other with theirs.

        in_room: the targets are in `room`, into which copies are queued.
        """
        own = self._channel.rank
        given = (each for taker, window in enumerate(windows) for each in self._deliveries(window, taker))
        self._targets, self._in_room = targets, in_room
        self._mover.run(
            by_distance((each for each in given if own in (each.giver, each.taker)), self._channel), num_under_way=1
        )
        self._copies.wait()
        self._targets = {}

    def _deliveries(self, window: Sequence[Piece], taker: int) -> Iterator[Delivery[Piece, Piece]]:
        """What fills a window: from the rank itself where it holds a piece, else from the holders in turn."""
        for target in window:
            holders = self._holders[target.name]
            for at in holders.overlapping(target):
                piece, givers = holders.pieces[at], holders.givers(at, taker)
                # In turn: otherwise the first of the replicas would send everything, and the others nothing.
                giver = holders.ranks[givers[at % len(givers)]]
                yield Delivery(giver, taker, piece, target, torch_dtype(target.dtype), moves(piece, target))

    def _put(self, piece: Piece, moves: Sequence[Move], elements: Iterable[torch.Tensor]) -> None:
        target = self._targets[piece]
        copy = self._copies.put if self._in_room else put
        for move, taken in zip(moves, elements, strict=True):
            copy(part_of(target, move.target, move.shape), taken)


def stream_whole(channel: Channel, arrangement: Arrangement, held: Held, sink: Sink | None) -> None:
    """Fill this rank's file with whole tensors, out of what all ranks hold.

    `sink` is None on a rank whose file cannot be written. It goes on sending, so that the others do not wait; so
    does a rank whose file fails on the way, which raises the error (OSError) at the end.
    """
    filler = WindowFiller(channel, arrangement.holders, held)
    failure: OSError | None = None
    files = [arrangement.file(rank) for rank in range(channel.size)]
    # Files have different numbers of windows. A rank that is done still sends: others need what it holds.
    for current in zip_longest(*(pieces_in_windows(file.pieces) for file in files), fillvalue=[]):
        mine = current[channel.rank]
        sizes = [piece.num_elements * itemsize_bytes(piece.dtype) for piece in mine]
        window = filler.room(sum(sizes))
        parts = zip(mine, window.split(sizes), strict=True) if mine else ()
        filler.fill(current, {piece: part.view(torch_dtype(piece.dtype)) for piece, part in parts}, in_room=True)
        # A rank that cannot write goes on filling windows: if it stopped, all others would wait for its messages.
        if sink is not None and failure is None:
            try:
                sink.write(bytes_of(window))
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


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
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `state` as a whole on the CPU, with its name, one after the other.

    state: as for `save`; ranks hold it together. rewrite: from its names and shapes to those that are wanted.
    channel: the ranks that hold it; all of them call this, and go through all of the iterator. Default: that of an
        engine, else see `default_channel`.
    to: "all", or the rank that gets the tensors. The iterators of the other ranks give nothing. To go through them is
        to take part: `for name, tensor in sw.full(engine, to=0): ...` is the same program on all ranks.
    optimizer: also the state of optimizers, and masters; without it tensors are the model's, as it computes with them.
    names: only these, in this order, as `state` (or the rewrite) names them. None: all.

    Names come in the model's order where the state knows it, else in the order in which ranks hold them. Tied tensors
    under each of their names. Without a rewrite, names of a model are those without wrappers around its modules, such
    as `torch.compile(layer)`, unless two would have one name.
    In memory there is one tensor (or small ones of 8 MiB together) and up to 8 MiB of messages each way, plus the
    tensors that the caller keeps. Tensors are the caller's own. Nothing happens before the first is asked for, and the
    state may not change before the last was given. A rank that stops early (`break`) tells the others, which raise
    CheckpointError unless they stop at the same place.
    Raises RewriteError, CheckpointError or MismatchError, the same on all ranks, before the first tensor.
    """
    with given_or_default(channel or channel_of(state), "full tensors") as used:
        supply = _agree(used, state, rewrite, to, names, optimizer=optimizer)
        batches = list(supply.batches())
        for number, batch in enumerate(batches):
            # Before the first batch all ranks have just agreed, so that nobody can have left.
            if number:
                _go_on(used)
            tensors = supply.gather(batch)
            try:
                yield from _handed_out(batch, tensors)
            except GeneratorExit:  # the caller has stopped
                # After the last batch nobody waits for this rank any more.
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
            # A tensor is let go of here with the last of its names. The caller may free it while the batch goes on.
            yield name, tensors.pop(whole) if last[whole] == at else tensors[whole]


def _go_on(channel: Channel) -> None:
    """Raise CheckpointError where another rank does not."""
    answers = channel.exchange(_GOING_ON, purpose=_PURPOSE)
    if left := [rank for rank, answer in enumerate(answers) if answer == _LEAVING]:
        raise CheckpointError(
            f"rank {left[0]} stopped taking full tensors before the last one, and this rank goes on. Go through all "
            "of sw.full on every rank, or stop at the same tensor"
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
            # A tied tensor is gathered once, whatever the number of its names.
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
            # Windows are flat parts of these, so that what comes needs no further copy.
            tensors = {each: torch.empty(each.global_shape, dtype=torch_dtype(each.dtype)) for each in wholes}
        for window in windows((each.num_elements, itemsize_bytes(each.dtype)) for each in wholes):
            parts = {part_of_piece(wholes[at], start, stop): (wholes[at], start, stop) for at, start, stop in window}
            targets = {
                part: tensors[whole].view(-1)[start:stop] for part, (whole, start, stop) in parts.items() if tensors
            }
            wanted = [list(parts) if rank in self.receivers else [] for rank in range(self.num_ranks)]
            self.filler.fill(wanted, targets)
        return tensors


def _agree(
    channel: Channel,
    state: State,
    rewrite: Rewrite | None,
    to: Receivers,
    names: Sequence[str] | None,
    *,
    optimizer: bool,
) -> _Supply:
    """The pieces of all ranks, and the tensors to give; raises the same error on all ranks."""
    with Gathering("pieces, ties and names of full tensors", at_once_bytes=AT_ONCE_BYTES).agreed(channel) as gathered:
        _check(channel, rewrite, to, optimizer=optimizer)
        held = hold(state) if optimizer else without_state(hold(state))
        request = f"rewrite={None if rewrite is None else str(rewrite)!r}, to={to!r}, optimizer={optimizer!r}"
        if names is not None:
            digest = checksum("\n".join(names).encode()).hex()
            request += f", {len(names)} names (digest {digest[:8]})"
        gathered.own = [request.encode(), *facts_of(state, held)]
    requests, pieces, packed = gathered.texts
    if different := [rank for rank, each in enumerate(requests) if each != requests[0]]:
        raise MismatchError(
            f"rank {different[0]} asks for full tensors with {requests[different[0]].decode()}, but rank 0 with "
            f"{requests[0].decode()}; make the same call on all ranks"
        )
    facts = RankFacts.of(pieces, packed, purpose=_PURPOSE)
    known = Holdings.of(facts, list(held.tensors), rewrite)
    held = known.held(channel, held)
    holders = holders_by_tensor(known.lists)
    if findings := check_cover(piece for each in holders.values() for piece in each.pieces):
        raise CheckpointError(*(f"the ranks together do not hold whole tensors: {each}" for each in findings))
    # Names are asked of an engine.
    if names is None and channel.size > 1 and "plan" not in facts.layout:
        compared = compared_replicas(channel, state, held, facts.layout, known.checked)
        shared = shared_pieces(holders)
        samples = samples_of(shared, channel.rank, compared)()
        compare_samples(shared, channel.exchange(samples, purpose="samples of replicas"))
    receivers = frozenset(range(channel.size) if to == "all" else [to])
    entries = _entries(holders, known.aliases, known.order)
    if names is not None:
        wholes = dict(entries)
        if unknown := [name for name in names if name not in wholes]:
            raise CheckpointError(f"names has {few_of(unknown)}, which the ranks do not hold; they hold {len(wholes)}")
        entries = [(name, wholes[name]) for name in names]
    return _Supply(
        entries=[(known.plain.get(name, name), whole) for name, whole in entries],
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


def _entries(holders: Mapping[str, Holders], aliases: Mapping[str, str], order: Iterable[str]) -> list[Entry]:
    """All names with their tensors: first those in `order`, then the others; ties that it does not have go together."""
    wholes = {name: each.tensor for name, each in holders.items()}
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
