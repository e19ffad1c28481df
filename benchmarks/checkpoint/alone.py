"""What needs no second rank: contents and plans for a thousand ranks, and a state of very many tiny tensors."""

import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import shardwise as sw
from benchmarks.checkpoint.outcome import Cell, Outcome
from shardwise.checkpoint.contents import BLOCK_BYTES, Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.packed_contents import pack_contents, unpack_contents
from shardwise.checkpoint.read_plan import plan_reads
from shardwise.plan import Parameter, Sharding, plan_ownership
from shardwise.space import Piece

__all__ = ["CONTENTS", "PLANNING", "measure_contents", "measure_planning", "measure_tiny"]

PLANNING = "plan one rank's reads"
CONTENTS = "understand contents of a million pieces"
NUM_TINY = 100_000


def measure_planning(cell: Cell, *, num_tensors: int = 10_000) -> Outcome:
    """Processor seconds to plan one rank's reads, and what it hands to whom, between two layouts of slices."""
    parameters = _parameters(num_tensors)
    saved = _slices(parameters, cell.num_savers, bucket_bytes=4 << 30)
    wanted = _slices(parameters, cell.num_ranks, bucket_bytes=3 << 30)
    stored = _as_stored(saved)
    outcome = Outcome(cell=cell)
    seconds: list[float] = []
    for at in range(cell.num_rounds):
        rank = (2 * at + 1) * cell.num_ranks // (2 * cell.num_rounds)
        gc.collect()
        begun = time.process_time()
        plan = plan_reads(stored, wanted, rank, block_bytes=BLOCK_BYTES, readers=range(cell.num_ranks))
        for span in plan.reads:
            for needer in plan.needers(span):
                plan.transfers(span, needer)
        seconds.append(time.process_time() - begun)
    outcome.seconds[PLANNING] = {"ours": seconds}
    return outcome


def measure_contents(cell: Cell, *, num_tensors: int = 1000) -> Outcome:
    """Processor seconds in which one rank understands what another has told it of tensors that all ranks have saved."""
    files = [f"rank{rank:05d}" for rank in range(cell.num_savers)]
    tensors = {}
    for at in range(num_tensors):
        whole = Piece(name=f"layers.{at}", dtype="bfloat16", global_shape=(4 * cell.num_savers, 4096))
        pieces = [
            StoredPiece(
                piece=replace(whole, offset=(4 * rank, 0), shape=(4, 4096)),
                file=file,
                start=4096 + at * BLOCK_BYTES,
                checksums=os.urandom(8),
            )
            for rank, file in enumerate(files)
        ]
        tensors[whole.name] = StoredTensor(name=whole.name, dtype=whole.dtype, shape=whole.global_shape, pieces=pieces)
    sizes = dict.fromkeys(files, 4096 + num_tensors * BLOCK_BYTES)
    packed = pack_contents(Contents(format="shardwise", location="", tensors=tensors, file_sizes=sizes))
    outcome = Outcome(cell=cell)
    outcome.peaks[CONTENTS] = {"ours": len(packed)}
    seconds = outcome.seconds[CONTENTS] = {"ours": []}
    for _ in range(cell.num_rounds):
        gc.collect()
        begun = time.process_time()
        unpack_contents(packed)
        seconds["ours"].append(time.process_time() - begun)
    return outcome


def _parameters(count: int) -> list[Parameter]:
    shapes = [(4096, 4096), (4096,), (14336, 4096), (1024, 4096), (4096,)]
    return [
        Parameter(
            name=f"layers.{at // len(shapes)}.{at % len(shapes)}",
            shape=shapes[at % len(shapes)],
            dtype="bfloat16",
            working="bfloat16",
            master="float32",
        )
        for at in range(count)
    ]


def _slices(parameters: Sequence[Parameter], num_owners: int, *, bucket_bytes: int) -> list[list[Piece]]:
    """What every owner has of the flat buckets, as runs of parameters."""
    ownership = plan_ownership(parameters, Sharding(bucket_bytes=bucket_bytes), num_owners=num_owners, num_replicas=1)
    shape_of = {parameter.name: parameter.shape for parameter in parameters}
    held: list[list[Piece]] = [[] for _ in range(num_owners)]
    for bucket in ownership.buckets:
        step = bucket.counts[0]
        for slot in bucket.slots:
            start = slot.start
            while start < slot.run.stop:
                stop = min(slot.run.stop, (start // step + 1) * step)
                run = (start - slot.start, stop - slot.start)
                piece = Piece(name=slot.name, dtype="float32", global_shape=shape_of[slot.name], run=run)
                held[start // step].append(piece)
                start = stop
    return held


def _as_stored(held: Sequence[Sequence[Piece]]) -> list[StoredPiece]:
    stored: list[StoredPiece] = []
    for writer, pieces in enumerate(held):
        end = 0
        for piece in pieces:
            stored.append(StoredPiece(piece=piece, file=f"rank{writer:05d}", start=end, checksums=None))
            end += stored[-1].num_bytes
    return stored


def measure_tiny(cell: Cell, folder: Path) -> Outcome:
    """Seconds to save and load very many tiny tensors in one process; once, for DCP takes long."""
    outcome = Outcome(cell=cell)
    state = {f"w{at}": torch.full((4, 4), float(at)) for at in range(cell.num_bytes // 64)}
    target = {name: torch.zeros(4, 4) for name in state}
    ours, theirs, file = folder / "tiny-ours", folder / "tiny-dcp", folder / "tiny.pt"
    turns: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "ours": (lambda: sw.save(ours, state), lambda: sw.load(ours, target)),
        "dcp": (
            lambda: save_dcp(dict(state), checkpoint_id=theirs, no_dist=True),
            lambda: load_dcp(dict(target), checkpoint_id=theirs, no_dist=True),
        ),
        "torch.save": (lambda: torch.save(state, file), lambda: target.update(torch.load(file, weights_only=True))),
    }
    for name, (save, load) in turns.items():
        for tensor in target.values():
            tensor.zero_()
        for job, act in (("save tiny tensors", save), ("load tiny tensors", load)):
            gc.collect()
            begun = time.perf_counter()
            act()
            outcome.seconds.setdefault(job, {})[name] = [time.perf_counter() - begun]
        if not all(torch.equal(state[key], target[key]) for key in state):
            raise RuntimeError(f"{name} does not bring the tiny tensors back")
    for path in (ours, theirs):
        shutil.rmtree(path)
    file.unlink()
    return outcome
