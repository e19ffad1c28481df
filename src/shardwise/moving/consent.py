"""Consent: ranks tell each other what they hold and want, plan alone, and compare before a byte moves."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, compare
from shardwise.comm.dtypes import torch_dtype
from shardwise.errors import MismatchError, PlanError, ShardwiseError
from shardwise.plan.reshard import ReshardPlan, plan_reshard
from shardwise.space import Piece

__all__ = ["Consent", "consent"]

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """What all ranks have agreed on, and the pieces of this one in the order that the plan counts them in."""

    plan: ReshardPlan
    sources: Sequence[Piece]
    targets: Sequence[Piece]
    words: Sequence[str]
    """What each rank said besides."""


def consent(
    channel: Channel,
    sources: Sequence[Piece],
    targets: Sequence[Piece],
    *,
    max_bytes: int,
    cast: bool,
    refusal: ShardwiseError | None = None,
    word: str = "",
) -> Consent:
    """Plan together with all ranks of the channel. `sources` and `targets` are what this one holds and wants.

    refusal: why this rank cannot take part; then every rank raises it. word: a short text for all ranks.
    Raises PlanError or MismatchError, the same on every rank.
    """
    texts = [_pack(sources), _pack(targets)]
    options = {"max_bytes": max_bytes, "cast": cast}
    value = b"".join(map(xxhash.xxh3_128_digest, texts)) + json.dumps([options, word]).encode()
    with agreed(channel, purpose="digests of pieces to reshard") as agreement:
        if refusal is not None:
            raise refusal
        agreement.value = value
    answers = agreement.values
    asked = [json.loads(answer[2 * _DIGEST_BYTES :]) for answer in answers]
    for rank, (theirs, _) in enumerate(asked):
        if theirs != asked[0][0]:
            raise MismatchError(
                f"rank {rank} reshards with {theirs}, but rank 0 with {asked[0][0]}; make the same call on all ranks"
            )
    digests = [answer[at : at + _DIGEST_BYTES] for at in (0, _DIGEST_BYTES) for answer in answers]
    pieces = _gather(channel, digests, texts)
    held, wanted = pieces[: channel.size], pieces[channel.size :]
    with agreed(channel, purpose="verdicts on a reshard") as agreement:
        plan = plan_reshard(held, wanted, max_bytes=max_bytes, cast=cast)
        _check_casts(plan, channel.device)
        text = plan.text()
        agreement.value = xxhash.xxh3_128_digest(text.encode())
    if len(set(agreement.values)) > 1:
        hint = "Run the same version of shardwise on all ranks"
        compare(channel, text.splitlines(), subject="plans of a reshard", hint=hint)
    return Consent(
        plan=plan, sources=held[channel.rank], targets=wanted[channel.rank], words=[word for _, word in asked]
    )


def _gather(channel: Channel, digests: Sequence[bytes], own: Sequence[bytes]) -> list[list[Piece]]:
    """The pieces behind every digest: what each rank holds, in rank order, then what each wants.

    A text that several give travels once, from the first of them; none travels where all hold and want the same.
    """
    known = {xxhash.xxh3_128_digest(text): text for text in own}
    rank_of: dict[bytes, int] = {}
    for at, digest in enumerate(digests):
        rank_of[digest] = min(at % channel.size, rank_of.get(digest, channel.size))
    pairs = zip(digests[: channel.size], digests[channel.size :], strict=True)
    if any(set(pair) != rank_of.keys() for pair in pairs):
        told = [known[digest].decode() for digest in rank_of if rank_of[digest] == channel.rank]
        answers = channel.exchange(json.dumps(told).encode(), purpose="pieces to reshard")
        texts = [iter(json.loads(answer)) for answer in answers]
        known |= {digest: next(texts[rank]).encode() for digest, rank in rank_of.items()}
    pieces = {digest: _unpack(known[digest]) for digest in rank_of}
    return [pieces[digest] for digest in digests]


def _pack(pieces: Iterable[Piece]) -> bytes:
    """Pieces as text: a row per tensor, with its pieces."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[Any]] = {}
    for piece in pieces:
        box = None if piece.shape == piece.global_shape else (piece.offset, piece.shape)
        rows.setdefault((piece.name, piece.dtype, piece.global_shape), []).append((box, piece.run))
    return json.dumps([[*tensor, parts] for tensor, parts in rows.items()], separators=(",", ":")).encode()


def _unpack(text: bytes) -> list[Piece]:
    """The pieces, one tensor after the other."""
    pieces = []
    for name, dtype, global_shape, parts in json.loads(text):
        for box, run in parts:
            offset, shape = box or (None, None)
            pieces.append(Piece(name=name, dtype=dtype, global_shape=global_shape, offset=offset, shape=shape, run=run))
    return pieces


def _check_casts(plan: ReshardPlan, device: torch.device) -> None:
    """Raise PlanError unless torch can make all casts of the plan."""
    pairs = {
        (route.dtype, route.wanted[share.target].piece.dtype)
        for route in plan.routes
        if any(place.piece.dtype != route.dtype for place in route.wanted)
        for share in route.shares
    }
    problems = []
    for held, wanted in sorted(pairs):
        try:
            torch.zeros(1, dtype=torch_dtype(held), device=device).to(torch_dtype(wanted))
        except (NotImplementedError, RuntimeError) as error:
            problems.append(f"torch cannot cast {held} to {wanted}, which some targets ask for: {error}")
    if problems:
        raise PlanError(*problems)
