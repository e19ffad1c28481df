"""Inputs follow parameters: what lets modules of different precision stand next to each other.

    compute = "bfloat16", keep = ["norm"]

    x float32 -> linear (bfloat16) : x cast to bfloat16  -> bfloat16
              -> norm   (float32)  : x cast to float32   -> float32, given back as bfloat16
              -> linear (bfloat16) : nothing to cast

A module with parameters of one dtype gets its floating-point inputs in that dtype. A module that is kept in master
precision gives its outputs back in the compute dtype. Activations are cast, parameters never.

A forward that reads parameters of a child has no such inputs, and casts itself.

Forwards and losses run inside of regions of torch.autocast around steps, and everything else outside:

    with torch.autocast("cuda"):      a plain loop                the engine
        engine.step(batch)            with autocast:              leaves the caller's region
                                          loss = f(model(x))      a region like it for each microbatch
                                      loss.backward()             no region: dtypes are those of the forward's kernels
                                      optimizer.step()            no region; then the caller's again

At the end of a region torch drops the casts of weights that it has kept. So each forward casts the weights as the last
update left them, and no cast of one microbatch enters the graph of another.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

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


Given = ParamSpec("Given")
Output = TypeVar("Output")


def casts_of(device: torch.device) -> list[tuple[str, torch.dtype]]:
    """The kinds of devices, of those that a model on `device` may compute on, whose operations are cast; to what."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """Outside of all regions of this thread, which are open again after the body."""
    kinds = [kind for kind, _ in casts_of(device)]
    caches, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() - 1
    _turn(kinds, to=False, caches=True)
    # torch drops its casts where the outermost region ends. So in the body it does at the end of each.
    while torch.autocast_decrement_nesting():
        pass
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        _turn(kinds, to=True, caches=caches)
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()


def _turn(kinds: list[str], *, to: bool, caches: bool) -> None:
    for kind in kinds:
        torch.set_autocast_enabled(kind, to)
    torch.set_autocast_cache_enabled(caches)


class AutocastRegions:
    """The caller's region of an engine's steps, and the forwards in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._casts: list[tuple[str, torch.dtype]] = []
        """Of the step, evaluation or prediction that goes on."""
        self._caches = True

    @contextmanager
    def left(self) -> Iterator[None]:
        """Outside of all regions: a step, say."""
        self._casts, self._caches = casts_of(self._device), torch.is_autocast_cache_enabled()
        with outside_autocast(self._device):
            yield

    def described(self) -> str:
        """The region that the caller is in now."""
        casts = casts_of(self._device)
        return " and ".join(f'torch.autocast("{kind}", dtype={dtype})' for kind, dtype in casts) or "no torch.autocast"

    def inside(self, compute: Callable[Given, Output]) -> Callable[Given, Output]:
        """`compute` in a region like the caller's, in any thread."""

        def compute_inside(*args: Given.args, **kwargs: Given.kwargs) -> Output:
            with ExitStack() as stack:
                for kind, dtype in self._casts:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches))
                return compute(*args, **kwargs)

        return compute_inside
