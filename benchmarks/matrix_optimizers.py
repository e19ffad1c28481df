"""Updates by Muon where each matrix has one rank, against ranks that all orthogonalise all matrices; in turns.

    python -m benchmarks.matrix_optimizers [--write] [--rounds 5] [--layers 4] [--layouts "dp_shard=2;tp=2;..."]

Joined processes hold the Llama of `workload.py`: Muon has the matrices of its blocks, AdamW the rest. One side is the
update of the engine at stage 1, from the clip to the new working copies on all ranks. The other one is what a loop does
that knows of no owners: every rank steps plain optimizers on all parameters; along tp it gathers all gradients first.
A ratio is that of one turn, by the slowest rank. Work is m n min(m, n) of each call of torch's Newton-Schulz iteration.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import _muon

import shardwise as sw
from benchmarks.cells import in_processes
from benchmarks.markdown import Row, markdown, write_page
from benchmarks.workload import ADAMW, Shape, batches, llama
from shardwise.comm import Channel

RESULT = Path(__file__).parent / "results" / "matrix-optimizers.md"
LAYOUTS = ("dp_shard=2", "tp=2", "dp_shard=4", "dp_shard=2,tp=2")
ASKED = {2: 0.6, 4: 0.35}
"""The update over that of the other side, at most, by the number of ranks."""
ASKED_BYTES = 1.15
"""Bytes of a rank over those with AdamW for all, at most."""
HEADER: Row = (
    "layout",
    "ranks",
    "all on each rank, ms",
    "update, ms",
    "ratio",
    "asked",
    "busiest rank's work",
    "bytes over AdamW's",
)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The matrices of the blocks to Muon, and the rest to AdamW."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if ".layers." in name and each.ndim == 2]
    others = [each for name, each in named.items() if not (".layers." in name and each.ndim == 2)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, **ADAMW)]


def adamw_for_all(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What the bytes are compared with."""
    return [torch.optim.AdamW(model.parameters(), **ADAMW)]


def engine_of(channel: Channel, layout: str, model: nn.Module, optimizers: Any) -> sw.Engine:
    """The model under a layout, at stage 1."""
    mesh = sw.Mesh.parse(layout)
    plan = sw.Plan(
        mesh=mesh,
        sharding=sw.Sharding(stage=1, bucket_bytes=4 << 20),
        tensor=sw.Tensor(rules="auto" if mesh.tp > 1 else None),
        precision=sw.Precision(compute="bfloat16"),
    )
    return sw.parallelize(model, plan, optimizer=optimizers(model), channel=channel)


def held_bytes(engine: sw.Engine) -> int:
    """What a rank holds: buffers by the formula, and the state that its optimizers have."""
    planned = engine.footprint()
    state = sum(
        value.nbytes
        for optimizer in engine.optimizers
        for entries in optimizer.state.values()
        for value in entries.values()
        if torch.is_tensor(value)
    )
    buffers = planned.working_bytes + planned.gradient_bytes + planned.master_bytes + planned.reducing_bytes
    return buffers + planned.updating_bytes + state


@contextmanager
def counted() -> Iterator[list[int]]:
    """The work of each orthogonalisation inside, on this rank."""
    work: list[int] = []
    orthogonalised = _muon._zeropower_via_newtonschulz

    def counting(gradient: torch.Tensor, *settings: Any) -> torch.Tensor:
        work.append(gradient.numel() * min(gradient.shape))
        return orthogonalised(gradient, *settings)

    _muon._zeropower_via_newtonschulz = counting  # type: ignore[assignment]
    try:
        yield work
    finally:
        _muon._zeropower_via_newtonschulz = orthogonalised


def redundant(channel: Channel, layout: str, model: nn.Module) -> Callable[[], None]:
    """The update of a rank that knows of no owners."""
    mesh = sw.Mesh.parse(layout)
    along = channel.over(mesh.peers(channel.rank, ("tp",)))
    optimizers = muon_and_adamw(model)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(each.shape, generator=generator) for each in model.parameters()]

    def update() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
            if along.size > 1 and gradient.numel() % along.size == 0:
                part = gradient.view(-1).chunk(along.size)[along.rank]
                along.all_gather(gradient.view(-1), part, purpose="gradients").wait()
        for optimizer in optimizers:
            optimizer.step()

    return update


def slowest(channel: Channel, seconds: float) -> float:
    """The most of all ranks."""
    return max(float(json.loads(each)) for each in channel.exchange(json.dumps(seconds).encode(), purpose="seconds"))


def measure(channel: Channel, layout: str, rounds: int, layers: int, width: int = 384) -> Row:
    """A row of the table; all ranks of the layout call it together."""
    mesh = sw.Mesh.parse(layout)
    engine = engine_of(channel, layout, llama(num_layers=layers, width=width), muon_and_adamw)
    other = redundant(channel, layout, llama(num_layers=layers, width=width))
    drawn = batches(Shape(num_sequences=1, num_tokens=16), 1, rank=mesh.data_rank(channel.rank), count=3)
    ratios, found = [], []
    num_work = 0
    for number in range(-1, rounds):
        gc.collect()
        engine.recorder.updates = []
        with counted() as work:
            engine.step(drawn[number % 3].whole)
        num_work = sum(work)
        ((begun, ended),) = engine.recorder.updates
        channel.exchange(b"", purpose="the other side begins")
        start = time.perf_counter()
        other()
        pair = slowest(channel, time.perf_counter() - start), slowest(channel, ended - begun)
        if number >= 0:
            ratios.append(pair[1] / pair[0])
            found.append(pair)
    shares = [json.loads(each) for each in channel.exchange(json.dumps(num_work).encode(), purpose="work")]
    plain = engine_of(channel, layout, llama(num_layers=layers, width=width), adamw_for_all)
    plain.step(drawn[0].whole)
    held, of_plain = slowest(channel, held_bytes(engine)), slowest(channel, held_bytes(plain))
    ms = [f"{statistics.median(side) * 1e3:.0f}" for side in zip(*found, strict=True)]
    asked = f"{ASKED[channel.size]:.2f}" if channel.size in ASKED else ""
    busiest = f"{max(shares) / sum(shares):.3f}"
    return (
        layout,
        str(channel.size),
        *ms,
        f"{statistics.median(ratios):.3f}",
        asked,
        busiest,
        f"{held / of_plain:.3f}",
    )


def of_rank(rank: int, folder: Path, *, layout: str, rounds: int, layers: int) -> None:
    """What a process does."""
    row = measure(sw.default_channel(), layout, rounds, layers)
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(row))


def table(layouts: Sequence[str], rounds: int, layers: int) -> list[Row]:
    """A row for each layout."""
    rows: list[Row] = []
    for layout in layouts:
        with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
            work = partial(of_rank, layout=layout, rounds=rounds, layers=layers)
            in_processes(work, Path(name), num_ranks=sw.Mesh.parse(layout).size)
            rows.append(tuple(json.loads((Path(name) / "row.json").read_text())))
    return rows


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix_optimizers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--layouts", default=";".join(LAYOUTS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found = markdown(HEADER, table(arguments.layouts.split(";"), arguments.rounds, arguments.layers))
    print(found)
    if arguments.write:
        reading = (
            f"Bytes are those of the rank with most, at stage 1; asked: {ASKED_BYTES} at most. Where ranks are more "
            "than cores, they take turns on them: both sides, so that work in total counts."
        )
        title = "Optimizers of whole matrices"
        write_page(RESULT, "benchmarks.matrix_optimizers", title, reading, found, load_before=before)


if __name__ == "__main__":
    main()
