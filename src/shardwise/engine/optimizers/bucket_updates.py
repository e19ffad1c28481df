"""The update of the masters and its publication, bucket by bucket where transfers go on alone.

    device   | step on bucket 0 | step on bucket 1 | step on bucket 2 |
    link                        | gather bucket 0 ...... | gather bucket 1 ..| gather bucket 2

Where masters are on the host, the host steps. A bucket moves up to the device, and on, while the next one is updated.

The norm of the whole gradient is known before the first step, so nothing else holds a bucket back. `optimizer.step()`
is then called once for each bucket, with the masters of that bucket in its groups. This must change nothing: a double
of the optimizer is tried before. One call is made where each is seen: by a hook, a `step` on the object, or a count
that the optimizer keeps.

In a plain loop gradients and values are the optimizer's own: it may keep a gradient, or give a parameter other memory.

    plain loop                          here
    state["last"] = p.grad              gradients of the next step come into the same memory: it gets a copy
    p.data = p.data - lr * p.grad       the master is a part of a buffer: the new values go there, p is it again
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain, compress
from typing import Any

import torch

from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.part_watch import Held, PartWatch
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.guards.plain_calls import counts_steps
from shardwise.engine.optimizers.known import KnownOptimizer, on_host
from shardwise.engine.optimizers.matrix_updates import MatrixUpdates
from shardwise.engine.optimizers.traits import in_table
from shardwise.engine.optimizers.trials import storages
from shardwise.engine.torch_private import storage_id, tree_map_only
from shardwise.engine.zero.flat_params import FlatParams, Owned

_Groups = list[dict[str, list[Any]]]
"""For each group of an optimizer its parameters, with their names where it has names."""

_Part = list[tuple[KnownOptimizer, _Groups]]
"""For each optimizer the masters of one bucket, or the matrices of one round."""

_Place = tuple[str, int]
"""("bucket" or "round", its number)."""


class BucketUpdates:
    """Steps the optimizers of a rank, and gives the new values to all ranks."""

    def __init__(
        self,
        optimizers: Sequence[KnownOptimizer],
        buffers: FlatParams,
        matrices: MatrixUpdates | None,
        *,
        has_parts: bool,
    ) -> None:
        """has_parts: whether a rank updates some elements only, or some parameters."""
        self._known = optimizers
        for each in buffers.buckets:
            each.master_memory.has_others = has_parts
        self._watch = partial(watched, buffers=buffers, has_parts=has_parts)
        self._of_torch = {each.optimizer for each in optimizers if in_table(each.optimizer) is not None}
        """They write in place and keep no gradient: their steps cost nothing more."""
        self._buffers = buffers
        self._matrices = matrices
        self._updated = buffers.owned if matrices is None else matrices.updated
        self._parts: dict[TrainedSet, dict[_Place, _Part] | None] = {}
        """For what is trained. None where the update is made at once."""

    def run(
        self,
        counters: Counters,
        trained: TrainedSet = ALL,
        *,
        gradients: Mapping[str, torch.Tensor],
        touched: Collection[str],
        at_once: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Step the optimizers of what is trained on the gradients of the masters, and publish the masters.

        gradients, touched: see `MatrixUpdates.carry_out`. at_once: optimizers step once, for all that they have.
        meanwhile: see `FlatParams.publish`.
        """
        stepping = self._known
        with ExitStack() as stack:
            if (chosen := trained.chosen) is not None:
                stepping = [each for each in stepping if not chosen.isdisjoint(chain(*each.parameters))]
                for known in stepping:
                    stack.enter_context(_only_groups(known, chosen))
            if self._buffers.is_offloaded:
                stack.enter_context(on_host([known.optimizer for known in stepping]))
            parts = None if at_once else self._parts_of(trained, stepping)
            if parts is None:
                self._step_at_once(stepping, gradients, touched)
                self._buffers.publish(counters, trained=trained, meanwhile=meanwhile)
            else:
                update, rounds = self._step_in_parts(stepping, parts, gradients, touched)
                self._buffers.publish(counters, trained=trained, before=update, meanwhile=meanwhile)
                deque(rounds, maxlen=0)  # no bucket waits for the last ones where few are trained

    def _step_at_once(
        self,
        stepping: Sequence[KnownOptimizer],
        gradients: Mapping[str, torch.Tensor],
        touched: Collection[str],
    ) -> None:
        def step(_: int) -> None:
            for known in stepping:
                self._step(known)

        if self._matrices is None:
            step(0)
        else:
            deque(self._matrices.carry_out(gradients, touched, step, at_once=True), maxlen=0)

    def _step_in_parts(
        self,
        stepping: Sequence[KnownOptimizer],
        parts: Mapping[_Place, _Part],
        gradients: Mapping[str, torch.Tensor],
        touched: Collection[str],
    ) -> tuple[Callable[[int], None], Iterator[int]]:
        """Begin an update in parts; returns what gives the masters of a bucket their new values, and the rounds."""
        held = {id(known) for part in parts.values() for known, _ in part}
        for known in stepping:
            # As always once per update, also where this rank has nothing for it: it may count them.
            if id(known) not in held:
                self._step(known)

        def step(kind: str, number: int) -> None:
            for known, groups in parts.get((kind, number), ()):
                self._step_on(known, groups)

        if self._matrices is None:
            return partial(step, "bucket"), iter(())
        last_rounds = self._matrices.last_rounds
        rounds = self._matrices.carry_out(gradients, touched, partial(step, "round"), at_once=False)
        num_over = next(rounds)

        def update(bucket: int) -> None:
            nonlocal num_over
            step("bucket", bucket)
            while num_over < last_rounds.get(bucket, 0):
                num_over = next(rounds)

        return update, rounds

    def _step(self, known: KnownOptimizer) -> None:
        """Step an optimizer on what is in its groups now."""
        optimizer = known.optimizer
        is_seen = counts_steps(optimizer)
        if optimizer in self._of_torch and not is_seen:  # nor has it code of the user around its step
            optimizer.step()
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        before = [each.data for each in parameters]
        if known.traits.keeps_gradients:
            for each in parameters:
                if each.grad is not None:
                    each.grad = each.grad.clone()
        # Code around a step may write to these gradients, which are the model's: they are not copied before.
        seen = storages([each.grad for each in parameters]) if is_seen else set()
        with self._watch(optimizer) if is_seen else nullcontext():
            optimizer.step()
        for each, values in zip(parameters, before, strict=True):
            is_moved = each.data_ptr() != values.data_ptr()
            lent = seen | storages(values) if is_moved else seen
            # Gradients and old values get other numbers from here on. State that is in their memory keeps its own.
            if lent and each in optimizer.state and lent & storages(state := optimizer.state[each]):
                state.update(tree_map_only(torch.Tensor, partial(_out_of, lent), dict(state)))
            if is_moved:
                values.copy_(each.detach())
                each.data = values

    def _step_on(self, known: KnownOptimizer, groups: _Groups) -> None:
        """Step an optimizer on some of its parameters."""
        # The groups stay the same objects, for schedulers; so do their lists of parameters afterwards.
        pairs = zip(known.optimizer.param_groups, groups, strict=True)
        before = [{key: group[key] for key in part} for group, part in pairs]
        _put(known.optimizer, groups)
        try:
            self._step(known)
        finally:
            _put(known.optimizer, before)

    def _parts_of(self, trained: TrainedSet, optimizers: Sequence[KnownOptimizer]) -> Mapping[_Place, _Part] | None:
        """What each bucket and each round has of the optimizers; None where the update is made at once."""
        if trained not in self._parts:
            if len(self._parts) > MOST_TRAINED:
                self._parts.clear()
            self._parts[trained] = self._find_parts(optimizers)
        return self._parts[trained]

    def _find_parts(self, optimizers: Sequence[KnownOptimizer]) -> dict[_Place, _Part] | None:
        if not self._buffers.publishes_in_parts and self._matrices is None:
            return None
        # Not asked of other ranks, which know the same of the optimizers.
        if not all(each.traits.steps_apart for each in optimizers):
            return None
        place_of = {each.parameter: self._place_of(each) for each in self._updated}
        parts: dict[_Place, _Part] = {}
        for place in dict.fromkeys(place_of.values()):
            for known in optimizers:
                groups = [
                    _chosen(group, [place_of[each] == place for each in group["params"]])
                    for group in known.optimizer.param_groups
                ]
                if any(group["params"] for group in groups):
                    parts.setdefault(place, []).append((known, groups))
        return parts

    def _place_of(self, each: Owned) -> _Place:
        number = None if self._matrices is None else self._matrices.round_of(each)
        return ("bucket", self._buffers.bucket_of(each)) if number is None else ("round", number)


