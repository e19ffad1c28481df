"""Forwards that take turns."""

import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.engine.pipeline.training_steps import Turn

CPU = torch.device("cpu")


def test_forwards_go_on_where_they_parked() -> None:
    seen: list[str] = []
    turns: dict[str, Turn] = {}

    def body(name: str) -> None:
        seen.append(f"{name}0")
        turns[name].park()
        seen.append(f"{name}1")

    for name in "ab":
        turns[name] = Turn(lambda name=name: body(name), CPU)  # type: ignore[misc]
    for name in "abba":
        turns[name].advance()
    assert seen == ["a0", "b0", "b1", "a1"]
    turns["a"].advance()
    assert seen == ["a0", "b0", "b1", "a1"], "a forward that has ended stays ended"


def test_grad_mode_and_autocast_of_the_caller_hold_in_the_forward() -> None:
    seen: list[object] = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        turn = Turn(lambda: seen.append((torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"))), CPU)
        turn.advance()
    assert seen == [(False, torch.bfloat16)]


def test_modes_and_hooks_of_the_caller_hold_in_the_forward() -> None:
    """A default device, a count of operations, and where what autograd saves goes."""
    saved: list[torch.Tensor] = []
    weight = torch.ones(3, requires_grad=True)
    made: list[torch.Tensor] = []

    def body() -> None:
        made.append(torch.ones(2, 2))
        made.append(made[0] @ made[0])
        weight.exp()

    counter = FlopCounterMode(display=False)

    def pack(each: torch.Tensor) -> torch.Tensor:
        saved.append(each)
        return each

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each)
    with torch.device("meta"), counter, hooks:
        torch.ones(2, 2) @ torch.ones(2, 2)
        before = counter.get_total_flops()
        turn = Turn(body, CPU)
        turn.advance()
        assert counter.get_total_flops() == 2 * before > 0
    assert made[0].is_meta
    assert len(saved) == 1
    with torch.inference_mode():
        turn = Turn(lambda: made.append(torch.ones(1)), CPU)
        turn.advance()
    assert made[-1].is_inference()


def test_what_a_forward_raises_is_raised_where_it_was_advanced() -> None:
    def body() -> None:
        raise ValueError("from inside")

    turn = Turn(body, CPU)
    with pytest.raises(ValueError, match="from inside"):
        turn.advance()
    turn.abandon()


def test_an_abandoned_forward_unwinds_and_leaves_no_thread() -> None:
    unwound: list[bool] = []
    before = threading.active_count()

    def body() -> None:
        try:
            turn.park()
        finally:
            unwound.append(True)

    turn = Turn(body, CPU)
    never_begun = Turn(body, CPU)
    turn.advance()
    turn.abandon()
    never_begun.abandon()
    assert unwound == [True]
    assert threading.active_count() == before


def test_an_abandoned_forward_that_would_park_again_ends_too() -> None:
    ended: list[str] = []

    def body() -> None:
        try:
            turn.park()
        finally:
            try:
                turn.park()
            finally:
                ended.append("outer")

    turn = Turn(body, CPU)
    turn.advance()
    turn.abandon()
    assert ended == ["outer"]
