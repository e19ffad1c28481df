"""What a step on a device waits for: nothing, in the steady state; and what stays there is right all the same.

The oracle is the same program with ranks on the CPU: the fake device has its kernels.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.errors import BatchError, MismatchError
from shardwise.testing.accelerator import LAST, Counts, behind, counted
from tests.fake_device.words import Batch, batch_of, fused, loss_of, plan, tokens, words


def steps(
    channel: sw.Channel,
    asked: sw.Plan,
    *,
    optimizer: Any = fused,
    loss_weight: Callable[[Batch], Any] | None = None,
    host_batch: bool = False,
    is_tied: bool = False,
    broken: int | None = None,
) -> tuple[list[Any], dict[str, torch.Tensor], Counts]:
    """Six steps: their reports, the state, and what was counted on this rank's device in the last three."""
    engine = sw.parallelize(
        words(channel.device, is_tied=is_tied),
        asked,
        optimizer=optimizer,
        loss=loss_of,
        loss_weight=loss_weight,
        channel=channel,
    )
    at = asked.mesh.data_rank(channel.rank)

    def batch(step: int) -> Batch:
        where = "cpu" if host_batch else channel.device
        return batch_of(10 * step + at, where, is_broken=step == broken and at == 0)

    reports = [engine.step(batch(step)) for step in range(3)]
    later = [batch(step) for step in range(3, 6)]
    # Ranks may be steps apart; here they wait for each other, so that each counts its own steps only.
    with counted("sync") as counts:
        reports += [engine.step(each) for each in later]
    found = counts[channel.device.index or 0]
    state = {str(piece): values.cpu() for piece, values in engine.state().items()}
    numbers = [(report.loss, report.grad_norm, report.skipped, report.weight) for report in reports]
    return [*numbers, (engine.counters.updates, engine.counters.skipped)], state, found


@pytest.mark.parametrize(
    ("scale", "asked", "look", "syncs"),
    [
        (None, None, lambda report: (report.norms, report.loss_scale), 0),
        (1024.0, None, lambda report: (report.norms, report.loss_scale), 0),
        ("dynamic", None, lambda report: report.norms, 0),
        ("dynamic", None, lambda report: (report.loss_scale, report.loss, report.norms), 1),
        (None, "parameters", lambda report: (report.loss_scale, report.num_microbatches), 0),
        (None, "parameters", lambda report: (report.norms, report.grad_norm), 1),
    ],
)
def test_a_look_waits_once_and_for_nothing_that_nobody_asked_for(
    scale: Any, asked: Any, look: Callable[[sw.StepReport], Any], syncs: int, fake: str
) -> None:
    def run(channel: sw.Channel) -> tuple[Any, int]:
        scaled = replace(plan(2, dp_shard=2), precision=sw.Precision(loss_scale=scale))
        engine = sw.parallelize(words(channel.device), scaled, optimizer=fused, loss=loss_of, channel=channel)
        for step in range(3):
            report = engine.step(batch_of(10 * step + channel.rank, channel.device), norms=asked)
        with counted("sync") as counts:
            seen = look(report)
        return seen, counts[channel.device.index or 0].syncs

    expected = sw.simulate(2, run)
    with behind(LAST):
        found = sw.simulate(2, run, device=fake)
    for (seen, count), (others, _) in zip(found, expected, strict=True):
        assert count == syncs
        assert as_numbers(seen) == pytest.approx(as_numbers(others), rel=1e-6, nan_ok=True)


def as_numbers(value: Any) -> list[float]:
    """What is in it, None as nan."""
    return [math.nan if each is None else float(each) for each in tree_leaves(value)]


def large_first(batch: Batch) -> torch.Tensor:
    found: torch.Tensor = (batch["ids"][0, 0] > 6).sum()
    return found


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


