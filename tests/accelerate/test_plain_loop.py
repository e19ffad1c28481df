"""The loop of accelerate beyond the contract of adapters: what is refused, memory, threads, and skipped updates."""

import json
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import (
    _get_current_function_mode_stack,
)  # what a thread has entered, of torch; it has no public name
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.errors import ModelError
from tests.accelerate.accelerate_loops import CLIP, PLANS, ROWS, Run, on_ranks, plainly, settings_of_threads, train
from tests.refusals import Refusals


def alone(plan: sw.Plan | None = None, **settings: Any) -> Accelerator:
    return Accelerator(cpu=True, plan=PLANS["one rank"] if plan is None else plan, **settings)


def prepared(accelerator: Any) -> tuple[Any, Any]:
    model = nn.Linear(4, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[no-any-return]


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


ROW = torch.ones(2, 4)


def without_backward() -> None:
    prepared(alone())[1].step()


def without_forward() -> None:
    accelerator = alone()
    prepared(accelerator)
    accelerator.backward(torch.ones((), requires_grad=True))


def without_eval() -> None:
    with torch.no_grad():
        prepared(alone())[0](ROW)


def after_backward(call: Any) -> None:
    """What a loop calls after its backward."""
    accelerator = alone()
    model, optimizer = prepared(accelerator)
    accelerator.backward(model(ROW).mean())
    call(accelerator, model, optimizer)


def follows_no_update(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    model(ROW)


def in_the_first_batch(call: Any) -> None:
    """What a loop calls after the first backward of an update of two."""
    accelerator = alone(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            loss = model(ROW).mean()
            call(accelerator, model, optimizer)
            accelerator.backward(loss)


def zero_in_the_second(accelerator: Any, model: Any, optimizer: Any) -> None:
    if accelerator.sync_gradients:
        optimizer.zero_grad()


def states_of_others(folder: Path) -> None:
    accelerator = alone()
    prepared(accelerator)
    accelerator.save_state(folder / "save")
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 2))
    accelerator.load_state(folder / "save")


def plain_with_an_engine(given: str) -> None:
    model = nn.Linear(4, 2)
    engine = sw.parallelize(model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = accelerate.Accelerator(cpu=True)
    called, optimizer = accelerator.prepare(engine if given == "engine" else engine.model, engine.optimizer)
    before = model.weight.detach().clone()
    try:
        accelerator.backward(called(ROW).mean())
        optimizer.step()
    finally:
        assert torch.equal(before, model.weight)


def own(call: Any) -> Any:
    """The call, with settings of accelerate of its own."""

    @wraps(call)
    def called(*arguments: Any) -> Any:
        with settings_of_threads():
            return call(*arguments)

    return called


CALLS = {
    "a step without backward": without_backward,
    "backward without a forward": without_forward,
    "a forward without gradients": without_eval,
    "a clip that the plan has not": partial(after_backward, lambda a, m, o: a.clip_grad_norm_(m.parameters(), 1.0)),
    "a clip by value": partial(after_backward, lambda a, m, o: a.clip_grad_value_(m.parameters(), 2.0)),
    "a forward before the update": partial(after_backward, follows_no_update),
    "a second model": partial(after_backward, lambda a, m, o: prepared(a)),
    "a clip of a batch that accumulates": partial(
        in_the_first_batch, lambda a, m, o: a.clip_grad_norm_(m.parameters(), 0.5)
    ),
    "gradients of batches before": partial(in_the_first_batch, zero_in_the_second),
    "states of other objects": states_of_others,
    "hooks of saves": lambda: alone().register_save_state_pre_hook(print),
    "mixed precision": lambda: alone(mixed_precision="bf16"),
    "microbatches": lambda: alone(sw.Plan(merge=sw.Merge(microbatches=2))),
    "chunks of stages": lambda: alone(sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved"))),
    "a compiler": lambda: alone(dynamo_backend="aot_eager"),
    **{f"plain accelerate with its {given}": partial(plain_with_an_engine, given) for given in ("engine", "model")},
}
REFUSED = Refusals("accelerate.plain_loop", {case: own(call) for case, call in CALLS.items()})


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_would_train_nothing_and_settings_of_the_plan_are_refused(case: str) -> None:
    REFUSED.check(case)


def test_memory_is_free_for_another_model_in_the_middle_of_an_update() -> None:
    with settings_of_threads():
        accelerator = alone()
        model, _ = prepared(accelerator)
        model(ROW)
        accelerator.free_memory()
        model, optimizer = prepared(accelerator)
        assert accelerator.unwrap_model(model) is accelerator.engine.model
        accelerator.backward(model(ROW).mean())
        optimizer.step()


def test_under_stages_a_loss_is_read_before_the_update_as_in_one_process() -> None:
    def losses(accelerator: Any) -> list[float]:
        model = net()
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

    expected = plainly(losses)
    for found in on_ranks(PLANS["pp"], losses):
        assert found == pytest.approx(expected, rel=1e-6)


def after_updates(accelerator: Any, factors: list[float]) -> Any:
    """The rate and the weights after an update for each factor of the loss."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    skipped = []
    for factor in factors:
        accelerator.backward(model(ROWS[0]).square().mean() * factor)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        scheduler.step()
        optimizer.zero_grad()
    return optimizer.param_groups[0]["lr"], dict(accelerator.get_state_dict(model)), skipped


@pytest.mark.parametrize("plan", ["stage 3", "pp"])
def test_an_update_that_is_not_finite_is_skipped_with_the_step_of_its_scheduler(plan: str) -> None:
    made = replace(PLANS[plan], clip_grad_norm=None)
    rate, weights, _ = plainly(lambda each: after_updates(each, [1.0, 1.0]))
    for found, state, skipped in on_ranks(made, lambda each: after_updates(each, [1.0, float("inf"), 1.0])):
        assert (found, skipped) == (rate, [False, True, False])
        if state:
            torch.testing.assert_close(state, weights, rtol=2e-5, atol=1e-6)


class Kept(torch.autograd.Function):
    """Its input, which it keeps for backward: bytes in `live`."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, live: list[int]) -> torch.Tensor:
        kept = x.detach().clone()
        live[0] += kept.nbytes
        live[1] = max(live)
        weakref.finalize(kept, freed, live, kept.nbytes)
        context.kept = kept
        return x * kept

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2 * context.kept, None


def freed(live: list[int], num_bytes: int) -> None:
    live[0] -= num_bytes


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.live = [0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(x, self.live) if x.requires_grad else x  # type: ignore[no-untyped-call]


def peak(accelerator: Any, steps: int) -> int:
    """The most bytes of activations in two updates of so many batches."""
    model: Any = nn.Sequential(nn.Linear(4, 8), Keeping(), nn.Linear(8, 3))
    live = model[1].live
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(ROWS[0][:4]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert live[0] == 0
    return int(live[1])


@pytest.mark.parametrize(("plan", "most"), [("stage 3", 1), ("pp", 2)])
def test_accumulated_batches_keep_no_activations(plan: str, most: int) -> None:
    """Under a pipeline as many batches as ranks: 1F1B keeps so many."""
    steps, made = 6, PLANS[plan]
    plain = plainly(lambda each: peak(each, steps), gradient_accumulation_steps=steps)
    found = max(on_ranks(made, lambda each: peak(each, steps), gradient_accumulation_steps=steps))
    assert 0 < found <= most * plain // made.mesh.tp


def loop_that_is_left(accelerator: Any, ends: str) -> Any:
    """Two epochs, and the first is left during an update; what the thread had then, and the weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = TensorDataset(*(each[:16] for each in ROWS))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    seen: list[Any] = []

    def epoch(leaves: bool) -> None:
        for number, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), targets)
                if leaves and number == 2 and ends != "break":
                    raise KeyboardInterrupt if ends == "interrupt" else ValueError
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(torch.rand(3).tolist())
            if leaves and number == 2:
                break

    with suppress(KeyboardInterrupt, ValueError):
        epoch(True)
    seen.append((len(_get_current_function_mode_stack()), torch.rand(3).tolist()))
    plain = nn.Linear(4, 1)
    plain(ROWS[0]).square().mean().backward()
    seen.append(plain.weight.grad.tolist())  # type: ignore[union-attr]
    epoch(False)
    return seen, dict(accelerator.get_state_dict(model))


@pytest.mark.parametrize(
    ("plan", "ends"), [("one rank", "break"), ("pp", "break"), ("pp", "error"), ("pp", "interrupt"), ("tp", "error")]
)
def test_a_loop_that_is_left_gives_the_thread_back_and_goes_on(plan: str, ends: str) -> None:
    made, left = replace(PLANS[plan], clip_grad_norm=None), partial(loop_that_is_left, ends=ends)
    expected_seen, expected = plainly(left, gradient_accumulation_steps=2)
    for seen, state in on_ranks(made, left, gradient_accumulation_steps=2):
        assert seen == expected_seen
        if state:
            torch.testing.assert_close(state, expected, rtol=2e-5, atol=1e-6)


def norm_after_one_that_is_left(accelerator: Any, leaves: bool) -> float:
    """The norm of an update of three batches, maybe after another model's was left in its last one."""
    for is_left in (True, False) if leaves else (False,):
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.step = 0
        for number in range(3):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(ROWS[0][number::3]), ROWS[1][number::3])
                if is_left and number == 2:
                    with pytest.raises(ModelError, match=r"after 2 batches whose stages wait .* before free_memory"):
                        accelerator.free_memory()
                    accelerator.backward(loss)
                    break
                accelerator.backward(loss)
                optimizer.step()
        if is_left:
            accelerator.free_memory()
    return float(accelerator.report.grad_norm)


def test_an_update_is_left_for_another_model_after_its_first_backwards() -> None:
    left, expected = (
        on_ranks(PLANS["pp"], partial(norm_after_one_that_is_left, leaves=leaves), gradient_accumulation_steps=3)
        for leaves in (True, False)
    )
    assert left == expected


@pytest.mark.parametrize("plan", ["stage 3", "pp"])
def test_a_trace_has_the_updates_of_all_ranks_and_changes_no_number(plan: str, tmp_path: Path) -> None:
    def run(accelerator: Any) -> Run:
        found = train(accelerator, batch=4)
        accelerator.end_training()
        return found

    settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
    traced, _ = on_ranks(PLANS[plan], run, trace=tmp_path / "traced", **settings)
    assert traced.norms == on_ranks(PLANS[plan], run, **settings)[0].norms
    events = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert names.count("step") == len(traced.norms)
        assert {"F0.0", "B1.0"} <= {*names} or rank


def test_a_loop_over_data_resumes_on_the_next_row_on_any_ranks(tmp_path: Path) -> None:
    def run(accelerator: Accelerator, *, resumes: bool) -> list[float]:
        torch.manual_seed(1)
        model, data = net(), sw.Data({"x": ROWS[0], "y": ROWS[1]}, global_batch=8, seed=2)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data)
        if resumes:
            accelerator.load_state(tmp_path)
        losses: list[float] = []
        for _ in range(2 - resumes):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(functional.cross_entropy(model(batch["x"]), batch["y"]))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and accelerator.report is not None:
                    losses.append(accelerator.report.loss)
                    if len(losses) == 4 and not resumes:
                        accelerator.save_state(tmp_path)
        return losses

    def under(plan: str, microbatches: int, *, resumes: bool) -> list[float]:
        plain = replace(PLANS[plan], clip_grad_norm=None)
        settings: dict[str, Any] = {"gradient_accumulation_steps": microbatches}
        found: list[float] = on_ranks(plain, partial(run, resumes=resumes), **settings)[0]
        return found

    whole = under("stage 3", 2, resumes=False)
    assert len(whole) == 6  # 24 rows
    assert under("stage 3", 2, resumes=True) == whole[4:]
    assert under("pp", 4, resumes=True) == pytest.approx(whole[4:], rel=2e-5)
