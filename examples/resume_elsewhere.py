"""Train under stage 3 on four ranks, save, and go on as a pipeline of two stages with matrices cut in two.

One learns: a save holds the model, not its layout; schedulers go along in `extra`; losses go on as in one process.

    python examples/resume_elsewhere.py             # four simulated ranks
    torchrun --nproc-per-node 4 examples/resume_elsewhere.py
"""

import tempfile
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

NUM_STEPS, SAVED_AT = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(F.gelu(self.up(states)))
        return states + change


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), *(Block() for _ in range(4)), nn.Linear(16, 32))


def words_of(step: int) -> torch.Tensor:
    """8 rows of 12 words: each word is the one before it plus 3."""
    return (torch.arange(8).view(8, 1) * 4 + torch.arange(12) * 3 + step) % 32


def entropy(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["words"][:, 1:].flatten())


FIRST = sw.Plan(mesh=sw.Mesh(dp_shard=4), sharding=sw.Sharding(stage=3), clip_grad_norm=1.0)
SECOND = sw.Plan(
    mesh=sw.Mesh(pp=2, tp=2),
    tensor=sw.Tensor(rules={"*.up": "column", "*.down": "row"}),
    merge=sw.Merge(microbatches=4),
    clip_grad_norm=1.0,
)


def train(channel: sw.Channel, plan: sw.Plan, steps: range, folder: str) -> list[float]:
    """Train these steps: from the save of the step before the first, and with a save at the end."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
    engine = sw.parallelize(model, plan, optimizer=optimizer, loss=entropy, channel=channel)
    if steps.start > 0:
        extra = sw.load(folder, engine, step=steps.start)
        scheduler.load_state_dict(extra["scheduler"])
    losses = []
    for step in steps:
        share = plan.mesh.data_rank(channel.rank)  # the same for all ranks of a pipeline
        rows = words_of(step).chunk(plan.mesh.num_data_ranks)[share]
        losses.append(engine.step({"words": rows}).loss)
        scheduler.step()
    sw.save(folder, engine, step=steps.stop, extra={"scheduler": scheduler.state_dict()})
    return losses


def train_elsewhere(channel: sw.Channel) -> list[float]:
    """The first half under one layout, the second half under another."""
    mine = tempfile.mkdtemp(prefix="resume_elsewhere-") if channel.rank == 0 else ""
    folder = channel.exchange(mine.encode(), purpose="the folder of rank 0")[0].decode()
    first = train(channel, FIRST, range(SAVED_AT), folder)
    return first + train(channel, SECOND, range(SAVED_AT, NUM_STEPS), folder)


if __name__ == "__main__":
    channel = sw.default_channel()
    losses, *_ = sw.simulate(4, train_elsewhere) if channel.size == 1 else [train_elsewhere(channel)]
    with tempfile.TemporaryDirectory() as folder:
        [alone] = sw.simulate(1, lambda channel: train(channel, sw.Plan(clip_grad_norm=1.0), range(NUM_STEPS), folder))
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, alone, strict=True))
    if channel.rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.5f} on {FIRST.mesh if step < SAVED_AT else SECOND.mesh}")
        print("saved under one layout and resumed under another, the losses are those of one process")
