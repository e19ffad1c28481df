"""The hooks through which finished gradients are taken over from autograd."""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Collectors:
    """A hook on each parameter, which gives its gradient to whoever collects them.

    A model that is put under another plan keeps the hooks: they do nothing once the one who collects is gone, and do
    not keep him alive.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], collect: Callable[[str, torch.Tensor], None]) -> None:
        """`collect`: a method, called with the name of a parameter and the parameter."""
        reference = weakref.WeakMethod(collect)
        self._parameters = parameters
        self._hooks = {name: _hook(reference, name) for name in parameters}
        self._handles = {name: self._put_on(name) for name in parameters}

    def stay_last(self) -> None:
        """Let hooks that a model has put on its parameters since, in its first forward, see the gradient first."""
        for name, handle in self._handles.items():
            if next(reversed(self._parameters[name]._post_accumulate_grad_hooks)) != handle.id:
                handle.remove()
                self._handles[name] = self._put_on(name)

    def _put_on(self, name: str) -> RemovableHandle:
        handle: RemovableHandle = self._parameters[name].register_post_accumulate_grad_hook(self._hooks[name])
        return handle


def _hook(
    reference: "weakref.WeakMethod[Callable[[str, torch.Tensor], None]]", name: str
) -> Callable[[torch.Tensor], None]:
    def give(parameter: torch.Tensor) -> None:
        if (collect := reference()) is not None:
            collect(name, parameter)

    return give
