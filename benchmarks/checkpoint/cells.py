"""Start the processes of a cell, and bring back what they measured."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint.outcome import Cell, Outcome
from benchmarks.checkpoint.rank import measure

__all__ = ["run"]


def run(cell: Cell, folder: Path) -> Outcome:
    """Measure one cell in `folder`, where what is saved for other cells stays."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the children read it at import; this process has nothing else to do
    (folder / "rendezvous").unlink(missing_ok=True)
    (folder / "cell.json").write_text(json.dumps(asdict(cell)))
    spawn(measure, args=(cell.num_ranks, str(folder)), nprocs=cell.num_ranks, join=True)
    return Outcome.read(folder / "outcome.json")
