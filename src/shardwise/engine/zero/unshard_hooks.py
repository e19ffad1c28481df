"""What goes around a forward that needs units, of a module or of one operation: gather, watch the backward, let go."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.pipeline.nested import tensors_in, transform
from shardwise.engine.wrapping import Forward, in_backward
from shardwise.engine.zero.unit_calls import GatheredUnit
from shardwise.engine.zero.unshard import FORWARD, RECOMPUTATION, Unshard
from shardwise.engine.zero.view_copies import Copy, copy_of_view
from shardwise.errors import ModelError


class UnshardHook:
    """A `Wrapper` for one module."""

    structure = None
    """It changes no shapes."""

    def __init__(
        self, gathering: Unshard, units: Sequence[GatheredUnit], place: tuple[nn.Module, str, nn.Parameter]
    ) -> None:
        """`place`: where the module, or one inside, has a parameter of the units."""
        self.gathering = gathering
        self._units = units
        self._holder, self._attribute, self._parameter = place

    def run(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Wrapper`."""
        if self._holder._parameters.get(self._attribute) is not self._parameter:
            return forward(*args, **kwargs)  # it is tried on tensors without values
        self.gathering.check_in_pass(self._units)
        return run_gathered(self.gathering, self._units, forward, args, kwargs)


def run_gathered(
    gathering: Unshard,
    units: Sequence[GatheredUnit],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward that needs the units, and see to its backward.

    The backward of a call begins when the gradient of the first of its outputs is complete, or when it asks for a
    parameter that was saved for it (values may leave a module by other ways than its output). Autograd runs what was
    made last first: the backward has ended when the gradient of an input is complete, or when that of an earlier call
    begins, at the latest with the whole backward. The inputs stay what they are, for a view of one would
    change the order in which autograd adds its gradients. Raises ModelError inside of torch.vmap.
    """
    given = tensors_in([*args, *kwargs.values()])
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, given)):
        raise _refusal_of_transformed(units)
    recomputes = _is_recomputed()
    if recomputes or not torch.is_grad_enabled():
        with gathering.using(units, RECOMPUTATION if recomputes else FORWARD):
            return _without_memory_of_units(gathering, units, forward(*args, **kwargs))
    call = gathering.call(units)
    for each in given:
        if each.requires_grad and not isinstance(each, nn.Parameter):
            if each.grad_fn is None:  # its gradient may be complete before those of parameters
                call.starts_graph = True
            else:
                each.register_hook(call.end)
    with gathering.using(units, FORWARD, call), gathering.saving(call):
        output = _without_memory_of_units(gathering, units, forward(*args, **kwargs))
    outputs = [each for each in tensors_in(output) if each.requires_grad and each.grad_fn is not None]
    for each in outputs:
        each.register_hook(call.begin)
    if outputs:
        gathering.expect_backward(call)
    return output


def _refusal_of_transformed(units: Sequence[GatheredUnit]) -> ModelError:
    names = ", ".join(repr(unit.plan.name) for unit in units)
    return ModelError(
        f"torch.vmap, or another transformation of torch.func, runs over parameters of unit {names}, which are cut "
        "over ranks (stage 3) and cannot be gathered inside of it; name the module around all that is transformed in "
        "sharding.units ('.' is the model itself)"
    )


def _without_memory_of_units(gathering: Unshard, units: Sequence[GatheredUnit], output: Any) -> Any:
    """The output, with copies of what views a parameter: that is not gathered any more when somebody reads it."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or isinstance(leaf, nn.Parameter):
            return leaf
        storage = leaf.untyped_storage()._cdata
        if (unit := next((each for each in units if storage in each.storages), None)) is None:
            return leaf
        copy = copy_of_view(leaf)
        gathering.watch(Copy(copy, unit.name_at(leaf), copy._version))
        return copy

    return transform(output, copied)


def _is_recomputed() -> bool:
    """Whether this forward runs for the sake of a backward that goes on: it gives saved tensors, and no graph."""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
