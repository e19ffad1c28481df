"""The loop of accelerate on one rank: its numbers, and what is refused. `tests/processes` has several ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.errors import ModelError, OptimizerError, PlanError, ShardwiseError
from tests.accelerate.accelerate_loops import PLANS, assert_same_run, train


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def alone(plan: sw.Plan | None = None, **settings: Any) -> Accelerator:
    return Accelerator(cpu=True, plan=PLANS["one rank"] if plan is None else plan, **settings)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loop_is_that_of_accelerate(steps: int, tmp_path: Path) -> None:
    expected = train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps), batch=8)
    found = train(alone(gradient_accumulation_steps=steps), batch=8, folder=tmp_path / "save")
    assert found.norms == expected.norms
    assert all(torch.equal(found.state[name], each) for name, each in expected.state.items())
    assert_same_run(found, expected)
    again = train(alone(gradient_accumulation_steps=steps), batch=8, folder=tmp_path / "save", resumes=True)
    assert_same_run(again, expected, of_last=len(again.norms))


def prepared(accelerator: Any) -> tuple[Any, Any]:
    model = nn.Linear(4, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[no-any-return]


def test_calls_that_would_train_nothing_are_refused() -> None:
    accelerator = alone()
    model, optimizer = prepared(accelerator)
    rows = torch.ones(2, 4)
    with pytest.raises(OptimizerError, match=r"without accelerator\.backward"):
        optimizer.step()
    with pytest.raises(ModelError, match="without a forward of the prepared model"):
        accelerator.backward(torch.ones((), requires_grad=True))
    with pytest.raises(ModelError, match=r"call model.eval\(\)"), torch.no_grad():
        model(rows)
    accelerator.backward(model(rows).mean())
    with pytest.raises(PlanError, match=r"give Plan\(clip_grad_norm=1.0\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(OptimizerError, match="did not follow"):
        model(rows)
    optimizer.step()
    with pytest.raises(PlanError, match="clip_grad_value=2"):
        accelerator.clip_grad_value_(model.parameters(), 2.0)
    with pytest.raises(ModelError, match="one model and its optimizer"):
        prepared(accelerator)
    assert accelerator.unwrap_model(model) is accelerator.engine.model


def test_settings_of_the_plan_are_not_those_of_accelerate() -> None:
    with pytest.raises(PlanError, match=r"precision\.compute"):
        alone(mixed_precision="bf16")
    with pytest.raises(PlanError, match=r"merge\.microbatches"):
        alone(sw.Plan(merge=sw.Merge(microbatches=2)))
    with pytest.raises(PlanError, match=r"pipeline\.schedule"):
        alone(sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved")))


@pytest.mark.parametrize("given", ["engine", "model"])
def test_plain_accelerate_with_an_engine_names_the_changed_lines(given: str) -> None:
    model = nn.Linear(4, 2)
    engine = sw.parallelize(model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = accelerate.Accelerator(cpu=True)
    called, optimizer = accelerator.prepare(engine if given == "engine" else engine.model, engine.optimizer)
    before = model.weight.detach().clone()

    def turn() -> None:
        accelerator.backward(called(torch.ones(2, 4)).mean())
        optimizer.step()

    with pytest.raises(ShardwiseError, match=r"\+    report = engine.step\(\(inputs, targets\)\)") as raised:
        turn()
    assert "shardwise.accelerate.Accelerator(plan=plan)" in str(raised.value)
    assert torch.equal(before, model.weight)
