"""Inputs follow parameters: what lets modules of different precision stand beside each other.

A module whose own parameters have one dtype is given its floating-point inputs in that dtype, and a module that is kept
in master precision gives its outputs back in the compute dtype. Activations are cast, parameters never.
"""

from typing import Any

import torch
from torch import nn

from shardwise.comm.dtypes import torch_dtype
from shardwise.plan import Precision


def let_inputs_follow(model: nn.Module, precision: Precision) -> None:
    """Install the casts where parameters compute in another dtype than the one that activations may come in.

    Does nothing when the plan computes in each parameter's own dtype, or when all parameters share the master's dtype.
    Casts that an earlier plan installed are taken off.
    """
    stop_following(model)
    if precision.compute is None:
        return
    compute = torch_dtype(precision.compute)
    floating = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    if compute == torch_dtype(precision.master) and floating <= {compute}:
        return
    for module in model.modules():
        own = {p.dtype for p in module.parameters(recurse=False) if p.dtype.is_floating_point}
        if len(own) == 1:
            _InputsFollow(module, own.pop(), compute)


def stop_following(model: nn.Module) -> None:
    """Take the casts off."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, _InputsFollow):
                hook.remove()


class _InputsFollow:
    """The hooks of one module."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, compute: torch.dtype) -> None:
        self._dtype = dtype
        self._compute = compute
        self._handles = [module.register_forward_pre_hook(self, with_kwargs=True)]
        if dtype != compute:
            self._handles.append(module.register_forward_hook(self._give_back))

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(_cast(each, self._dtype) for each in args),
            {key: _cast(each, self._dtype) for key, each in kwargs.items()},
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _give_back(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, self._compute)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its real floating tensors in `dtype`, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if type(value) in (tuple, list):
        return type(value)(_cast(each, dtype) for each in value)
    if type(value) is dict:
        return {key: _cast(each, dtype) for key, each in value.items()}
    return value
