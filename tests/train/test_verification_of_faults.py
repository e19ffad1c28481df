"""Planted faults are named: the tensor, its module, the update, the microbatch where one has it, and both values."""

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import simulated
from shardwise.engine.norm import divide_and_square
from shardwise.engine.pipeline.post import MessageKind, Post
from shardwise.engine.pipeline.stage_ties import StageTies
from shardwise.train.verification.report import Divergence, VerificationReport
from tests.engine.models import NUM_WORDS
from tests.train.verified import Net, compared, plan, tied, verified

Monkeypatch = pytest.MonkeyPatch


def simulated_rank() -> int | None:
    """The rank that this thread is; None for the one process."""
    name = threading.current_thread().name
    return int(name.split()[-1]) if name.startswith("simulated rank") else None


class _Done:
    is_done = True

    def wait(self) -> None:
        """There is nothing to wait for."""


def leave_out_sums(monkeypatch: Monkeypatch, purpose_part: str) -> None:
    """Ranks keep what they have instead of adding up."""
    real = simulated._SimulatedChannel.reduce_scatter

    def keep_own(
        self: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        purpose: str,
        counts: Sequence[int] | None = None,
    ) -> Any:
        if purpose_part not in purpose:
            return real(self, output, input, purpose=purpose, counts=counts)
        sizes = [output.numel()] * self.size if counts is None else list(counts)
        start = sum(sizes[: self.rank])
        output.copy_(input[start : start + sizes[self.rank]].clone())
        return _Done()

    monkeypatch.setattr(simulated._SimulatedChannel, "reduce_scatter", keep_own)


def scale_means(monkeypatch: Monkeypatch, factor: float) -> None:
    """Ranks divide by another number."""

    def scaled(gradients: Any, divisor: int, device: torch.device) -> float:
        pairs = list(gradients)
        for gradient, _ in pairs if simulated_rank() is not None else ():
            gradient.mul_(factor)
        return divide_and_square(pairs, divisor, device)

    monkeypatch.setattr("shardwise.engine.step_figures.divide_and_square", scaled)


def named(report: VerificationReport) -> Divergence:
    assert report.verdict == "diverges", report.text()
    assert report.divergence is not None
    assert report.divergence.text() in report.text()
    return report.divergence


@pytest.mark.parametrize(
    "asked",
    [
        plan(dp_shard=2),
        plan(dp_shard=2, stage=2),
        plan(dp_shard=2, stage=3),
        plan(dp_replicate=2, stage=0),
        plan(dp_shard=2, pp=2),
        plan(dp_shard=2, tp=2, bf16=True),
    ],
    ids=["stage 1", "stage 2", "stage 3", "stage 0", "stages", "tensor, bfloat16"],
)
def test_a_missing_gradient_reduction(asked: sw.Plan, monkeypatch: Monkeypatch) -> None:
    leave_out_sums(monkeypatch, "gradients of bucket")
    found = named(verified(asked))
    assert (found.kind, found.tensor, found.module, found.step) == ("mean gradient of", "head.weight", "head", 0)
    # Which rank's sum is looked at first depends on where the worst element is; each has its own two microbatches.
    words = {
        2: "It is as if microbatches 0 to 1 counted once, 2 to 3 counted not at all",
        0: "It is as if microbatches 0 to 1 counted not at all, 2 to 3 counted once",
    }
    assert found.microbatch is not None
    assert found.explanation == words[found.microbatch]


@pytest.mark.parametrize(
    ("asked", "factor"),
    [
        (plan(dp_shard=2), 1.01),
        (plan(pp=2, bf16=True), 1.01),
        (plan(tp=2), 1.01),
        (plan(tp=2, bf16=True), 1.01),
        (plan(pp=2, tp=2, dp_shard=2, stage=3), 1.01),
        (plan(dp_shard=2), 2.0),
        (plan(tp=2, bf16=True), 0.5),
    ],
    ids=["data", "stages, bfloat16", "tensor", "tensor, bfloat16", "all", "data, twice", "tensor, half"],
)
def test_a_wrong_average(factor: float, asked: sw.Plan, monkeypatch: Monkeypatch) -> None:
    scale_means(monkeypatch, factor)
    found = named(verified(asked))
    assert found.kind == "mean gradient of"
    assert found.step == 0
    assert found.microbatch is None
    assert found.explanation == f"It is {factor:g} times that of one process"
    assert math.isclose(
        float(found.layout) / float(found.one_process), factor, rel_tol=0.1 if "tp" in str(asked.mesh) else 1e-5
    )


