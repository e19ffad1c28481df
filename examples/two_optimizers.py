"""Two optimizers for one model: Muon for the matrices of the blocks, AdamW for all else, each with its scheduler.

One learns: optimizers and schedulers are built as in plain PyTorch; Muon gets its matrices whole, from one owner each.

    python examples/two_optimizers.py               # two simulated ranks
    torchrun --nproc-per-node 2 examples/two_optimizers.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

import shardwise as sw

NUM_STEPS = 8


class Net(nn.Module):
    """Predicts the next word from the words before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        states, _ = self.mix(self.embed(words))
        for block in self.blocks:
            states = states + block(states)
        logits: torch.Tensor = self.head(states)
        return logits


def build() -> tuple[Net, list[torch.optim.Optimizer], list[LRScheduler]]:
    """The model, its optimizers and their schedulers: all of it plain PyTorch."""
    torch.manual_seed(0)
    model = Net()
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.startswith("blocks.") and parameter.ndim == 2 else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=0.05)
    adamw = torch.optim.AdamW(others, lr=0.02)
    return model, [muon, adamw], [CosineAnnealingLR(muon, NUM_STEPS), LinearLR(adamw, 1.0, 0.1, NUM_STEPS)]


def words_of(step: int) -> torch.Tensor:
    """8 rows of 12 words: each word is the one before it plus 3."""
    return (torch.arange(8).view(8, 1) * 4 + torch.arange(12) * 3 + step) % 32


def entropy(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean loss of each word from those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def train_plainly() -> list[float]:
    """One process, without shardwise."""
    model, optimizers, schedulers = build()
    losses = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        loss = entropy(model(words_of(step)), words_of(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(loss.item())
    return losses


def train(channel: sw.Channel) -> tuple[list[float], list[tuple[float, ...]]]:
    """The same on all data ranks: losses, and the learning rates of Muon and AdamW."""
    model, optimizers, schedulers = build()
    engine = sw.parallelize(
        model,
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=1)),
        optimizer=optimizers,
        loss=lambda logits, batch: entropy(logits, batch["words"]),
        channel=channel,
    )
    losses, rates = [], []
    for step in range(NUM_STEPS):
        rates.append(tuple(float(scheduler.get_last_lr()[0]) for scheduler in schedulers))
        losses.append(engine.step({"words": words_of(step).chunk(channel.size)[channel.rank]}).loss)
        for scheduler in schedulers:
            scheduler.step()
    return losses, rates


if __name__ == "__main__":
    channel = sw.default_channel()
    (losses, rates), *_ = sw.simulate(2, train) if channel.size == 1 else [train(channel)]
    [(alone, same_rates)] = sw.simulate(1, train)
    plain = train_plainly()
    assert alone == plain  # every bit
    assert same_rates == rates
    # Ranks add gradients in another order, and Muon rounds to bfloat16, where a last bit counts for more.
    assert all(abs(a - b) < 5e-3 for a, b in zip(losses, plain, strict=True))
    if channel.rank == 0:
        for step, (loss, (muon, adamw)) in enumerate(zip(losses, rates, strict=True)):
            print(f"step {step}: loss {loss:.3f}, learning rates {muon:.4f} (Muon) and {adamw:.4f} (AdamW)")
        print("an engine on one rank has the losses of plain PyTorch to the bit")
        print("two ranks, each with whole matrices, have them but for rounding")
