"""Operations of torch as they are made, and what is known of one: its floating-point operations, its precision."""

from collections.abc import Callable
from operator import add
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwise.comm.accelerators import rounds_convolutions
from shardwise.engine.torch_private import TorchDispatchMode, tensor_leaves

Fact = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]
"""A number of an operation: of the overload, its arguments, and what it made."""

_TF32 = 2.0**-10
"""The precision of float32 products of 10 bits."""


class Observed(TorchDispatchMode):
    """Brings together a fact of all operations of this thread: their sum, or the largest of all."""

    def __init__(self, fact: Fact, together: Callable[[float, float], float] = add) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value: float = 0
        self._fact = fact
        self._together = together

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self.value = self._together(self.value, self._fact(func, args, kwargs, made))
        return made


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    """The floating-point operations of a product; 0 for other operations."""
    packet = getattr(func, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch counts the others of its kind
        packet = torch.ops.aten._scaled_dot_product_flash_attention
    if (count := flop_registry.get(packet)) is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=made))
    except Exception:  # torch 2.11 has none for attention with fewer heads of keys than of queries
        return sum(each.numel() for each in tensor_leaves(made))


def eps_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> float:
    """The coarsest precision of what an operation makes, and of the products in it; 0 for whole numbers."""
    tensors = tensor_leaves(made)
    floats = [each for each in tensors if each.is_floating_point() or each.is_complex()]
    return max((max(torch.finfo(each.dtype).eps, _eps_inside(str(func), each)) for each in floats), default=0.0)


def _eps_inside(operation: str, made: torch.Tensor) -> float:
    """The precision of products that torch may take in fewer digits than those of their dtype (TF32)."""
    if made.dtype != torch.float32:
        return 0.0
    if "convolution" in operation:
        return _TF32 if rounds_convolutions(made.device) else 0.0
    if any(word in operation for word in ("mm", "matmul", "linear", "addmv", "dot", "attention")):
        return {"highest": 0.0, "high": _TF32}.get(
            torch.get_float32_matmul_precision(), torch.finfo(torch.bfloat16).eps
        )
    return 0.0
