"""What one rank of a cell does: prepare every side, prove that each one trains, then let them step in turns."""

import gc
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.device.sides import SIDES, Step, pairs_on
from benchmarks.rank import prove_training
from benchmarks.workload import Batch, llama

MODELS = {
    # Name: width, layers, heads, words.
    "tiny": (64, 2, 4, 256),
    "small": (384, 8, 6, 2048),
    "1b": (2048, 16, 32, 32000),
}

NUM_BATCHES = 8

NUM_PROOF_STEPS = 10
"""The loss of the smallest model falls by 0.015 and more in each, with four microbatches too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCell:
    """One run of all sides that go on so many ranks."""

    device: str
    """The kind of device, such as "cuda"."""
    num_ranks: int
    model: str
    rows: int
    """Of a microbatch."""
    tokens: int
    num_microbatches: int
    num_rounds: int
    num_steps: int
    """Of one side in one round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOutcome:
    """What a cell measured."""

    cell: DeviceCell
    device_name: str
    num_parameters: int
    seconds: dict[str, list[float]]
    """By side, one value per round: seconds of a step, of the slowest rank."""
    losses: dict[str, list[float]]
    """By side, the losses of the proof steps, all on one batch, averaged over ranks."""
    peak_bytes: dict[str, int]
    """By side, the most that rank 0's allocator gave out for it at a time; empty where none counts."""


def model_of(name: str) -> nn.Module:
    """The model in float32 on the CPU, the same on every rank."""
    width, layers, heads, words = MODELS[name]
    return llama(num_heads=heads, num_layers=layers, width=width, vocabulary=words, num_positions=4096)


def drawn(cell: DeviceCell, rank: int, device: torch.device) -> list[Batch]:
    """Random tokens on the device, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    found = []
    for _ in range(NUM_BATCHES):
        size = (cell.num_microbatches * cell.rows, cell.tokens)
        tokens = torch.randint(0, MODELS[cell.model][3], size, generator=generator).to(device)
        found.append(
            Batch(
                whole={"input_ids": tokens, "labels": tokens},
                microbatches=[{"input_ids": cut, "labels": cut} for cut in tokens.split(cell.rows)],
            )
        )
    return found


def enter(rank: int, cell: DeviceCell, folder: str) -> None:
    """Be a rank in a fresh process, and leave the outcome in the folder."""
    os.dup2(2, 1)  # what libraries print is no part of the table
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cpu")
    backend = "cpu:gloo"
    if cell.device != "cpu":
        device = torch.device(cell.device, rank)
        torch.accelerator.set_device_index(rank)
        backend += f",{cell.device}:{dist.get_default_backend_for_device(cell.device)}"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=cell.num_ranks)
    try:
        outcome = run_device_cell(cell, device)
        if rank == 0:
            (Path(folder) / "outcome.json").write_text(json.dumps(asdict(outcome)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_device_cell(cell: DeviceCell, device: torch.device) -> DeviceOutcome:
    """Measure on this rank of the default process group."""
    names = list(dict.fromkeys(each for pair in pairs_on(cell.num_ranks) for each in (pair.ours, pair.against)))
    batches = drawn(cell, dist.get_rank(), device)
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    num_parameters = 0
    for name in names:
        before = _begin_peak(device)
        model = model_of(cell.model)
        num_parameters = sum(each.numel() for each in model.parameters())
        steps[name] = SIDES[name].prepare(model, device, cell.num_microbatches)
        losses[name] = [_mean_of_ranks(float(steps[name](batches[0]))) for _ in range(NUM_PROOF_STEPS)]
        if before is not None:
            # All sides stay, so that they can step in turns: what others hold was there before.
            peaks[name] = torch.accelerator.max_memory_allocated(device) - before
    prove_training([SIDES[name] for name in names], losses)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, cell.num_rounds):  # one round to warm up
        # Each round starts with another side, every second one runs backwards.
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 == 0 else reversed(turned):
            taken = _turn(steps[name], batches, cell.num_steps, device)
            if number >= 0:
                seconds[name].append(taken)
    name_of = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return DeviceOutcome(
        cell=cell,
        device_name=device.type if name_of is None else name_of(device.index),
        num_parameters=num_parameters,
        seconds=seconds,
        losses=losses,
        peak_bytes=peaks,
    )


def _begin_peak(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def _turn(step: Step, batches: list[Batch], num_steps: int, device: torch.device) -> float:
    """Seconds per step, from a common start to the end of the slowest rank."""
    _settle(device)
    dist.barrier()
    begun = time.perf_counter()
    for number in range(num_steps):
        step(batches[number % len(batches)])
    _settle(device)
    elapsed = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item() / num_steps


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _mean_of_ranks(loss: float) -> float:
    value = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def median(values: list[float]) -> float:
    """Of rounds."""
    return statistics.median(values)
