"""Start the processes of a cell, and bring back what they measured."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from benchmarks.pipeline.outcome import Cell, Outcome
from benchmarks.pipeline.rank import measure

__all__ = ["run"]

CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run(cell: Cell) -> Outcome:
    """Measure one cell."""
    os.environ.update(CHILD_ENVIRONMENT)  # the children read it at import; this process has nothing else to do
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        (folder / "cell.json").write_text(json.dumps(asdict(cell)))
        spawn(measure, args=(cell.num_ranks, str(folder)), nprocs=cell.num_ranks, join=True)
        return Outcome.read(folder / "outcome.json")
