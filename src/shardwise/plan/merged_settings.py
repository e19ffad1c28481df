"""Merged settings: what a checkpoint keeps beside the state, as JSON values, put together from what ranks know."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import MismatchError

__all__ = ["merge_settings"]


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
