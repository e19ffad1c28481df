"""Blocks that run again in backward: the plan's `activations.checkpoint` against torch's `checkpoint` in a plain loop.

    python -m benchmarks.activations [--write] [--rounds 20] [--quick]

One process, one thread, float32. All sides have the same decoder, take the same updates (forward, backward, AdamW) in
turns, and end with the same bits. A ratio is the median over the rounds of two updates that stand next to each other.
Peak bytes are those that one update allocates, seen by torch's profiler.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from benchmarks.markdown import Row, markdown

RESULTS = Path(__file__).parent / "results" / "activations.md"
LIMIT = 1.02
"""Of an update under our checkpoint, over one under torch's."""
SAVED = ("aten.addmm", "aten.mm")

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the decoder and its batch."""

    blocks: int = 8
    width: int = 192
    rows: int = 8
    length: int = 96


class Block(nn.Module):
    """Attention and two linear maps, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.mix(self.norm_1(x)).view(rows, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm_2(x)))), 0.0, self.training)


class Decoder(nn.Module):
    """Blocks in a row; torch's checkpoint is around each where it is asked for."""

    def __init__(self, size: Size, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.head = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        out: torch.Tensor = self.head(x)
        return out


def loss_of(output: torch.Tensor, _: Mapping[str, Any]) -> torch.Tensor:
    """Any loss."""
    return output.square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all sides."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def batch_of(size: Size) -> dict[str, torch.Tensor]:
    """The same rows for all sides."""
    return {"x": torch.randn(size.rows, size.length, size.width, generator=torch.Generator().manual_seed(1))}


def plain(size: Size, *, is_checkpointed: bool) -> tuple[nn.Module, Step]:
    """The loop that everybody writes."""
    torch.manual_seed(0)
    model = Decoder(size, is_checkpointed=is_checkpointed)
    optimizer, batch = adamw(model.parameters()), batch_of(size)

    def step() -> torch.Tensor:
        loss = loss_of(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def ours(size: Size, activations: sw.Activations) -> tuple[nn.Module, Step]:
    """An engine, with the model as it is."""
    torch.manual_seed(0)
    model = Decoder(size, is_checkpointed=False)
    batch = batch_of(size)
    engine = sw.parallelize(model, sw.Plan(activations=activations), optimizer=adamw, loss=loss_of)
    return model, lambda: torch.tensor(engine.step(batch).loss)


SIDES: dict[str, Callable[[Size], tuple[nn.Module, Step]]] = {
    "plain loop": lambda size: plain(size, is_checkpointed=False),
    "plain loop, torch's checkpoint": lambda size: plain(size, is_checkpointed=True),
    "engine": lambda size: ours(size, sw.Activations()),
    "engine, checkpoint": lambda size: ours(size, sw.Activations(checkpoint="blocks")),
    "engine, checkpoint, products saved": lambda size: ours(size, sw.Activations(checkpoint="blocks", save=SAVED)),
}
BASE = {"engine": "plain loop", "engine, checkpoint": "plain loop, torch's checkpoint"}
"""What a side is compared with: the same work without a plan."""


def peak_bytes(step: Step) -> int:
    """The most that an update has allocated at one time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    held = peak = 0
    kineto: Any = seen.profiler
    for event in kineto.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one side."""

    seconds: Sequence[float]
    """Of its update in each round."""
    peak_bytes: int


def measure(size: Size, num_rounds: int) -> dict[str, Outcome]:
    """All sides in turns. Raises AssertionError where their parameters differ in the end."""
    built = {name: make(size) for name, make in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for number in range(num_rounds + 2):
        # Backwards in every second round: what comes after what is the same for all in the end.
        names = list(built) if number % 2 == 0 else list(reversed(built))
        for name in names:
            gc.collect()
            begun = time.perf_counter()
            built[name][1]()
            if number >= 2:  # the first updates take memory and make state
                seconds[name].append(time.perf_counter() - begun)
    peaks = {name: peak_bytes(step) for name, (_, step) in built.items()}
    first, *others = (list(model.parameters()) for model, _ in built.values())
    for other in others:
        assert all(torch.equal(one, each) for one, each in zip(first, other, strict=True)), "sides differ"
    return {name: Outcome(seconds=seconds[name], peak_bytes=peaks[name]) for name in built}


def ratio(outcomes: Mapping[str, Outcome], name: str) -> float:
    """The median over the rounds of a side over its base."""
    pairs = zip(outcomes[name].seconds, outcomes[BASE[name]].seconds, strict=True)
    return statistics.median(one / other for one, other in pairs)


def text(outcomes: Mapping[str, Outcome], size: Size, num_rounds: int) -> str:
    """The page of results."""
    rows: list[Row] = [
        (
            name,
            f"{1000 * statistics.median(each.seconds):.1f}",
            f"{each.peak_bytes / 2**20:.1f}",
            f"{ratio(outcomes, name):.3f} of {BASE[name]}" if name in BASE else "",
        )
        for name, each in outcomes.items()
    ]
    asked = ratio(outcomes, "engine, checkpoint")
    return "\n".join(
        [
            "# Activations",
            "",
            f"A decoder of {size.blocks} blocks of width {size.width}, {size.rows} rows of {size.length}, float32, one",
            f"thread of two cores that other programs use too, {num_rounds} rounds. All sides end with the same bits.",
            "",
            markdown(("side", "ms per update", "peak MiB", "ratio"), rows),
            "",
            "A plain loop allocates its gradients in each update; an engine has memory for them all the time.",
            f"Asked: at most {LIMIT} of torch's checkpoint around the same blocks; measured {asked:.3f}.",
            "",
            f"Written by `python -m benchmarks.activations --write`, {date.today().isoformat()}.",
            "",
        ]
    )


def main() -> None:
    """Measure, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(blocks=3, width=32, rows=2, length=8) if arguments.quick else Size()
    found = text(measure(size, arguments.rounds), size, arguments.rounds)
    print(found)
    if arguments.write:
        RESULTS.write_text(found)


if __name__ == "__main__":
    main()
