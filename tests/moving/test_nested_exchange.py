"""`sw.exchange` gives values of any nesting to all ranks, and refuses the others alike on all."""

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import PeerError, PlanError
from tests.engine.refusals import same_error_everywhere
from tests.refusals import Refusals


def value_of(rank: int) -> Any:
    """Another kind, and other sizes, on each rank."""
    if rank == 1:
        return None
    return {
        "tokens": [torch.arange(6 + rank).view(1, -1).t(), (torch.tensor(True), torch.zeros(0, 3))],
        "weights": torch.nn.Parameter(torch.tensor([0.1, float("nan"), -0.0], dtype=torch.bfloat16)),
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
        "of many": torch.arange(8.0)[rank::8],
        "": (rank, 0.1, True, None, "\U0001f600 \ud83d", float("inf"), {}),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        is_like = (one.dtype, one.shape) == (other.dtype, other.shape) and not other.requires_grad
        return is_like and one.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).equal(
            other.cpu().view(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_every_rank_gets_the_values_of_all_to_the_bit(device: str, request: pytest.FixtureRequest) -> None:
    if device == "fake":
        request.getfixturevalue("fake")

    def run(channel: sw.Channel) -> list[Any]:
        found = sw.exchange(value_of(channel.rank), channel=channel, purpose="rollouts")
        assert found[0]["wide"].device == channel.device
        found[0]["wide"].zero_()  # a copy: nothing of rank 0 changes
        return sw.exchange(value_of(channel.rank), channel=channel, purpose="rollouts")

    for found in sw.simulate(3, run, device=device):
        assert all(same(value_of(rank), each) for rank, each in enumerate(found))
    assert same(value_of(0), sw.exchange(value_of(0))[0])


def test_it_costs_one_exchange_and_one_gathering_where_there_are_tensors() -> None:
    def run(channel: sw.Channel) -> list[str]:
        recorded = sw.Recorded(channel)
        sw.exchange(channel.rank, channel=recorded)
        sw.exchange(torch.ones(channel.rank), channel=recorded)
        return [call.operation for call in recorded.calls]

    assert sw.simulate(2, run) == [["exchange", "exchange", "all_gather"]] * 2


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def given(value: Any) -> None:
    """By one rank of two; alone it is refused too."""
    with pytest.raises(PlanError):
        sw.exchange(value, purpose="rollouts")
    raise same_error_everywhere(
        2, lambda channel: sw.exchange(value if channel.rank else None, channel=channel, purpose="rollouts")
    )


REFUSED = Refusals(
    "moving.exchange",
    {
        "a set": lambda: given({"a": [0, {1, 2}]}),
        "a number as key": lambda: given({"a": {3: 4}}),
        "no dense elements, and bytes": lambda: given([torch.ones(2).to_sparse(), b"x"]),
        "no elements": lambda: given(torch.empty(2, device="meta")),
        "a large number": lambda: given(1 << 64),
        "a circle": lambda: given(circle()),
    },
    kind=PlanError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_other_values_of_one_rank_are_refused_on_all(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[",
        b"\xff",
        b'["tensor", "float32", [-1]]',
        b'["tensor", "float32", [true]]',
        b'["tensor", "nn", [1]]',
        b'["tensor", "float32", [1099511627776, 1099511627776]]',
        b'["tensor", "float32", [0, 18446744073709551616]]',
        b'["tensor", "float32"]',
        b'["set", []]',
        b'["dict", [[1, 2]]]',
        b'["list", [["tensor", [], [1]]]]',
        b'["list", 3]',
    ],
)
def test_a_peer_that_gives_other_bytes_is_named(header: bytes) -> None:
    class Answers(sw.Recorded):
        def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
            return [value, b"+" + header]

    with pytest.raises(PeerError, match="rank 1 gave"):
        sw.simulate(2, lambda channel: sw.exchange(None, channel=Answers(channel)))
