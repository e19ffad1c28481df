"""What `sw.reshard` cannot be called with: one sentence for each mistake, the same on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.space import Piece
from tests.moving.layouts import State

A, B, C = (Piece(name=name, dtype="float32", global_shape=(4,)) for name in "abc")


@pytest.mark.parametrize(
    ("source", "target", "options", "text"),
    [
        ([A], {A: None}, {}, "the source is a list; give a dict of tensors by Piece"),
        ({A: torch.ones(4)}, [A], {}, "the target is a list; give a dict of tensors by Piece"),
        ({A: torch.ones(4)}, {A: None}, {"max_bytes": "64"}, "max_bytes is '64', a str; give a whole number of bytes"),
    ],
    ids=["source", "target", "max_bytes"],
)
def test_arguments_of_another_kind_are_refused_on_every_rank(
    source: Any, target: Any, options: dict[str, Any], text: str
) -> None:
    def move(channel: sw.Channel) -> str:
        right: tuple[Any, Any, dict[str, Any]] = ({A: torch.ones(4)}, {A: None}, {})
        held, wanted, more = (source, target, options) if channel.rank == 1 else right
        with pytest.raises(PlanError) as caught:
            sw.reshard(held, wanted, channel, **more)
        return str(caught.value)

    first, second = sw.simulate(2, move)
    assert first == second
    assert text in first


SHARING: list[tuple[Callable[[torch.Tensor], State], str | None]] = [
    (lambda m: {A: m[0:4], B: m[0:4]}, "a.* and b"),
    (lambda m: {A: m[0:4], B: m[8:12], C: m[3:7]}, "a.* and c"),
    (lambda m: {A: m[0:8:2], B: m[1:9:2], C: m[4:16:3]}, "[ab].* and c"),
    (lambda m: {A: m[0:12:3], B: m[1:13:3], C: m[2:14:3]}, None),  # columns
    (lambda m: {A: m[8:12], B: m[4:8], C: m[0:4]}, None),
]
"""Targets in one memory, and what is said of them."""


@pytest.mark.parametrize(("lie", "text"), SHARING, ids=lambda _: "")
def test_two_targets_in_one_memory_are_refused(lie: Callable[[torch.Tensor], State], text: str | None) -> None:
    memory = torch.zeros(16)
    target = lie(memory)
    source = {piece: torch.full((4,), at + 1.0) for at, piece in enumerate((A, B, C))}
    if text is not None:
        with pytest.raises(PlanError, match=f"{text}.* would be written into memory that they share"):
            sw.simulate(1, lambda channel: sw.reshard(source, {**target}, channel))
        assert not memory.any()
        return
    sw.simulate(1, lambda channel: sw.reshard(source, {**target}, channel))
    assert all(torch.equal(tensor, source[piece]) for piece, tensor in target.items())


def test_what_stays_as_it_is_may_share_memory() -> None:
    memory = torch.arange(6.0)
    state = {A: memory[0:4], B: memory[2:6]}
    sw.simulate(1, lambda channel: sw.reshard(state, {**state}, channel))
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
