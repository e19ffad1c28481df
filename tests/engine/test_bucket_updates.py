"""A bucket travels while the next one is updated, where the optimizer allows it; the bits are those of one step."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.host_cost import Stage
from tests.engine.late_channels import Event, Late, Log, Logged, LoggedBlock
from tests.engine.loops import mean_square, plan_of
from tests.oracle.program import seeded

WIDTH = 8
SECONDS_OF_ELEMENT = 1.0


def engine_of(
    channel: sw.Channel,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    inner: Sequence[int],
    stage: Stage = 1,
) -> sw.Engine:
    """An engine over blocks with these inner widths: a block of 8 fills a bucket of 600 bytes."""
    blocks = enumerate(inner)
    model = seeded(lambda: nn.Sequential(*(LoggedBlock(Log(), str(at), WIDTH, width) for at, width in blocks)))()
    plan = plan_of("dp_shard=2", stage, sharding={"bucket_bytes": 600}, clip_grad_norm=0.5)
    return sw.parallelize(model, plan, optimizer=optimizer, loss=mean_square, channel=channel)


def updates_of(stage: Stage, inner: Sequence[int]) -> list[Event]:
    """The updates and publications of the third step: "U" and how many elements it writes."""
    log = Log()

    class Logging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            count = sum(each.numel() for group in self.param_groups for each in group["params"])
            log.compute(f"U {count}")
            return super().step(closure)

    engine = engine_of(Logged(log), lambda parameters: Logging(parameters, lr=0.1), inner, stage)
    for _ in range(3):
        log.events.clear()
        engine.step({"input": torch.ones(2, WIDTH)})
    first = min(at for at, each in enumerate(log.events) if each.what.startswith("U"))
    return log.events[first:]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_publication_begins_before_the_next_bucket_is_updated(stage: Stage) -> None:
    kinds = [each.kind for each in updates_of(stage, [8, 8, 8])]
    assert kinds == ["compute", "issue"] * 3 + ["wait"] * 3


CALLS: Counter[int] = Counter()
"""Calls of `step`, by the id of the optimizer: one that counted them itself would be stepped at once."""


class Counting(torch.optim.SGD):
    """The calls of its step are counted, after `begin`."""

    begin: ClassVar[Any] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        self.begin()
        return super().step(closure)


def counting(begin: Callable[[Any], None], is_grouped: bool = False) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that does `begin` in each step; with two groups where `is_grouped`."""
    kind = type("Counting", (Counting,), {"begin": begin})

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [{"params": every[::2], "lr": 0.2}, {"params": every[1::2]}] if is_grouped else every
        made: torch.optim.Optimizer = kind(groups, lr=0.1)
        return made

    return make


def nothing(self: Any) -> None:
    """A plain step."""


def late(self: Any) -> None:
    """Its learning rate falls once, after more calls than a trial makes: its own count is for all parameters."""
    self.count = getattr(self, "count", 0) + 1
    for group in self.param_groups:
        group["lr"] = 0.1 if self.count < 1000 else 0.01


def count_of_group(self: Any) -> None:
    """A count in the group: a tensor, to which it adds in place."""
    for group in self.param_groups:
        group.setdefault("count", torch.zeros(())).add_(1)


def decaying(self: Any) -> None:
    """Its learning rate falls with each call: one count for all parameters."""
    for group in self.param_groups:
        group["lr"] = 0.9 * group["lr"]


def first_of_all(self: Any) -> None:
    """Reads its first parameter, as if every group had one."""
    assert self.param_groups[0]["params"][0].device.type == "cpu"


@torch.no_grad()
def moves_all(self: Any) -> None:
    """Moves what has no gradient, too."""
    for group in self.param_groups:
        for each in group["params"]:
            each.mul_(0.99)


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


def wrap(optimizer: Any) -> None:
    own = optimizer.step
    vars(optimizer)["step"] = lambda *given: own(*given)


def wrap_and_schedule(optimizer: Any) -> None:
    vars(optimizer)["step"] = MethodType(lambda each, *given: Counting.step(each, *given), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "plain": (sgd, True),
    "scheduled": (with_change(lambda each: torch.optim.lr_scheduler.StepLR(each, 1)), True),
    "two groups": (counting(nothing, is_grouped=True), True),
    "names": (lambda each: ByName([(str(at), one) for at, one in enumerate(each)], lr=0.1), True),
    "first of all": (counting(first_of_all, is_grouped=True), False),
    "late count": (counting(late), False),
    "count of group": (counting(count_of_group), False),
    "one count": (counting(decaying), False),
    "moves all": (counting(moves_all), True),
    "hooked": (with_change(lambda each: each.register_step_post_hook(lambda *_: None)), False),
    "wrapped": (with_change(wrap), False),
    "wrapped, scheduled": (with_change(wrap_and_schedule), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_parts_are_left_where_somebody_would_see_them_and_change_no_bit(name: str) -> None:
    optimizer, in_parts = OPTIMIZERS[name]

    def run(channel: sw.Channel) -> tuple[tuple[int, int], list[float], dict[str, torch.Tensor]]:
        engine = engine_of(channel, optimizer, [8, 16])
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
