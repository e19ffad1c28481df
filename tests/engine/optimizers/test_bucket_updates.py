"""A bucket travels while the next one is updated, where the optimizer allows it; the bits are those of one step."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.late_channels import WIDTH, Late, Log, engine_of, third_step
from tests.engine.loops import assert_alike, in_one_process, on_ranks, plan_of, rows


@pytest.mark.parametrize("stage", [1, 2])
def test_a_publication_begins_before_the_next_bucket_is_updated(stage: int) -> None:
    log = Log()

    class Logging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            log.compute("U")
            return super().step(closure)

    events = third_step(log, engine_of(log, None, stage, [8, 8, 8], optimizer=Logging))
    first = next(at for at, each in enumerate(events) if each.what == "U")
    assert [each.kind for each in events[first:]] == ["compute", "issue"] * 3 + ["wait"] * 3


CALLS: Counter[int] = Counter()
"""Calls of `step`, by the id of the optimizer: one that counted them itself would be stepped at once."""


class Counting(torch.optim.SGD):
    """The calls of its step are counted, after `begin`."""

    begin: ClassVar[Any] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        self.begin()
        return super().step(closure)


def counting(begin: Callable[[Any], None]) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that does `begin` in each step."""
    kind: Any = type("Counting", (Counting,), {"begin": begin})
    return lambda parameters: kind(parameters, lr=0.1)


def in_two(each: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups, of which a bucket may have one alone."""
    every = list(each)
    return [{"params": every[::2], "lr": 0.2}, {"params": every[1::2]}]


def late(self: Any) -> None:
    """Its learning rate falls once, after more calls than a trial makes: its own count is for all parameters."""
    self.count = getattr(self, "count", 0) + 1
    for group in self.param_groups:
        group["lr"] = 0.1 if self.count < 1000 else 0.01


def count_of_group(self: Any) -> None:
    """A count in the group: a tensor, to which it adds in place."""
    for group in self.param_groups:
        group.setdefault("count", torch.zeros(())).add_(1)


def first_of_all(self: Any) -> None:
    """Reads its first parameter, as if every group had one."""
    assert self.param_groups[0]["params"][0].device.type == "cpu"


class ByName(torch.optim.SGD):
    """Biases have another learning rate, by their names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        for group in self.param_groups:
            for name, each in zip(group["param_names"], group["params"], strict=False):
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.1 if "bias" in name else 0.2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1, momentum=0.9)


def with_change(change: Callable[[Any], object]) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that somebody has changed."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        change(optimizer)
        return optimizer

    return make


def wrap_and_schedule(optimizer: Any) -> None:
    vars(optimizer)["step"] = MethodType(lambda each, *given: Counting.step(each, *given), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "plain": (sgd, True),
    "scheduled": (with_change(lambda each: torch.optim.lr_scheduler.StepLR(each, 1)), True),
    "names": (lambda each: ByName(in_two((str(at), one) for at, one in enumerate(each)), lr=0.1), True),
    "first of all": (lambda each: counting(first_of_all)(in_two(each)), False),
    "late count": (counting(late), False),
    "count of group": (counting(count_of_group), False),
    "hooked": (with_change(lambda each: each.register_step_post_hook(lambda *_: None)), False),
    "wrapped, scheduled": (with_change(wrap_and_schedule), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_parts_are_left_where_somebody_would_see_them_and_change_no_bit(name: str) -> None:
    optimizer, in_parts = OPTIMIZERS[name]

    def run(channel: sw.Channel) -> tuple[tuple[int, int], list[float], dict[str, torch.Tensor]]:
        engine = engine_of(Log(), channel, 1, [8, 16], optimizer=optimizer)
        before = CALLS[id(engine.optimizer)]
        lists = [group["params"] for group in engine.optimizer.param_groups]
        generator = torch.Generator().manual_seed(channel.rank)
        reports = [engine.step({"input": torch.randn(2, WIDTH, generator=generator)}) for _ in range(3)]
        assert all(one is group["params"] for one, group in zip(lists, engine.optimizer.param_groups, strict=True))
        values = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
        counts = CALLS[id(engine.optimizer)] - before, engine.counters.reduce_scatters
        return counts, [each.loss for each in reports], values

    once = sw.simulate(2, run)
    parts = sw.simulate(2, lambda channel: run(Late(channel)))
    for ((num_once, num_reduced), losses, values), ((num_parts, _), other_losses, other_values) in zip(
        once, parts, strict=True
    ):
        assert (num_once, num_parts) == (3, num_reduced if in_parts else 3)
        assert losses == other_losses
        for name, each in values.items():
            assert torch.equal(each, other_values[name]), name


def keep(optimizer: torch.optim.Optimizer) -> None:
    """Add half of the last gradient, and keep this one, as it was."""
    for each in optimizer.param_groups[0]["params"]:
        last, now = optimizer.state[each].get("last", (None,))[0], each.grad
        each.grad = now if last is None else now + 0.5 * last
        optimizer.state[each]["last"] = (now,)


def keeping(parameters: Any, *, by_hook: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step: Any = optimizer.step

    def stepped(closure: Any = None) -> Any:
        keep(optimizer)
        return step(closure)

    if by_hook:
        optimizer.register_step_pre_hook(lambda *_: keep(optimizer))
    else:
        optimizer.step = stepped  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("by_hook", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_code_around_a_step_keeps_in_the_state_stay_what_they_were(stage: int, by_hook: bool) -> None:
    batches, make = [rows(seed) for seed in range(4)], partial(nn.Linear, 4, 3)
    optimizer = partial(keeping, by_hook=by_hook)
    ranks = on_ranks(make, plan_of("dp_shard=2", stage), batches, optimizer=optimizer)
    assert_alike(ranks, in_one_process(make, batches, optimizer=optimizer))
