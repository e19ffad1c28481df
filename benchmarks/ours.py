"""Our own sides: the same engine over several channels, with several precisions."""

from functools import partial
from typing import Literal

import shardwise as sw
import torch
import torch.distributed as dist
from shardwise.comm import Channel
from torch import nn

from benchmarks.silence import Silence
from benchmarks.workload import ADAMW, Batch, Side, Step

Wire = Literal["shared memory", "tcp", "silent"]

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


def engine(
    model: nn.Module,
    num_microbatches: int,
    *,
    precision: sw.Precision,
    over: Channel,
    adamw: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> sw.Engine:
    """Put the workload's model under stage 1 on all ranks of the channel."""
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=over.size), merge=sw.Merge(microbatches=num_microbatches), precision=precision
    )
    return sw.parallelize(model, plan, optimizer=lambda parameters: adamw(parameters, **ADAMW), channel=over)


def _prepare(
    model: nn.Module, num_microbatches: int, *, precision: sw.Precision, wire: Wire, autocast: bool = False
) -> Step:
    if autocast:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    trained = engine(model, num_microbatches, precision=precision, over=channel(wire))

    def step(batch: Batch) -> float:
        return trained.step(batch.whole).loss

    return step


def _side(name: str, about: str, *, precision: sw.Precision, wire: Wire, autocast: bool = False) -> Side:
    prepare = partial(_prepare, precision=precision, wire=wire, autocast=autocast)
    return Side(name=name, about=f"{about}; {wire}", prepare=prepare, trains_fully=wire != "silent")


_ONCE = "shardwise stage 1, bf16 working copies, one cast per update, accumulates in fp32, sends gradients in"
_NARROW = "shardwise stage 1, bf16 working copies, one cast per update, accumulates and sends gradients in bf16"
_EACH = "shardwise stage 1, fp32 parameters under autocast(bf16), a cast per microbatch"
OURS = (
    _side("ours", f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="shared memory"),
    _side("ours-tcp", f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="tcp"),
    _side("ours-silent", f"{_ONCE} fp32 (bf16 when k = 1)", precision=ONCE, wire="silent"),
    _side("ours-wire", f"{_ONCE} bf16", precision=ONCE_NARROW_WIRE, wire="shared memory"),
    _side("ours-bf16", _NARROW, precision=ONCE_NARROW, wire="shared memory"),
    _side("ours-bf16-silent", _NARROW, precision=ONCE_NARROW, wire="silent"),
    _side("cast-each", _EACH, precision=EACH, wire="shared memory", autocast=True),
    _side("cast-each-silent", _EACH, precision=EACH, wire="silent", autocast=True),
)
