"""Our own sides: the same engine over several channels, with several precisions."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from benchmarks.workload import ADAMW, Batch, Side, Training
from shardwise.comm import Channel

Wire = Literal["shared memory", "tcp", "silent"]

STAGE_1 = sw.Sharding(stage=1)
ONCE = sw.Precision(compute="bfloat16")
"""The library's own choice: one cast per update, gradients of several microbatches added and sent in float32."""
ONCE_NARROW_WIRE = sw.Precision(compute="bfloat16", accumulate="float32", reduce="bfloat16")
ONCE_NARROW = sw.Precision(compute="bfloat16", accumulate="bfloat16", reduce="bfloat16")
EACH = sw.Precision(compute="float32")
"""For models that cast their float32 parameters themselves, under autocast, in every microbatch."""


def channel(wire: Wire) -> Channel:
    """Join the ranks of the default process group."""
    if wire == "silent":
        return Silence(rank=dist.get_rank(), size=dist.get_world_size())
    return sw.processes(shared_memory=wire == "shared memory")


def cast_each_time(model: nn.Module) -> None:
    """Let the model cast its parameters to bf16 in each of its forward passes."""
    autocast = torch.autocast("cpu", torch.bfloat16)
    setattr(model, "forward", autocast(model.forward))  # noqa: B010, it shadows a method


def plan_of(
    num_ranks: int, num_microbatches: int, *, precision: sw.Precision, sharding: sw.Sharding = STAGE_1
) -> sw.Plan:
    """Data ranks, and nothing else."""
    return sw.Plan(
        mesh=sw.Mesh(dp_shard=num_ranks),
        sharding=sharding,
        merge=sw.Merge(microbatches=num_microbatches),
        precision=precision,
    )


def engine(model: nn.Module, plan: sw.Plan, *, over: Channel) -> sw.Engine:
    """The workload's model under a plan, on all ranks of the channel."""
    return sw.parallelize(
        model, plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, **ADAMW), channel=over
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What tells our sides apart."""

    about: str
    precision: sw.Precision
    wire: Wire
    autocast: bool = False
    sharding: sw.Sharding = STAGE_1


def _prepare(model: nn.Module, num_microbatches: int, *, settings: Settings) -> Training:
    if settings.autocast:
        cast_each_time(model)
    over = channel(settings.wire)
    plan = plan_of(over.size, num_microbatches, precision=settings.precision, sharding=settings.sharding)
    trained = engine(model, plan, over=over)

    def step(batch: Batch) -> float:
        return trained.step(batch.whole).loss

    held = trained.footprint()
    moments = 2 * 4 * held.owned_elements  # AdamW's, in float32
    return Training(step=step, predicted_bytes=held.working_bytes + held.gradient_bytes + held.master_bytes + moments)


_ONCE = "shardwise stage 1, bf16 working copies, one cast per update, accumulates in fp32, sends gradients in"
_NARROW = "shardwise stage 1, bf16 working copies, one cast per update, accumulates and sends gradients in bf16"
_EACH = "shardwise stage 1, fp32 parameters under autocast(bf16), a cast per microbatch"
OURS_SETTINGS = {
    "ours": Settings(about=f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="shared memory"),
    "ours-tcp": Settings(about=f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="tcp"),
    "ours-silent": Settings(about=f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="silent"),
    "ours-wire": Settings(about=f"{_ONCE} bf16", precision=ONCE_NARROW_WIRE, wire="shared memory"),
    "ours-bf16": Settings(about=_NARROW, precision=ONCE_NARROW, wire="shared memory"),
    "ours-bf16-silent": Settings(about=_NARROW, precision=ONCE_NARROW, wire="silent"),
    "cast-each": Settings(about=_EACH, precision=EACH, wire="shared memory", autocast=True),
    "cast-each-silent": Settings(about=_EACH, precision=EACH, wire="silent", autocast=True),
}
_SHARDED = "bf16 working copies, one cast per update, gradients travel in bf16 per microbatch, accumulate in fp32"
_SILENT: dict[str, Wire] = {"-silent": "silent"}
"""Not for stage 3, whose whole parameters nobody would fill."""
_SHARDINGS = {
    "stage2": (sw.Sharding(stage=2), "shardwise stage 2"),
    "stage3": (sw.Sharding(stage=3), "shardwise stage 3, a unit gathered anew for each forward and backward"),
    "stage3-keep": (sw.Sharding(stage=3, keep_gathered=True), "shardwise stage 3, units gathered once per update"),
}
_WIRES: dict[str, Wire] = {"": "shared memory", "-tcp": "tcp"}
OURS_SETTINGS |= {
    f"{name}{suffix}": Settings(about=f"{about}, {_SHARDED}", precision=ONCE, wire=wire, sharding=sharding)
    for name, (sharding, about) in _SHARDINGS.items()
    for suffix, wire in (_WIRES | _SILENT if sharding.stage < 3 else _WIRES).items()
}
OURS = tuple(
    Side(
        name=name,
        about=f"{settings.about}; {settings.wire}",
        prepare=partial(_prepare, settings=settings),
        trains_fully=settings.wire != "silent",
    )
    for name, settings in OURS_SETTINGS.items()
)
