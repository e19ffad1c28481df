"""Loads written universal checkpoints with the real DeepSpeed, and records the losses of its next updates.

    DS_ACCELERATOR=cpu V/bin/python -m tests.checkpoint.deepspeed.load_universal          (V: see `write`)

`universal_losses.json` has, for each source, the digest of the folder that was written of it, and the losses by stage
and ranks. A test writes the folder again, and compares both: so nobody needs DeepSpeed to know that it loads them.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwise import checkpoint
from tests.checkpoint.deepspeed.model import MORE_STEPS, STEPS, batch_of, groups_of, loss_of, words_model
from tests.checkpoint.deepspeed.write import CASES, FOLDERS, Case, configuration

LOSSES = Path(__file__).with_name("universal_losses.json")

RUNS = {
    "z1-fp32-1": [(1, 2), (2, 1)],
    "z2-fp32-2": [(1, 1), (2, 3), (3, 2)],
    "saved z2-fp32-2": [(2, 2)],
    "z2-bf16-4": [(1, 2), (2, 2)],
    "z3-bf16-2": [(1, 1), (3, 2), (3, 3)],
}
"""Stages of ZeRO and numbers of ranks that load what is written of a folder, or of a save of shardwise made of it."""


def write_universal(name: str, folder: Path) -> Path:
    """Write the universal checkpoint of a source."""
    source = FOLDERS / name.removeprefix("saved ")
    if name.startswith("saved "):
        checkpoint.convert(source, folder / "saved")
        source = folder / "saved"
    checkpoint.convert(source, folder / "written", to="deepspeed-universal")
    return folder / "written"


def digest_of(folder: Path) -> str:
    """Of the names and bytes of all files."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def go_on(rank: int, name: str, stage: int, ranks: int, folder: str, found: Any) -> None:
    """Load the folder and make more updates, on one rank."""
    source = CASES[name.removeprefix("saved ")]
    case = Case(stage, ranks, source.dtype, tied=source.tied, frozen=source.frozen, groups=source.groups)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    meet = f"file://{folder}/rendezvous-{stage}-{ranks}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = words_model(tied=case.tied, frozen=case.frozen)
    with torch.no_grad():  # what is trained is to come out of the files
        for each in model.parameters():
            each.mul_(each.requires_grad * 0.5 + (not each.requires_grad))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(groups_of(model) if case.groups else trained, lr=0.5, weight_decay=0.7)
    config = {**configuration(case), "checkpoint": {"load_universal": True}}
    if name.startswith("saved "):
        del config["scheduler"]  # whose state only folders of DeepSpeed have
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    path, _ = engine.load_checkpoint(f"{folder}/written")
    assert path is not None
    assert engine.global_steps == STEPS
    losses = []
    for step in range(STEPS, STEPS + MORE_STEPS):
        mine = {key: each.chunk(ranks)[rank] for key, each in batch_of(step).items()}
        loss = loss_of(engine(mine["input"]), mine)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
    if rank == 0:
        found[f"stage {stage}, ranks {ranks}"] = losses
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    recorded = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
            written = write_universal(name, Path(folder))
            found = manager.dict()
            for stage, ranks in RUNS[name]:
                spawn(go_on, (name, stage, ranks, folder, found), nprocs=ranks)
            recorded[name] = {"digest": digest_of(written), "losses": dict(found)}
    LOSSES.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
