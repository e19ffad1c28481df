"""Two versions of shardwise side by side: the same programs on two source trees, in turns.

    git worktree add /tmp/before 26db98a
    python -m benchmarks.two_trees --before /tmp/before/src --rounds 5 --write two-trees

Each cell is a fresh process of one tree. It warms up, repeats its work, and prints its shortest time (of steps the
median): on a machine that is shared, the minimum moves least. The ratio of a round is taken between neighbours; the
table has the medians.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.markdown import markdown

SOURCE = Path(__file__).parents[1] / "src"
RESULTS = Path(__file__).parent / "results"

COMMON = """
import sys, tempfile, time
import torch
import shardwise as sw
torch.set_num_threads(1)

def least(work, times=5, before=lambda: ()):
    found = []
    for _ in range(times + 1):
        given = before()
        start = time.perf_counter()
        work(*given)
        found.append(time.perf_counter() - start)
    print(min(found[1:]))

def state(rank, size, rows=True):
    pieces = {}
    for number in range(32):
        at = dict(offset=(0, 1024 * rank), shape=(1024, 1024))
        if rows:
            at = dict(offset=(512 * rank, 0), shape=(512, 2048))
        pieces[sw.Piece(name=f"w{number}", dtype="float32", global_shape=(1024, 2048), **at)] = torch.ones(at["shape"])
    return pieces
"""

CELLS = {
    "import shardwise": "import time\nstart = time.perf_counter()\nimport shardwise\n"
    + "print(time.perf_counter() - start)",
    "shardwise --help": (
        "import contextlib, io, time\nstart = time.perf_counter()\n"
        "from shardwise.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main(['--help'])\n"
        "print(time.perf_counter() - start)"
    ),
    "parallelize, 2,000 parameters": COMMON
    + """
def build():
    torch.manual_seed(0)
    return (torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(1000))),)
plan = sw.Plan(sharding=sw.Sharding(stage=1), precision=sw.Precision(compute="bfloat16"))
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
least(lambda model: sw.parallelize(model, plan, optimizer=sgd, loss=lambda o, b: o.sum()), before=build)
""",
    **{
        f"step, 2 simulated ranks, {name}, k = {k}": COMMON
        + f"""
def train(channel):
    torch.manual_seed(0)
    engine = sw.parallelize(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50))),
        sw.Plan({plan}, merge=sw.Merge(microbatches={k}), precision=sw.Precision(compute="bfloat16")),
        optimizer=lambda p: torch.optim.AdamW(p), loss=lambda o, b: o.float().square().mean(), channel=channel)
    batch = {{"input": torch.ones(8, 64)}}
    found = []
    for _ in range(40):
        start = time.perf_counter()
        engine.step(batch)
        found.append(time.perf_counter() - start)
    return sorted(found[10:])[15]  # ranks are threads that take turns: the shortest of their steps is by chance
print(max(sw.simulate(2, train)))
"""
        for k in (1, 4)
        for name, plan in {
            **{f"stage {at}": f"mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage={at})" for at in range(4)},
            "pp": "mesh=sw.Mesh(pp=2)",
            "tp": "mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={str(n): ('column', 'row')[n % 2] for n in range(50)})",
        }.items()
    },
    "generate 32 tokens, 2 simulated ranks, stage 3": COMMON
    + """
from transformers import LlamaConfig, LlamaForCausalLM
def go(channel):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4))
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))
    engine = sw.parallelize(model, plan, optimizer=lambda p: torch.optim.AdamW(p), channel=channel)
    found = []
    for _ in range(4):
        start = time.perf_counter()
        engine.generate(torch.ones(2, 8, dtype=torch.long), max_new_tokens=32, do_sample=False)
        found.append(time.perf_counter() - start)
    return min(found[1:])
print(max(sw.simulate(2, go)))
""",
    "plan_reshard, 2,000 different tensors, 8 ranks": COMMON
    + """
