# mypy: ignore-errors
# The libraries that it calls are not installed for the tests.
"""Writes the folders next to it again: `python -m tests.checkpoint.foreign_files.write_files`, from the root.

It needs accelerate (1.15), lightning (2.6) and gguf (0.17) in addition; the tests do not. `losses.json` has the losses
of the updates after each save, in the program that made it.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.multiprocessing

from tests.checkpoint.foreign_files.small_program import (
    LATER,
    SAVED_AT,
    batch,
    loss_of,
    make_model,
    make_optimizer,
    make_scheduler,
    update,
)

HERE = Path(__file__).parent


def write_plain(folder: Path) -> list[float]:
    """One file of a program of one's own, as torch writes it now and as it did before 1.6."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    for number in range(SAVED_AT):
        update(model, optimizer, number)
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "step": SAVED_AT,
    }
    folder.mkdir()
    torch.save(state, folder / "plain.pt")
    torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    return [update(model, optimizer, number) for number in LATER]


def write_accelerate(folder: Path, *, safetensors: bool) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = make_optimizer(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make_scheduler(optimizer))
    for number in range(SAVED_AT):
        update(model, optimizer, number)
        scheduler.step()
    accelerator.save_state(str(folder), safe_serialization=safetensors)
    return [update(model, optimizer, number) for number in LATER]


def write_lightning(file: Path) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.losses: list[float] = []

        def training_step(self, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(self.net(rows[0]), rows[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> object:
            optimizer = make_optimizer(self)
            return [optimizer], [{"scheduler": make_scheduler(optimizer), "interval": "step"}]

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    rows = torch.utils.data.DataLoader([batch(number) for number in range(LATER.stop)], batch_size=None)
    trainer = lightning.Trainer(max_steps=SAVED_AT, enable_checkpointing=False, **quiet)
    trainer.fit(module, rows)
    trainer.save_checkpoint(file)
    optimizer = trainer.optimizers[0]
    return [update(module.net, optimizer, number) for number in LATER]


def write_fsdp(rank: int, folder: Path, losses: dict[str, list[float]]) -> None:
    """FSDP1, whole and cut, and FSDP2, by two processes."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("fsdp1", "fsdp2"):
        model = make_model()
        if kind == "fsdp1":
            model = FullyShardedDataParallel(
                model, device_mesh=None, device_id=torch.device("cpu"), use_orig_params=True
            )
        else:
            fully_shard(model, mesh=mesh)
        optimizer = make_optimizer(model)
        for number in range(SAVED_AT):
            update(model, optimizer, number)  # the same rows on both ranks: their mean is that of one process
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save({**state, "step": SAVED_AT}, checkpoint_id=str(folder / f"{kind}_dcp"))
        if kind == "fsdp2":
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            full = {
                "model": get_model_state_dict(model, options=whole),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
            }
            flat = StateDictOptions(flatten_optimizer_state_dict=True)
            titan = {
                **get_model_state_dict(model),
                **get_optimizer_state_dict(model, optimizer, options=flat),
            }
            dcp.save(titan, checkpoint_id=str(folder / "flattened_dcp"))
            if rank == 0:
                torch.save(full, folder / "full_state.pt")
        found = [update(model, optimizer, number) for number in LATER]
        for name in (f"{kind}_dcp", *(("full_state.pt", "flattened_dcp") if kind == "fsdp2" else ())):
            if rank == 0:
                losses[name] = found
    dist.destroy_process_group()


def write_gguf(file: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_string("general.name", "small")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for kind in (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(np.dtype(kind).name, values.astype(kind))
    brain = torch.arange(12.0).view(3, 4).bfloat16().view(torch.uint8).numpy()
    writer.add_tensor("bfloat16", brain, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    losses: dict[str, list[float]] = {}
    kinds = sys.argv[1:] or ["plain", "accelerate", "lightning", "fsdp", "gguf"]
    known = HERE / "losses.json"
    if known.exists():
        losses |= json.loads(known.read_text())
    if "plain" in kinds:
        shutil.rmtree(HERE / "single", ignore_errors=True)
        losses["single/plain.pt"] = losses["single/legacy.pth"] = write_plain(HERE / "single")
    if "accelerate" in kinds:
        for name, safetensors in {"accelerate_bin": False, "accelerate_safetensors": True}.items():
            shutil.rmtree(HERE / name, ignore_errors=True)
            losses[name] = write_accelerate(HERE / name, safetensors=safetensors)
    if "lightning" in kinds:
        losses["lightning.ckpt"] = write_lightning(HERE / "lightning.ckpt")
    if "fsdp" in kinds:
        for name in ("fsdp1_dcp", "fsdp2_dcp", "flattened_dcp"):
            shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / "meet").unlink(missing_ok=True)
        shared = torch.multiprocessing.Manager().dict()
        torch.multiprocessing.spawn(write_fsdp, args=(HERE, shared), nprocs=2)
        (HERE / "meet").unlink(missing_ok=True)
        losses |= dict(shared)
    if "gguf" in kinds:
        write_gguf(HERE / "small.gguf")
    known.write_text(json.dumps(dict(sorted(losses.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