def _out_of(memory: set[int], kept: torch.Tensor) -> torch.Tensor:
    return kept.clone() if storages(kept) & memory else kept


def _only_groups(known: KnownOptimizer, chosen: frozenset[str]) -> AbstractContextManager[None]:
    """Inside, the optimizer has only the groups with something that is chosen, here or on another rank."""
    # An optimizer may count the steps of a group, whether or not its parameters have gradients.
    pairs = zip(known.optimizer.param_groups, known.parameters, strict=True)
    left = [group for group, names in pairs if not chosen.isdisjoint(names)]
    return attributes_set(known.optimizer, {"param_groups": left})


def _chosen(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, list[Any]]:
    return {key: list(compress(group[key], chosen)) for key in ("params", "param_names") if key in group}


def _put(optimizer: torch.optim.Optimizer, groups: _Groups) -> None:
    for group, part in zip(optimizer.param_groups, groups, strict=True):
        group.update(part)


def watched(optimizer: torch.optim.Optimizer, *, buffers: FlatParams, has_parts: bool) -> AbstractContextManager[None]:
    """Around a step of the optimizer. has_parts: whether some rank updates elements only, or some parameters."""
    # Where a rank has all in one memory, code of the user has what a plain program has.
    apart = [each.working for each in buffers.buckets if each.has_master or buffers.is_shared]
    stale = {storage_id(each.untyped_storage()) for each in apart}
    if not stale and not has_parts:
        return nullcontext()
    held: list[Held] = []
    for at, each in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        is_part = has_parts and each._place.is_part
        held += [(each, is_part, at), (each if each.grad is None else each.grad, is_part, at)]
    return PartWatch(held if has_parts else [], stale=stale).around(optimizer)
