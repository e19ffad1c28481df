"""The loops of accelerate as users write them, and the column of accelerate in the contract of adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.accelerate import Accelerator
from tests.contracts.adapter_cases import PLAIN, Asked, Column, Outcome

CLIP = 0.5
PLANS = {
    "one rank": sw.Plan(clip_grad_norm=CLIP),
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0), clip_grad_norm=CLIP),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3), clip_grad_norm=CLIP),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "1": 0, "2": 1}), clip_grad_norm=CLIP),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"}), clip_grad_norm=CLIP),
}
_made = torch.Generator().manual_seed(5)
ROWS = torch.randn(24, 4, generator=_made), torch.randint(3, (24,), generator=_made)


class Run(NamedTuple):
    norms: list[float]
    num_right: float
    num_rows: int
    state: dict[str, torch.Tensor]
    rate: float


def train(accelerator: Any, *, batch: int, epochs: int = 2, folder: Path | None = None, resumes: bool = False) -> Run:
    """Train, save after the first epoch or go on from there, and count what is right at the end."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = DataLoader(TensorDataset(*ROWS), batch_size=batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resumes:
        accelerator.load_state(folder)
    norms = []
    for epoch in range(resumes, epochs):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if folder is not None and not epoch and not resumes:
            accelerator.save_state(folder)
    model.eval()
    right = []
    with torch.no_grad():
        for inputs, targets in loader:
            outputs, wanted = accelerator.gather_for_metrics((model(inputs), targets))
            right.append((outputs.argmax(-1) == wanted).float())
    counted = torch.cat(right)
    state = accelerator.get_state_dict(model)
    return Run(norms, counted.sum().item(), len(counted), dict(state), optimizer.param_groups[0]["lr"])


def assert_same_run(found: Run, expected: Run) -> None:
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.state, expected.state, rtol=2e-5, atol=1e-6)
    assert (found.num_right, found.num_rows, found.rate) == (expected.num_right, expected.num_rows, expected.rate)


@contextmanager
def settings_of_threads() -> Iterator[None]:
    """accelerate keeps its settings for the process, and simulated ranks are threads. It has no public way."""
    kinds = (AcceleratorState, GradientState, PartialState)
    before = [vars(kind)["_shared_state"] for kind in kinds]
    for kind in kinds:
        setattr(kind, "_shared_state", ThreadLocalSharedDict())  # noqa: B010
    try:
        yield
    finally:
        for kind, each in zip(kinds, before, strict=True):
            setattr(kind, "_shared_state", each)  # noqa: B010


def on_ranks(plan: sw.Plan, run: Callable[[Any], Any], *, device: str = "cpu", **settings: Any) -> list[Any]:
    """What `run` gives on each rank, for an accelerator there."""

    def on(channel: sw.Channel) -> Any:
        return run(Accelerator(cpu=True, plan=plan, channel=channel, **settings))

    with settings_of_threads():
        return sw.simulate(plan.mesh.size, on, device=device)


def plainly(run: Callable[[Any], Any], **settings: Any) -> Any:
    """What `run` gives for accelerate's own accelerator."""
    with settings_of_threads():
        return run(accelerate.Accelerator(cpu=True, **settings))


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


def drop_gradients_first(model: Any, rows: torch.Tensor, accelerator: Any, optimizer: Any) -> None:
    """Of each update, plain accelerate drops here all batches but the last."""
    for each in [*rows, *rows]:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(each).square().mean())
            optimizer.step()


def update_in_a_region(model: Any, rows: torch.Tensor, accelerator: Any, optimizer: Any) -> None:
    for each in [*rows, *rows]:
        with accelerator.accumulate(model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(each)
            accelerator.backward(output.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.is_autocast_enabled("cpu")


def evaluate_in_an_update(model: Any, rows: torch.Tensor, accelerator: Any, optimizer: Any) -> None:
    for number, each in enumerate([*rows, rows[0]]):
        with accelerator.accumulate(model):
            accelerator.backward(model(each).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            assert model(each).shape == (8, 3), number
        model.train()


LOOPS: dict[str, tuple[Any, int]] = {
    "a batch is dropped": (drop_a_batch, 1),
    "evaluates in the loss": (evaluate_in_the_loss, 1),
    "drops gradients first": (drop_gradients_first, 2),
    "a region of autocast": (update_in_a_region, 2),
    "evaluates in an update": (evaluate_in_an_update, 2),
}
STEPS = {PLAIN: 1, "two batches": 2, "three batches": 3}
"""Batches of an update of `train`."""


def _outcome(accelerator: Any, asked: Asked) -> Outcome:
    if asked.setting in LOOPS:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 3))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        LOOPS[asked.setting][0](model, ROWS[0].reshape(3, 8, 4), accelerator, optimizer)
        return Outcome(figures=[], weights=dict(accelerator.get_state_dict(model)))
    ranks = accelerator.num_processes
    folder = asked.folder if asked.saves or asked.resumes else None
    run = train(accelerator, batch=8 // ranks, folder=folder, resumes=asked.resumes)
    figures = [
        *({"norm": each} for each in run.norms),
        {"right": run.num_right, "rows": run.num_rows, "rate": run.rate},
    ]
    return Outcome(figures=figures, weights=run.state)


def _trained(plan: sw.Plan | None, channel: sw.Channel | None, asked: Asked) -> Outcome:
    steps = LOOPS[asked.setting][1] if asked.setting in LOOPS else STEPS[asked.setting]
    if plan is None:
        return plainly(lambda each: _outcome(each, asked), gradient_accumulation_steps=steps)  # type: ignore[no-any-return]
    made = replace(plan, clip_grad_norm=None) if asked.setting in LOOPS else plan
    return _outcome(Accelerator(cpu=True, plan=made, channel=channel, gradient_accumulation_steps=steps), asked)


class _OfThreads(Column):
    def run(self, plan: str, asked: Asked, *, device: str = "cpu") -> list[Outcome]:
        with settings_of_threads():
            return super().run(plan, asked, device=device)


COLUMN = _OfThreads(
    plans=PLANS,
    train=_trained,
    cases=[
        *(("one rank", setting) for setting in (PLAIN, "two batches", *LOOPS)),
        *(
            ("stage 0", "two batches"),
            ("tp", PLAIN),
            ("pp", PLAIN),
            ("pp", "two batches"),
            ("stage 3", "three batches"),
        ),
    ],
    moves=[("one rank", "stage 3"), ("stage 3", "pp"), ("pp", "tp")],
    on_device=[("stage 3", "three batches"), ("pp", "two batches")],
    exact="one rank",
)
