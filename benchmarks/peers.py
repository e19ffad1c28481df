"""The other libraries, each with the best settings that it allows on two CPU ranks over gloo.

Every function takes the process group that is already there and leaves no thread or hook behind outside its own model.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import ADAMW, Batch, Side, Training

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW)


def _zero_redundancy(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)


def _ddp(
    model: nn.Module, num_microbatches: int, *, optimizer: MakeOptimizer, compress: bool = False, hold: bool = False
) -> Training:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch 2.13 renames broadcast_buffers; 2.11 has the old name only
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    if compress:
        # Called by another name, because DDP refuses torch's own hook on gloo, where it works.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    updates = optimizer(wrapped.parameters())

    def step(batch: Batch) -> float:
        total = torch.zeros(())
        # A disabled outer autocast keeps the inner ones' cache of cast weights until the update: one cast per update.
        with torch.autocast("cpu", enabled=False) if hold else nullcontext():
            for index, microbatch in enumerate(batch.microbatches):
                last = index == num_microbatches - 1
                with nullcontext() if last else wrapped.no_sync():
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = wrapped(**microbatch).loss / num_microbatches
                    loss.backward()
                total += loss.detach()
        updates.step()
        updates.zero_grad()
        return float(total)

    return Training(step=step)


def _fsdp2(
    model: Any, num_microbatches: int, *, reshard: bool, reduce_dtype: torch.dtype, hold: bool = True
) -> Training:
    """`hold`: gradients stay whole until the last microbatch; False: each microbatch's are reduced and freed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    updates = _adamw(model.parameters())

    def step(batch: Batch) -> float:
        total = torch.zeros(())
        for index, microbatch in enumerate(batch.microbatches):
            last = index == num_microbatches - 1
            model.set_requires_gradient_sync(last or not hold)
            model.set_is_last_backward(last)
            # Whole from one microbatch's backward to the next forward: an all-gather less per group and microbatch.
            model.set_reshard_after_backward(last or (reshard and not hold))
            loss = model(**microbatch).loss / num_microbatches
            loss.backward()
            total += loss.detach()
        updates.step()
        updates.zero_grad()
        return float(total)

    return Training(step=step)


