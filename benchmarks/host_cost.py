"""What an engine costs the host: processor time per parameter and update over the plain loop, on tiny tensors.

    python -m benchmarks.host_cost [--write] [--rounds 60] [--ranks 2] [--profile SIDE [--depth 40]]
    python -m benchmarks.host_cost --parallelize             # how `parallelize` grows with the number of parameters

One process is one rank of several, and hears itself only: our sides on `Silence`, FSDP2 on torch's fake process group.
So nothing but the host's own work is counted. All sides take one update in turns, in one thread, by its processor
time. What a side adds is the least over the rounds less the least of the plain loop: what others do on the machine
makes every update longer, and the least one least of all.

Every update is a forward, a backward, a clip by the global norm and AdamW (foreach). Tensors have 8 or 64 elements.
"""

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.markdown import markdown, write_page
from benchmarks.silence import DONE, Silence
from shardwise.comm import Channel, Work, alone

RESULTS = Path(__file__).parent / "results" / "host-cost.md"
READING = """What other programs do makes the plain loop longer too, and what is added grows alike.
Compare within a table. Times are of an update, so with k = 4 of four microbatches. Under stages 1 to 3 the optimizer
has the part of a rank, which saves time that the plain loop spends. Goal: 10 us for each parameter."""
WIDTH = 8
PARAMETERS_OF_A_BLOCK = 12
SIZES = (147, 450)
Stage: TypeAlias = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
SHARDED: tuple[Stage, ...] = (1, 3)
MORE_RANKS = (4, 8, 64)

Step = Callable[[], object]


class Block(nn.Module):
    """A block of a transformer, without attention: 12 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(torch.tanh(self.mix(self.norm_1(x))))
        return x + cast("torch.Tensor", self.down(torch.relu(self.up(self.norm_2(x)))))


class Blocks(nn.Module):
    """Blocks, and modules before and behind them."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        num_blocks, rest = divmod(num_parameters, PARAMETERS_OF_A_BLOCK)
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(rest))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in (*self.first, *self.blocks):
            x = each(x)
        return x


def built(num_parameters: int) -> nn.Module:
    """The same model for every side."""
    torch.manual_seed(0)
    model = Blocks(num_parameters)
    assert len(list(model.parameters())) == num_parameters
    return model


def _loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return output.square().mean()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def _rows(num_microbatches: int) -> torch.Tensor:
    return torch.ones(4 * num_microbatches, WIDTH)


def plain(num_parameters: int, num_microbatches: int) -> Step:
    """The loop that everybody writes."""
    return _loop(built(num_parameters), num_microbatches)


def _loop(model: nn.Module, num_microbatches: int, before: Callable[[int], None] = lambda number: None) -> Step:
    optimizer = _adamw(model.parameters())
    batch = {"x": _rows(num_microbatches)}

    def step() -> None:
        for number, rows in enumerate(batch["x"].chunk(num_microbatches)):
            before(number)
            (_loss(model(rows), batch) / num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_on(channel: Channel, num_parameters: int, num_microbatches: int, stage: Stage) -> sw.Engine:
    """The model under a plan, over all ranks of the channel."""
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=num_microbatches),
        clip_grad_norm=1.0,
    )
    return sw.parallelize(built(num_parameters), plan, optimizer=_adamw, loss=_loss, channel=channel)


class Zeros(Silence):
    """Silent ranks whose parts are zeros: with what happens to be in memory, no update would be finite, nor made."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """Write the own part; where the memory is new (stage 3) nothing but zeros, as FSDP2's group writes nothing."""
        if purpose.startswith("parameters of unit"):
            output.zero_()
            return DONE
        return super().all_gather(output, input, purpose=purpose, counts=counts)


def ours(num_parameters: int, num_microbatches: int, *, stage: Stage, num_ranks: int) -> Step:
    """An engine on one rank of several."""
    channel = alone() if num_ranks == 1 else Zeros(rank=0, size=num_ranks)
    engine = engine_on(channel, num_parameters, num_microbatches, stage)
    batch = {"x": _rows(num_microbatches)}
    warnings.simplefilter("ignore", sw.errors.SameRowsWarning)  # silent ranks have the rows of this one

    def step() -> None:
        assert not engine.step(batch).skipped

    return step


def fsdp2(num_parameters: int, num_microbatches: int, *, reshard: bool) -> Step:
    """`fully_shard` of each block and of the model, on a process group that moves nothing."""
    from torch.distributed.fsdp import fully_shard

    model = built(num_parameters)
    assert isinstance(model, Blocks)
    sharded = [fully_shard(each, reshard_after_forward=reshard) for each in model.blocks]
    sharded.append(fully_shard(model, reshard_after_forward=reshard))

    def before(number: int) -> None:
        cast("Any", model).set_requires_gradient_sync(number == num_microbatches - 1)

    return _loop(model, num_microbatches, before)