from shardwise.routes.reshard import plan_reshard
def pieces(by_rows):
    ranks = []
    for rank in range(8):
        held = []
        for number in range(2000):
            shape = (64 + 8 * (number % 97), 64 + 8 * (number % 89))
            rows, columns = shape
            part = dict(offset=(rank * rows // 8, 0), shape=(rows // 8, columns)) if by_rows else dict(
                offset=(0, rank * columns // 8), shape=(rows, columns // 8))
            held.append(sw.Piece(name=f"w{number}", dtype="float32", global_shape=shape, **part))
        ranks.append(held)
    return ranks
held, wanted = pieces(True), pieces(False)
least(lambda: plan_reshard(held, wanted), times=2)
""",
    "reshard rows to columns, 256 MiB, 2 simulated ranks": COMMON
    + """
def go(channel):
    held, wanted = state(channel.rank, 2), state(channel.rank, 2, rows=False)
    found = []
    for _ in range(5):
        channel.exchange(b"", purpose="start")
        start = time.perf_counter()
        sw.reshard(held, wanted, channel)
        found.append(time.perf_counter() - start)
    return min(found[1:])
print(max(sw.simulate(2, go)))
""",
    "save, 256 MiB, 2 simulated ranks": COMMON
    + """
folder = tempfile.mkdtemp(dir=sys.argv[1])
def go(channel):
    held = state(channel.rank, 2)
    found = []
    for number in range(4):
        channel.exchange(b"", purpose="start")
        start = time.perf_counter()
        sw.save(f"{folder}/{number}", held, channel=channel)
        found.append(time.perf_counter() - start)
    return min(found[1:])
print(max(sw.simulate(2, go)))
""",
    **{
        f"load rows as {kind}, 256 MiB, 2 simulated ranks": COMMON
        + f"""
folder = tempfile.mkdtemp(dir=sys.argv[1])
sw.simulate(2, lambda channel: sw.save(folder, state(channel.rank, 2), channel=channel))
def go(channel):
    wanted = state(channel.rank, 2, rows={kind == "rows"})
    found = []
    for _ in range(5):
        channel.exchange(b"", purpose="start")
        start = time.perf_counter()
        sw.load(folder, wanted, channel=channel)
        found.append(time.perf_counter() - start)
    return min(found[1:])
print(max(sw.simulate(2, go)))
"""
        for kind in ("rows", "columns")
    },
    "convert pieces to whole, 256 MiB": COMMON
    + """
folder = tempfile.mkdtemp(dir=sys.argv[1])
sw.simulate(2, lambda channel: sw.save(folder + "/a", state(channel.rank, 2), channel=channel))
numbers = iter(range(100))
least(lambda: sw.checkpoint.convert(folder + "/a", f"{folder}/{next(numbers)}", to="whole"), times=3)
""",
}


def seconds(tree: Path, program: str) -> float:
    """Run one cell on one tree."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
        command = [sys.executable, "-c", program, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{tree}: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the src folder of the other tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    arguments = parser.parse_args()
    rows = []
    for name, program in CELLS.items():
        if arguments.only not in name:
            continue
        before: list[float] = []
        now: list[float] = []
        for turn in range(arguments.rounds):
            sides = [(before, arguments.before), (now, SOURCE)]
            for times, tree in sides if turn % 2 else reversed(sides):
                times.append(seconds(tree, program))
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        least = min(now) / min(before)
        rows.append((name, f"{1e3 * min(before):.1f}", f"{1e3 * min(now):.1f}", f"{least:.2f}", f"{ratio:.2f}"))
        print(rows[-1], flush=True)
    text = markdown(("what", "before, ms", "now, ms", "now / before", "median of ratios"), rows)
    if arguments.write:
        command = f"python -m benchmarks.two_trees {' '.join(sys.argv[1:])}"
        page = (
            f"# Two versions in turns\n\nMade by `{command}` on {date.today()}: {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, torch {version('torch')}. Least times of all rounds, and their ratio.\n\n"
            f"{text}\n"
        )
        (RESULTS / f"{arguments.write}.md").write_text(page)
    print(text)


if __name__ == "__main__":
    main()
