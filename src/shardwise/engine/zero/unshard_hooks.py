"""What goes around a forward that needs units, of a module or of one operation: gather, watch the backward, let go.

`UnshardHook` stands around a module. `OutsideReads` stands around one operation that takes a parameter outside of its
unit: a tied head, a table of positions, a penalty in the loss. Each such operation is a separate call:

    forward    gather embed  run embed | ...  | gather embed  linear(x, embed.weight) | loss
    backward                                    gather embed  its gradients           | ...  reduce embed

All data ranks run one program, and so gather in one order. What an operation gives as a view of a parameter is a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.nested_values import tensors_in, transform
from shardwise.engine.forward.layers import Layer, Place, in_backward
from shardwise.engine.forward.sharded_parameters import Copy, copy_of_view, refusal_of_write
from shardwise.engine.forward.transforms import outside_of_transformations
from shardwise.engine.forward.writes import SeenTensor
from shardwise.engine.parameter_kinds import shares_memory
from shardwise.engine.torch_private import (
    graph_task,
    is_transformed,
    on_gradient,
    storage_id,
    top_saved_hooks,
    version_of,
)
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.unshard import GatheredUnit, Unshard
from shardwise.plan.residency import FORWARD, RECOMPUTATION

_TENSORS = frozenset({torch.Tensor})


class UnshardHook(Layer):
    """Gathers the units that a module needs while it runs."""

    place = Place.UNSHARD

    def __init__(
        self, unshard: Unshard, units: Sequence[GatheredUnit], place: tuple[nn.Module, str, nn.Parameter]
    ) -> None:
        """`place`: where the module, or one inside, has a parameter of the units."""
        self.unshard = unshard
        self._units = units
        self._holder, self._attribute, self._parameter = place

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Shapes are inferred by running modules with other tensors instead of their parameters. Those have no values,
        # and not all data ranks need run the module then: nothing may be gathered.
        held = self._holder._parameters.get(self._attribute)
        if held is not self._parameter and not (held is not None and shares_memory(held, self._parameter)):
            return self.forward(*args, **kwargs)
        self.unshard.check_in_pass(self._units)
        return run_gathered(self.unshard, self._units, self.forward, args, kwargs)


def run_gathered(
    unshard: Unshard,
    units: Sequence[GatheredUnit],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward that needs the units, and see to its backward.

    The backward of a call begins when its first output has a complete gradient, or when it asks for a parameter that
    was saved for it. It has ended when an input has a complete gradient, or the backward of an earlier call begins. At
    the latest it ends with the whole backward. A backward that a forward or a loss runs itself, or a transformation of
    torch.func, holds the units instead.
    """
    # Hooks on tensors and no autograd function around the call: that would give views of the inputs, and a tensor that
    # several modules use would have its gradients added in another order than in one process.
    given = [*args, *kwargs.values()]
    if not _TENSORS.issuperset(map(type, given)):  # most calls take nothing else
        given = tensors_in(given)
    recomputes = _is_recomputed()
    if is_transformed():
        return _run_held(unshard, units, partial(forward, *args, **kwargs), RECOMPUTATION if recomputes else FORWARD)
    # No call: without gradients no backward follows, and that of a recomputed forward belongs to its first run.
    if recomputes or not torch.is_grad_enabled():
        with unshard.using(units, RECOMPUTATION if recomputes else FORWARD):
            return _without_memory_of_units(unshard, units, forward(*args, **kwargs))
    call = unshard.call(units)
    for each in given:
        if each.requires_grad:
            if each.grad_fn is not None:
                # Autograd runs what was made last first: all nodes of the call come before the one that made its input.
                on_gradient(each, call.end)
            elif not isinstance(each, nn.Parameter):  # its gradient may be complete before those of parameters
                call.starts_graph = True
    for unit in units:
        unshard.use(unit, FORWARD)
    unshard.begin_saving(call)
    try:
        output = _without_memory_of_units(unshard, units, forward(*args, **kwargs))
    finally:
        unshard.end_saving(call)
        for unit in units:
            unshard.drop(unit, FORWARD)
    found = [output] if type(output) is torch.Tensor else tensors_in(output)
    outputs = [each for each in found if each.requires_grad and each.grad_fn is not None]
    for each in outputs:
        on_gradient(each, call.begin)
    # A call whose outputs are all without a graph (its unit is frozen, or they are numbers) has no backward, and a
    # reduction that waited for it would come only with the end of the microbatch.
    if outputs:
        unshard.expect_backward(call)
    return output


