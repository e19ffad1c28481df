"""Weight streams: the weights of a running trainer go into the tensors of receivers, each with its own cuts.

[1] agree    what each rank gives and wants: digests, and where they are new the texts, the rewrite and one plan
[2] compare  with `delta` alone: both ends of each stream compare checksums of its blocks
[3] move     batches of the plan, or what of them has changed
[4] certify  both ends compare the checksums of what the target holds now

trainers, pp = 2 x tp = 2            receivers, tp = 4
rank 0, 1   stage 0, half each       rank 4   a quarter of both stages
rank 2, 3   stage 1, half each       rank 5 to 7   the same
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from shardwise.checkpoint.contents import model_name_of_master
from shardwise.checkpoint.holdings import Holdings, RankFacts, compared_replicas, facts_of, without_state
from shardwise.checkpoint.state_pieces import Held, check_targets, hold
from shardwise.checkpoint.states import Restorable, Restoration, State, wrong_rewrite
from shardwise.checkpoint.stream_digests import (
    ElementsOf,
    PlacedDelivery,
    Sums,
    changed_only,
    differing,
    num_blocks_of,
    placed,
    sums_of,
    tell,
)
from shardwise.comm import Channel
from shardwise.comm.agreement import aborting, agreed, json_as, understood
from shardwise.comm.digests import digest_of
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import MismatchError, PlanError
from shardwise.moving.copies import fill, part_of
from shardwise.moving.live_states import findings_of
from shardwise.moving.mover import Delivery, Mover, PlanDeliveries
from shardwise.moving.piece_exchange import AT_ONCE_BYTES, Gathering, agree_on_plan, pack_pieces, unpack_alike
from shardwise.moving.replica_samples import SharedPieces, compare_samples, samples_of
from shardwise.plan.names import is_state_name
from shardwise.rewrite import Rewrite
from shardwise.routes.holders import holders_by_tensor, shared_pieces
from shardwise.routes.reshard import DEFAULT_MAX_BYTES
from shardwise.space import Move, Piece

_PURPOSE = "layouts of a stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """What went from trainers to receivers: the same on all ranks."""

    sent_bytes: int
    """Bytes of the messages of all ranks, with the digests of blocks and what fills up alignments."""
    needed_bytes: int
    """Bytes of what ranks want and do not hold themselves, each element once per rank, in the narrower dtype."""
    num_blocks: int
    """Blocks of up to 256 KiB that were compared: of all that is wanted."""
    skipped_blocks: int
    """Those of them that did not travel, since the receiver has them."""
    skipped_bytes: int
    """Bytes of these that another rank would have sent."""
    digest: str
    """Of what receivers hold now (xxh3); both ends of every stream have computed it from their own tensors."""
    casts: tuple[str, ...]
    """Casts that were made, as "float32 -> bfloat16": the target says the second."""
    unwanted: tuple[str, ...]
    """Tensors of the source that no receiver wants any part of, in the order of the model."""
    _layouts: "_StreamLayouts" = field(repr=False, compare=False)
    """What the next call need not find out again, if it is given this report as `last`."""


def stream(
    source: State | None,
    target: Mapping[Piece, torch.Tensor] | Mapping[str, torch.Tensor] | Restorable | None,
    *,
    channel: Channel,
    rewrite: Rewrite | None = None,
    delta: bool = False,
    last: StreamReport | None = None,
) -> StreamReport:
    """Fill the tensors of receivers with the weights of trainers, as all ranks of a channel call it together.

    source: an engine, or tensors by piece or by name; None on ranks that give nothing. Of an engine, the model's
        tensors as it computes with them.
    target: the tensors to fill, by piece (whole ones by name), of the receiver's own dtypes and cuts; or an engine
        under any plan, or a `TorchState`, which then has these weights; None on ranks that want nothing.
    channel: of trainers and receivers. An engine of the trainers alone has `channel.over(ranks)`.
    rewrite: from the names and shapes of the source to those of the targets. All ranks with a source give it; the
        others may leave it out.
    delta: send only the blocks that the target does not hold already, as digests of both sides tell.
    last: the report of an earlier call: layouts that are still the same are not planned again.

    In memory there are up to 64 MiB of messages on each rank, and no tensor as a whole. Tied tensors are there under
    each of their names; without a rewrite, names are those without wrappers such as `torch.compile`.
    Raises PlanError, RewriteError, CheckpointError or MismatchError, the same on all ranks, before anything is moved;
    MismatchError where a target does not hold afterwards what was given. PeerError where a rank is lost: then targets
    are written in part.
    """
    if not isinstance(channel, Channel):
        raise PlanError(f"channel is a {type(channel).__name__}; give the channel of all trainers and receivers")
    with aborting(channel, "a stream of weights"):
        with agreed(channel, purpose=_PURPOSE) as agreement:
            given = _GivenStream.of(source, target, rewrite, delta=delta, last=last)
            known = b"" if last is None else last._layouts.key + last._layouts.samples(channel, given)
            agreement.value = bytes([given.delta]) + given.digest + known
        if different := [rank for rank, each in enumerate(agreement.values) if each[:1] != agreement.values[0][:1]]:
            raise MismatchError(f"ranks 0 and {different[0]} differ in delta; make the same call on all ranks")
        digests = [each[1 : 1 + _DIGEST_BYTES] for each in agreement.values]
        keys = {each[1 + _DIGEST_BYTES : 1 + 2 * _DIGEST_BYTES] for each in agreement.values}
        # A key is made of one call, so that ranks with the same key know the same, and decide alike.
        if last is not None and keys == {last._layouts.key} and digests == last._layouts.digests:
            compare_samples(last._layouts.shared, [each[1 + 2 * _DIGEST_BYTES :] for each in agreement.values])
            layouts, held = last._layouts, last._layouts.held_again(channel, given)
        else:
            layouts, held = _found_out(channel, given, digests)
        report = _StreamCall(channel, layouts, held, given.wanted.tensors).carried_out(delta=delta)
        if given.restoration is not None:
            given.restoration.finish()
        return report


_DIGEST_BYTES = 16
_CERTIFICATE = tuple[int, int, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenStream:
    """The arguments of this rank, understood and checked."""

    source: State
    held: Held
    wanted: Held
    texts: Sequence[bytes]
    """What the other ranks have to know."""
    rewrite: Rewrite | None
    delta: bool
    restoration: Restoration | None
    """What makes the tensors an engine's own, where the target is one."""

    @classmethod
    def of(
        cls, source: State | None, target: object, rewrite: Rewrite | None, *, delta: object, last: object
    ) -> "_GivenStream":
        problems = wrong_rewrite(rewrite)
        if type(delta) is not bool:
            problems.append(f"delta is {delta!r}; give True or False")
        if last is not None and not isinstance(last, StreamReport):
            problems.append(f"last is a {type(last).__name__}; give the report of an earlier stream, or None")
        if target is not None and not isinstance(target, Mapping | Restorable):
            problems.append(
                f"the target is a {type(target).__name__}; give an engine, or the tensors to fill, by Piece"
            )
        if problems:
            raise PlanError(*problems)
        held = Held(tensors={}) if source is None else hold(source, what="the source")
        if not isinstance(source, Mapping):
            held = without_state(held)
        restoration = target.restore({}, {}) if isinstance(target, Restorable) else None
        fills: Any = (target or {}) if restoration is None else _weights_of(restoration)
        wanted = hold(fills, what="the target")
        check_targets(wanted)
        if findings := findings_of(held.tensors, wanted.tensors, renamed=rewrite is not None):
            raise PlanError(*findings)
        request = json.dumps([bool(held.tensors), None if rewrite is None else rewrite.to_record()])
        texts = [request.encode(), *facts_of(source or {}, held), pack_pieces(list(wanted.tensors))]
        return cls(
            source=source or {},
            held=held,
            wanted=wanted,
            texts=texts,
            rewrite=rewrite,
            delta=bool(delta),
            restoration=restoration,
        )

    @property
    def digest(self) -> bytes:
        """Of all that the other ranks have to know."""
        return digest_of(b"".join(map(digest_of, self.texts)))


