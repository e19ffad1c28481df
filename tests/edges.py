"""The core works without its edges: `python -m tests.edges` takes one after the other away, and trains without it.

Each edge is deleted from a copy of the source. There a process imports the core, trains two updates at each stage of
sharding, under pp and under tp, evaluates, saves, and goes on from the save in one process. The save is verified, and
converted there and back to all other formats that are left.
"""

import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"

EDGES = {
    "averages of the weights": ["engine/averages.py"],
    "generation": ["engine/generation.py"],
    "metrics": ["engine/metrics.py"],
    "telemetry": ["engine/telemetry.py"],
    "rules found": ["engine/tensor/auto", "plan/tensor_inference.py"],
    "proof of regions": ["engine/tensor/proof"],
    "samples by configurations": ["engine/samples.py"],
    "records of models": ["plan/model_records.py"],
    "packed weights": ["engine/packed.py"],
    "peft": ["engine/adapters.py", "plan/adapted_maps.py"],
    "trainers of others": ["hf", "lightning", "accelerate", "trainers"],
    "averages of checkpoints": ["checkpoint/averages.py"],
    "block scales": [f"checkpoint/{each}.py" for each in ("block_scales", "scaled_weights")],
    **{
        f"the format {each}": [f"checkpoint/formats/{each}"] for each in ("huggingface", "dcp", "deepspeed", "megatron")
    },
    **{f"the format {each}": [f"checkpoint/formats/{each}.py"] for each in ("torch_save", "gguf")},
    "pictures": ["pictures"],
    "the command line": ["cli", "pictures", "train"],
    "verification": ["cli", "pictures", "train", "verification"],
}
"""What is deleted, by the name of the edge; under src/shardwise."""


def train_core(folder: Path) -> None:
    """Train under plans, and compare with one process."""
    import torch

    import shardwise as sw  # for each edge from another folder

    stages = [sw.Sharding(stage=0), sw.Sharding(stage=1), sw.Sharding(stage=2), sw.Sharding(stage=3)]
    plans = {
        **{f"stage {each.stage}": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=each) for each in stages},
        "pp": sw.Plan(
            mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "2": 1}), merge=sw.Merge(microbatches=2)
        ),
        "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"}, prove=False)),
    }

    def engine_of(channel: sw.Channel, plan: sw.Plan) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        loss = lambda output, batch: (output - batch["target"]).square().mean()  # noqa: E731
        return sw.parallelize(model, plan, optimizer=lambda each: torch.optim.AdamW(each), loss=loss, channel=channel)

    def losses_of(engine: Any, seeds: range) -> list[float]:
        mesh, losses = engine.plan.mesh, []
        for seed in seeds:
            chance = torch.Generator().manual_seed(seed)
            batch = {key: torch.randn(8, width, generator=chance) for key, width in (("input", 6), ("target", 4))}
            at = mesh.data_rank(engine.channel.rank)
            share = {key: each.chunk(mesh.num_data_ranks)[at] for key, each in batch.items()}
            losses += [engine.evaluate(share).loss, engine.step(share).loss]
        return losses

    def alone(channel: sw.Channel) -> list[float]:
        return losses_of(engine_of(channel, sw.Plan()), range(3))

    (expected,) = sw.simulate(1, alone)
    for name, plan in plans.items():

        def run(channel: sw.Channel, plan: sw.Plan = plan, path: Path = folder / name) -> list[float]:
            engine = engine_of(channel, plan)
            losses = losses_of(engine, range(2))
            sw.save(path, engine)
            return losses

        def go_on(channel: sw.Channel, path: Path = folder / name) -> list[float]:
            engine = engine_of(channel, sw.Plan())
            sw.load(path, engine)
            return losses_of(engine, range(2, 3))

        found = sw.simulate(plan.mesh.size, run)[0] + sw.simulate(1, go_on)[0]
        assert all(math.isclose(*each, rel_tol=1e-5) for each in zip(found, expected, strict=True)), (
            f"{name}: {found}, and {expected} in one process"
        )
    look_into(folder / "stage 3")


def look_into(save: Path) -> None:
    """Verify a save, compare it, and convert it."""
    from shardwise import checkpoint
    from shardwise.checkpoint.formats.registry import folder_planners

    assert checkpoint.verify(save).good
    checkpoint.convert(save, save.with_name(f"{save.name} whole"))
    assert checkpoint.diff(save, save.with_name(f"{save.name} whole")).equal
    for target in folder_planners().keys() - {"megatron"}:  # which asks for its own names
        made = save.with_name(f"{save.name} as {target}")
        checkpoint.convert(save, made, to=target)  # type: ignore[arg-type]  # any that is left
        assert checkpoint.diff(save, made, model_only=True).equal, target


def works_without(paths: list[str], folder: Path) -> bool:
    """Whether the core works in a copy of the source without these files."""
    shutil.copytree(SOURCE / "shardwise", folder / "shardwise")
    for path in paths:
        gone = folder / "shardwise" / path
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    if process := os.fork():
        return not os.waitpid(process, 0)[1]
    try:
        sys.path.insert(0, str(folder))
        train_core(folder)
        assert Path(str(sys.modules["shardwise.engine"].__file__)).is_relative_to(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(names: list[str]) -> int:
    """Print a line for each edge; returns how many of them the core cannot do without. names: of some, else all."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # Once for all processes, which are forked: they use most of it, and it takes longer than what they do.
    import lark  # noqa: F401
    import torch._dynamo  # noqa: F401

    faults = 0
    for name, paths in EDGES.items():
        if names and name not in names:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            works = works_without(paths, Path(folder))
        print(f"without {name}: {'works' if works else 'FAILS'}, {time.monotonic() - begun:.1f} s", flush=True)
        faults += not works
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
