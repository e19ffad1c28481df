"""Hooks of the user on parameters that are cut along `tp`: they get the whole gradient, as in one process.

    rank 0   gradient of rows 0:6  --+                                       +-->  rows 0:6
                                     +-->  hook(gradient of all 12 rows)  -->+
    rank 1   gradient of rows 6:12 --+     on both ranks                     +-->  rows 6:12

Of a whole parameter whose gradient is a sum over ranks, each has a term: the hook gets the sum, and rank 0 keeps what
it gives. `p.grad` of a cut parameter has the shape of the part: hooks behind the accumulation have a `PartWatch`.
"""

from collections.abc import Callable, MutableMapping
from typing import Any, TypeAlias

import torch

from shardwise.comm import Channel
from shardwise.engine.forward.part_watch import PartWatch
from shardwise.engine.tensor.summed_gradients import SummedGradients, sum_over_ranks
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.tensor.tp_collectives import TpCollectives
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, backward_hooks, gradient_hooks
from shardwise.errors import few_of
from shardwise.plan.tensor_plan import TensorPlan

_Hook: TypeAlias = Callable[[torch.Tensor], Any]


class WholeGradients:
    """Stands around the hooks that users put on the parameters of one rank."""

    def __init__(self, summed: SummedGradients, plan: TensorPlan, channel: Channel) -> None:
        """summed: knows the parameters, and whose gradients are terms. Takes off what an earlier plan has put there."""
        self.summed = summed
        self.channel = channel
        self.portions = [plan.portions(rank) for rank in range(channel.size)]
        for _, hooks in self._hooks():
            for key, hook in list(hooks.items()):
                hooks[key] = getattr(hook, "hook", hook) if isinstance(hook, _AroundHook) else hook

    def take_in(self, *, compares: bool) -> str:
        """Stand around hooks that came since. Returns, to be compared, the parameters that have some: in words."""
        if self.channel.size == 1:
            return ""
        found = set()
        for name, hooks in self._hooks():
            for key, hook in list(hooks.items()):
                # Those of this package know parts.
                if not str(getattr(hook, "__module__", "")).startswith("shardwise."):
                    hooks[key] = _AroundHook(hook, name, self)
                if isinstance(hooks[key], _AroundHook):
                    found.add(name)
        return f", with hooks on {few_of(sorted(found))}" if found and compares else ""

    def _hooks(self) -> list[tuple[str, MutableMapping[int, Any]]]:
        with DisableTorchFunctionSubclass():  # between steps a part follows what is asked of it
            return [
                (name, hooks)
                for name, each in self.summed.parameters.items()
                for hooks in (backward_hooks(each), gradient_hooks(each))
                if hooks
            ]


class _AroundHook:
    def __init__(self, hook: _Hook, name: str, gradients: WholeGradients) -> None:
        self.hook = hook
        self._name = name
        self._channel = gradients.channel
        self._summed = gradients.summed
        self._portions = [each.get(name) for each in gradients.portions]

    def __call__(self, given: torch.Tensor) -> Any:
        is_accumulated = given.is_leaf and given.requires_grad  # the parameter itself
        gradient = given.grad if is_accumulated else given
        if gradient is None:
            return self.hook(given)
        if self._portions[0] is None and self._name not in self._summed.names:
            return self.hook(given)
        if self._portions[0] is not None and is_accumulated:
            watch = PartWatch([(given, True, 0), (gradient, True, 0)])
            watch.turn(True)
            try:
                return self.hook(given)
            finally:
                watch.turn(False)
        with torch.no_grad():
            whole = self._whole(gradient)
        if is_accumulated:
            given.grad = whole
            self.hook(given)
            found = given.grad
        else:
            found = self.hook(whole)
        own = self._own(whole if found is None else found)
        if not is_accumulated:
            return own
        given.grad = own
        return None

    def _whole(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._portions[0] is None:
            whole = gradient.clone()
            sum_over_ranks([whole], self._channel)
            return whole
        portions = [each for each in self._portions if each is not None]
        collectives = TpCollectives(self._channel, f"gradient of {self._name!r} for a hook")
        return collectives.all_gather(gradient, portions[0].dim, [each.ranges for each in portions])

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        portion = self._portions[self._channel.rank]
        if portion is not None:
            return portion_of(whole, portion).contiguous()
        return whole if self._channel.rank == 0 else torch.zeros_like(whole)
