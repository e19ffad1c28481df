"""The update of the masters and its publication, bucket by bucket where transfers go on alone.

    device   | step on bucket 0 | step on bucket 1 | step on bucket 2 |
    link                        | gather bucket 0 ...... | gather bucket 1 ..| gather bucket 2

Where masters are on the host, the host steps. A bucket moves up to the device, and on, while the next one is updated.

The norm of the whole gradient is known before the first step, so nothing else holds a bucket back. `optimizer.step()`
is then called once for each bucket, with the masters of that bucket in its groups. This must change nothing: a double
of the optimizer is tried before. One call is made where each is seen: by a hook, a `step` on the object, or a count
that the optimizer keeps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, compress
from typing import Any

import torch

from shardwise.engine.optimizer_trials import updates_apart
from shardwise.engine.optimizers import KnownOptimizer, on_host
from shardwise.engine.plain_calls import counts_steps
from shardwise.engine.reports import Counters
from shardwise.engine.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.zero.flat_params import FlatParams

_Groups = list[dict[str, list[Any]]]
"""For each group of an optimizer its parameters, with their names where it has names."""

_Part = list[tuple[torch.optim.Optimizer, _Groups]]
"""For each optimizer the masters of one bucket."""


class BucketUpdates:
    """Steps the optimizers of a rank, and gives the new values to all ranks."""

    def __init__(self, optimizers: Sequence[KnownOptimizer], buffers: FlatParams) -> None:
        self._known = optimizers
        self._buffers = buffers
        self._parts: dict[TrainedSet, dict[int, _Part]] = {}
        """By bucket, for what is trained. Empty where the update is made at once."""

    def run(self, counters: Counters, trained: TrainedSet = ALL, meanwhile: Callable[[], None] | None = None) -> None:
        """Step the optimizers of what is trained on the gradients of the masters, and publish the masters.

        meanwhile: see `FlatParams.publish`.
        """
        stepping = self._known
        with ExitStack() as stack:
            if (chosen := trained.chosen) is not None:
                stepping = [each for each in stepping if not chosen.isdisjoint(chain(*each.parameters))]
                for known in stepping:
                    stack.enter_context(_only_groups(known, chosen))
            optimizers = [known.optimizer for known in stepping]
            if self._buffers.is_offloaded:
                stack.enter_context(on_host(optimizers))
            self._run(optimizers, counters, trained, meanwhile)

    def _run(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        counters: Counters,
        trained: TrainedSet,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        if (parts := self._parts.get(trained)) is None:
            if len(self._parts) > MOST_TRAINED:
                self._parts.clear()
            parts = self._parts[trained] = self._find_parts(optimizers)
        if not parts or any(map(counts_steps, optimizers)):
            for optimizer in optimizers:
                optimizer.step()
            self._buffers.publish(counters, trained=trained, meanwhile=meanwhile)
            return
        held = {id(optimizer) for part in parts.values() for optimizer, _ in part}
        for optimizer in optimizers:
            # As always once per update, also where this rank has nothing for it: it may count them.
            if id(optimizer) not in held:
                optimizer.step()

        def step(bucket: int) -> None:
            for optimizer, groups in parts.get(bucket, ()):
                _step_on(optimizer, groups)

        self._buffers.publish(counters, trained=trained, before=step, meanwhile=meanwhile)

    def _find_parts(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, _Part]:
        if not self._buffers.publishes_in_parts:
            return {}
        device = next(each.master.device for each in self._buffers.buckets if each.plan.trainable)
        # Not asked of other ranks: they publish in the same order, whether or not they step in parts.
        if not all(updates_apart(each, device) for each in optimizers):
            return {}
        bucket_of = {each.parameter: self._buffers.bucket_of(each) for each in self._buffers.owned}
        parts: dict[int, _Part] = {}
        for bucket in dict.fromkeys(bucket_of.values()):
            for optimizer in optimizers:
                groups = [
                    _chosen(group, [bucket_of[each] == bucket for each in group["params"]])
                    for group in optimizer.param_groups
                ]
                if any(group["params"] for group in groups):
                    parts.setdefault(bucket, []).append((optimizer, groups))
        return parts


@contextmanager
def _only_groups(known: KnownOptimizer, chosen: frozenset[str]) -> Iterator[None]:
    """Inside, the optimizer has only the groups with something that is chosen, here or on another rank."""
    # An optimizer may count the steps of a group, whether or not its parameters have gradients.
    groups = known.optimizer.param_groups
    known.optimizer.param_groups = [
        group for group, names in zip(groups, known.parameters, strict=True) if not chosen.isdisjoint(names)
    ]
    try:
        yield
    finally:
        known.optimizer.param_groups = groups


def _chosen(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, list[Any]]:
    return {key: list(compress(group[key], chosen)) for key in ("params", "param_names") if key in group}


def _step_on(optimizer: torch.optim.Optimizer, groups: _Groups) -> None:
    """Step on some of the parameters of an optimizer."""
    # The groups stay the same objects, for schedulers; so do their lists of parameters afterwards.
    before = [{key: group[key] for key in part} for group, part in zip(optimizer.param_groups, groups, strict=True)]
    _put(optimizer, groups)
    try:
        optimizer.step()
    finally:
        _put(optimizer, before)


def _put(optimizer: torch.optim.Optimizer, groups: _Groups) -> None:
    for group, part in zip(optimizer.param_groups, groups, strict=True):
        group.update(part)