def _run_held(unshard: Unshard, units: Sequence[GatheredUnit], forward: Callable[[], Any], phase: str) -> Any:
    """Run a forward inside of torch.func: its units stay, whatever its graph saves of them."""
    with outside_of_transformations():
        unshard.hold(unshard.call(units))
        for unit in units:
            unshard.use(unit, phase)
    try:
        return forward()
    finally:
        with outside_of_transformations():
            for unit in units:
                unshard.drop(unit, phase)


def _without_memory_of_units(unshard: Unshard, units: Sequence[GatheredUnit], output: Any) -> Any:
    """The output, with copies of what views a parameter: that is not gathered any more when somebody reads it."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        storage = storage_id(leaf.untyped_storage())
        for unit in units:
            if storage in unit.storages and not isinstance(leaf, nn.Parameter):
                copy = copy_of_view(leaf)
                seen = SeenTensor(copy, content=copy.device.type == "cpu")  # a device is not waited for
                unshard.watch(Copy(seen, unit.name_at(leaf)))
                return copy
        return leaf

    return copied(output) if type(output) is torch.Tensor else transform(output, copied)


def _is_recomputed() -> bool:
    """Whether this forward runs for the sake of a backward that goes on: it gives saved tensors, and no graph."""
    # As `in_backward`, for each call of a unit.
    is_in_backward = graph_task() != -1
    return is_in_backward and top_saved_hooks(True) is not None


class OutsideReads:
    """Gathers for the operations that take parameters at rest."""

    def __init__(self, unshard: Unshard, params: FlatParams) -> None:
        self._unshard = unshard
        self._unit_of = {id(each): unit for unit in unshard.units for each, _, _ in unit.parameters}
        params.read_by(self.read)

    def read(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        taken: Sequence[torch.Tensor],
        *,
        is_followed: bool = True,
    ) -> Any:
        """What the operation gives. `taken`: the parameters at rest among its arguments. Not `is_followed`: it gives
        memory, in which a write is not seen.

        NotImplemented outside of a step, an evaluation or a prediction: no other rank gathers then; and for what is not
        followed, but in a forward that runs again, where the unit's own module reads it. Raises ModelError for
        operations that write to a parameter.
        """
        if not self._unshard.is_in_pass:
            return NotImplemented
        found = {self._unit_of[id(each)].number: self._unit_of[id(each)] for each in taken}
        # By number, so that all ranks gather them in one order, whatever the order of the arguments.
        units: list[GatheredUnit] = [found[number] for number in sorted(found)]
        is_held = in_backward() and all(self._unshard.residency.num_uses[unit.number] for unit in units)
        if is_held and not (is_followed and torch.is_grad_enabled()):
            with self._unshard.using(units, RECOMPUTATION):  # the backward of a function that saved the parameter
                return function(*args, **kwargs)
        if not is_followed:
            return NotImplemented
        if not torch.is_grad_enabled():  # perhaps the forward of such a function, or of a reentrant checkpoint
            self._unshard.reduce_at_end(units)

        def forward(*args: Any, **kwargs: Any) -> Any:
            versions = [version_of(each) for each in taken]
            output = function(*args, **kwargs)
            for each, version in zip(taken, versions, strict=True):
                if version_of(each) != version:
                    raise refusal_of_write(each._unit_place[0])  # type: ignore[attr-defined]
            # An iterator over a parameter would go on to read after the operation; all its views are taken here.
            return list(output) if isinstance(output, Iterator) else output

        output = run_gathered(self._unshard, units, forward, args, kwargs)
        return iter(output) if function is torch.Tensor.__iter__ else output
