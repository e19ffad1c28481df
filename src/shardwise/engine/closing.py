"""What the data ranks tell each other once per update, between reduction and update."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import Channel
from shardwise.engine.norm import norm_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """The same on every rank."""

    loss: float
    grad_norm: float
    touched: list[bool]
    """For each trainable parameter: whether any rank has a gradient for it."""
    changed_buffers: list[bool]
    """For each buffer of the model: whether any rank's forward wrote to it."""


def exchange_closing(
    channel: Channel,
    *,
    loss: float,
    squares: float,
    norm_dtype: torch.dtype,
    touched: Sequence[bool],
    changed_buffers: Sequence[bool],
) -> Closing:
    """Exchange this rank's share of the loss and of the squared norm, and what it touched."""
    flags = [*touched, *changed_buffers]
    packed = struct.pack("<dd", loss, squares) + _bits(flags).to_bytes(-(-len(flags) // 8), "little")
    answers = channel.exchange(packed, purpose="losses and norms")
    shares = [struct.unpack("<dd", answer[:16]) for answer in answers]
    union = 0
    for answer in answers:
        union |= int.from_bytes(answer[16:], "little")
    anywhere = [bool(union >> at & 1) for at in range(len(flags))]
    return Closing(
        loss=_sum([share for share, _ in shares]),
        grad_norm=norm_of([share for _, share in shares], norm_dtype),
        touched=anywhere[: len(touched)],
        changed_buffers=anywhere[len(touched) :],
    )


def exchange_sum(channel: Channel, value: float, *, purpose: str) -> float:
    """The sum of every rank's value, correctly rounded: the same float on every rank."""
    answers = channel.exchange(struct.pack("<d", value), purpose=purpose)
    return _sum([struct.unpack("<d", answer)[0] for answer in answers])


def _bits(flags: Sequence[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)) or "0", 2)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
