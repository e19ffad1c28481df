"""What the cases of the suite of channels share: inputs that every rank can compute for every rank, and oracles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

GATHERED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64)


Channel: TypeAlias = Any
"""What is tried. The suite imports no channel, and so knows none by its type."""

Work: TypeAlias = Any
"""What a channel gives for a call that has begun."""

Errors: TypeAlias = Any
"""What has `MismatchError` and `PeerError` as attributes, such as `shardwise.errors`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One claim about channels, called with its channel on every rank."""

    body: Callable[..., None]
    poisons: bool
    """The channel is of no use afterwards."""
    errors: Errors = None
    """What claims on refusals get: these all poison."""

    @property
    def name(self) -> str:
        """Unique among all."""
        return self.body.__name__

    def __call__(self, channel: Channel) -> None:
        if self.poisons:
            self.body(channel, self.errors)
        else:
            self.body(channel)


def case(body: Callable[[Channel], None]) -> Case:
    """A claim after which the channel goes on."""
    return Case(body, poisons=False)


def poisoning_case(body: Callable[[Channel, Errors], None]) -> Case:
    """A claim on how a channel refuses, or ends."""
    return Case(body, poisons=True)


def values(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What rank `rank` gives: different for every rank and element, and inexact to add in floating point."""
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    if dtype is torch.bool:
        return torch.randint(0, 2, (num_elements,), generator=generator).to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (num_elements,), generator=generator).to(dtype)
    return torch.randn(num_elements, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)


def given(channel: Channel, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What this rank gives, on its device."""
    return values(channel.rank, num_elements, dtype).to(channel.device)


def full(channel: Channel, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """An output that holds something wrong everywhere."""
    return torch.full((num_elements,), 77, dtype=dtype, device=channel.device)


def part_of(whole: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """The elements of a rank, where each has so many."""
    return whole[sum(counts[:rank]) : sum(counts[: rank + 1])]


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit, wherever the first is."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    got_bytes, expected_bytes = got.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
    assert torch.equal(got_bytes, expected_bytes), f"got {got}, expected {expected}"


def assert_sum(channel: Channel, got: torch.Tensor, inputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """`got` is this rank's part of the plain sum in rank order, to the bit, on devices too."""
    terms = [part_of(whole, counts, channel.rank).to(got.dtype) for whole in inputs]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    assert_same_bits(got, total)


def told(counts: Sequence[int]) -> Sequence[int] | None:
    """Of equal parts a caller says no counts."""
    return counts if len({*counts}) > 1 else None


def uneven(channel: Channel) -> list[int]:
    """Counts with zeros for some ranks, the first among them: 0, 5, 3, 0, 5 ..."""
    return [(0, 5, 3)[rank % 3] for rank in range(channel.size)]


def gather_and_check(channel: Channel, counts: Sequence[int], dtype: torch.dtype, purpose: str) -> None:
    """All-gather parts of so many elements."""
    output, own = full(channel, sum(counts), dtype), given(channel, counts[channel.rank], dtype)
    channel.all_gather(output, own, purpose=purpose, counts=told(counts)).wait()
    assert_same_bits(own, values(channel.rank, counts[channel.rank], dtype))  # is left alone
    assert_same_bits(output, torch.cat([values(rank, count, dtype) for rank, count in enumerate(counts)]))


def reduce_and_check(
    channel: Channel, counts: Sequence[int], dtype: torch.dtype, sum_dtype: torch.dtype, purpose: str
) -> None:
    """Reduce-scatter into parts of so many elements."""
    output = full(channel, counts[channel.rank], sum_dtype)
    own = given(channel, sum(counts), dtype)
    channel.reduce_scatter(output, own, purpose=purpose, counts=told(counts)).wait()
    assert_sum(channel, output, [values(rank, sum(counts), dtype) for rank in range(channel.size)], counts)
