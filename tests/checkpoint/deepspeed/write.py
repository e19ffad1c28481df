"""Writes the folders of `tests/checkpoint/deepspeed/folders` with the real DeepSpeed, and what they have to be read as.

    python3.11 -m venv V; echo SITE_PACKAGES_OF_TORCH > V/lib/python3.11/site-packages/torch.pth
    DS_BUILD_OPS=0 V/bin/pip install --no-deps --no-build-isolation deepspeed==0.19.8
    V/bin/pip install --no-deps hjson py-cpuinfo ninja msgpack einops psutil packaging tqdm pydantic ...
    DS_ACCELERATOR=cpu V/bin/python -m tests.checkpoint.deepspeed.write [NAME ...]

Each folder is what `save_checkpoint` left after `STEPS` updates, without the scripts that DeepSpeed adds. Beside
it, `NAME.safetensors` has the values of the live engine: weights in float32 (of masters), moments, and the losses of
the next updates. They come from the engine's memory, gathered by its own addresses of fragments, not from files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.checkpoint.deepspeed.model import (
    MORE_STEPS,
    ROWS,
    STEPS,
    batch_of,
    groups_of,
    loss_of,
    pipe_layers,
    words_model,
)

FOLDERS = Path(__file__).with_name("folders")


@dataclass(frozen=True)
class Case:
    """How a folder is written."""

    stage: int
    ranks: int
    dtype: str
    tied: bool = False
    frozen: bool = False
    groups: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stages: int = 1
    """Of a pipeline."""
    tp: int = 1
    """Tensor-parallel ranks, as Megatron has them: each trains parameters of its own."""


CASES = {
    "z0-fp32-1": Case(0, 1, "fp32"),
    "z0-bf16-2": Case(0, 2, "bf16", frozen=True),
    "z0-fp16-1": Case(0, 1, "fp16"),
    "z1-fp32-1": Case(1, 1, "fp32", groups=True, tied=True),
    "z1-fp16-3": Case(1, 3, "fp16", frozen=True, tied=True),
    "z1-bf16-2-fp32-sums": Case(
        1, 2, "bf16", groups=True, frozen=True, config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "z2-fp32-2": Case(2, 2, "fp32"),
    "z2-bf16-4": Case(2, 4, "bf16", groups=True, frozen=True, tied=True),
    "z2-bf16-2": Case(2, 2, "bf16", groups=True),
    "z2-bf16-2-round-robin": Case(2, 2, "bf16", groups=True, zero={"round_robin_gradients": True}),
    "z3-fp32-4": Case(3, 4, "fp32", groups=True, frozen=True, tied=True),
    "z3-bf16-2": Case(3, 2, "bf16", frozen=True),
    "z3-bf16-3": Case(3, 3, "bf16", groups=True, frozen=True, zero={"sub_group_size": 100}),
    "z1-bf16-4-tp": Case(1, 4, "bf16", tp=2),
    "z1-bf16-4-pipe": Case(1, 4, "bf16", stages=2),
    "z1-fp32-2-pipe": Case(1, 2, "fp32", stages=2),
}


UNIVERSAL = ("universal-z3-bf16-3", "universal-z2-bf16-4")
"""Made of the folder whose name follows, by DeepSpeed's ds_to_universal."""


