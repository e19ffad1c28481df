"""Loads what shardwise wrote with the real megatron-core, and goes on: the losses have to be those of the reference.

    tar -C /tmp -xf tests/checkpoint/megatron/folders.tar.xz
    shardwise ckpt convert /tmp/llama-1 /tmp/written --to megatron
    V/bin/python -m tests.checkpoint.megatron.load /tmp/written llama-1 [--tp 2] [--pp 2] [--dp 2] [--form FORM]

The names and shapes that Megatron asks for are those of the case. Bits are compared where one process has all of it;
see `write` for how to install Megatron.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.checkpoint.megatron.cases import CASES, MORE_STEPS, STEPS, Case
from tests.checkpoint.megatron.folders import folders
from tests.checkpoint.megatron.write import OnTheProcessor, Run, started, values_of


def load(rank: int, case: Case, name: str, folder: str, temporary: str) -> None:
    """Load on a rank, and go on."""
    started(rank, case.ranks, temporary)
    with OnTheProcessor():
        from megatron.core import dist_checkpointing
        from safetensors.torch import load_file

        run = Run(case, tp=case.tp, pp=case.pp, ep=case.ep)
        tag = (Path(folder) / "latest_checkpointed_iteration.txt").read_text()
        saved = Path(folder) / (f"iter_{int(tag):07d}" if tag.isdigit() else tag)
        common = dist_checkpointing.load_common_state_dict(str(saved))
        assert common["iteration"] == STEPS
        run.load(saved)
        run.scheduler.load_state_dict(common["opt_param_scheduler"])
        expected = load_file(folders() / f"{name}.safetensors")
        if case.ranks == 1:
            found = dict(values_of(run))
            assert found.keys() == expected.keys() - {"logits", "losses"}
            for each, tensor in found.items():
                assert torch.equal(tensor, expected[each]), each
        losses = torch.tensor([run.update(STEPS + step) for step in range(MORE_STEPS)], dtype=torch.float64)
        if case.ranks > 1:
            losses *= run.last and run.tp_rank == 0
            dist.all_reduce(losses)
            losses /= run.data
        torch.testing.assert_close(losses, expected["losses"], rtol=1e-3 if case.bf16 else 1e-5, atol=0)
        if rank == 0:
            print(name, f"tp={case.tp} pp={case.pp} ranks={case.ranks} {case.form}", losses.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    for each in ("tp", "pp", "dp"):
        parser.add_argument(f"--{each}", type=int, default=1)
    parser.add_argument("--form", default="")
    given = parser.parse_args(sys.argv[1:])
    wanted = replace(
        CASES[given.name], ranks=given.tp * given.pp * given.dp, tp=given.tp, pp=given.pp, ep=1, form=given.form
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with tempfile.TemporaryDirectory() as made:
        spawn(load, (replace(wanted, metadata=(), version="0.16"), given.name, given.folder, made), nprocs=wanted.ranks)