PLANS: dict[str, tuple[sw.Plan, dict[str, Any]]] = {
    # Its state would be made in that step, which the host leaves out.
    "one, the first step broken": (plan(), {"optimizer": momentum, "broken": 0}),
    "one, bf16, k=4, no clip": (plan(4, bf16=True, clip=None), {}),
    "stage 0, a broken step": (plan(2, stage=0, dp_shard=2), {"broken": 4}),
    "stage 2, k=4": (plan(4, stage=2, dp_shard=2), {}),
    "stage 3, bf16, k=4, a broken step": (plan(4, stage=3, dp_shard=2, bf16=True), {"broken": 4}),
    "weights of a batch on the host": (plan(2, dp_shard=2), {"loss_weight": tokens, "host_batch": True}),
    "weights, none of some microbatches": (plan(4), {"loss_weight": large_first}),
    "tp, bf16, k=4, weights": (plan(4, tp=2, bf16=True), {"loss_weight": tokens}),
    "pp, k=4, weights, tied": (plan(4, pp=2), {"loss_weight": tokens, "is_tied": True}),
    "pp and tp, a broken step": (plan(2, pp=2, tp=2), {"broken": 4}),
    "all": (plan(2, stage=2, pp=2, dp_shard=2, tp=2), {}),
    "average of replicas": (replace(plan(dp_shard=2, dp_replicate=2), average=sw.Average(decay=0.9)), {}),
    "mean, stage 3, bf16": (replace(plan(stage=3, dp_shard=2, bf16=True), average=sw.Average(every=2)), {}),
}


QUICK = ("tp, bf16, k=4, weights", "one, the first step broken")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.quick if case in QUICK else ()) for case in PLANS]
)
def test_a_steady_step_waits_for_nothing(case: str, fake: str) -> None:
    """Not even where one is broken on a rank, which the devices of all ranks leave out."""
    asked, options = PLANS[case]
    size = asked.mesh.size
    expected = sw.simulate(size, lambda channel: steps(channel, asked, **options))
    got = sw.simulate(size, lambda channel: steps(channel, asked, **options), device=fake)
    for (numbers, state, counts), (others, other_state, _) in zip(got, expected, strict=True):
        assert counts.syncs == 0, counts.lines
        assert numbers[-1] == ((5, 1) if "broken" in options else (6, 0)) == others[-1]
        for one, other in zip(numbers[:-1], others[:-1], strict=True):
            assert one == pytest.approx(other, rel=1e-6, nan_ok=True)
        assert state.keys() == other_state.keys()
        for name, values in state.items():
            torch.testing.assert_close(values, other_state[name], rtol=1e-4, atol=1e-6)
    assert len({str(numbers) for numbers, *_ in got}) == 1


def test_a_gradient_with_an_infinite_element_is_left_out(fake: str) -> None:
    def run(channel: sw.Channel) -> tuple[torch.Tensor, bool]:
        model = nn.Linear(3, 1, bias=False).to(channel.device)
        engine = sw.parallelize(model, plan(), optimizer=fused, loss=lambda y, batch: y.sum(), channel=channel)
        x = torch.ones(2, 3, device=channel.device)
        engine.step({"x": x})
        before = model.weight.detach().clone()
        x[0, 0] = math.inf  # the gradient is the sum of the rows: no element of it is nan
        skipped = engine.step({"x": x}).skipped
        return (model.weight.detach() - before).cpu(), skipped

    ((moved, skipped),) = sw.simulate(1, run, device=fake)
    assert skipped
    assert torch.equal(moved, torch.zeros(1, 3))


def test_an_optimizer_that_cannot_skip_on_the_device_costs_one_wait(fake: str) -> None:
    (found,) = sw.simulate(1, lambda channel: steps(channel, plan(), optimizer=torch.optim.AdamW), device=fake)
    assert found[2].syncs == 3, found[2].lines


