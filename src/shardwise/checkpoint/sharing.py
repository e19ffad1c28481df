"""Sharing: texts that every rank has to know, sent once where ranks say the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from shardwise.comm import Channel
from shardwise.comm.agreement import agree
from shardwise.errors import MismatchError, ShardwiseError
from shardwise.space import Piece

__all__ = [
    "gather_findings",
    "gather_texts",
    "merge_settings",
    "merge_ties",
    "pack_pieces",
    "unpack_alike",
    "unpack_pieces",
]


def gather_texts(channel: Channel, text: bytes, *, purpose: str, refusal: ShardwiseError | None = None) -> list[bytes]:
    """Every rank's text, in rank order; texts that are alike travel once, and are one object.

    Where a rank gives a refusal instead, every rank raises it.
    """
    digests = agree(channel, refusal, purpose=f"digests of {purpose}", value=xxhash.xxh3_128_digest(text))
    first_of: dict[bytes, int] = {}
    for rank, digest in enumerate(digests):
        first_of.setdefault(digest, rank)
    if len(first_of) == 1:
        return [text] * channel.size
    mine = text if first_of[digests[channel.rank]] == channel.rank else b""
    texts = channel.exchange(mine, purpose=purpose)
    return [texts[first_of[digest]] for digest in digests]


def gather_findings(channel: Channel, findings: Sequence[str], *, purpose: str) -> list[str]:
    """The findings of all ranks, each once, the same on every rank."""
    texts = gather_texts(channel, json.dumps(list(findings)).encode(), purpose=purpose)
    return list(dict.fromkeys(each for text in dict.fromkeys(texts) for each in json.loads(text)))


def pack_pieces(pieces: Sequence[Piece]) -> bytes:
    """Pieces as text: a row per tensor, then its pieces."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[Any]] = {}
    for at, piece in enumerate(pieces):
        whole = piece.shape == piece.global_shape
        box = None if whole else (piece.offset, piece.shape)
        rows.setdefault((piece.name, piece.dtype, piece.global_shape), []).append((at, box, piece.run))
    return json.dumps([[*tensor, parts] for tensor, parts in rows.items()], separators=(",", ":")).encode()


def unpack_pieces(text: bytes) -> list[Piece]:
    """The pieces of a text of `pack_pieces`, in the order in which they were given."""
    pieces = []
    for name, dtype, shape, parts in json.loads(text):
        for at, box, run in parts:
            offset, size = box or (None, None)
            piece = Piece(name=name, dtype=dtype, global_shape=shape, offset=offset, shape=size, run=run)
            pieces.append((at, piece))
    return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]


def unpack_alike(texts: Sequence[bytes], text: bytes, own: list[Piece]) -> dict[bytes, list[Piece]]:
    """The pieces of every different text, in the order of the ranks; `text` was packed from `own` and needs no work."""
    return {each: own if each == text else unpack_pieces(each) for each in dict.fromkeys(texts)}


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


def merge_settings(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that ranks know together. Raises MismatchError where two say different things under one key."""
    merged: dict[str, Any] = {}
    for rank, settings in enumerate(by_rank):
        merged = _merge(merged, settings, rank, "settings")
    return merged


def _merge(one: Any, other: Any, rank: int, place: str) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            **one,
            **{key: _merge(one.get(key, value), value, rank, f"{place}.{key}") for key, value in other.items()},
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            _merge(mine, yours, rank, f"{place}[{at}]") for at, (mine, yours) in enumerate(zip(one, other, strict=True))
        ]
    if one != other:
        raise MismatchError(
            f"{place} is {one!r} on the ranks before rank {rank}, and {other!r} there; settings (learning rates, "
            "groups) are to be equal on all ranks when they are saved"
        )
    return one
