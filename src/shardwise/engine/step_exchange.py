"""What all ranks tell each other once per update, between reduction and update."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.comm import Channel
from shardwise.errors import MismatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExchange:
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
    written: list[int]
    """Parameters of the model, by number, that a forward wrote to on some rank."""
    stop: bool
    """Whether some rank asked to stop."""


def exchange_step(
    channel: Channel,
    *,
    loss: float,
    alike: Sequence[Sequence[int]],
    squares: float,
    norms: Mapping[int, float],
    touched: Sequence[bool],
    changed_buffers: Sequence[bool],
    written: Sequence[bool],
    stop: bool,
) -> StepExchange:
    """Exchange this rank's share of the loss and of the norm, and what it touched. `alike`: see `sum_of_losses`."""
    # One bit per parameter and buffer in one message: a step costs one exchange whatever is agreed on in it.
    flags = [*touched, *changed_buffers, *written, stop]
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
    return StepExchange(
        loss=sum_of_losses([share for share, _ in shares], alike, is_exact=channel.device.type == "cpu"),
        squares=[share for _, share in shares],
        norms=dict(pair for answer in answers for pair in struct.iter_unpack("<qd", answer[16 + num_bytes :])),
        touched=anywhere[: len(touched)],
        changed_buffers={
            at: [rank for rank, bits in enumerate(bits_of) if bits >> len(touched) + at & 1] for at in changed
        },
        written=[at for at in range(len(written)) if anywhere[len(touched) + len(changed_buffers) + at]],
        stop=anywhere[-1],
    )


def exchange_loss(channel: Channel, loss: float, alike: Sequence[Sequence[int]]) -> float:
    """The sum of every rank's share of a loss, correctly rounded: the same float on every rank."""
    answers = channel.exchange(struct.pack("<d", loss), purpose="loss")
    shares = [struct.unpack("<d", answer)[0] for answer in answers]
    return sum_of_losses(shares, alike, is_exact=channel.device.type == "cpu")


def sum_of_losses(shares: Sequence[float], alike: Sequence[Sequence[int]], *, is_exact: bool) -> float:
    """The sum of the ranks' shares. `alike`: ranks along tp, which all have the same share; it counts once.

    Raises MismatchError where they have not: some value that each of them has in part was taken for a whole one.
    is_exact: to the last bit; else as far as kernels that add in any order allow.
    """
    for ranks in alike:
        first = shares[ranks[0]]
        for rank in ranks[1:]:
            if not _is_same(shares[rank], first, tolerance=0.0 if is_exact else 1e-3):
                raise MismatchError(
                    f"rank {ranks[0]} and rank {rank} lie along tp and have the same samples, but their losses are "
                    f"{first!r} and {shares[rank]!r}: somewhere a value of which each rank has its own part is read as "
                    "if it were whole. Look at tensor.rules (a 'column' needs a 'row' or 'colwise_gather_output' "
                    "behind it, bare parameters a 'sum' around them); sw.verify (shardwise verify) names the first "
                    "tensor that differs"
                )
    return _sum([shares[ranks[0]] for ranks in alike])


def _is_same(one: float, other: float, *, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))


def _bits(flags: Sequence[bool]) -> int:
    return int("".join("1" if flag else "0" for flag in reversed(flags)) or "0", 2)


def _sum(values: Sequence[float]) -> float:
    # fsum rounds once, so that the sum does not depend on the order of the ranks, nor on how many they are.
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
