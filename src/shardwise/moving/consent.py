"""Consent: ranks tell each other what they hold and want, plan alone, and compare before a byte moves."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, compare
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import MismatchError, PlanError, ShardwiseError
from shardwise.moving.piece_texts import Gathering, pack_pieces, unpack_pieces
from shardwise.plan.reshard import ReshardPlan, plan_reshard
from shardwise.space import Piece

__all__ = ["Consent", "consent"]


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
    texts = [pack_pieces(sources), pack_pieces(targets)]
    options = {"max_bytes": max_bytes, "cast": cast}
    with Gathering("pieces to reshard").agreed(channel) as gathered:
        if refusal is not None:
            raise refusal
        gathered.own, gathered.value = texts, json.dumps([options, word]).encode()
    asked = [json.loads(answer) for answer in gathered.values]
    for rank, (theirs, _) in enumerate(asked):
        if theirs != asked[0][0]:
            raise MismatchError(
                f"rank {rank} reshards with {theirs}, but rank 0 with {asked[0][0]}; make the same call on all ranks"
            )
    pieces_of = {text: unpack_pieces(text) for each in gathered.texts for text in dict.fromkeys(each)}
    held, wanted = ([pieces_of[text] for text in each] for each in gathered.texts)
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