@pytest.mark.parametrize("asked", [plan(dp_shard=2), plan(tp=2)], ids=["data", "tensor"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_mean_that_is_not_finite(value: float, asked: sw.Plan, monkeypatch: Monkeypatch) -> None:
    def spoiled(gradients: Any, divisor: int, device: torch.device) -> float:
        pairs = list(gradients)
        square = divide_and_square(pairs, divisor, device)
        for gradient, _ in pairs if simulated_rank() is not None else ():
            gradient.view(-1)[:1] = value
        return square

    monkeypatch.setattr("shardwise.engine.step_figures.divide_and_square", spoiled)
    found = named(verified(asked))
    assert (found.kind, found.step, found.layout) == ("mean gradient of", 0, str(value))
    assert (
        found.explanation == "The gradients of its microbatches agree: their sum over microbatches and ranks does not"
    )


class Cut(nn.Module):
    """All parameters are cut over the ranks along tp, so that no rank has a whole gradient of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 64)
        self.head = nn.Linear(64, NUM_WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(words))
        return out


def test_a_wrong_average_that_is_within_the_rounding_of_each_tensor(monkeypatch: Monkeypatch) -> None:
    asked = plan(tp=2, bf16=True, tensor=sw.Tensor(rules={"embedding": "vocab", "head": "vocab"}))
    assert verified(asked, make_model=Cut).verdict == "rounding"
    scale_means(monkeypatch, 1.02)
    found = named(verified(asked, make_model=Cut))
    assert (found.kind, found.tensor, found.one_process) == ("mean gradient of", "head.weight", "1")
    assert 1.015 < float(found.layout) < 1.025
    assert found.explanation == "The values are a factor that all gradients have in common"


def test_a_tie_that_is_cut_in_the_sum_over_stages(monkeypatch: Monkeypatch) -> None:
    def forget(self: Any, _: Any) -> None:
        for gradients in self._gradients.values():
            gradients.stop()

    monkeypatch.setattr(StageTies, "collect", forget)
    found = named(verified(plan(pp=2), make_model=tied))
    assert (found.kind, found.tensor, found.module) == ("mean gradient of", "embedding.weight", "embedding")
    assert found.explanation == "It is as if its uses, along pp, on rank 0 counted once, on rank 1 counted not at all"


def test_a_tie_that_is_cut_within_a_backward(monkeypatch: Monkeypatch) -> None:
    monkeypatch.setattr(StageTies, "hand_down", lambda *_: None)
    found = named(verified(plan(1, pp=2), make_model=tied))
    assert (found.kind, found.tensor, found.step, found.microbatch) == ("gradient of", "embedding.weight", 0, 0)


def test_replicas_that_stay_behind_are_found_in_the_next_update(monkeypatch: Monkeypatch) -> None:
    monkeypatch.setattr(StageTies, "publish", lambda *_: None)
    report = verified(plan(pp=2), make_model=tied, steps=2)
    found = named(report)
    assert (found.kind, found.tensor, found.module) == ("output", "output", "head")
    assert (found.step, found.microbatch, found.rank) == (1, 0, 1)
    assert len(report.steps) == 2


def test_parts_of_ranks_along_tp_that_are_not_added(monkeypatch: Monkeypatch) -> None:
    leave_out_sums(monkeypatch, "tensor parallelism of narrow")
    found = named(verified(plan(tp=2, bf16=True)))
    assert (found.kind, found.module, found.microbatch) == ("output", "narrow", 0)
    assert found.index is not None


def test_a_value_that_is_rounded_where_it_crosses(monkeypatch: Monkeypatch) -> None:
    """Two of 24 bits are lost: less than what ranks along tp may round."""
    real = Post.send

    def rounded(self: Post, rank: int, key: Any, content: torch.Tensor | None, **more: Any) -> None:
        if key.kind is MessageKind.VALUE and content is not None and content.is_floating_point():
            content = 5 * content - (5 * content - content)
        real(self, rank, key, content, **more)

    monkeypatch.setattr(Post, "send", rounded)
    found = named(verified(plan(pp=2)))
    assert (found.kind, found.step, found.microbatch, found.allowed) == ("output", 0, 0, 0)
    assert math.isclose(float(found.layout), float(found.one_process), rel_tol=1e-4)


class Detour(Net):
    """Under a layout it gives the same, but has something else in between."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault if simulated_rank() is not None else ""
        self.factor = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.full((2,), -math.inf))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        inner = self.narrow(torch.relu(self.wide(hidden)))
        if self.fault == "shape":
            inner = self.drop(inner[None])[0]
        elif self.fault != "module":
            inner = self.drop(inner)
        hidden = hidden + inner
        if self.fault != "gradient":
            hidden = hidden * self.factor
        if self.fault in ("mask", "scale") and self.training:
            getattr(self, self.fault).data.fill_(0.5)
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


@pytest.mark.parametrize(
    ("fault", "asked", "words"),
    [
        ("module", plan(dp_shard=2), ("output", "output", "drop", "a value", "none")),
        ("shape", plan(pp=2), ("output", "output", "drop", "shape [2, 5, 8]", "[1, 2, 5, 8]")),
        ("gradient", plan(dp_shard=2, stage=3), ("gradient of", "factor", "", "a value", "none")),
    ],
)
def test_what_a_layout_has_not_or_in_another_shape(fault: str, asked: sw.Plan, words: tuple[str, ...]) -> None:
    assert verified(asked, make_model=lambda: Detour("")).divergence is None
    found = named(verified(asked, make_model=lambda: Detour(fault)))
    assert (found.kind, found.tensor, found.module, found.one_process, found.layout) == words
    assert (found.step, found.microbatch) == (0, 0)


@pytest.mark.parametrize("asked", [plan(), plan(dp_shard=2), plan(tp=2)], ids=["one rank", "data", "tensor"])
@pytest.mark.parametrize("buffer", ["mask", "scale"])
def test_a_buffer_that_one_process_does_not_write(buffer: str, asked: sw.Plan) -> None:
    found = named(verified(asked, make_model=lambda: Detour(buffer)))
    assert (found.kind, found.tensor, found.layout) == ("updated", buffer, "0.5")
    assert found.one_process == ("-inf" if buffer == "mask" else "1")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class FaultyNet(Net):
    """Under a layout, in its microbatch 1: a module gives something else, or something else goes back through it."""

    def __init__(self, forward_factor: float = 1.0, backward_factor: float = 1.0) -> None:
        super().__init__()
        self.factors = forward_factor, backward_factor
        self.num_calls = 0
        self.narrow.register_forward_hook(self.spoil)

    def spoil(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        self.num_calls += 1
        if simulated_rank() != 1 or self.num_calls != 2:
            return None
        scaled: torch.Tensor = _Scale.apply(output * self.factors[0], self.factors[1])  # type: ignore[no-untyped-call]
        return scaled


@pytest.mark.parametrize("asked", [plan(dp_shard=2), plan(dp_shard=2, bf16=True)], ids=["float32", "bfloat16"])
def test_a_module_that_gives_something_else(asked: sw.Plan) -> None:
    found = named(verified(asked, make_model=lambda: FaultyNet(forward_factor=1.01)))
    assert (found.kind, found.module, found.step, found.microbatch, found.rank) == ("output", "narrow", 0, 3, 1)
    assert found.allowed == 0
    assert found.one_process != found.layout


def test_a_backward_that_gives_something_else() -> None:
    found = named(verified(plan(dp_shard=2), make_model=lambda: FaultyNet(backward_factor=1.01)))
    assert (found.kind, found.module, found.step, found.microbatch) == ("gradient of", "narrow", 0, 3)
    assert (found.tensor, found.allowed) == ("narrow.bias", 0)


def spoiled_on_rank_1(parameters: Any) -> torch.optim.Optimizer:
    """SGD; on one rank its second update does a little more."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    calls: list[int] = []

    def spoil(*_: Any) -> None:
        calls.append(0)
        if simulated_rank() == 1 and len(calls) == 2:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].mul_(1.001)

    optimizer.register_step_post_hook(spoil)
    return optimizer


def test_an_optimizer_that_does_something_else() -> None:
    found = named(verified(plan(dp_shard=2), optimizer=spoiled_on_rank_1, steps=3))
    assert (found.kind, found.step) == ("updated", 1)
    assert "was given the layout's gradients" in found.explanation


def test_replicas_that_differ() -> None:
    found = named(verified(plan(dp_replicate=2, stage=0), optimizer=spoiled_on_rank_1, steps=3))
    assert found.kind in ("updated", "replica")  # whichever of both was saved
    assert found.step == 1


def test_other_initial_values() -> None:
    def make_model() -> Net:
        model = Net()
        if simulated_rank() is not None:
            nn.init.ones_(model.head.weight)
        return model

    found = named(verified(plan(pp=2), make_model=make_model))
    assert (found.kind, found.tensor, found.module, found.layout) == ("initial", "head.weight", "head", "1")


def test_what_comes_before_the_first_divergence_is_told() -> None:
    report = verified(plan(dp_shard=2), make_model=lambda: FaultyNet(backward_factor=1.01))
    total, equal = compared(report, "outputs of modules")
    assert total == equal == 4 * 7
    assert report.text().endswith("verdict: diverges")
    assert VerificationReport.unpacked(report.packed()) == report
