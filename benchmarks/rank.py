"""What one process of a cell does: prepare every side, prove that each one trains, then let them step in turns."""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.sides import side_named
from benchmarks.workload import Batch, Shape, Training, batches, llama

NUM_BATCHES = 32
NUM_PROOF_STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run: these sides in turns, on one shape and one number of microbatches."""

    sides: tuple[str, ...]
    shape: str
    num_microbatches: int
    num_rounds: int
    num_ranks: int = 2
    num_heads: int = 6
    num_layers: int = 8
    same_samples: bool = False
    """All ranks see the same samples, as they do along tp; False: each has its own."""
    seconds_per_turn: float = 0.4
    """A turn of one side in one round is as many steps as take about this long on the median side, at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a cell measured."""

    cell: Cell
    num_steps_per_turn: int
    seconds: dict[str, list[float]]
    """By side, one value per round: seconds of a step, of the slowest rank."""
    passes: dict[str, list[float]]
    """The same of its forwards and backwards, for sides that clock them."""
    losses: dict[str, list[float]]
    """By side, the losses of the proof steps, all on one batch, averaged over ranks."""
    held_bytes: dict[str, int]
    """By side, bytes of tensors that it holds between two steps on rank 0."""
    predicted_bytes: dict[str, int]
    """The same by formula, for sides that have one."""

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read what `write` wrote."""
        fields = json.loads(path.read_text())
        cell = fields.pop("cell")
        return cls(cell=Cell(**{**cell, "sides": tuple(cell["sides"])}), **fields)


def run_cell(cell: Cell) -> Outcome:
    """Run a cell on this rank of the default process group; every rank gets the same outcome but for `held_bytes`."""
    sides = [side_named(name) for name in cell.sides]
    sees = 0 if cell.same_samples else dist.get_rank()
    drawn = batches(Shape.parse(cell.shape), cell.num_microbatches, rank=sees, count=NUM_BATCHES)
    trainings: dict[str, Training] = {}
    losses: dict[str, list[float]] = {}
    held: dict[str, int] = {}
    predicted: dict[str, int] = {}
    gc.collect()
    gc.freeze()  # what the libraries brought along is not looked through each time that tensors are counted
    before = live_tensor_bytes()
    for side in sides:
        model = llama(num_heads=cell.num_heads, num_layers=cell.num_layers)
        training = side.prepare(model, cell.num_microbatches)
        trainings[side.name] = training
        if training.predicted_bytes is not None:
            predicted[side.name] = training.predicted_bytes
        losses[side.name] = [_mean_of_ranks(training.step(drawn[0])) for _ in range(NUM_PROOF_STEPS)]
        after = live_tensor_bytes()
        held[side.name], before = after - before, after
    prove_training(sides, losses)
    turns, num_steps = _alternate(trainings, drawn, cell)
    return Outcome(
        cell=cell,
        num_steps_per_turn=num_steps,
        seconds={name: [each.step_s for each in rounds] for name, rounds in turns.items()},
        passes={
            name: [each.passes_s for each in rounds]
            for name, rounds in turns.items()
            if trainings[name].passes_s is not None
        },
        losses=losses,
        held_bytes=held,
        predicted_bytes=predicted,
    )


class Proven(Protocol):
    """A side, as far as its losses prove that it trains (`Side`)."""

    @property
    def name(self) -> str:
        """Its key among the losses."""

    @property
    def trains_fully(self) -> bool:
        """See `Side.trains_fully`."""

    @property
    def tolerance(self) -> float:
        """See `Side.tolerance`."""


def prove_training(sides: Sequence[Proven], losses: dict[str, list[float]]) -> None:
    """Raise `RuntimeError` unless all sides start at one loss and, where they exchange gradients, end at one, lower."""
    starts = {name: values[0] for name, values in losses.items()}
    ends = {side.name: losses[side.name][-1] for side in sides if side.trains_fully}
    problems = [
        f"{name}: the loss went from {values[0]:.4f} to {values[-1]:.4f} and should fall by 0.1 or more"
        for name, values in losses.items()
        if not values[-1] < values[0] - 0.1
    ]
    same = {side.name: 0.005 for side in sides}
    later = {side.name: side.tolerance for side in sides}
    for what, values, tolerances in (("first", starts, same), ("last", ends, later)):
        middle = statistics.median(values.values()) if values else 0.0
        problems += [
            f"{name}: the {what} loss is {value:.4f}, the other sides' {middle:.4f}"
            for name, value in values.items()
            if not abs(value - middle) <= tolerances[name] * middle
        ]
    if problems:
        raise RuntimeError("a side does not train as the others do:\n" + "\n".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A turn of one side; the same numbers on every rank."""

    step_s: float
    """Seconds per step, from a common start to the end of the slowest rank."""
    passes_s: float
    """Of them in forwards and backwards, on the slowest rank; 0 for a side that does not clock them."""


def _alternate(trainings: dict[str, Training], drawn: list[Batch], cell: Cell) -> tuple[dict[str, list[_Turn]], int]:
    warm = [_turn(training, drawn, 0, 2).step_s for training in trainings.values()]
    num_steps = max(1, round(cell.seconds_per_turn / statistics.median(warm)))
    turns: dict[str, list[_Turn]] = {name: [] for name in trainings}
    order = list(trainings)
    for index in range(cell.num_rounds):
        # Each round starts with another side, every second one runs backwards: nobody has one neighbour all the time.
        turned = order[index % len(order) :] + order[: index % len(order)]
        for name in turned if index % 2 == 0 else reversed(turned):
            turns[name].append(_turn(trainings[name], drawn, index * num_steps, num_steps))
        if dist.get_rank() == 0:
            print(f"    round {index + 1} of {cell.num_rounds}", file=sys.stderr, flush=True)
    return turns, num_steps


def _turn(training: Training, drawn: list[Batch], first: int, num_steps: int) -> _Turn:
    passes_s = training.passes_s or float
    dist.barrier()
    start, start_passes = time.perf_counter(), passes_s()
    for index in range(first, first + num_steps):
        training.step(drawn[index % len(drawn)])
    elapsed = torch.tensor([time.perf_counter() - start, passes_s() - start_passes], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    step_s, passes = (elapsed / num_steps).tolist()
    return _Turn(step_s=step_s, passes_s=passes)


def _mean_of_ranks(loss: float) -> float:
    value = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def live_tensor_bytes() -> int:
    """Bytes of all tensor storages that Python can reach, each once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, nn.Parameter):  # subclasses (DTensor) show their local tensors as well
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None and type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def enter(rank: int, world_size: int, folder: str, work: Callable[[int, Path], None]) -> None:
    """Join the process group through a file in `folder`, do `work(rank, folder)` and leave; runs in a fresh process."""
    os.dup2(2, 1)  # what libraries print is no part of the table
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed wants it
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        work(rank, Path(folder))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(rank: int, folder: Path) -> None:
    """Run the cell described in `folder`; rank 0 leaves the outcome there."""
    fields = json.loads((folder / "cell.json").read_text())
    outcome = run_cell(Cell(**{**fields, "sides": tuple(fields["sides"])}))
    if rank == 0:
        outcome.write(folder / "outcome.json")