def sides_over(num_ranks: int) -> dict[str, Callable[[int, int], Step]]:
    """What is measured, by name; the first is what the others are compared with."""
    found: dict[str, Callable[[int, int], Step]] = {
        "plain": plain,
        "stage 0, 1 rank": partial(ours, stage=0, num_ranks=1),
    }
    for stage in STAGES:
        found[f"stage {stage}, {num_ranks} ranks"] = partial(ours, stage=stage, num_ranks=num_ranks)
    for more in MORE_RANKS:
        for stage in (STAGES[0], STAGES[-1]):
            found[f"stage {stage}, {more} ranks"] = partial(ours, stage=stage, num_ranks=more)
    for reshard in (False, True):
        kept = "resharded" if reshard else "kept whole"
        found[f"FSDP2, {kept}, {num_ranks} ranks"] = partial(fsdp2, reshard=reshard)
    return found


def milliseconds_in_turns(steps: Mapping[str, Step], *, num_rounds: int, num_warm: int = 5) -> dict[str, list[float]]:
    """Processor time of every update of every side, in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_warm + num_rounds):
        if number == num_warm:
            gc.collect()
            gc.freeze()  # what was built is not walked again; what an update leaves behind is collected in its time
        for name, step in steps.items():
            begun = time.thread_time_ns()
            step()
            if number >= num_warm:
                found[name].append((time.thread_time_ns() - begun) / 1e6)
    gc.unfreeze()
    return found


def rows_of(found: Mapping[str, Sequence[float]], num_parameters: int, num_microbatches: int) -> list[tuple[str, ...]]:
    """One row per side: its time, what it adds, and that per parameter."""
    base = min(found["plain"])
    rows: list[tuple[str, ...]] = []
    for name, times in found.items():
        added = min(times) - base
        rows.append(
            (
                str(num_parameters),
                str(num_microbatches),
                name,
                f"{statistics.median(times):.2f}",
                f"{min(times):.2f}",
                "" if name == "plain" else f"{added:.2f}",
                "" if name == "plain" else f"{added / num_parameters * 1e3:.1f}",
            )
        )
    return rows


HEADER = ("parameters", "k", "side", "median, ms", "least, ms", "added, ms", "added per parameter, us")


def measure(arguments: argparse.Namespace) -> str:
    """The table over all models and numbers of microbatches."""
    with_fake_group(arguments.ranks)
    makers = sides_over(arguments.ranks)
    rows = []
    for num_parameters in map(int, arguments.parameters.split(",")):
        for num_microbatches in map(int, arguments.k.split(",")):
            steps = {name: make(num_parameters, num_microbatches) for name, make in makers.items()}
            found = milliseconds_in_turns(steps, num_rounds=arguments.rounds)
            rows += rows_of(found, num_parameters, num_microbatches)
    return markdown(HEADER, rows)


def with_fake_group(num_ranks: int) -> None:
    """A process group of torch for FSDP2, whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)


def parallelize_table(counts: Sequence[int]) -> str:
    """Processor time of `parallelize`, one unit per parameter."""
    rows = [
        (str(stage), str(count), f"{least_of_parallelize(stage, count):.0f}") for stage in SHARDED for count in counts
    ]
    return markdown(("stage", "parameters", "parallelize, ms"), rows)


def least_of_parallelize(stage: Stage, count: int, times: int = 3) -> float:
    """The least milliseconds of several calls, on a model of `count` modules with one parameter each."""
    found = []
    for _ in range(times):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage))
        gc.collect()
        begun = time.process_time()
        sw.parallelize(model, plan, optimizer=_adamw, loss=_loss, channel=Silence(rank=0, size=2))
        found.append((time.process_time() - begun) * 1e3)
    return min(found)


def profile(arguments: argparse.Namespace) -> None:
    """Where the time of a side goes."""
    with_fake_group(arguments.ranks)
    num_parameters, num_microbatches = (int(each.split(",")[0]) for each in (arguments.parameters, arguments.k))
    step = sides_over(arguments.ranks)[arguments.profile](num_parameters, num_microbatches)
    for _ in range(5):
        step()
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    for _ in range(arguments.rounds):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(arguments.depth)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", default=",".join(map(str, SIZES)))
    parser.add_argument("--k", default="1,4")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--profile", metavar="SIDE", help="instead, where the time of one side goes")
    parser.add_argument("--depth", type=int, default=40, help="lines of the profile")
    parser.add_argument("--parallelize", action="store_true", help="instead, the cost of parallelize")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    if arguments.profile:
        profile(arguments)
        return
    table = parallelize_table((250, 1000, 4000)) if arguments.parallelize else measure(arguments)
    print(table)
    if arguments.write:
        tables = [measure(arguments) if arguments.parallelize else table, parallelize_table((250, 1000, 4000))]
        write_page(RESULTS, "benchmarks.host_cost", "Host cost", READING, "\n\n".join(tables), load_before=before)


if __name__ == "__main__":
    main()
