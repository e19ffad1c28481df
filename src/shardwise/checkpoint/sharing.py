"""Sharing: findings and ties of all ranks, put together the same on every rank."""

import json
from collections.abc import Mapping, Sequence

from shardwise.comm import Channel
from shardwise.errors import MismatchError
from shardwise.moving.piece_texts import Gathering
from shardwise.space import Piece

__all__ = ["gather_findings", "merge_ties"]


def gather_findings(channel: Channel, findings: Sequence[str], *, purpose: str) -> list[str]:
    """The findings of all ranks, each once, the same on every rank."""
    (texts,) = Gathering(purpose).gather(channel, [json.dumps(list(findings)).encode()])
    return list(dict.fromkeys(each for text in dict.fromkeys(texts) for each in json.loads(text)))


def merge_ties(ties: Sequence[Mapping[str, str]], pieces: Sequence[Sequence[Piece]]) -> dict[str, str]:
    """The ties that ranks know together. Raises MismatchError where what is one tensor to a rank is two to another."""
    merged = {alias: name for each in ties for alias, name in each.items()}
    for rank, (own, held) in enumerate(zip(ties, pieces, strict=True)):
        names = {piece.name for piece in held}
        for alias, name in merged.items():
            if name in merged or own.get(alias, name) != name or {alias, name} <= names:
                raise MismatchError(
                    f"{alias} and {name} are one tensor to some ranks, but rank {rank} has them otherwise (as two, or "
                    "in another order); tie the same tensors on all ranks, and give states in the same order"
                )
    return merged