def _deepspeed(
    model: nn.Module, num_microbatches: int, *, accumulate: str = "bf16", stage: int = 1, **zero: bool | int
) -> Training:
    import deepspeed  # an optional extra; needs DS_ACCELERATOR=cpu, which `cells` sets

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 0.0,  # its default clips at 1.0
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": accumulate},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=config, dist_init_required=False
    )

    def step(batch: Batch) -> float:
        total = torch.zeros(())
        for microbatch in batch.microbatches:
            loss = engine(**microbatch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        return float(total) / num_microbatches

    return Training(step=step)


_FSDP2 = "fully_shard per layer and root, param_dtype bf16, gradients kept whole and sent on the last microbatch only"
_FSDP2_EACH = (
    "fully_shard per layer and root, param_dtype bf16, gradients of each microbatch sent in bf16, added in fp32"
)
_DEEPSPEED = "DeepSpeed ZeRO stage 1, bf16, no clipping, client AdamW"
_BF16_SUMS = 0.02
"""Where gradients are added over ranks in bf16, losses drift from the others': by 0.7 % in six steps on 4 ranks."""
_LATER = "bf16, no clipping, client AdamW, grad_accum_dtype bf16"
_TUNED = "contiguous_gradients=False and reduce_scatter=False (faster here than its defaults)"
PEERS = (
    Side(
        name="ddp",
        about="DistributedDataParallel, autocast(bf16), fp32 parameters, gradient_as_bucket_view, no_sync",
        prepare=partial(_ddp, optimizer=_adamw),
    ),
    Side(
        name="ddp-held",
        about="ddp, with autocast's cache of cast weights held over all microbatches of an update",
        prepare=partial(_ddp, optimizer=_adamw, hold=True),
    ),
    Side(
        name="ddp-bf16",
        about="ddp, with bf16_compress_hook (gradients travel and are summed in bf16)",
        prepare=partial(_ddp, optimizer=_adamw, compress=True),
    ),
    Side(
        name="zero1",
        about="ddp with ZeroRedundancyOptimizer, parameters_as_bucket_view",
        prepare=partial(_ddp, optimizer=_zero_redundancy),
    ),
    Side(
        name="fsdp2",
        about=f"{_FSDP2}; reshard_after_forward=True, reduce_dtype fp32",
        prepare=partial(_fsdp2, reshard=True, reduce_dtype=torch.float32),
    ),
    Side(
        name="fsdp2-keep",
        about=f"{_FSDP2}; reshard_after_forward=False, reduce_dtype fp32",
        prepare=partial(_fsdp2, reshard=False, reduce_dtype=torch.float32),
    ),
    Side(
        name="fsdp2-bf16",
        about=f"{_FSDP2}; reshard_after_forward=True, reduce_dtype bf16 (accumulates in bf16)",
        prepare=partial(_fsdp2, reshard=True, reduce_dtype=torch.bfloat16),
    ),
    Side(
        name="fsdp2-keep-bf16",
        about=f"{_FSDP2}; reshard_after_forward=False, reduce_dtype bf16 (accumulates in bf16)",
        prepare=partial(_fsdp2, reshard=False, reduce_dtype=torch.bfloat16),
    ),
    Side(
        name="deepspeed",
        about=f"{_DEEPSPEED}, grad_accum_dtype bf16, {_TUNED}",
        prepare=partial(_deepspeed, accumulate="bf16", contiguous_gradients=False, reduce_scatter=False),
    ),
    Side(
        name="deepspeed-default",
        about=f"{_DEEPSPEED}, grad_accum_dtype bf16, its own defaults",
        prepare=partial(_deepspeed, accumulate="bf16"),
    ),
    Side(
        name="deepspeed-fp32",
        about=f"{_DEEPSPEED}, grad_accum_dtype fp32 (its BF16_Optimizer), {_TUNED}",
        prepare=partial(_deepspeed, accumulate="fp32", contiguous_gradients=False, reduce_scatter=False),
    ),
    Side(
        name="fsdp2-each",
        about=f"{_FSDP2_EACH}; reshard_after_forward=True",
        prepare=partial(_fsdp2, reshard=True, reduce_dtype=torch.bfloat16, hold=False),
    ),
    Side(
        name="fsdp2-keep-each",
        about=f"{_FSDP2_EACH}; reshard_after_forward=False, whole until the last microbatch's backward",
        prepare=partial(_fsdp2, reshard=False, reduce_dtype=torch.bfloat16, hold=False),
    ),
    Side(
        name="deepspeed2",
        about=f"DeepSpeed ZeRO stage 2, {_LATER}, {_TUNED}",
        prepare=partial(_deepspeed, stage=2, contiguous_gradients=False, reduce_scatter=False),
        tolerance=_BF16_SUMS,
    ),
    Side(
        name="deepspeed2-default",
        about=f"DeepSpeed ZeRO stage 2, {_LATER}, its own defaults",
        prepare=partial(_deepspeed, stage=2),
        tolerance=_BF16_SUMS,
    ),
    Side(
        name="deepspeed3",
        about=f"DeepSpeed ZeRO stage 3, {_LATER}, reduce_scatter=False, no prefetching (faster here than its defaults)",
        prepare=partial(_deepspeed, stage=3, reduce_scatter=False, stage3_prefetch_bucket_size=0),
        tolerance=_BF16_SUMS,
    ),
    Side(
        name="deepspeed3-default",
        about=f"DeepSpeed ZeRO stage 3, {_LATER}, its own defaults",
        prepare=partial(_deepspeed, stage=3),
        tolerance=_BF16_SUMS,
    ),
)
