"""Transfers that go on alone overlap with computation: by the order of calls, and by counters."""

import re
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.engine.late_channels import WIDTH, Late, Log, engine_of, third_step
from tests.engine.loops import mean_square


def in_short(stage: int, num_blocks: int, *, k: int = 1) -> list[str]:
    """What a step did, a word or two each: 'F 1', 'gather 1', 'reduce 1', 'wait 1' of unit or bucket 1."""
    log, words = Log(), []
    for each in third_step(log, engine_of(log, None, stage, [8] * num_blocks, k=k), k):
        found = re.search(r"unit '(\d)'", each.what) or re.search(r"bucket (\d)", each.what)
        if each.kind == "compute":
            words.append(each.what)
        elif found is not None:
            what = "reduce" if each.what.startswith("gradients") else "gather"
            words.append(f"{what} {found[1]}" if each.kind == "issue" else f"wait {found[1]}")
    return words


def begun(words: list[str]) -> list[str]:
    return [each for each in words if not each.startswith("wait")]


def test_reductions_begin_inside_of_backward() -> None:
    # Bucket 0 has the last block.
    computed = ["F 0", "F 1", "F 2", "B 2", "reduce 0", "B 1", "reduce 1", "B 0", "reduce 2"]
    published = ["gather 0", "gather 1", "gather 2"]
    assert begun(in_short(1, 3)) == [*computed, *published]
    # Only the last microbatch makes a sum complete.
    assert begun(in_short(1, 3, k=2)) == ["F 0", "F 1", "F 2", "B 2", "B 1", "B 0", *computed, *published]


def test_under_stage_2_no_reduction_waits_for_one_before_it_while_there_is_a_buffer() -> None:
    backward = ["B 2", "reduce 0", "B 1", "reduce 1", "B 0", "wait 0", "reduce 2", "wait 1", "wait 2"]
    words = in_short(2, 3)
    assert words[3 : 3 + len(backward)] == backward


def test_a_unit_is_gathered_while_the_one_before_it_computes() -> None:
    # The last two units of a forward are still there for the backward.
    forward = ["gather 0", "gather 1", "F 0", "gather 2", "F 1", "gather 3", "F 2", "F 3"]
    # A gather goes ahead of the gradients whose unit makes room for it: a backward waits for it.
    backward = ["B 3", "gather 1", "reduce 3", "B 2", "gather 0", "reduce 2", "B 1", "reduce 1", "B 0", "reduce 0"]
    assert begun(in_short(3, 4)) == forward + backward


@pytest.mark.parametrize(("num_units", "k", "reads"), [(1, 1, True), (2, 3, False), (3, 1, False), (5, 3, True)])
def test_gatherings_are_those_of_the_formula(num_units: int, k: int, reads: bool) -> None:
    """`reads`: the loss reads a parameter."""

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        weight: Any = engine.model[0].up.weight  # type: ignore[index]
        return mean_square(output @ weight.t() if reads else output)

    log = Log()
    engine = engine_of(log, None, 3, [8] * num_units, k=k, loss=loss)
    events = third_step(log, engine, k)
    sent = sum(each.num_bytes for each in events if each.kind == "issue" and each.what.startswith("parameters"))
    assert sent == engine.traffic().gather_bytes


@pytest.mark.parametrize(("stage", "k"), [(1, 1), (2, 2), (3, 2)])
def test_transfers_that_are_late_change_no_bit(stage: int, k: int) -> None:
    def run(channel: sw.Channel) -> tuple[list[tuple[float, float]], int]:
        engine = engine_of(Log(), channel, stage, [8, 24], k=k)
        generator = torch.Generator().manual_seed(channel.rank)
        batches = [{"input": torch.randn(2 * k, WIDTH, generator=generator)} for _ in range(2)]
        reports = [engine.step(batch) for batch in batches]
        return [(each.loss, each.grad_norm) for each in reports], engine.counters.early_reductions

    punctual = sw.simulate(2, run)
    late = sw.simulate(2, lambda channel: run(Late(channel)))
    assert [found for found, _ in late] == [found for found, _ in punctual]
    assert all(num_early > 0 for _, num_early in late)
