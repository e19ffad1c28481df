"""A bucket travels while the next one is updated, where the optimizer allows it; the bits are those of one step."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.host_cost import Stage
from tests.engine.late_channels import Event, Late, Log, Logged, LoggedBlock
from tests.engine.link_timeline import makespan
from tests.engine.test_overlap import building, loss

WIDTH = 8
SECONDS_OF_ELEMENT = 1.0


def engine_of(
    channel: sw.Channel,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    inner: Sequence[int],
    stage: Stage = 1,
) -> sw.Engine:
    """An engine over blocks with these inner widths: a block of 8 fills a bucket of 600 bytes."""
    with building:  # ranks are threads, and draw from one generator
        torch.manual_seed(0)
        model = nn.Sequential(*(LoggedBlock(Log(), str(at), WIDTH, width) for at, width in enumerate(inner)))
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=stage, bucket_bytes=600),
        merge=sw.Merge(microbatches=1),
        clip_grad_norm=0.5,
    )
    return sw.parallelize(model, plan, optimizer=optimizer, loss=loss, channel=channel)


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


def least(durations: Sequence[tuple[float, float]]) -> float:
    """Seconds of the best order of updates, each with the transfer behind it."""

    def seconds(order: Sequence[tuple[float, float]]) -> float:
        device = link = 0.0
        for update, transfer in order:
            device += update
            link = max(link, device) + transfer
        return link

    return min(seconds(order) for order in permutations(durations))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_publication_begins_before_the_next_bucket_is_updated(stage: Stage) -> None:
    kinds = [each.kind for each in updates_of(stage, [8, 8, 8])]
    assert kinds == ["compute", "issue"] * 3 + ["wait"] * 3


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("inner", [(8, 8, 8, 8), (8, 8, 8), (16, 8, 24), (8, 16, 8)])
def test_publications_on_a_link_are_as_little_exposed_as_can_be(stage: Stage, inner: tuple[int, ...]) -> None:
    events = updates_of(stage, inner)
    if stage == 0:  # each rank updates everything, and nothing travels
        assert [each.kind for each in events] == ["compute"]
        return
    computed = [float(each.what.split()[1]) * SECONDS_OF_ELEMENT for each in events if each.kind == "compute"]
    sent = [each.num_bytes for each in events if each.kind == "issue"]
    assert len(computed) == len(sent) > 1
    # Of a bucket half is updated here, and half travels to the other rank: from links that are as fast as the update.
    for bytes_per_second in (0.5, 1, 2, 4):
        best = least([(update, size / bytes_per_second) for update, size in zip(computed, sent, strict=True)])
        taken = makespan(events, lambda what: float(what.split()[1]) * SECONDS_OF_ELEMENT, bytes_per_second)
        assert taken - sum(computed) <= 1.05 * (best - sum(computed))


CALLS: Counter[int] = Counter()
"""Calls of `step`, by the id of the optimizer: one that counted them itself would be stepped at once."""


class Counting(torch.optim.SGD):
    """The calls of its step are counted."""

    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        return super().step(closure)


class Scheduled(Counting):
    """Its learning rate falls once, after more calls than a trial makes: its own count is for all parameters."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 if self.count < 1000 else 0.01
        return super().step(closure)


class ScheduledByGroup(Counting):
    """The same, with a count in the group: a tensor, to which it adds in place."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(())).add_(1)
        return super().step(closure)


class LooksAtFirst(Counting):
    """Reads its first parameter, as if every group had one."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].device.type == "cpu"
        return super().step(closure)


class ByName(Counting):
    """Biases have another learning rate, by their names."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        for group in self.param_groups:
            for name, each in zip(group["param_names"], group["params"], strict=False):
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.1 if "bias" in name else 0.2)


class Decaying(Counting):
    """Its learning rate falls with each call: one count for all parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.9 * group["lr"]
        return super().step(closure)


class Restless(Counting):
    """Moves what has no gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.mul_(0.99)
        return super().step(closure)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1, momentum=0.9)


def hooked(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def wrapped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    own = optimizer.step
    vars(optimizer)["step"] = lambda *given: own(*given)
    return optimizer


def scheduled(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def wrapped_and_scheduled(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    vars(optimizer)["step"] = MethodType(lambda each, *given: Counting.step(each, *given), optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    groups: list[dict[str, Any]] = [{"params": every[::2], "lr": 0.2}, {"params": every[1::2]}]
    return Counting(groups, lr=0.1, momentum=0.9)


def two_groups_of_which_the_first_is_read(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return LooksAtFirst([{"params": every[::2]}, {"params": every[1::2]}], lr=0.1)


def named(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return ByName([(str(at), each) for at, each in enumerate(parameters)], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "in_parts"),
    [
        (sgd, True),
        (scheduled, True),
        (two_groups, True),
        (named, True),
        (two_groups_of_which_the_first_is_read, False),
        (lambda each: Scheduled(each, lr=0.1), False),
        (lambda each: ScheduledByGroup(each, lr=0.1), False),
        (lambda each: Decaying(each, lr=0.1), False),
        (lambda each: Restless(each, lr=0.1), True),
        (hooked, False),
        (wrapped, False),
        (wrapped_and_scheduled, False),
    ],
    ids=[
        "plain",
        "scheduled",
        "two groups",
        "names",
        "first of all",
        "late count",
        "count of group",
        "one count",
        "moves all",
        "hooked",
        "wrapped",
        "wrapped, scheduled",
    ],
)
def test_steps_in_parts_are_left_where_somebody_would_see_them_and_change_no_bit(
    optimizer: Any, in_parts: bool
) -> None:
    def run(channel: sw.Channel) -> tuple[tuple[int, int], list[float], dict[str, torch.Tensor]]:
        engine = engine_of(channel, optimizer, [8, 16])
        before = CALLS[id(engine.optimizer)]
        lists = [group["params"] for group in engine.optimizer.param_groups]
        generator = torch.Generator().manual_seed(channel.rank)
        reports = [engine.step({"input": torch.randn(2, WIDTH, generator=generator)}) for _ in range(3)]
        assert all(one is group["params"] for one, group in zip(lists, engine.optimizer.param_groups, strict=True))
        values = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
        counts = CALLS[id(engine.optimizer)] - before, len(engine._buffers.buckets)
        return counts, [each.loss for each in reports], values

    once = sw.simulate(2, run)
    parts = sw.simulate(2, lambda channel: run(Late(channel)))
    for ((num_once, num_buckets), losses, values), ((num_parts, _), other_losses, other_values) in zip(
        once, parts, strict=True
    ):
        assert (num_once, num_parts) == (3, 3 * num_buckets if in_parts else 3)
        assert losses == other_losses
        for name, each in values.items():
            assert torch.equal(each, other_values[name]), name
