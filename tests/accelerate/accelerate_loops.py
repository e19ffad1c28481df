"""The loop of accelerate as users write it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw

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


def assert_same_run(found: Run, expected: Run, *, of_last: int | None = None) -> None:
    """`of_last`: so many norms, where the run went on."""
    norms = expected.norms if of_last is None else expected.norms[-of_last:]
    torch.testing.assert_close(found.norms, norms, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found.state, expected.state, rtol=2e-5, atol=1e-6)
    assert (found.num_right, found.num_rows, found.rate) == (expected.num_right, expected.num_rows, expected.rate)
