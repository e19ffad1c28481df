"""Models cut by rules of tensor parallelism over simulated ranks, beside the whole model in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.recorded import Recorded, RecordedCall
from shardwise.engine.tensor.tensor_decision import TensorDecision
from tests.oracle.batches import Batch
from tests.oracle.program import seeded

MakeModel = Callable[[], nn.Module]
Rules = Mapping[str, str]
AnyRules = Rules | Literal["auto"]
Run = Callable[[nn.Module], torch.Tensor]
"""From a model to what is computed with it; its sum is the loss."""

descent = partial(torch.optim.SGD, lr=1.0)


@dataclass
class Computed:
    """What one process, or all ranks together, computed."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """What plain descent took away."""
    decision: TensorDecision
    """What the rules came to."""
    calls: list[RecordedCall]
    """Of a rank in its step."""


def compute(
    make_model: MakeModel, run: Run, num_ranks: int = 1, rules: AnyRules | None = None, *, sample: Batch | None = None
) -> Computed:
    """One step in float64, whose rules are taken at their word; all ranks have the same numbers."""

    def on_rank(channel: sw.Channel) -> Computed:
        model = seeded(make_model)().double()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        recorded = Recorded(channel)
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=sw.Tensor(rules=rules, prove=False)),
            optimizer=descent,
            loss=lambda batch: run(model).sum(),
            channel=recorded,
            seed=0,
            sample=sample,
        )
        num_calls = len(recorded.calls)
        loss = engine.step({"row": torch.ones(1)}).loss
        calls, after = recorded.calls[num_calls:], dict(sw.full(engine))
        gradients = {name: value - after[name] for name, value in before.items()}
        return Computed(loss, gradients, engine.tensor_decision, calls)

    first, *others = sw.simulate(num_ranks, on_rank)
    for other in others:
        assert other.loss == first.loss
        assert all(torch.equal(value, first.gradients[name]) for name, value in other.gradients.items())
    return first


def assert_cut_is_right(
    make_model: MakeModel,
    rules: AnyRules,
    run: Run,
    num_ranks: int = 2,
    *,
    relative: float = 1e-12,
    floor: float = 1.0,
    sample: Batch | None = None,
) -> Computed:
    """The cut model has the loss and the gradients of the whole one, to `relative` of the largest element.

    Sums are taken in another order. sample: what rules are inferred from, if no model carries them. floor: what the
    largest element counts as at least: terms of order 1 may cancel.
    """
    got, whole = compute(make_model, run, num_ranks, rules, sample=sample), compute(make_model, run)
    assert got.loss == pytest.approx(whole.loss, rel=relative, abs=relative * floor)
    assert got.gradients.keys() == whole.gradients.keys()
    for name, wanted in whole.gradients.items():
        bound = relative * max(floor, float(wanted.abs().max()))
        largest = float((got.gradients[name] - wanted).abs().max())
        assert largest <= bound, f"{name} differs by {largest}, more than {bound}"
    return got
