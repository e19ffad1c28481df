"""Tensor parallelism: ours, by the plan that transformers' Llama carries, and `parallelize_module` with the same cuts.

Both cut queries, keys, values, gate and up by columns, the two projections back by rows, and the head by columns, whose
logits are gathered for the model's own loss, and the embedding by rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from benchmarks.ours import Wire, channel, engine
from benchmarks.workload import ADAMW, Batch, Side, Training

__all__ = ["HEADS", "TENSOR", "tensor_plan"]

HEADS = 8
"""Of the model that is cut: as many as can be divided by 4."""
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Adds up the seconds of what is called through it."""

    seconds: float = 0.0

    def on(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, clocked."""

        def clocked(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return clocked


def tensor_plan(num_ranks: int, num_microbatches: int, dtype: str = "bfloat16") -> sw.Plan:
    """All ranks along tp."""
    return sw.Plan(
        mesh=sw.Mesh(tp=num_ranks),
        merge=sw.Merge(microbatches=num_microbatches),
        precision=sw.Precision(compute=dtype),
        tensor=sw.Tensor(rules="auto"),
    )


def _ours(model: nn.Module, num_microbatches: int, *, dtype: str, wire: Wire) -> Training:
    over = channel(wire)
    trained = engine(model, tensor_plan(over.size, num_microbatches, dtype), over=over)
    clock = _Clock()
    computation = trained._computation
    setattr(computation, "train", clock.on(computation.train))  # noqa: B010, it shadows a method

    def step(batch: Batch) -> float:
        return trained.step(batch.whole).loss

    return Training(step=step, passes_s=lambda: clock.seconds)


def _theirs(model: Any, num_microbatches: int, *, dtype: torch.dtype) -> Training:
    model.to(dtype)
    columns = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    rows = {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    vocabulary = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {**columns, **rows, **vocabulary})
    cut = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    updates = torch.optim.AdamW([{"params": cut}, {"params": whole}], **ADAMW)
    clock = _Clock()

    def passes(batch: Batch) -> torch.Tensor:
        total = torch.zeros(())
        for microbatch in batch.microbatches:
            loss = model(**microbatch).loss / num_microbatches
            loss.backward()
            total += loss.detach()
        return total

    clocked = clock.on(passes)

    def step(batch: Batch) -> float:
        total = clocked(batch)
        updates.step()
        updates.zero_grad()
        return float(total)

    return Training(step=step, passes_s=lambda: clock.seconds)


_WIRES: dict[str, Wire] = {"": "shared memory", "-tcp": "tcp"}
_CUTS = "layers, embedding and head cut along tp, logits gathered"
TENSOR = (
    *(
        Side(
            name=f"tp-{short}{suffix}",
            about=f"shardwise, {_CUTS}; {dtype} working copies; {wire}",
            prepare=partial(_ours, dtype=dtype, wire=wire),
        )
        for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
        for suffix, wire in _WIRES.items()
    ),
    Side(
        name="parallelize-fp32",
        about=f"parallelize_module, {_CUTS}; float32 parameters; gloo",
        prepare=partial(_theirs, dtype=torch.float32),
    ),
    Side(
        name="parallelize-bf16",
        about=f"parallelize_module, {_CUTS}; bfloat16 parameters without masters; gloo",
        prepare=partial(_theirs, dtype=torch.bfloat16),
        trains_fully=False,  # AdamW on bfloat16 parameters rounds small updates away
    ),
)
