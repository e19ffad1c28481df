"""What one process of a cell does: save with every side in turns, load with every side in turns, and prove it right."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.checkpoint import asynchronous, states
from benchmarks.checkpoint.jobs import jobs_of
from benchmarks.checkpoint.memory import CountingStore, peak_memory, read_characters
from benchmarks.checkpoint.outcome import Cell, Outcome, Reads
from benchmarks.checkpoint.sides import LOADERS, SAVERS, Loader
from benchmarks.checkpoint.states import Held, Layout, Specs, World
from benchmarks.joined import joined

__all__ = ["Bench", "Turn", "measure"]

Turn: TypeAlias = Callable[[], object]

WARM_ELEMENTS = 7 << 20


def most(value: float) -> float:
    """The largest value of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _of_all(value: int) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([value]))
    return [int(each) for each in gathered]


Spent: TypeAlias = tuple[float, float]
"""Seconds from a common start to the end of the slowest rank, and seconds of a processor per rank."""


def timed(turn: Turn) -> Spent:
    """What a turn takes; the same numbers on every rank."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    turn()
    took = torch.tensor([time.perf_counter() - start, time.process_time() - used], dtype=torch.float64)
    of_all = [torch.zeros_like(took) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, took)
    seconds, processor = torch.stack(of_all).unbind(1)
    return seconds.max().item(), processor.mean().item()


def in_turns(turns: Mapping[str, Turn], num_rounds: int, *, between: Callable[[str], None]) -> dict[str, list[Spent]]:
    """Time every turn once per round; `between` is called with its name before each, untimed."""
    spent: dict[str, list[Spent]] = {name: [] for name in turns}
    order = list(turns)
    for index in range(num_rounds):
        # Each round starts with another side, every second one runs backwards: nobody has one neighbour all the time.
        at = index % len(order)
        turned = order[at:] + order[:at]
        for name in turned if index % 2 == 0 else reversed(turned):
            between(name)
            spent[name].append(timed(turns[name]))
    return spent


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What all jobs of a cell share."""

    world: World
    specs: Specs
    folder: Path
    outcome: Outcome

    def held(self, layouts: set[Layout]) -> dict[Layout, Held]:
        """The state as this rank holds it, by layout; slices are views of the flat buffers."""
        held: dict[Layout, Held] = {}
        if "rows" in layouts:
            held["rows"] = states.sharded(self.specs, self.world)
        if "columns" in layouts:
            held["columns"] = states.sharded(self.specs, self.world, columns=True)
        if layouts & {"slices", "flat"}:
            buffers = states.flat(self.specs, self.world)
            held |= {"flat": buffers, "slices": states.slices(self.specs, self.world, buffers)}
        return held

    def empty(self, path: Path) -> None:
        """Leave an empty folder, and nothing for the disk to do."""
        if self.world.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            os.sync()
        dist.barrier()

    def in_turns(self, job: str, turns: Mapping[str, Turn], *, between: Callable[[str], None]) -> None:
        """See `in_turns`, with the cell's number of rounds; note what it took."""
        spent = in_turns(turns, self.outcome.cell.num_rounds, between=between)
        self.outcome.seconds[job] = {name: [seconds for seconds, _ in each] for name, each in spent.items()}
        self.outcome.processor[job] = {name: [used for _, used in each] for name, each in spent.items()}

    def peak(self, job: str, name: str, turn: Turn, *, known_bytes: int = 0) -> None:
        """Do the turn, and note its peak memory without `known_bytes`."""
        dist.barrier()
        with peak_memory() as peak:
            turn()
            dist.barrier()
        self.outcome.peaks.setdefault(job, {})[name] = int(most(peak.sampled - known_bytes))
        self.outcome.kernel_peaks.setdefault(job, {})[name] = int(most(peak.kernel - known_bytes))


