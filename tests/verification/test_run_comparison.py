"""Planted faults are named: the tensor, its module, the update, the microbatch where one has it, and both values."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Work
from shardwise.verification.report import Divergence, VerificationReport
from tests.verification.verified import Net, compared, plan, tied, verified


def simulated_rank() -> int | None:
    """The rank that this thread is; None for the one process."""
    name = threading.current_thread().name
    return int(name.split()[-1]) if name.startswith("simulated rank") else None


Change = Callable[["Faulty", torch.Tensor, torch.Tensor | None], object]
"""f(channel, what arrived, what was given) changes what arrived."""


class Faulty(sw.Recorded):
    """A channel that changes what arrives in calls for a purpose."""

    def __init__(self, channel: sw.Channel, part: str, change: Change) -> None:
        super().__init__(channel)
        self.fault = part, change

    def _wrapped(self, inner: sw.Channel) -> "Faulty":
        return Faulty(inner, *self.fault)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        given = input.clone()
        work = super().reduce_scatter(output, input, purpose=purpose, counts=counts)
        if self.fault[0] in purpose:
            work.wait()
            sizes = [output.numel()] * self.size if counts is None else list(counts)
            start = sum(sizes[: self.rank])
            self.fault[1](self, output, given[start : start + sizes[self.rank]])
        return work

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        work = super().receive(tensor, source, purpose=purpose)
        if self.fault[0] in purpose:
            work.wait()
            self.fault[1](self, tensor, None)
        return work


def keeps_own(channel: Faulty, arrived: torch.Tensor, own: torch.Tensor | None) -> None:
    """As if ranks did not add up."""
    assert own is not None
    arrived.copy_(own)


def found_by(asked: sw.Plan, part: str, change: Change, **more: Any) -> VerificationReport:
    def on(channel: sw.Channel) -> VerificationReport:
        return verified(asked, channel=Faulty(channel, part, change), **more)

    return sw.simulate(asked.mesh.size, on)[0]


def named(report: VerificationReport) -> Divergence:
    assert report.verdict == "diverges", report.text()
    assert report.divergence is not None
    assert report.divergence.text() in report.text()
    assert report.text().endswith("verdict: diverges")
    assert VerificationReport.unpacked(report.packed()) == report
    return report.divergence


@pytest.mark.parametrize(
    "asked",
    [
        plan(dp_shard=2, stage=3),
        plan(dp_shard=2, pp=2),
        plan(dp_shard=2, tp=2, bf16=True),
    ],
    ids=["stage 3", "stages", "tensor, bfloat16"],
)
def test_a_missing_gradient_reduction(asked: sw.Plan) -> None:
    found = named(found_by(asked, "gradients of bucket", keeps_own))
    assert (found.kind, found.tensor, found.module, found.step) == ("mean gradient of", "head.weight", "head", 0)
    # Which rank's sum is looked at first depends on where the worst element is; each has its own two microbatches.
    words = {
        2: "It is as if microbatches 0 to 1 counted once, 2 to 3 counted not at all",
        0: "It is as if microbatches 0 to 1 counted not at all, 2 to 3 counted once",
    }
    assert found.microbatch is not None
    assert found.explanation == words[found.microbatch]


@pytest.mark.parametrize("factor", [1.01, 2.0])
def test_a_wrong_average(factor: float) -> None:
    asked = plan(dp_shard=2)
    found = named(found_by(asked, "gradients of bucket", lambda channel, arrived, own: arrived.mul_(factor)))
    assert (found.kind, found.step, found.microbatch) == ("mean gradient of", 0, None)
    assert found.explanation == f"It is {factor:g} times that of one process"
    assert math.isclose(float(found.layout) / float(found.one_process), factor, rel_tol=1e-5)


def test_parts_of_ranks_along_tp_that_are_not_added() -> None:
    found = named(found_by(plan(tp=2, bf16=True), "tensor parallelism of narrow", keeps_own))
    assert (found.kind, found.module, found.microbatch) == ("output", "narrow", 0)
    assert found.index is not None


def test_a_tie_that_is_cut_in_the_sum_over_stages() -> None:
    def lost(channel: Faulty, arrived: torch.Tensor, own: torch.Tensor | None) -> None:
        if arrived.is_floating_point():
            arrived.zero_()

    report = found_by(plan(pp=2), "of parameters of several stages", lost, make_model=tied)
    found = named(report)
    assert (found.kind, found.tensor, found.module) == ("mean gradient of", "embedding.weight", "embedding")
    assert "along pp" in found.explanation


class Changed(Net):
    """Under a layout, something of it is not what it is in one process."""

    def __init__(self, fault: str, rank: int | None = None) -> None:
        super().__init__()
        here = simulated_rank()
        self.fault = fault if here is not None and rank in (None, here) else ""
        self.calls = 0
        self.factor = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.full((2,), -math.inf))
        self.register_buffer("scale", torch.ones(2))
        if self.fault == "values":
            nn.init.ones_(self.head.weight)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding(words)
        inner = self.narrow(torch.relu(self.wide(hidden)))
        if self.fault == "output" and self.calls == 2:
            inner = self.drop(inner * 1.01)
        elif self.fault == "backward" and self.calls == 2:
            inner = self.drop(inner + 0.01 * (inner - inner.detach()))
        elif self.fault == "shape":
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


FAULTS: dict[str, tuple[str, int | None, sw.Plan, dict[str, Any]]] = {
    "a module that is not called": ("module", None, plan(dp_shard=2), {
        "kind": "output", "module": "drop", "one_process": "a value", "layout": "none", "microbatch": 0}),
    "an output of another shape": ("shape", None, plan(pp=2), {
        "kind": "output", "module": "drop", "one_process": "shape [2, 5, 8]", "layout": "[1, 2, 5, 8]"}),
    "a parameter without a gradient": ("gradient", None, plan(dp_shard=2, stage=3), {
        "kind": "gradient of", "tensor": "factor", "one_process": "a value", "layout": "none", "microbatch": 0}),
    "another output in bfloat16": ("output", 1, plan(dp_shard=2, bf16=True), {
        "kind": "output", "module": "drop", "microbatch": 3, "rank": 1, "allowed": 0}),
    "another backward on one rank": ("backward", 1, plan(dp_shard=2), {
        "kind": "gradient of", "module": "narrow", "microbatch": 3, "allowed": 0}),
    "other initial values": ("values", None, plan(pp=2), {
        "kind": "initial", "tensor": "head.weight", "module": "head", "layout": "1"}),
    **{f"a buffer that is written, {name}": (buffer, None, asked, {
        "kind": "updated", "tensor": buffer, "layout": "0.5", "one_process": value})
       for name, asked in (("data", plan(dp_shard=2)), ("tp", plan(tp=2)))
       for buffer, value in (("mask", "-inf"), ("scale", "1"))},
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_model_that_is_another_one_under_a_layout(case: str) -> None:
    fault, rank, asked, expected = FAULTS[case]
    report = verified(asked, make_model=lambda: Changed(fault, rank))
    found = named(report)
    assert found.step == 0
    assert {name: getattr(found, name) for name in expected} == expected
    if fault == "backward":
        total, equal = compared(report, "outputs of modules")
        assert total == equal > 0, "what comes before the first divergence is told"


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


@pytest.mark.parametrize("asked", [plan(dp_shard=2), plan(dp_replicate=2, stage=0)], ids=["data", "replicas"])
def test_an_optimizer_that_does_something_else_on_one_rank(asked: sw.Plan) -> None:
    found = named(verified(asked, optimizer=spoiled_on_rank_1, steps=3))
    assert found.step == 1
    assert found.kind in ("updated", "replica")  # of replicas whichever was saved
    assert asked.mesh.dp_replicate > 1 or "was given the layout's gradients" in found.explanation
