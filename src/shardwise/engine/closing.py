"""What all ranks tell each other once per update, between reduction and update."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.comm import Channel


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """The same on every rank."""

    loss: float
    squares: list[float]
    """Every rank's sum of squares of the gradient's elements that it counts."""
    norms: dict[int, float]
    """The norms of whole parameters' gradients, by the number of the parameter, as far as ranks gave them."""
    touched: list[bool]
    """For each trainable parameter: whether any rank has a gradient for it."""
    changed_buffers: dict[int, list[int]]
    """Buffers of the model, by number, that a forward wrote to, and the ranks where one did."""


def exchange_closing(
    channel: Channel,
    *,
    loss: float,
    squares: float,
    norms: Mapping[int, float],
    touched: Sequence[bool],
    changed_buffers: Sequence[bool],
) -> Closing:
    """Exchange this rank's share of the loss and of the norm, and what it touched."""
    flags = [*touched, *changed_buffers]
    num_bytes = -(-len(flags) // 8)
    packed = struct.pack("<dd", loss, squares) + _bits(flags).to_bytes(num_bytes, "little")
    packed += b"".join(struct.pack("<qd", *each) for each in norms.items())
    answers = channel.exchange(packed, purpose="losses and norms")
    shares = [struct.unpack("<dd", answer[:16]) for answer in answers]
    bits_of = [int.from_bytes(answer[16 : 16 + num_bytes], "little") for answer in answers]
    union = 0
    for bits in bits_of:
        union |= bits
    anywhere = [bool(union >> at & 1) for at in range(len(flags))]
    changed = [at for at in range(len(changed_buffers)) if anywhere[len(touched) + at]]
    return Closing(
        loss=_sum([share for share, _ in shares]),
        squares=[share for _, share in shares],
        norms=dict(pair for answer in answers for pair in struct.iter_unpack("<qd", answer[16 + num_bytes :])),
        touched=anywhere[: len(touched)],
        changed_buffers={
            at: [rank for rank, bits in enumerate(bits_of) if bits >> len(touched) + at & 1] for at in changed
        },
    )


def exchange_sum(channel: Channel, value: float, *, purpose: str) -> float:
    """The sum of every rank's value, correctly rounded: the same float on every rank."""
    answers = channel.exchange(struct.pack("<d", value), purpose=purpose)
    return _sum([struct.unpack("<d", answer)[0] for answer in answers])


def _bits(flags: Sequence[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)) or "0", 2)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
