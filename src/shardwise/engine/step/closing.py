"""What ends a step: the reduction of its gradients, the figures that all ranks agree on, and the update.

[3] to [5] of `engine.engine`. Ranks along pp and tp count each gradient once:

    reduce    ties to their owners  -->  reduce-scatter per bucket  -->  sums over tp of what is whole there
    close     mean, |g|^2, flags    -->  one exchange               -->  `Figures`, the same on all ranks
    update    clip  -->  gradients to the masters that some rank touched  -->  optimizers, bucket by bucket
              averages of the weights, where the plan has some, while the new values travel
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import compress, count

import torch
from torch import nn

from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.forward.precision import computes_in_float16, warn_of_underflow
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.forward.writes import is_due
from shardwise.engine.guards.forward_writes import ForwardWrites
from shardwise.engine.guards.plain_calls import counts_steps
from shardwise.engine.model.rank_parts import RankParts
from shardwise.engine.optimizers.bucket_updates import BucketUpdates
from shardwise.engine.optimizers.known import can_skip_on_device, skipping
from shardwise.engine.optimizers.shown_gradients import ShownGradients
from shardwise.engine.step.edges import StepObserver
from shardwise.engine.step.exchange import StepExchange, StepFlags, Weighting, exchange_step
from shardwise.engine.step.figures import Divisors, FigureMaking, Figures, RankFigures
from shardwise.engine.step.loss_entries import LossEntries
from shardwise.engine.step.norm import NormParts, Norms, clip_values, clipped_parts, norm_parts, reported_parts
from shardwise.engine.tensor.summed_gradients import WholeGradients, sum_over_ranks
from shardwise.engine.zero.flat_params import Owned, runs_of
from shardwise.engine.zero.grad_buffers import HostGradients
from shardwise.engine.zero.masters import close_masters, open_masters
from shardwise.engine.zero.reduce import GradReduce


class StepClosing:
    """Ends the steps of one engine."""

    def __init__(self, rank: RankParts, *, writes: ForwardWrites, observer: StepObserver) -> None:
        tensors, gradients = rank.tensors, rank.gradients
        self._plan, self._names, self._channels = rank.plan, rank.names, rank.channels
        self._computation, self._updates = rank.computation, rank.updates
        self._buffers, self._ties, self._model_buffers = tensors.buffers, tensors.ties, tensors.model_buffers
        self._gradients, self._host_gradients, self._summed = gradients.reduced, gradients.on_host, gradients.summed
        self._writes = writes
        self._observer = observer
        self._cut = {spec.name for spec in rank.tensors.owned.specs if spec.portion is not None}
        """Names of owned parameters that are cut along tp."""
        self.hooked = WholeGradients(self._summed, rank.computation.forwards.decision.plan, rank.channels.tensor)
        self.runs = runs_of(
            self._buffers.owned, self._buffers.ownership, counts=lambda name: 0 if self._counts(name) else ~0
        )
        """What this rank owns, in as few runs of memory as can be."""
        self._figures = FigureMaking(rank.channels, tuple(rank.names.trainable.values()))
        self._unjudged: deque[Figures] = deque()
        """Of steps that the device has not finished yet."""
        are_here = rank.plan.mesh.pp * rank.plan.mesh.tp == 1 and self._host_gradients is None
        self._shown = ShownGradients(rank.model, self._buffers, rank.channels.owners, are_here=are_here)
        self._bucket_updates = BucketUpdates(
            rank.updates.optimizers,
            self._buffers,
            rank.updates.matrices,
            has_parts=not rank.updates.plain_calls.owns_all,
        )
        self._parts: dict[str, NormParts | None] = {}
        self._asked = self.norms(None)
        self.trained = ALL
        """What the step that goes on trains, or the last one."""
        self._updated: set[str] = set()
        """Parameters that optimizers have updated: from then on they have state for them."""

    @cached_property
    def owned(self) -> list[Owned]:
        """What this rank owns of each parameter."""
        # Buckets run from the last parameter to the first. Norms are added in the order of the model, as one process
        # adds them.
        owned_of = {each.segment.name: each for each in self._buffers.owned}
        return [owned_of[name] for name in self._names.trainable if name in owned_of]

    @cached_property
    def _masters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizers have in buckets, with names, bucket by bucket."""
        homes = self._buffers.ownership.homes
        return [(each.segment.name, each.parameter) for each in self._buffers.owned if each.segment.name not in homes]

    @cached_property
    def _underflows(self) -> bool:
        """Whether small gradients may be rounded to zero."""
        return self._computation.loss_scale is None and computes_in_float16(self._names.specs)

    def _counts(self, name: str) -> bool:
        """Whether this rank counts it in the norm: one replica does, and one rank along tp what is not cut there."""
        return self._channels.replicas.rank == 0 and (self._channels.tensor.rank == 0 or name in self._cut)

    def norms(self, asked: Norms | None) -> NormParts | None:
        """The parts whose norms a step needs: for a report, or to clip by them. Raises PlanError for unknown ones."""
        key = repr(asked)
        if key not in self._parts:
            if len(self._parts) > MOST_TRAINED:
                self._parts.clear()
            self._parts[key] = self._norm_parts(asked)
        return self._parts[key]

    def _norm_parts(self, asked: Norms | None) -> NormParts | None:
        specs, limits = self._names.specs, self._plan.clip_grad_norm
        members = {} if asked is None else reported_parts(asked, self._names.groups, specs)
        if isinstance(limits, Mapping):
            members |= clipped_parts(limits, self._names.groups, specs)
        if not members:
            return None
        return norm_parts(
            members, list(self._names.trainable), self._buffers.owned, self._buffers.ownership, counts=self._counts
        )

    def begin(self, num_microbatches: int, weighting: Weighting, trained: TrainedSet, norms: NormParts | None) -> None:
        """The gradients of a step follow. trained: whose. norms: the parts whose norms are taken."""
        self.trained = trained
        self._asked = norms
        # Before any backward, whose gradients may leave for the host as they are reduced.
        if self._host_gradients is not None:
            self._host_gradients.begin(*self._divisors(weighting))
        # May lay out the arena anew, under the views that `engine.gradients()` gave.
        self._gradients.begin(num_microbatches, trained)
        self._ties.begin(num_microbatches, trained)
        self._writes.begin()
        self._summed.turn_to(trained)

    def _divisors(self, weighting: Weighting) -> Divisors:
        """What makes a mean of the sum of all gradients."""
        scaling = self._computation.loss_scale
        number = weighting.num_microbatches if self._plan.merge.average else self._channels.everyone.size
        return Divisors(number, None if scaling is None else scaling.value)

    # [3] ------------------------------------------------------------------------------------------------------------

    def reduce(self) -> Mapping[str, torch.Tensor]:
        """Sum over all stages and data ranks; the owned gradients by name, in the order of the model's parameters."""
        # Before the reduction: a tied parameter has one owner, who adds the sums of the other stages to its own. The
        # reduction over data ranks must find the whole sum in the bucket.
        self._ties.collect(self._gradients)
        self._gradients.reduce()
        owned = self._gradients.views_of(self.owned)
        # After it, on owned parts: each rank along tp owns the same part of a parameter that is whole, so that a sum
        # over tp of the parts is enough and sends 1/d of the elements.
        summed = [
            owned[each.segment.name]
            for each in self._buffers.owned
            if each.segment.name in self._summed.names and each.segment.name in self.trained
        ]
        sum_over_ranks(summed, self._channels.tensor)
        if self._host_gradients is not None:
            self._host_gradients.send_rest()
        return owned

    # [4] ------------------------------------------------------------------------------------------------------------

    def gives(
        self,
        losses: Sequence[MicrobatchLoss],
        weighting: Weighting,
        weights: torch.Tensor | None,
        digests: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
    ) -> RankFigures:
        """What this rank gives to the loss and the norm of a step."""
        mine = self._gradients.touched & gradients.keys() if self._channels.have_whole_gradients else frozenset()
        # What has left for the host is a mean already.
        divisors = self._divisors(weighting) if self._host_gradients is None else Divisors(1, None)
        scaling = self._computation.loss_scale
        scale = None if scaling is None or scaling.fixed is not None else scaling.value
        return RankFigures(
            losses=LossEntries(losses, weighting, self._channels.everyone.rank, scale=scale),
            weights=weights,
            digests=digests,
            # Every gradient is divided, also those that another rank counts: this rank's optimizer updates them.
            runs=self._gradients.runs_of(self.runs if self._asked is None else self._asked.runs),
            parts=self._gradients.parts,
            norms=self._asked,
            # One division, of the sum, before the norm and the clip: k merged microbatches then equal one batch of all
            # their rows.
            divisors=divisors,
            # One process has no gradient for a parameter that no microbatch used, and its norm then has one term
            # fewer. The zeros that stand here in its place would not change the sum, but may change the order in which
            # torch groups it.
            used={at: gradients[name] for at, name in enumerate(self._names.trainable) if name in mine} if mine else {},
        )

    @torch.no_grad()
    def close(self, own: RankFigures, *, stop: bool, see: Callable[[], object] | None) -> tuple[StepExchange, Figures]:
        """Take the mean of the gradients, and exchange what every rank has to know before any of them updates.

        Returns that, and the loss and the norm of the whole gradient.
        """
        touched = self._gradients.touched
        self._updates.counters.exchanges += 1
        # The first steps read, to see what is written without a count.
        changed = self._model_buffers.changed(reads_device=not self._updated or is_due(self._computation.step))
        closing = exchange_step(
            self._channels.world,
            StepFlags(
                touched=list(map(touched.__contains__, self._names.trainable)),
                changed_buffers=changed,
                written=self._writes.found(),
                outside=self._computation.loss_parameters.flags(),
                stop=stop,
                steps_at_once=any(counts_steps(known.optimizer) for known in self._updates.optimizers),
                shows_gradients=see is not None,
                are_reshaped=self._model_buffers.are_reshaped,
            ),
            figures=self._figures.given(own),
            times=self._observer.packed(),
        )
        self._model_buffers.are_reshaped = closing.flags.are_reshaped
        figures = self._figures.made(own, closing.figures)
        # Before the update, and on all ranks: what a forward wrote to a cast of a master would be gone after [6].
        self._writes.check([*compress(count(), closing.flags.written)])
        self._computation.loss_parameters.reduce(closing.flags.outside, *self._divisors(own.losses.weighting))
        return closing, figures

    def judge(self, *, last: Figures | None = None) -> None:
        """Raise for what the figures of earlier steps show, and warn.

        last: of the step that ends now. Do not wait for it, nor for any that cannot be refused.
        """
        if last is not None:
            self._unjudged.append(last)
        while self._unjudged:
            figures = self._unjudged[0]
            # Which of them is judged here must not depend on which has come: that differs from rank to rank, and all
            # ranks raise in the same step. A wait for the step before leaves the device the whole of this one to do.
            is_due = len(self._unjudged) > 1 if figures.may_be_refused else figures.is_known
            if last is not None and not is_due:
                return
            self._unjudged.popleft()
            figures.check()
            if self._channels.world.rank == 0 and self._underflows and not figures.grad_norm:
                warn_of_underflow("all gradients of a step are zero")

    # [5], [6] -------------------------------------------------------------------------------------------------------

    def update(
        self,
        flags: StepFlags,
        figures: Figures,
        gradients: Mapping[str, torch.Tensor],
        see: Callable[[], object] | None = None,
    ) -> None:
        """Clip, step the optimizers on the owned masters, cast once, gather the working copies; or skip all of it.

        see: called before the step, with the gradients in the model's parameters.
        """
        touched = set(compress(self._names.trainable, flags.touched))
        # An optimizer makes the state of a parameter in its first step, which must not be one that the device leaves
        # out: the state of torch's fused SGD would be memory without values. So the host looks, on all ranks alike. It
        # also looks for optimizers that cannot leave out a step by themselves, and where masters are on the host.
        found_inf = figures.found_inf if self._host_gradients is None else None
        optimizers = [known.optimizer for known in self._updates.optimizers]
        if not (can_skip_on_device(optimizers) and touched <= self._updated):
            found_inf = None
        if found_inf is None:
            figures.check()
            # The norm is the same float on all ranks, so all skip or none does.
            if not figures.is_finite:
                self._updates.counters.count(figures)
                return
        self._updates.counters.count(figures)
        if self._host_gradients is not None:
            gradients = self._host_gradients.arrived(self.owned)
        masters = [each.parameter for each in self._updates.updated]
        open_masters(masters, shown=flags.steps_at_once or flags.shows_gradients)
        for name, master in self._masters:
            # As in one process: what no microbatch used has no gradient, and the optimizer leaves it alone. Zeros would
            # decay the weights and the moments.
            master.grad = gradients[name] if name in touched else None
        self._clip(self._gradients, figures)
        if self._host_gradients is not None:
            self._clip(self._host_gradients, figures)
        stepped = set(touched)
        if flags.shows_gradients:
            with self._shown.shown(gradients, touched, to_hooks=False) as dropped:
                if see is not None:
                    see()
            stepped -= dropped
            for name, master in self._masters:
                if name in dropped:
                    master.grad = None
        shown: AbstractContextManager[object] = nullcontext()
        if flags.steps_at_once:
            shown = self._shown.shown(gradients, touched, to_hooks=True)
        # The hook that refuses `optimizer.step()` of a user's loop is on the same optimizer.
        recorder = self._computation.recorder
        averages = self._updates.averages
        average = None if averages is None else partial(averages.update, self._computation.step, found_inf)
        with self._updates.plain_calls.engine_step(), skipping(optimizers, found_inf), recorder.updating(), shown:
            self._bucket_updates.run(
                self._updates.counters,
                self.trained,
                gradients=gradients,
                touched=stepped,
                at_once=flags.steps_at_once,
                meanwhile=average,
            )
        close_masters(masters)
        self._updated |= touched
        # `touched` is the union over all ranks, so that stages 2 and 3 learn on all ranks alike which gradients to
        # wait for.
        self._gradients.expect(touched)
        # After the owner's working copy has the new values: replicas on other stages are copies of it.
        self._ties.publish(self.trained)

    def _clip(self, gradients: GradReduce | HostGradients, figures: Figures) -> None:
        """Every rank clips its own part of the gradient by norms of the whole one, and then by value."""
        limits = self._plan.clip_grad_norm
        if isinstance(limits, Mapping):
            assert self._asked is not None
            runs = gradients.runs_of(self._asked.runs)
            for name, most in limits.items():
                atoms = self._asked.atoms["clip", name]
                of_part = [run for run, mark in runs if (mark if mark >= 0 else ~mark) in atoms]
                figures.clip(of_part, most, ("clip", name))
        elif limits is not None:
            figures.clip(gradients.parts, limits)
        if self._plan.clip_grad_value is not None:
            clip_values(gradients.parts, self._plan.clip_grad_value)