def save_in_turns(bench: Bench, held: Mapping[Layout, Held]) -> None:
    """Time all savers; one save of each stays in the folder. Where no saves are timed, those that are loaded save."""
    cell = bench.outcome.cell
    loaded = {LOADERS[name].saved_by for loads in jobs_of(cell).values() for name in loads if name in LOADERS}
    savers = [
        each for each in SAVERS.values() if (cell.rare or not each.rare) and (cell.times_saves or each.name in loaded)
    ]
    for saver in savers:
        path = bench.folder / saver.name
        bench.empty(path)
        bench.peak("save", saver.name, partial(saver.save, bench.world, path, held[saver.layout]))
    if not cell.times_saves:
        bench.outcome.peaks.clear()
        bench.outcome.kernel_peaks.clear()
        return
    scratch = bench.folder / "round"
    turns = {saver.name: partial(saver.save, bench.world, scratch, held[saver.layout]) for saver in savers}
    bench.in_turns("save", turns, between=lambda name: bench.empty(scratch))
    bench.empty(scratch)


def load_in_turns(
    bench: Bench,
    job: str,
    loaders: Mapping[str, Layout],
    expected: Mapping[Layout, Held],
    target: Mapping[Layout, Held],
) -> None:
    """Prove that every loader fills `target` with what is `expected`, note what it reads, and time it."""
    there = [LOADERS[name] for name in loaders if name in LOADERS and (bench.folder / LOADERS[name].saved_by).exists()]
    turns: dict[str, Turn] = {}
    for loader in there:
        layout = loaders[loader.name]
        _prove(bench, job, loader, target[layout], expected[layout])
        turns[loader.name] = partial(loader.load, bench.world, bench.folder / loader.saved_by, target[layout])
        bench.peak(job, loader.name, turns[loader.name])
    bench.in_turns(job, turns, between=lambda name: None)


def _prove(bench: Bench, job: str, loader: Loader, target: Held, expected: Held) -> None:
    states.poison(target)
    path = bench.folder / loader.saved_by
    store = CountingStore(path)
    before = read_characters()
    loader.load(bench.world, store if loader.reads == "store" else path, target)
    read = store.read_bytes if loader.reads == "store" else read_characters() - before
    states.check(bench.world, target, expected)
    if loader.reads != "mapped":
        needed = _of_all(states.local_bytes(target))
        reads = Reads(read=_of_all(read), needed=needed, stored=bench.specs.num_bytes)
        bench.outcome.reads.setdefault(job, {})[loader.name] = reads


def warm_heap() -> None:
    """Bring glibc's heap into the state that it has in a training program.

    Once a process has freed a block of 28 MiB, glibc takes blocks up to that size from its heap instead of mapping new
    pages for each (mallopt(3), M_MMAP_THRESHOLD): a peer that allocates its buffers anew in each load gains most.
    """
    for _ in range(2):
        block = torch.ones(WARM_ELEMENTS)
        del block


def measure_cell(cell: Cell, folder: Path, world: World) -> Outcome:
    """Run a cell on this rank; all ranks get the same outcome."""
    warm_heap()
    outcome = Outcome(cell=cell)
    specs = Specs.of_bytes(cell.num_bytes, cell.kind)
    bench = Bench(world=world, specs=specs, folder=folder / "saved", outcome=outcome)
    jobs = jobs_of(cell)
    saves = cell.work == "save and load"
    layouts = {layout for loaders in jobs.values() for layout in loaders.values()}
    expected = bench.held(layouts | ({"rows", "flat"} if saves else set()))
    if saves:
        save_in_turns(bench, expected)
        if cell.times_saves:
            asynchronous.measure(bench, expected["rows"])
    for job, loaders in jobs.items():
        # A target of its own for each job: two states in memory, not one for each layout.
        target = bench.held(set(loaders.values()))
        load_in_turns(bench, job, loaders, expected, target)
        progress(f"{job}: done")
    return outcome


def progress(text: str) -> None:
    """Say it, once."""
    if dist.get_rank() == 0:
        print(f"    {text}", file=sys.stderr, flush=True)


def measure(rank: int, num_ranks: int, folder: str) -> None:
    """Run the cell described in `folder`, in a fresh process; rank 0 leaves the outcome there."""
    with joined(rank, num_ranks, folder, timeout_seconds=600.0) as (place, channel):
        mesh = init_device_mesh("cpu", (num_ranks,))
        cell = Cell(**json.loads((place / "cell.json").read_text()))
        outcome = measure_cell(cell, place, World(rank=rank, size=num_ranks, mesh=mesh, channel=channel))
        if rank == 0:
            outcome.write(place / "outcome.json")
