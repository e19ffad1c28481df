"""The sides: a plain loop, DDP, FSDP2 and our stages, each with the same model, optimizer, dtypes and microbatches.

    pair                       parameters, optimizer    forward, backward    gradients travel    the other side
    float32, whole             float32                  float32              float32             plain, DDP
    float32, cut               float32                  float32              float32             FSDP2
    bfloat16, cut              float32                  bfloat16             bfloat16            FSDP2, mixed precision

Ours add over ranks as the others do, by the devices' library. None of them reads a loss on the host while it is timed,
and nothing is compiled. The optimizer is torch's AdamW everywhere, fused where torch has it for the device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from benchmarks.workload import Batch

Step = Callable[[Batch], Any]
"""One update; what it returns gives the mean loss of this rank's rows, or of all, when `float` is called on it."""

Prepare = Callable[[nn.Module, torch.device, int], Step]
"""From a fresh model on the CPU, the device of this rank and the number of microbatches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSide:
    """One way to train."""

    name: str
    about: str
    prepare: Prepare
    least_ranks: int = 1
    most_ranks: int = 1 << 30
    trains_fully: bool = True
    tolerance: float = 0.02
    """How far its last loss may be from the other sides', as a part of it; some compute in bfloat16."""


@dataclass(frozen=True, slots=True)
class DevicePair:
    """What is compared: seconds and bytes of `ours` by those of `against`."""

    ours: str
    against: str


def adamw(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of all sides."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    fused = device.type in _get_fused_kernels_supported_devices()
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def _loop(model: Any, device: torch.device, k: int, last: Callable[[Any, bool], None]) -> Step:
    """The loop that a plain model, DDP and FSDP2 have in common; `last`: called before each microbatch."""
    optimizer = adamw(model.parameters(), device)

    def step(batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for number, microbatch in enumerate(batch.microbatches):
            last(model, number == k - 1)
            loss = model(**microbatch).loss / k
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _plain(model: nn.Module, device: torch.device, k: int) -> Step:
    return _loop(model.to(device), device, k, lambda model, is_last: None)


def _ddp(model: nn.Module, device: torch.device, k: int) -> Step:
    def tell(model: Any, is_last: bool) -> None:
        model.require_backward_grad_sync = is_last  # what `no_sync` sets

    wrapped = DistributedDataParallel(
        model.to(device),
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,
    )
    return _loop(wrapped, device, k, tell)


def _fsdp2(
    model: Any, device: torch.device, k: int, *, compute: torch.dtype | None = None, reshard: bool = True
) -> Step:
    def tell(model: Any, is_last: bool) -> None:
        # As our stages 2 and 3: each microbatch's gradients are reduced and freed.
        model.set_is_last_backward(is_last)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return _loop(model, device, k, tell)


def _ours(model: nn.Module, device: torch.device, k: int, *, stage: Any, compute: str, sums: Any = "backend") -> Step:
    channel = sw.processes(device=device) if dist.get_world_size() > 1 else _alone(device)
    engine = sw.parallelize(
        model,
        sw.Plan(
            mesh=sw.Mesh(dp_shard=channel.size),
            sharding=sw.Sharding(stage=stage),
            merge=sw.Merge(microbatches=k),
            precision=sw.Precision(compute=compute, sums=sums),
        ),
        optimizer=lambda parameters: adamw(parameters, device),
        channel=channel,
    )

    class Loss:
        """Read when somebody looks."""

        def __init__(self, report: sw.StepReport) -> None:
            self.report = report

        def __float__(self) -> float:
            return self.report.loss

    return lambda batch: Loss(engine.step(batch.whole))


def _alone(device: torch.device) -> sw.Channel:
    from shardwise.comm import alone

    return alone(device)


def _stage(stage: int, compute: str, sums: str = "backend") -> Prepare:
    return lambda model, device, k: _ours(model, device, k, stage=stage, compute=compute, sums=sums)


SIDES = {
    side.name: side
    for side in (
        DeviceSide(name="plain", about="a loop in one process, float32", prepare=_plain, most_ranks=1),
        DeviceSide(
            name="ddp", about="DistributedDataParallel, float32, no_sync, bucket views", prepare=_ddp, least_ranks=2
        ),
        DeviceSide(
            name="fsdp2",
            about="fully_shard per layer and root, float32, resharded after forward, reduced per microbatch",
            prepare=_fsdp2,
            least_ranks=2,
        ),
        DeviceSide(
            name="fsdp2-keep",
            about="as fsdp2, with reshard_after_forward=False",
            prepare=lambda model, device, k: _fsdp2(model, device, k, reshard=False),
            least_ranks=2,
        ),
        DeviceSide(
            name="fsdp2-bf16",
            about="as fsdp2, with param_dtype and reduce_dtype bfloat16",
            prepare=lambda model, device, k: _fsdp2(model, device, k, compute=torch.bfloat16),
            least_ranks=2,
        ),
        *(
            DeviceSide(
                name=f"stage {stage}", about=f"shardwise stage {stage}, float32", prepare=_stage(stage, "float32")
            )
            for stage in range(4)
        ),
        DeviceSide(
            name="stage 1-exact",
            about="as stage 1, with sums in rank order, which is our default",
            prepare=_stage(1, "float32", "exact"),
        ),
        DeviceSide(
            name="stage 3-bf16",
            about="shardwise stage 3, computes in bfloat16, which is what travels",
            prepare=_stage(3, "bfloat16"),
        ),
    )
}

PAIRS = (
    DevicePair("stage 0", "plain"),
    DevicePair("stage 0", "ddp"),
    DevicePair("stage 1", "ddp"),
    DevicePair("stage 1-exact", "ddp"),
    DevicePair("stage 2", "fsdp2-keep"),
    DevicePair("stage 3", "fsdp2"),
    DevicePair("stage 3-bf16", "fsdp2-bf16"),
)


def pairs_on(num_ranks: int) -> list[DevicePair]:
    """Those whose sides both run on so many ranks."""

    def runs(name: str) -> bool:
        return SIDES[name].least_ranks <= num_ranks <= SIDES[name].most_ranks

    return [pair for pair in PAIRS if runs(pair.ours) and runs(pair.against)]
