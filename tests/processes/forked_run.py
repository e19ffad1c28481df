"""`python -m tests.processes.forked_run OUTPUT`: the hybrid example on eight processes, which share their imports.

Eight interpreters that each import torch and transformers would take most of the time of the test.
"""

import io
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import LlamaForCausalLM  # noqa: F401, what the example builds

from shardwise.comm.processes import processes
from shardwise.train import RunConfig, rank, read_config

NUM_RANKS = 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.toml"


def shortened(output: Path, *overrides: str, num_processes: int = NUM_RANKS) -> RunConfig:
    """Two updates, and an evaluation at the end."""
    brief = ("train.steps=2", "train.warmup_steps=1", "train.log_every=1", "train.evaluate_batches=1")
    given = [f"train.output={output}", *brief, *overrides]
    return read_config(EXAMPLE, overrides=given, num_processes=num_processes)


def say_little() -> None:
    """What the trained model goes on to write is of no interest here."""
    setattr(rank, "_SAMPLE_TOKENS", 1)  # noqa: B010, it is not to be set otherwise


def _live(number: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{output}.meeting", rank=number, world_size=NUM_RANKS)
    channel = processes(device=torch.device("cpu"))
    rank.run(shortened(output), channel, Console(file=io.StringIO()))
    channel.close()


def main(output: Path) -> int:
    """Fork the ranks and wait for them; 0 where all have done their part."""
    say_little()
    children = []
    for number in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            try:
                _live(number, output)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
