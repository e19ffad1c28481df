"""Start a fresh pair of processes for one cell and bring back what it measured."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from benchmarks.rank import Cell, Outcome, enter, measure

CHILD_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def in_processes(work: Callable[[int, Path], None], folder: Path, *, num_ranks: int = 2) -> None:
    """Run `work(rank, folder)` in fresh processes joined by gloo; raise when one of them fails."""
    os.environ.update(CHILD_ENVIRONMENT)  # the children read it at import; this process has nothing else to do
    spawn(enter, args=(num_ranks, str(folder), work), nprocs=num_ranks, join=True)


def run(cell: Cell) -> Outcome:
    """Measure one cell."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        (folder / "cell.json").write_text(json.dumps(asdict(cell)))
        in_processes(measure, folder, num_ranks=cell.num_ranks)
        return Outcome.read(folder / "outcome.json")