@pytest.mark.parametrize(
    ("asked", "is_first"), [(plan(tp=2), False), (plan(pp=2), True)], ids=["tp, later", "pp, first"]
)
def test_batches_that_differ_are_named_and_train_nothing(asked: sw.Plan, is_first: bool, fake: str) -> None:
    found: dict[int, list[list[torch.Tensor]]] = {}

    def run(channel: sw.Channel) -> None:
        def values() -> list[torch.Tensor]:
            return [each.detach().cpu().clone() for each in engine.model.parameters() if not each.is_meta]

        engine = sw.parallelize(words(channel.device), asked, optimizer=fused, loss=loss_of, channel=channel)
        for step in range(0 if is_first else 2):
            engine.step(batch_of(step, channel.device))
        states = found[channel.rank] = [values()]
        other = batch_of(7, "cpu")
        other["ids"][3, 4] += 1 if channel.rank else 0
        try:
            report = engine.step({name: each.to(channel.device) for name, each in other.items()})
            assert report.loss
        finally:
            states.append(values())

    with pytest.raises(MismatchError, match=r"ranks along pp and tp need the same batch, but rank 1 got another"):
        sw.simulate(2, run, device=fake)
    for before, after in found.values():
        assert before
        assert all(map(torch.equal, before, after))


def test_losses_that_differ_along_tp_are_refused_by_all_ranks_in_the_next_step(fake: str) -> None:
    def run(channel: sw.Channel) -> tuple[int, str]:
        wrong: list[float] = []

        def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
            return loss_of(output, batch) + sum(wrong)

        engine = sw.parallelize(words(channel.device), plan(tp=2), optimizer=fused, loss=loss, channel=channel)
        steps = 0
        try:
            for steps in range(9):
                wrong += [0.5] * (steps == 3 and channel.rank)
                engine.step(batch_of(steps, channel.device))
        except MismatchError as error:
            return steps, str(error)
        return steps, ""

    with behind(3):
        (found, text), other = sw.simulate(2, run, device=fake)
    assert (found, text) == other
    assert found == 4
    assert "rank 0 and rank 1 are peers along tp" in text


def test_a_weight_on_the_device_that_is_none_is_named_at_a_look(fake: str) -> None:
    def run(channel: sw.Channel) -> None:
        signs = [1, 1, 1, -1]
        engine = sw.parallelize(
            words(channel.device),
            plan(2),
            optimizer=fused,
            loss=loss_of,
            loss_weight=lambda batch: tokens(batch) * signs.pop(0),
            channel=channel,
        )
        assert engine.step(batch_of(0, channel.device)).weight == float(tokens(batch_of(0, "cpu")))
        report = engine.step(batch_of(1, channel.device))
        assert report.num_microbatches == 2
        with pytest.raises(BatchError, match=r"loss_weight gave -\d.0 for a microbatch"):
            report.loss  # noqa: B018
        raise BatchError("seen")

    with pytest.raises(BatchError):
        sw.simulate(1, run, device=fake)


class Silent(nn.Module):
    """Writes a vector in a way that torch does not count, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(6))
        self.var = nn.Buffer(torch.ones(6))
        self.fixed = nn.Buffer(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True) * self.fixed


@pytest.mark.parametrize("kind", [lambda: nn.BatchNorm1d(6), Silent], ids=["torch", "own"])
def test_running_statistics_are_those_of_the_first_rank_and_wait_for_nothing(
    kind: Callable[[], nn.Module], fake: str
) -> None:
    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 6), kind()).to(channel.device)
        engine = sw.parallelize(
            model, plan(dp_shard=2), optimizer=fused, loss=lambda y, batch: y.square().mean(), channel=channel
        )
        syncs = 0
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + channel.rank))
            batch = {"x": x.to(channel.device)}
            with counted("sync") as counts:
                engine.step(batch)
            syncs = counts[channel.device.index or 0].syncs
        return {name: each.cpu() for name, each in model.named_buffers()}, syncs

    (first, no_syncs), (second, none) = sw.simulate(2, run, device=fake)
    (expected, _), _ = sw.simulate(2, run)
    assert (no_syncs, none) == (0, 0)
    for name, values in first.items():
        assert torch.equal(values, second[name])
        torch.testing.assert_close(values, expected[name])
    assert not torch.equal(first["1.running_mean" if "1.running_mean" in first else "1.mean"], torch.zeros(6))