def _weights_of(restoration: Restoration) -> dict[Piece, torch.Tensor]:
    """What a load of weights alone fills; masters under the names of their parameters."""
    named = {replace(piece, name=model_name_of_master(piece.name) or piece.name): piece for piece in restoration.wanted}
    return {piece: restoration.wanted[own] for piece, own in named.items() if not is_state_name(piece.name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StreamLayouts:
    """What ranks have found out about a source, a rewrite and targets: it holds as long as these keep their layouts."""

    key: bytes
    """The same on all ranks, and on none after another call."""
    digests: Sequence[bytes]
    """Of what each rank had said."""
    layout: Mapping[str, Any]
    """Of the source, see `layout_of`."""
    shared: SharedPieces
    """What of the source several ranks hold."""
    holdings: Holdings
    """Who gives what."""
    sources: Mapping[Piece, Piece]
    """What this rank gives, as the plan calls it, and as it holds it."""
    batches: Sequence[Sequence[PlacedDelivery]]
    """What this rank gives and takes."""
    needed_bytes: int
    casts: tuple[str, ...]
    casts_in_rewrite: bool
    unwanted: tuple[str, ...]

    def samples(self, channel: Channel, given: _GivenStream) -> bytes:
        """Of the replicas that this rank gives now."""
        return _samples(channel, given, self.layout, self.shared)

    def held_again(self, channel: Channel, given: _GivenStream) -> Held:
        """What this rank gives now: maybe other tensors in the same layout."""
        return self.renamed(self.holdings.held(channel, given.held))

    def renamed(self, held: Held) -> Held:
        """The same tensors, as the plan calls them."""
        return Held(
            tensors={piece: held.tensors[own] for piece, own in self.sources.items()},
            casts={piece: held.casts[own] for piece, own in self.sources.items() if own in held.casts},
        )


def _samples(channel: Channel, given: _GivenStream, layout: Mapping[str, Any], shared: SharedPieces) -> bytes:
    compared = compared_replicas(channel, given.source, given.held, layout, None)
    return samples_of(shared, channel.rank, compared)()


def _found_out(channel: Channel, given: _GivenStream, digests: Sequence[bytes]) -> tuple[_StreamLayouts, Held]:
    """What the layouts of all ranks mean, and what this rank gives. Raises the same error on all ranks."""
    with Gathering(_PURPOSE, at_once_bytes=AT_ONCE_BYTES).agreed(channel) as gathered:
        gathered.own, gathered.value = given.texts, os.urandom(_DIGEST_BYTES)
    requests, pieces, packed, wants = gathered.texts
    rewrite = _one_rewrite(channel, requests, given.rewrite)
    facts = RankFacts.of(pieces, packed, purpose=_PURPOSE)
    known = Holdings.of(facts, list(given.held.tensors), rewrite)
    source = known.held(channel, given.held)
    own_targets = list(given.wanted.tensors)
    pieces_of = unpack_alike(wants, given.texts[-1], own_targets)
    targets = [pieces_of[text] for text in wants]
    wanted_names = {piece.name for pieces in targets for piece in pieces}
    if not wanted_names:
        raise PlanError("no rank wants anything; give the tensors to fill as the target of the receivers")
    # Under each name that is wanted: receivers may have for two tensors what is one to the trainer.
    names = known.names()
    given_as = [
        [(replace(piece, name=name), piece) for piece in each for name in names[piece.name] if name in wanted_names]
        for each in known.lists
    ]
    held = [[piece for piece, _ in each] for each in given_as]
    plan = agree_on_plan(channel, held, targets, max_bytes=DEFAULT_MAX_BYTES, cast=True)
    shared: SharedPieces = ()
    if "plan" not in facts.layout:
        known_as = unpack_alike(pieces, given.texts[1], list(given.held.tensors))
        shared = shared_pieces(holders_by_tensor([known_as[text] for text in pieces]))
    with agreed(channel, purpose="casts and replicas of a stream") as agreement:
        # Only the giver of a value that its rewrite casts knows of the cast.
        agreement.value = bytes([bool(source.casts)]) + _samples(channel, given, facts.layout, shared)
    compare_samples(shared, [each[1:] for each in agreement.values])
    sources = dict(given_as[channel.rank])
    deliveries = PlanDeliveries(plan, channel.rank, list(sources), own_targets)
    unwanted = {name for name, all_names in names.items() if wanted_names.isdisjoint(all_names)}
    in_order = dict.fromkeys([*known.order, *names])
    layouts = _StreamLayouts(
        key=digest_of(b"".join(gathered.values)),
        digests=digests,
        layout=facts.layout,
        shared=shared,
        holdings=known,
        sources=sources,
        batches=placed(deliveries.batches(in_order=False)),
        needed_bytes=plan.needed_bytes(),
        casts=tuple(f"{held} -> {wanted}" for held, wanted in plan.casts()),
        casts_in_rewrite=any(each.startswith(b"\1") for each in agreement.values),
        unwanted=tuple(known.plain.get(name, name) for name in in_order if name in unwanted),
    )
    return layouts, layouts.renamed(source)


def _one_rewrite(channel: Channel, requests: Sequence[bytes], own: Rewrite | None) -> Rewrite | None:
    """The rewrite of the ranks that give one. Raises the same error on all ranks where they differ."""
    form = cache(json_as(tuple[bool, dict[str, Any] | None]))
    asked = understood(requests, form, purpose=_PURPOSE)
    records: dict[str, int] = {}
    for rank, (is_source, record) in enumerate(asked):
        if is_source or record is not None:
            records.setdefault(json.dumps(record), rank)
    if len(records) > 1:
        one, other = list(records.values())[:2]
        raise MismatchError(
            f"ranks {one} and {other} give different rewrites: {asked[one][1]} and {asked[other][1]}; give the same on "
            "all ranks that have a source"
        )
    if not records.keys() - {json.dumps(None)}:
        return None
    with agreed(channel, purpose="rewrite of a stream"):
        made = cache(lambda each: None if (record := form(each)[1]) is None else Rewrite.from_record(record))
        return own or next(filter(None, understood(requests, made, purpose=_PURPOSE)), None)


@dataclass(frozen=True, slots=True)
class _StreamCall:
    """One stream of weights, whose layouts are known."""

    channel: Channel
    layouts: _StreamLayouts
    held: Held
    targets: Mapping[Piece, torch.Tensor]

    @torch.no_grad()
    def carried_out(self, *, delta: bool) -> StreamReport:
        """Move, and certify."""
        channel, batches = self.channel, self.layouts.batches
        moving = [[each.delivery for each in batch] for batch in batches]
        digest_bytes = num_skipped = 0
        if delta:
            given, taken = self._sums(0, self._given), self._sums(1, self._taken)
            of_givers, num_came = tell(channel, given, taken)
            of_takers, num_back = tell(channel, taken, given, by_taker=True)
            changed = {ends: differing(each, of_takers[ends]) for ends, each in given.items()}
            changed |= {ends: differing(each, of_givers[ends]) for ends, each in taken.items()}
            moving = list(changed_only(batches, changed))
            digest_bytes = num_came + num_back
            num_skipped = sum(num_blocks_of(each) - len(changed[ends]) for ends, each in taken.items())
        mover: Mover[Piece, Piece] = Mover(
            channel,
            take=self.held.parts_of,
            put=lambda piece, moves, elements: fill(self.targets[piece], moves, elements),
            purpose="stream",
        )
        mover.run(moving)
        if not delta or any(each.taker == channel.rank for batch in moving for each in batch):
            taken = self._sums(1, self._taken)
        if not delta:
            # Not before the move: givers read their tensors while takers read theirs.
            of_givers, digest_bytes = tell(channel, self._sums(0, self._given), taken)
        with agreed(channel, purpose="certificate of a stream") as agreement:
            self._certify(taken, of_givers)
            counts = mover.received_bytes + digest_bytes, sum(map(num_blocks_of, taken.values())), num_skipped
            skipped = self._arriving_bytes(each.delivery for batch in batches for each in batch)
            skipped -= self._arriving_bytes(each for batch in moving for each in batch)
            digest = digest_of(b"".join(taken[ends] for ends in sorted(taken))).hex()
            agreement.value = json.dumps([*counts, skipped, digest]).encode()
        counts_of = understood(agreement.values, json_as(_CERTIFICATE), purpose="certificate of a stream")
        ranks = list(zip(*counts_of, strict=True))
        return StreamReport(
            sent_bytes=sum(ranks[0]),
            needed_bytes=self.layouts.needed_bytes,
            num_blocks=sum(ranks[1]),
            skipped_blocks=sum(ranks[2]),
            skipped_bytes=sum(ranks[3]),
            digest=digest_of("".join(ranks[4]).encode()).hex(),
            casts=self.layouts.casts,
            unwanted=self.layouts.unwanted,
            _layouts=self.layouts,
        )

    def _certify(self, taken: Sums, of_givers: Sums) -> None:
        """Raise MismatchError unless the targets of this rank hold what was given."""
        for ends, each in taken.items():
            if wrong := differing(each, of_givers[ends]):
                name = next(
                    placed.delivery.target.name
                    for batch in self.layouts.batches
                    for placed in batch
                    if placed.ends == ends and wrong[0] in placed.blocks
                )
                raise MismatchError(
                    f"the target does not hold what rank {ends[0]} gave: {len(wrong)} of {num_blocks_of(each)} blocks "
                    f"differ, the first in {name}. A memory or a link is broken, or somebody wrote to the tensors "
                    "meanwhile; stream again before you use the target"
                )

    def _sums(self, which: int, elements: ElementsOf) -> Sums:
        return sums_of(self.layouts.batches, self.channel.rank, which, elements, one_nan=self.layouts.casts_in_rewrite)

    def _arriving_bytes(self, deliveries: Iterable[Delivery[Piece, Piece]]) -> int:
        """Bytes of the elements that come from other ranks."""
        rank = self.channel.rank
        return sum(
            move.num_elements * each.dtype.itemsize
            for each in deliveries
            if each.taker == rank != each.giver
            for move in each.moves
        )

    def _given(self, delivery: Delivery[Piece, Piece], moves: Sequence[Move]) -> Iterable[torch.Tensor]:
        """What the giver has, as the target is to have it."""
        dtype = torch_dtype(delivery.target.dtype)
        return (part.to(dtype) for part in self.held.parts_of(delivery.source, moves))

    def _taken(self, delivery: Delivery[Piece, Piece], moves: Sequence[Move]) -> Iterable[torch.Tensor]:
        """What the target has."""
        target = self.targets[delivery.target].detach()
        return (part_of(target, move.target, move.shape) for move in moves)
