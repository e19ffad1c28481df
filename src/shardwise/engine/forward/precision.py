"""Inputs follow parameters: what lets modules of different precision stand next to each other.

    compute = "bfloat16", keep = ["norm"]

    x float32 -> linear (bfloat16) : x cast to bfloat16  -> bfloat16
              -> norm   (float32)  : x cast to float32   -> float32, given back as bfloat16
              -> linear (bfloat16) : nothing to cast

A module with parameters of one dtype gets its floating-point inputs in that dtype. A module that is kept in master
precision gives its outputs back in the compute dtype. Activations are cast, parameters never.

A forward that reads parameters of a child has no such inputs, and casts itself.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise.comm.local_tensors import torch_dtype
from shardwise.comm.nested_values import transform
from shardwise.engine.forward.outline import innermost_module
from shardwise.engine.torch_private import forward_pre_hooks
from shardwise.errors import ModelError, ShardwiseError, UnderflowWarning
from shardwise.plan import Parameter, Precision

_DTYPES_DIFFER = re.compile(r"(same|expected) (scalar )?(d?type)|types? .* should be the same", re.IGNORECASE)
"""What torch says where an operation takes tensors of one dtype only."""


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
    # Then a batch in another dtype is the program's own matter, as without a plan.
    if compute == torch_dtype(precision.master) and floating <= {compute}:
        return
    # What computes a weight gives it as it is kept: the module that reads it has its inputs follow.
    within = {
        each for module in model.modules() if is_parametrized(module) for each in _parametrizing(module).modules()
    }
    for module in model.modules():
        own = _dtypes(module, recurse=False)
        if not own:
            # Containers have no forward of their own: their module reads the parameters.
            own = {dtype for child in _containers(module) for dtype in _dtypes(child, recurse=True)}
        # Of two dtypes neither is right for all inputs; `dtypes_explained` says so where torch refuses the mixture.
        if len(own) == 1:
            (dtype,) = own
            _InputsFollow(module, dtype, dtype if module in within else compute)


def computes_in_float16(specs: Sequence[Parameter]) -> bool:
    """Whether gradients come in float16."""
    return any(spec.trainable and spec.working == "float16" for spec in specs)


def warn_of_underflow(what: str) -> None:
    """Say that gradients in float16 may be, or (`what`) are, zero where they should be small."""
    warnings.warn(
        f"{what}: float16 rounds gradients below 6e-8 to zero, and losses are not scaled; set precision.loss_scale to "
        '"dynamic", or compute in bfloat16',
        UnderflowWarning,
        stacklevel=2,
    )


@contextmanager
def dtypes_explained(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Raise ModelError, which says what to do, where a module of the model mixes dtypes that the plan made differ."""
    try:
        yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        if precision.compute is None or not _DTYPES_DIFFER.search(str(error)):
            raise
        # Torch's message names dtypes and no module; the traceback of the error still has its frame.
        found = innermost_module(model, error.__traceback__)
        name, kind = ("", type(model)) if found is None else (found[0], type(found[1]))
        where = repr(name) if name else "the model itself"
        raise ModelError(
            f"{where} ({kind.__name__}) mixes dtypes under precision.compute={precision.compute!r}: {error}. Inputs "
            "are cast to the dtype of the parameters that a module holds. If it reads those of another module "
            "(child.weight), or of several dtypes, cast there (x.to(weight.dtype)). Or name them in precision.keep, "
            "or call engine.step under torch.autocast"
        ) from error


def _dtypes(module: nn.Module, *, recurse: bool) -> set[torch.dtype]:
    return {each.dtype for each in module.parameters(recurse) if each.dtype.is_floating_point}


def _parametrizing(module: nn.Module) -> nn.Module:
    assert isinstance(module.parametrizations, nn.Module)
    return module.parametrizations


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """Children that hold parameters for the forward of the module, and have no forward."""
    if is_parametrized(module):
        yield _parametrizing(module)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield child


def stop_following(model: nn.Module) -> None:
    """Take the casts off."""
    for module in model.modules():
        for hook in list(forward_pre_hooks(module).values()):
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
    """`value` with its real floating tensors in `dtype`, through containers; the same object where nothing changes."""

    def cast(leaf: Any) -> Any:
        # Not integers (tokens, positions) and not complex numbers, which have no narrow dtype.
        is_other = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if is_other else leaf

    return cast(value) if isinstance(value, torch.Tensor) else transform(value, cast)
