"""Forwards that take turns, and forwards that end by an error: no rank waits for what does not come."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.engine.pipeline.forward_threads import ForwardThreads
from tests.covering import covering
from tests.engine.formed import formed, one_after_another, several
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.pipeline_programs import Block
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS

CPU = torch.device("cpu")


def test_modes_and_hooks_of_the_caller_hold_in_the_forward() -> None:
    """Without gradients, autocast, a default device, a count of operations, and where what autograd saves goes."""
    saved: list[torch.Tensor] = []
    made: list[Any] = []
    weight = torch.ones(3, requires_grad=True)

    def body() -> None:
        made.append(torch.ones(2, 2))
        made.append(made[0] @ made[0])
        weight.exp()

    def pack(each: torch.Tensor) -> torch.Tensor:
        saved.append(each)
        return each

    counter = FlopCounterMode(display=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each)
    threads = ForwardThreads(CPU)
    with torch.device("meta"), counter, hooks:
        threads.begin(body).advance()
    assert counter.get_total_flops() == 2 * 2 * 2 * 2
    assert made[0].is_meta
    assert len(saved) == 1
    with torch.inference_mode():
        threads.begin(lambda: made.append(torch.ones(1))).advance()
    assert made[-1].is_inference()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        threads.begin(lambda: made.append((torch.is_grad_enabled(), torch.get_autocast_dtype("cpu")))).advance()
    assert made[-1] == (False, torch.bfloat16)
    threads.begin(lambda: made.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))).advance()
    assert made[-1] == (True, False)


def forwards_but(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of forwards that have begun since; those of other tests may end at any time."""
    return [each for each in threading.enumerate() if each.name == "forward" and each not in before]


def test_an_abandoned_forward_unwinds_and_its_thread_takes_the_next_one() -> None:
    """Also one that never began, and one that would park again."""
    ended: list[str] = []
    before = set(threading.enumerate())
    threads = ForwardThreads(CPU)

    def body() -> None:
        try:
            turn.park()
        finally:
            try:
                turn.park()
            finally:
                ended.append("outer")

    turn, never_begun = threads.begin(body), threads.begin(body)
    turn.advance()
    turn.abandon()
    never_begun.abandon()
    assert ended == ["outer"]
    for _ in range(2):
        threads.begin(lambda: ended.append("next")).advance()
    assert ended == ["outer", "next", "next"]
    assert len(forwards_but(before)) == 2
    threads.close()
    assert not forwards_but(before)
    threads.begin(lambda: None).advance()
    (idle,) = forwards_but(before)
    del threads
    gc.collect()
    idle.join(timeout=60)
    assert not idle.is_alive()


def test_a_stage_whose_result_is_dropped_answers_the_stage_before() -> None:
    assert_trains_like_one_process(PROGRAMS["ignored"], plan_of(PROGRAMS["ignored"], "pp=3", k=2))


class Broken(Block):
    """Raises in the call that it is told to."""

    calls = 0
    fails_in = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_in:
            raise RuntimeError("broken sample")
        return super().forward(x)


class Cleaning(nn.Module):
    """Cleans up after each forward, whatever came of it."""

    def __init__(self, clean: Callable[[Any, torch.Tensor], object], *, catches: bool) -> None:
        super().__init__()
        self.blocks, self.after = several(Broken, 4)(), several(Block, 4)()
        self.clean, self.catches = clean, catches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            for block, after in zip(self.blocks, self.after, strict=True):
                x = after(block(x))
        except RuntimeError:
            if self.catches:
                self.clean(self, x)
            raise
        finally:
            if not self.catches:
                self.clean(self, x)
        return x


WAYS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "operations": lambda model, x: (x * 2).sum(),
    "modules": lambda model, x: [block(torch.zeros(1, 7)) for block in model.after],
    "modules of values": lambda model, x: model.after[2](model.after[1](model.after[0](x))),
    "a read": lambda model, x: float(x.detach().sum()),
    "the last module": lambda model, x: model.after[3](torch.zeros(1, 7)),
}
BROKEN = [("interleaved", 2, 1), ("interleaved", 1, 3), ("1f1b", 2, 2)]
"""Schedule, the block that raises, and in which call."""


@pytest.mark.parametrize(("way", "catches", "broken"), covering(list(WAYS), [False, True], BROKEN, strength=2))
def test_what_runs_because_of_an_error_makes_no_rank_wait(
    way: str, catches: bool, broken: tuple[str, int, int]
) -> None:
    schedule, number, call = broken
    num_stages = 4 if schedule == "interleaved" else 2
    stages = {f"{part}.{at}": at * num_stages // 4 for part in ("blocks", "after") for at in range(4)}
    plan = sw.Plan(
        mesh=sw.Mesh(pp=2),
        pipeline=sw.Pipeline(schedule=schedule, stages=stages),
        merge=sw.Merge(microbatches=4),
    )

    def run(channel: sw.Channel) -> None:
        model: Any = Cleaning(WAYS[way], catches=catches)
        model.blocks[number].fails_in = call
        optimizer, loss = torch.optim.SGD, lambda output, batch: output.square().mean()
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss, channel=channel)
        engine.step({"x": torch.ones(8, 7)})

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="broken sample"):
        sw.simulate(2, run, timeout_seconds=60)
    for each in forwards_but(before):
        each.join(timeout=60)
        assert not each.is_alive()


def test_a_forward_that_has_failed_keeps_neither_the_model_nor_a_thread() -> None:
    """Its error has a traceback, whose tensors hold graphs that Python's collector does not see through."""
    models: list[weakref.ref[nn.Module]] = []
    before = set(threading.enumerate())

    def stumbling(model: Any, input: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        x: torch.Tensor = one_after_another(model.blocks, input)
        if model.calls == 2:
            raise RuntimeError("broken sample")
        return x

    def run(channel: sw.Channel) -> None:
        model = formed(stumbling, blocks=several(lambda: nn.Linear(7, 7), 4), calls=lambda: 0)()
        models.append(weakref.ref(model))
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=4), pipeline=sw.Pipeline(schedule="interleaved")),
            optimizer=torch.optim.AdamW,
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        with contextlib.suppress(RuntimeError, sw.ShardwiseError):
            engine.step({"input": torch.ones(8, 7)})

    sw.simulate(2, run)
    gc.collect()
    assert [each() for each in models] == [None, None]
    for each in set(threading.enumerate()) - before:
        each.join(timeout=60)
        assert not each.is_alive()