def configuration(case: Case) -> dict[str, Any]:
    """What `deepspeed.initialize` gets."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // case.ranks * case.tp,
        "gradient_accumulation_steps": case.stages,  # of a pipeline: as many microbatches as stages
        "gradient_clipping": 0.0,  # else it clips at 1.0
        "zero_optimization": {"stage": case.stage, **case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
        },
        **case.config,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True, **({"initial_scale_power": 8} if case.dtype == "fp16" else {})}
    return config


def write_case(rank: int, name: str, folder: str) -> None:
    """Train, save and go on, on one rank."""
    case = CASES[name]
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(case.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.ranks)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # on a CPU it trains in it, but says that it does not

    mpu = Megatron(case.tp) if case.tp > 1 else None
    seed = 0 if mpu is None else mpu.get_model_parallel_rank()
    model = words_model(tied=case.tied, frozen=case.frozen, seed=seed) if case.stages == 1 else pipeline(case)
    trained = [each for each in model.parameters() if each.requires_grad]
    params = groups_of(model) if case.groups else trained
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(case), mpu=mpu, dist_init_required=False
    )

    def update(step: int) -> float:
        if case.stages > 1:
            return update_pipeline(engine, case, step)
        mine = {key: each.chunk(case.ranks // case.tp)[rank // case.tp] for key, each in batch_of(step).items()}
        loss = loss_of(engine(mine["input"]), mine)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        return float(total) / case.ranks

    for step in range(STEPS):
        update(step)
    engine.save_checkpoint(f"{folder}/saved")
    reference = {key: each.detach().clone() for key, each in live_values(engine, case)}
    reference["losses"] = torch.tensor([update(STEPS + step) for step in range(MORE_STEPS)], dtype=torch.float64)
    if mpu is not None:
        reference = {f"tp{seed}.{key}" if key != "losses" else key: each for key, each in reference.items()}
    if case.stages > 1 or mpu is not None:
        reference = of_all_ranks(reference)
    if rank == 0:
        from safetensors.torch import save_file

        save_file({key: each.clone().contiguous() for key, each in reference.items()}, f"{folder}/{name}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


class Megatron:
    """The groups of ranks, as Megatron's `mpu` has them: ranks 0 and 1 are tensor-parallel, 0 and 2 data ranks."""

    def __init__(self, tp: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._tp = tp
        models = [list(range(first, first + tp)) for first in range(0, world, tp)]
        self._model, self._data = (
            next(group for ranks, group in made if rank in ranks)
            for made in (
                [(ranks, dist.new_group(ranks)) for ranks in kind] for kind in (models, list(zip(*models, strict=True)))
            )
        )

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() % self._tp

    def get_model_parallel_world_size(self) -> int:
        return self._tp

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._tp

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._tp

    def get_data_parallel_group(self) -> Any:
        return self._data


def pipeline(case: Case) -> torch.nn.Module:
    """The layers of a pipeline; the embedding is the head too."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    def head(module: torch.nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, module.weight)

    layers = pipe_layers(
        lambda *sizes: TiedLayerSpec("embed", torch.nn.Embedding, *sizes),
        lambda *sizes: TiedLayerSpec("embed", torch.nn.Embedding, *sizes, forward_fn=head),
    )
    torch.manual_seed(0)
    loss = lambda output, target: loss_of(output, {"target": target})  # noqa: E731 - of this model
    module: torch.nn.Module = PipelineModule(layers, num_stages=case.stages, loss_fn=loss, partition_method="uniform")
    return module


def update_pipeline(engine: Any, case: Case, step: int) -> float:
    """An update of a pipeline, in as many microbatches as it has stages."""
    data, index = case.ranks // case.stages, engine.grid.get_data_parallel_rank()
    batch = batch_of(step)
    microbatches = [
        (words.chunk(data)[index], target.chunk(data)[index])
        for words, target in zip(batch["input"].chunk(case.stages), batch["target"].chunk(case.stages), strict=True)
    ]
    return float(engine.train_batch(iter(microbatches)))


def of_all_ranks(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of model-parallel ranks together."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {key: each for values in gathered[::-1] for key, each in values.items()}


def live_values(engine: Any, case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Masters (or weights) and moments, whole, from the memory of all ranks."""
    optimizer = engine.optimizer
    if case.zero.get("round_robin_gradients"):
        return  # the addresses of fragments are wrong then: the folder has to be read as that without the setting
    for name, parameter in engine.module.named_parameters():
        if case.stage == 3:
            yield from zero3_values(engine, name, parameter)
        elif not parameter.requires_grad:
            yield name, parameter.detach()
        elif case.stage == 0 or not hasattr(parameter, "_hp_mapping"):
            yield from plain_values(optimizer, name, parameter)
        else:
            yield from fragment_values(optimizer, name, parameter)
    for name, buffer in engine.module.named_buffers():
        yield name, buffer


def plain_values(optimizer: Any, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Of parameters that every rank has whole."""
    master = parameter
    inner = getattr(optimizer, "optimizer", optimizer)
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        master = next(b for low, high in pairs for a, b in zip(low, high, strict=True) if a is parameter)
    yield name, master.detach()
    for key in ("exp_avg", "exp_avg_sq"):
        yield f"{name}/{key}", inner.state[master][key]


def fragment_values(optimizer: Any, name: str, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of parameters whose masters are parts of flat vectors on several ranks."""
    mapping, inner = parameter._hp_mapping, optimizer.optimizer
    for key in (None, "exp_avg", "exp_avg_sq"):
        whole = torch.zeros(parameter.numel())
        if mapping is not None:
            flat = inner.param_groups[mapping.param_group_index]["params"][0]
            source = flat if key is None else inner.state[flat][key]
            at, to = mapping.hp_fragment_address, mapping.lp_fragment_address
            whole[to.start : to.start + to.numel] = source.detach()[at.start : at.start + at.numel].float()
        dist.all_reduce(whole, group=parameter._dp_group)
        yield name if key is None else f"{name}/{key}", whole.view(parameter.shape)


def zero3_values(engine: Any, name: str, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of parameters that are cut into one part per rank."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    def whole(part: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.detach().contiguous())
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)

    if not parameter.requires_grad:
        yield name, whole(parameter.ds_tensor.data.flatten())
        return
    yield name, whole(safe_get_local_fp32_param(parameter))
    for key in ("exp_avg", "exp_avg_sq"):
        yield f"{name}/{key}", whole(safe_get_local_optimizer_state(parameter, key))


def write_folder(name: str, into: Path) -> None:
    """Write one folder, anew."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(write_case, (name, folder), nprocs=CASES[name].ranks)
        shutil.rmtree(into / name, ignore_errors=True)
        scripts = shutil.ignore_patterns("*.py")
        shutil.copytree(f"{folder}/saved", into / name, ignore=scripts)
        shutil.copy(f"{folder}/{name}.safetensors", into / f"{name}.safetensors")


def write_universal(name: str, into: Path) -> None:
    """Make a universal checkpoint of one of the folders."""
    made = into / f"universal-{name}"
    shutil.rmtree(made, ignore_errors=True)
    arguments = [
        "--input_folder",
        into / name / f"global_step{STEPS}",
        "--output_folder",
        made / "global_step3_universal",
    ]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--inject_missing_state"]
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    FOLDERS.mkdir(exist_ok=True)
    for each in sys.argv[1:] or [*CASES, *UNIVERSAL]:
        if each in UNIVERSAL:
            write_universal(each.removeprefix("universal-"), FOLDERS)
        else:
            write_folder(each, FOLDERS)
