"""Loops of accelerate on simulated ranks: numbers on the host and on a device, memory, and the threads of loops."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.errors import ModelError
from tests.accelerate.accelerate_loops import PLANS, ROWS, assert_same_run, train


@pytest.fixture(autouse=True)
def each_rank_has_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps its settings for the process: simulated ranks are threads."""
    for kind in (AcceleratorState, GradientState, PartialState):
        monkeypatch.setattr(kind, "_shared_state", ThreadLocalSharedDict())


def on_ranks(plan: sw.Plan, run: Callable[[Any], Any], *, device: str | None = None, **settings: Any) -> list[Any]:
    """What `run` gives on each rank, for an accelerator there."""
    return sw.simulate(
        plan.mesh.size,
        lambda channel: run(Accelerator(cpu=True, plan=plan, channel=channel, **settings)),
        device=device or "cpu",
    )


@pytest.mark.parametrize(
    ("plan", "steps"), [("stage 3", 3), ("pp", 2), pytest.param("tp", 1, marks=pytest.mark.stress)]
)
def test_a_loop_on_devices_is_that_of_the_host(fake: str, plan: str, steps: int) -> None:
    expected = train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps), batch=4)
    batch = 4 // PLANS[plan].mesh.num_data_ranks
    settings: dict[str, Any] = {"device": fake, "gradient_accumulation_steps": steps}
    found = on_ranks(PLANS[plan], lambda accelerator: train(accelerator, batch=batch), **settings)
    assert_same_run(found[0]._replace(state={k: v.cpu() for k, v in found[0].state.items()}), expected)


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


@pytest.mark.parametrize(("plan", "most"), [("one rank", 1), ("stage 3", 1), ("tp", 1), ("pp", 2)])
def test_accumulated_batches_keep_no_activations(plan: str, most: int) -> None:
    """Under a pipeline as many batches as ranks: 1F1B keeps so many."""
    steps = 6
    plain = peak(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps), steps)
    made = PLANS[plan]
    found = max(on_ranks(made, lambda each: peak(each, steps), gradient_accumulation_steps=steps))
    assert 0 < found <= most * plain // made.mesh.tp


def draws() -> Any:
    return torch.rand(3).tolist()


def loop_that_is_left(accelerator: Any, ends: str) -> Any:
    """Two epochs, and the first is left during an update; what the thread had then, and the weights."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = TensorDataset(*(each[:16] for each in ROWS))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    seen = []

    def epoch(leaves: bool) -> None:
        for number, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), targets)
                if leaves and number == 2 and ends != "break":
                    raise KeyboardInterrupt if ends == "interrupt" else ValueError
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(draws())
            if leaves and number == 2:
                break

    with suppress(KeyboardInterrupt, ValueError):
        epoch(True)
    seen.append((len(_get_current_function_mode_stack()), draws()))
    plain = nn.Linear(4, 1)
    plain(ROWS[0]).square().mean().backward()
    seen.append(plain.weight.grad.tolist())  # type: ignore[union-attr]
    epoch(False)
    return seen, dict(accelerator.get_state_dict(model))


@pytest.mark.parametrize(
    ("plan", "ends"), [("one rank", "break"), ("pp", "break"), ("pp", "error"), ("pp", "interrupt"), ("tp", "error")]
)
def test_a_loop_that_is_left_gives_the_thread_back_and_goes_on(plan: str, ends: str) -> None:
    made = replace(PLANS[plan], clip_grad_norm=None)
    plain = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected_seen, expected = loop_that_is_left(plain, ends)
    for seen, state in on_ranks(made, lambda each: loop_that_is_left(each, ends), gradient_accumulation_steps=2):
        assert seen == expected_seen
        if state:
            torch.testing.assert_close(state, expected, rtol=2e-5, atol=1e-6)


def norm_after_one_that_is_left(accelerator: Any, leaves: bool) -> float:
    """The norm of an update of three batches, maybe after another model's was left in its last one."""
    for is_left in (True, False) if leaves else (False,):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.step = 0
        for number in range(3):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(ROWS[0][number::3]), ROWS[1][number::3])
                if is_left and number == 2:
                    if accelerator.plan.mesh.pp > 1:
                        with pytest.raises(
                            ModelError, match=r"after 2 batches whose stages wait .* before free_memory"
                        ):
                            accelerator.free_memory()
                    accelerator.backward(loss)
                    break
                accelerator.backward(loss)
                optimizer.step()
        if is_left:
            accelerator.free_memory()
    return float(accelerator.report.grad_norm)


@pytest.mark.parametrize("plan", ["pp", pytest.param("stage 3", marks=pytest.mark.stress)])
def test_an_update_is_left_for_another_model_after_its_first_backwards(plan: str) -> None:
    left, expected = (
        on_ranks(PLANS[plan], partial(norm_after_one_that_is_left, leaves=leaves), gradient_accumulation_steps=3)
        for leaves in (True, False)
    )
    assert left == expected
