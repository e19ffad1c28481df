"""The loop of accelerate on one rank: its numbers, and what is refused. `tests/processes` has several ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.errors import CheckpointError, ModelError, OptimizerError, PlanError, ShardwiseError
from tests.accelerate.accelerate_loops import CLIP, PLANS, ROWS, assert_same_run, train


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def drop_a_batch(model: Any, rows: torch.Tensor, accelerator: Any, optimizer: Any) -> None:
    for number, each in enumerate(rows):
        accelerator.backward(model(each).square().mean())
        if number:
            optimizer.step()
        (model if number == 1 else optimizer).zero_grad()


def evaluate_in_the_loss(model: Any, rows: torch.Tensor, accelerator: Any, optimizer: Any) -> None:
    for each in rows:
        loss = model(each).square().mean()
        model.eval()
        with torch.no_grad():
            wanted = model(each * 2)
        loss = loss + (model(each) - wanted).square().mean()
        model.train()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


@pytest.mark.parametrize("loop", [drop_a_batch, evaluate_in_the_loss])
def test_all_of_a_loss_trains_and_what_was_dropped_does_not(loop: Any) -> None:
    def weights(accelerator: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 3))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loop(model, ROWS[0].reshape(3, 8, 4), accelerator, optimizer)
        return dict(accelerator.get_state_dict(model))

    expected = weights(accelerate.Accelerator(cpu=True))
    found = weights(alone(sw.Plan()))
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_clip_of_a_batch_that_accumulates_is_refused() -> None:
    accelerator = alone(gradient_accumulation_steps=2)
    model, _ = prepared(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        with pytest.raises(OptimizerError, match=r"under `if accelerator\.sync_gradients:`"):
            accelerator.clip_grad_norm_(model.parameters(), 0.5)


def test_memory_is_free_for_another_model_in_the_middle_of_an_update() -> None:
    accelerator = alone()
    model, _ = prepared(accelerator)
    model(torch.ones(2, 4))
    accelerator.free_memory()
    model, optimizer = prepared(accelerator)
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()


def test_states_of_other_objects_than_were_saved_are_named(tmp_path: Path) -> None:
    accelerator = alone()
    prepared(accelerator)
    accelerator.save_state(tmp_path / "save")
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 2))
    with pytest.raises(CheckpointError, match=r"the states of 0 schedulers .* this loop has 1"):
        accelerator.load_state(tmp_path / "save")
    with pytest.raises(ModelError, match="would not be called"):
        accelerator.register_save_state_pre_hook(print)


def test_settings_of_the_plan_are_not_those_of_accelerate() -> None:
    with pytest.raises(PlanError, match=r"precision\.compute"):
        alone(mixed_precision="bf16")
    with pytest.raises(PlanError, match=r"merge\.microbatches"):
        alone(sw.Plan(merge=sw.Merge(microbatches=2)))
    with pytest.raises(PlanError, match=r"pipeline\.schedule"):
        alone(sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved")))


def test_the_compiler_of_accelerate_is_not_left_out_in_silence() -> None:
    with pytest.raises(PlanError, match="dynamo_backend=AOT_EAGER"):
        alone(dynamo_backend="aot_eager")


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


def test_under_stages_a_loss_is_read_before_the_update_as_in_one_process() -> None:
    def losses(accelerator: Any) -> list[float]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for rows in ROWS[0].split(8):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            found.append(loss.item())
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = losses(accelerate.Accelerator(cpu=True))
    for found in sw.simulate(2, lambda channel: losses(Accelerator(plan=PLANS["pp"], channel=channel))):
        assert found == pytest.approx(expected, rel=1e-6)
