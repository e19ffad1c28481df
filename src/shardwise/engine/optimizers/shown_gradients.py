"""`p.grad` of the model's parameters, while code of the user looks at them between the last backward and the update.

whole on this rank    the reduced gradient itself, or one in the parameter's dtype that is taken back
cut over owners       gathered where the code asked for it on some rank, and cut again; else it refuses to be read
cut along tp, pp      refuses to be read
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.forward.part_watch import PART
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, version_of
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.masters import GradientElsewhere
from shardwise.errors import OptimizerError

_REFUSAL = f"p.grad of the model's parameters is whole on no rank here: {PART}. To change gradients, p.register_hook"


class ShownGradients:
    """Puts the gradients of an update in the places where a plain program has them."""

    def __init__(self, model: nn.Module, buffers: FlatParams, owners: Channel, *, are_here: bool) -> None:
        """are_here: whether no rank has parts of parameters along tp, or some of them along pp, or on the host."""
        self._model = model
        self._buffers = buffers
        self._owners = owners
        self._are_here = are_here

    @contextmanager
    def shown(self, gradients: Mapping[str, torch.Tensor], touched: Set[str], *, to_hooks: bool) -> Iterator[set[str]]:
        """Inside, they are there. Gives the names that have none afterwards: the code inside took them away.

        gradients: of what is owned here, by name. to_hooks: of optimizers, around their steps: nothing is gathered for
        them, nor taken back.
        """
        parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        given: dict[str, torch.Tensor] = {}
        if self._are_here and (not to_hooks or self._owners.size == 1):
            given = dict(self._whole(gradients, touched & parameters.keys()))
        placed: dict[str, torch.Tensor] = {}
        with DisableTorchFunctionSubclass():  # at rest or not
            for name in touched & parameters.keys():
                each = parameters[name]
                if name in given and (given[name].dtype == each.dtype or not to_hooks):
                    placed[name] = given[name].view(each.shape).to(each.dtype)
                else:
                    placed[name] = GradientElsewhere.of(each, _REFUSAL)
                each.grad = placed[name]
        versions = {name: version_of(placed[name]) for name in given}
        runs = {each.segment.name: each.segment.run for each in self._buffers.owned}
        dropped: set[str] = set()
        try:
            yield dropped
            with torch.no_grad(), DisableTorchFunctionSubclass():
                for name, before in placed.items():
                    now = parameters[name].grad
                    is_new = now is not before
                    if now is None:
                        dropped.add(name)
                    elif is_new and (to_hooks or name not in given):
                        raise OptimizerError(
                            f"p.grad of parameter {name!r} was replaced where the update does not see it. Write in "
                            f"place into those of optimizer.param_groups. {_REFUSAL}"
                        )
                    elif (
                        not to_hooks
                        and name in given.keys() & gradients.keys()
                        and (is_new or version_of(now) != versions[name])
                    ):
                        run, mine = runs[name], gradients[name]
                        mine.copy_(now.reshape(-1)[run.start : run.stop].view(mine.shape))
        finally:
            with DisableTorchFunctionSubclass():
                for each in parameters.values():
                    each.grad = None

    def _whole(self, gradients: Mapping[str, torch.Tensor], touched: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients of whole parameters, flat."""
        for at, bucket in enumerate(self._buffers.buckets):
            names = touched & {slot.name for slot in bucket.plan.slots}
            if self._owners.size == 1:
                yield from ((name, gradients[name]) for name in names)
            elif names:  # alike on all ranks
                own = torch.zeros_like(bucket.master, device=self._owners.device)
                for name in names & bucket.segments.keys():
                    segment = bucket.segments[name]
                    own[segment.start : segment.start + segment.run.num_elements] = gradients[name].reshape(-1)
                room = own.new_empty(bucket.plan.num_elements)
                self._owners.all_gather(
                    room, own, counts=bucket.plan.counts, purpose=f"gradients of bucket {at}, for a look"
                ).wait()
                yield from (
                    (slot.name, room[slot.run.start : slot.run.stop])
                    for slot in bucket.plan.slots
                    if slot.name in names
                )
