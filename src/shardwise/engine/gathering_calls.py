"""What goes around the forward of a module that needs units: gather, watch the backward, let go."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.autograd_state import in_backward
from shardwise.engine.gathering import FORWARD, RECOMPUTATION, GatheredUnit, Gathering, UnitCall
from shardwise.engine.pipeline.nested import tensors_in, transform
from shardwise.engine.wrapping import Forward


class GatheringCalls:
    """A `Wrapper` for one module.

    The backward of a call begins when the gradient of the first of its outputs is complete, or when it asks for a
    parameter that was saved for it (values may leave a module by other ways than its output), and has ended when
    autograd comes to the view that was taken of an input before anything else in the call: it runs what was made last
    first. Where no input needs a gradient it ends with the backward of the microbatch.
    """

    structure = None
    """It changes no shapes."""

    def __init__(
        self, gathering: Gathering, units: Sequence[GatheredUnit], place: tuple[nn.Module, str, nn.Parameter]
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
        recomputes = _is_recomputed()
        if recomputes or not torch.is_grad_enabled():
            with self.gathering.using(self._units, RECOMPUTATION if recomputes else FORWARD):
                return self._without_memory_of_units(forward(*args, **kwargs))
        call = self.gathering.call(self._units)
        args, kwargs = _watched(call, args, kwargs)
        with self.gathering.using(self._units, FORWARD), self.gathering.saving(call):
            output = self._without_memory_of_units(forward(*args, **kwargs))
        tensors = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        outputs = [each for each in tensors if each.requires_grad and each.grad_fn is not None]
        for each in outputs:
            each.register_hook(call.begin)
        if outputs:
            self.gathering.expect_backward(call)
        return output

    def _without_memory_of_units(self, output: Any) -> Any:
        """The output, with copies of what views a parameter: that is not gathered any more when somebody reads it."""

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf
            storage = leaf.untyped_storage()._cdata
            if not any(storage in unit.storages for unit in self._units):
                return leaf
            return leaf if isinstance(leaf, nn.Parameter) else leaf.clone()

        return transform(output, copied)


def _is_recomputed() -> bool:
    """Whether this forward runs for the sake of a backward that goes on: it gives saved tensors, and no graph."""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _watched(call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with views of the tensors that need gradients; one view where the same tensor comes twice."""
    views: dict[int, torch.Tensor] = {}

    def watched(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.requires_grad or value.layout != torch.strided or value.is_nested:
                return value
            if id(value) not in views:
                view = views[id(value)] = value.view_as(value)
                view.register_hook(call.end)
            return views[id(value)]
        if type(value) is tuple:
            items = tuple(map(watched, value))
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value

    return tuple(map(watched, args)), {key: watched(value) for key, value in kwargs.items()}
