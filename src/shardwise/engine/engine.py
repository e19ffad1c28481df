"""The engine: a model under a plan, trained one update at a time. What it costs a rank is in `PlanSizes`.

One update on two data ranks (numbers as in docs/life-of-a-parameter.md):

    rank 0, 8 rows, k = 2            rank 1, 6 rows, k = 2
    [1] open      4 4                    3 3            one exchange: here all ranks refuse a bad batch of one rank
    [2] compute   loss * 4/3.5           loss * 3/3.5   k forwards and backwards; gradients go into the arena
    [3] reduce    owned sum              owned sum      ties to their owners, then one reduce-scatter per bucket
    [4] close     sum / 4, |g|^2         sum / 4, |g|^2 one exchange: loss, norm, what was touched or written, stop
    [5] update    clip, optimizer        the same       or skip, on all ranks, where the norm is not finite
    [6] publish   cast the master once, one all-gather per bucket, replicas of ties, buffers that forwards changed

    ready --[1]--> open --[2]--> computed --[3]--> reduced --[4]--> closed --[5]--> updated --[6]--> ready
      ^  refused     |                                                 |                               ^
      +--------------+  nothing was computed                           +------------ skipped ----------+

An error in [2] to [6] on one rank stops the others (`stopping_peers`): they would wait in a collective forever.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import agreed
from shardwise.engine.batches import Batch, LossWeight, count_rows, split_batch
from shardwise.engine.channels import EngineChannels, RankGroups, stopping_peers
from shardwise.engine.computation import Computation
from shardwise.engine.forward_writes import ForwardWrites, ModelBuffers
from shardwise.engine.inventory import Inventory, places_in, refuse_added, refuse_moved, refuse_replaced
from shardwise.engine.norm import (
    clip,
    divide_and_square,
    norm_dtype,
    norm_in_one_process,
    norm_of,
    norm_of_norms,
    norms_of,
)
from shardwise.engine.optimizers import KnownOptimizer
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.stage_ties import StageTies
from shardwise.engine.plain_calls import PlainCalls
from shardwise.engine.precision import computes_in_float16, warn_of_underflow
from shardwise.engine.reports import Counters, EvaluationReport, StepReport
from shardwise.engine.state import EngineRestoration, HandOver, ModelNames, placed, state_of
from shardwise.engine.step_exchange import (
    StepExchange,
    Weighting,
    check_writes,
    describe_batch,
    exchange_loss,
    exchange_step,
    merge_weights,
    pack_weights,
    weigh,
)
from shardwise.engine.tensor.summed_gradients import SummedGradients, sum_over_ranks
from shardwise.engine.tensor.tensor_decision import TensorDecision
from shardwise.engine.zero.flat_params import FlatParams, Owned
from shardwise.engine.zero.grad_reduce import GradReduce
from shardwise.engine.zero.install import OwnedLayout
from shardwise.engine.zero.uneven_microbatches import Passes
from shardwise.errors import ModelError, OptimizerError
from shardwise.plan import Footprint, Plan, Traffic, footprint, traffic
from shardwise.plan.memory import sharded_footprint, sharded_traffic
from shardwise.plan.saved_settings import settings_of_model
from shardwise.space import Piece


class PlanSizes:
    """The formulas of `plan.memory` for what this rank has."""

    def __init__(
        self,
        plan: Plan,
        layout: OwnedLayout,
        *,
        owner: int,
        ties: StageTies,
        passes: Passes,
        runner: PipelineRunner | None,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._owner = owner
        self._ties = ties
        self._passes = passes
        self._runner = runner

    def footprint(self, num_microbatches: int) -> Footprint:
        """Bytes that the buffers take."""
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        if layout.stage < 2:
            owned = footprint(layout.ownership, self._owner, precision, num_microbatches=k)
        else:
            units = [unit.name for unit in layout.units.units]
            owned = sharded_footprint(
                layout.ownership,
                self._owner,
                precision,
                num_microbatches=k,
                units=units,
                keeps=self._plan.sharding.keep_gathered,
                late=layout.late,
            )
        return replace(
            owned,
            working_bytes=owned.working_bytes + self._ties.replica_bytes(),
            gradient_bytes=owned.gradient_bytes + self._ties.gradient_bytes(k),
        )

    def traffic(self, num_microbatches: int) -> Traffic:
        """Bytes of gradients and parameters that are sent per update.

        How often units are gathered follows from the order in which the last step used them; before there was one,
        from their order in the model.
        """
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        if layout.stage < 2:
            owned = traffic(layout.ownership, self._owner, precision, num_microbatches=k)
        else:
            schedule = None if self._runner is None else self._runner.schedule
            actions = None
            if self._runner is not None and schedule is not None and schedule.num_microbatches == k:
                actions = [(each.kind, each.stage) for each in schedule.orders[self._runner.stages.rank]]
            gathers = self._passes.gathers_in(k, actions)
            owned = sharded_traffic(
                layout.ownership, self._owner, precision, num_microbatches=k, gathers=gathers, late=layout.late
            )
        return Traffic(
            reduce_bytes=owned.reduce_bytes + self._ties.sent_gradient_bytes(k),
            gather_bytes=owned.gather_bytes + self._ties.sent_value_bytes(),
        )


class Engine:
    """A model that trains under a plan. Built by `shardwise.parallelize`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        names: ModelNames,
        computation: Computation,
        loss_weight: LossWeight | None,
        channels: EngineChannels,
        buffers: FlatParams,
        gradients: GradReduce,
        ties: StageTies,
        model_buffers: ModelBuffers,
        optimizers: tuple[KnownOptimizer, ...],
        counters: Counters,
        sizes: PlanSizes,
        summed: SummedGradients,
        plain_calls: PlainCalls,
        tensor_decision: TensorDecision,
    ) -> None:
        """`inventory`: of what this rank owns, or owns a part of."""
        self.model = model
        self.plan = plan
        self.optimizers = tuple(known.optimizer for known in optimizers)
        """The optimizers over this rank's masters; attach torch's learning-rate schedulers to them."""
        self.counters = counters
        self._known_optimizers = optimizers
        self._inventory = inventory
        self._names = names
        self._computation = computation
        self._loss_weight = loss_weight
        self.channel = channels.world
        """All ranks that train the model; `sw.save`, `sw.load` and `sw.full` go over it where they are given none."""
        self._channels = channels
        self._buffers = buffers
        self._gradients = gradients
        self._ties = ties
        self._sizes = sizes
        self._model_buffers = model_buffers
        self._summed = summed
        self._plain_calls = plain_calls
        self.tensor_decision = tensor_decision
        """How parameters are cut along tp: the plan, the rules that "auto" inferred, and what it left whole and why."""
        self._writes = ForwardWrites(model, names.specs, plan.mesh, channels.world)
        # Where parameters were when the optimizers were built: a module that is put in later has some that nobody
        # trains.
        self._places = places_in(model)
        self._has_gradients = False
        # The rewrite by which a load made the values. `EngineRestoration` fills this very dict, so that a later save
        # repeats it.
        self._origin: dict[str, Any] = {}
        self._is_used_up = False
        self._cut = {spec.name for spec in inventory.specs if spec.portion is not None}
        self._norm_dtype = norm_dtype(names.trainable.values())
        self._ranks = RankGroups.of(plan)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, where there is one. Raises OptimizerError where the model has several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise OptimizerError(f"the model has {len(self.optimizers)} optimizers; use engine.optimizers")
        return self.optimizers[0]

    @property
    def pipeline(self) -> PipelineRunner | None:
        """What runs the stages of this rank; None where the model is not cut into stages."""
        return self._computation.runner

    def step(
        self, batch: Batch, *, microbatches: int | None = None, stop: Callable[[], bool] | None = None
    ) -> StepReport:
        """Train on this data rank's share of a batch: one update of all parameters.

        `batch` is a dict of tensors with rows in dim 0; it is cut into `microbatches` (default: the plan's) of as equal
        size as can be. All data ranks call it together. Raises BatchError, the same on all ranks, before anything is
        computed; PeerError when another rank stops. stop: asked once per step; where it is true on any rank, `stop` of
        the report is true on all, so that a signal to one ends all loops after the same step. It costs no message.
        """
        num_microbatches = self._count(microbatches)
        parts, weighting = self._open(batch, num_microbatches, purpose="weights of a step")
        # Every rank has the same weights, so all raise this or none does: it needs no exchange, and stands before the
        # block that stops peers.
        self._computation.check_even(weighting)
        with self._stopping_peers("a step"):
            self._has_gradients = False
            # May lay out the arena anew, under the views that `gradients()` gave: so it gives none from here on.
            self._gradients.begin(num_microbatches)
            self._ties.begin(num_microbatches)
            self._writes.begin()
            factors = weighting.factors(self._channels.everyone.rank)
            losses = self._computation.train(
                # The last backward differs from those before: what it finishes gets no further terms, so a bucket
                # that is full may be reduced while backward still runs. Before it, every bucket still waits for the
                # next microbatch.
                parts,
                factors,
                joint=weighting.joint,
                before_last_backward=self._gradients.expect_last,
            )
            gradients = self._reduce()
            self._has_gradients = True
            closing, grad_norm = self._close(losses, weighting, gradients, stop=stop is not None and stop())
            # The norm is the same float on all ranks, so all skip or none does.
            skipped = not math.isfinite(grad_norm)
            if not grad_norm and self.channel.rank == 0 and computes_in_float16(self._names.specs):
                warn_of_underflow("all gradients of a step are zero")
            if skipped:
                self.counters.skipped += 1
            else:
                self._update(closing, grad_norm, gradients)
            changed = {
                # A module that two stages use (a tied block) may have changed on both. The first stage decides, so
                # that all ranks choose alike.
                at: min(self._ranks.stages[rank] for rank in ranks)
                for at, ranks in closing.changed_buffers.items()
            }
            self._model_buffers.synchronise(self._channels.everyone, self._channels.pipeline, changed, self.counters)
        return StepReport(
            loss=closing.loss,
            grad_norm=grad_norm,
            skipped=skipped,
            weight=weighting.total,
            num_microbatches=num_microbatches,
            stop=closing.stop,
        )

    def evaluate(self, batch: Batch) -> EvaluationReport:
        """The loss on this data rank's share of a batch, without gradients, in evaluation mode.

        Ranks may have different numbers of rows, and some of them none.
        """
        # None: ranks need not have equally many microbatches. The last batch of an evaluation has rows on some ranks
        # only.
        parts, weighting = self._open(batch, None, purpose="weights of an evaluation")
        own = weighting.by_rank[self._channels.everyone.rank]
        with self._stopping_peers("an evaluation"), self._writes.refused():
            losses = self._computation.evaluate(parts, own, weighting.joint)
            self.counters.exchanges += 1
            share = weighting.share_of_mean(losses, self._channels.everyone.rank)
            loss = exchange_loss(self._channels.world, share, self._ranks.alike)
        return EvaluationReport(loss=loss, weight=weighting.total)

    def predict(self, inputs: Batch, output_of: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """What `output_of` makes of the inputs by calling the model, without gradients, in evaluation mode.

        All ranks along pp and tp call it together, with equal inputs (their tensors are moved to the device), and get
        the same tensor. Whatever else `output_of` does runs on each of them as well. Under stage 3 all data ranks
        call it together too, for each gathers from the others: with inputs of their own, and the same modules in the
        same order.
        """
        device = self._channels.everyone.device
        moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        with self._stopping_peers("a prediction"), self._writes.refused():
            return self._computation.predict(moved, output_of)

    def state(self) -> dict[Piece, torch.Tensor]:
        """What this rank owns, as views: pieces of parameters, masters and optimizer state; the model's buffers.

        Raises OptimizerError for optimizer state that is neither a tensor nor a number.
        """
        self._check_turn()
        self._buffers.adopt_writes()
        # After `adopt_writes`: a `load_state_dict` between steps wrote to working copies, and masters would be saved
        # without it.
        return state_of(self._inventory, self.model, self._buffers, self._known_optimizers)

    def gradients(self) -> dict[Piece, torch.Tensor]:
        """The gradients of the last step, of what this rank owns, as the optimizer saw them: averaged and clipped.

        Views, in the dtype of the masters, that hold until the next step begins. Of parameters that no microbatch
        used, those are zero.
        """
        spec_of = {spec.name: spec for spec in self._inventory.specs}
        pieces: dict[Piece, torch.Tensor] = {}
        # Views of the arena, not copies: a copy would double the memory of the gradients for a figure in a log.
        for owned in self._buffers.owned if self._has_gradients else ():
            name = owned.segment.name
            pieces |= placed(name, self._gradient_of(owned), spec_of[name], owned.segment)
        return pieces

    def settings(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, as JSON values: the plan, ties, random numbers, the optimizers, the
        configuration of a model that has one (`config.json`), the rewrite through which it was loaded.

        Ranks differ in `plain` and `none` only, which name what is no tensor in the optimizer state that a rank has.
        """
        self._check_turn()
        name_of = self._buffers.name_of()
        return {
            "plan": self.plan.text(),
            "ties": self._names.ties,
            "random": {"seed": self._computation.random.seed, "step": self._computation.step},
            "optimizers": [known.named_with_state(name_of).to_json() for known in self._known_optimizers],
            **(settings_of_model(self.model) | self._origin if self.channel.rank == 0 else {}),  # once is enough
        }

    def hand_over(self) -> HandOver:
        """What `relayout` takes; all ranks call it together.

        Raises, the same on all ranks, ModelError for a model that is no longer this engine's, and OptimizerError.
        """
        world = self._channels.world
        with agreed(world, purpose="verdict on the engine before a relayout", doing="a relayout"):
            self._check_model()
            state, settings = self.state(), self.settings()
        return HandOver(
            model=self.model,
            channel=world,
            names=self._names,
            state=state,
            settings=settings,
            loss=self._computation.loss,
            loss_weight=self._loss_weight,
            optimizers=self._known_optimizers,
        )

    def take_charge(self) -> None:
        """Refuse from here on what would go past the engine: see `PlainCalls`."""
        self._plain_calls.refuse()

    def use_up(self) -> None:
        """Leave the model to the engine of another plan: from here on this one refuses."""
        self._is_used_up = True

    def names(self) -> list[str]:
        """Names of the model's parameters and persistent buffers in its own order, ties under each of their names."""
        return list(self.model.state_dict(keep_vars=True))

    def restore(self, stored: Mapping[str, Piece], settings: Mapping[str, Any]) -> EngineRestoration:
        """Prepare to take over a checkpoint, without changing anything; `sw.load` calls it and does the rest.

        stored: every tensor of the checkpoint as one piece. settings: as `settings` gave them, from any layout; {}
        for plain weights. Raises ModelError for a model whose parameters were replaced since parallelize, and
        CheckpointError for settings that are not understood.
        """
        self._check_model()  # also adopts writes from outside, which would otherwise come over the values that are read
        return EngineRestoration(
            inventory=self._inventory,
            aliases=self._names.ties,
            model=self.model,
            buffers=self._buffers,
            ties=self._ties,
            computation=self._computation,
            model_buffers=self._model_buffers,
            optimizers=self._known_optimizers,
            counters=self.counters,
            stopping_peers=lambda: self._stopping_peers("a load"),
            stored=stored,
            settings=settings,
            origin=self._origin,
        )

    def footprint(self, *, microbatches: int | None = None) -> Footprint:
        """Bytes that the plan gives this rank's buffers."""
        return self._sizes.footprint(self._count(microbatches))

    def traffic(self, *, microbatches: int | None = None) -> Traffic:
        """Bytes of gradients and parameters that this rank sends per update."""
        return self._sizes.traffic(self._count(microbatches))

    def _count(self, microbatches: int | None) -> int:
        return self.plan.merge.microbatches if microbatches is None else microbatches

    # [1] ------------------------------------------------------------------------------------------------------------

    def _open(self, batch: Batch, num_microbatches: int | None, *, purpose: str) -> tuple[Sequence[Batch], Weighting]:
        """Split and weigh the batch; every rank raises the same error when one cannot."""
        parts: Sequence[Batch] = []
        self.counters.exchanges += 1
        with agreed(self._channels.world, purpose=purpose, doing="splitting a batch") as agreement:
            self._check_model()
            wanted = num_microbatches
            if wanted is None:
                wanted = min(self.plan.merge.microbatches, count_rows(batch))
            # Without rows there is nothing to split: legal in an evaluation, and an error of `split_batch` in a step.
            if wanted or num_microbatches is not None:
                parts = split_batch(batch, wanted, self._channels.everyone.device)
            weights = weigh(parts, self._loss_weight)
            # Ranks along pp and tp compute one batch together. Given two different batches they would train on a
            # mixture, without any error; digests cost one pass over the batch and are compared in the message that is
            # sent anyway.
            lines = describe_batch(batch) if self.plan.mesh.pp * self.plan.mesh.tp > 1 else []
            agreement.value = pack_weights(weights, batch_lines=lines, written=self._buffers.written)
        weighting, written = merge_weights(
            agreement.values, same_count=num_microbatches is not None, data_ranks=self._ranks.data_ranks
        )
        # A second exchange, only after a write from outside: data ranks hold the same parameters, and one that loaded
        # other values would go its own way with every loss still looking right. All ranks
        # know that they take part, because `written` is the union over all of them.
        if written:
            check_writes(self._channels.world, self._buffers.digests(written), self._ranks.replicas)
            self._buffers.written.clear()
        return parts, weighting

    def _check_turn(self) -> None:
        if self._is_used_up:
            raise ModelError("sw.relayout has given the model of this engine to another; go on with that one")

    def _check_model(self) -> None:
        self._check_turn()
        refuse_replaced([*self._inventory.replaced(), *self._ties.replaced()])
        refuse_added(self.model, self._places)
        self._plain_calls.check_groups()
        refuse_moved([*self._buffers.moved(), *self._ties.moved()])
        self._buffers.adopt_writes()

    # [3] ------------------------------------------------------------------------------------------------------------

    def _reduce(self) -> dict[str, torch.Tensor]:
        """Sum over all stages and data ranks; the owned gradients by name, in the order of the model's parameters."""
        # Before the reduction: a tied parameter has one owner, who adds the sums of the other stages to its own. The
        # reduction over data ranks must find the whole sum in the bucket.
        self._ties.collect(self._gradients)
        self._gradients.reduce()
        # After it, on owned parts: each rank along tp owns the same part of a parameter that is whole, so that a sum
        # over tp of the parts is enough and sends 1/d of the elements.
        summed = [self._gradient_of(each) for each in self._buffers.owned if each.segment.name in self._summed.names]
        sum_over_ranks(summed, self._channels.tensor)
        owned = {each.segment.name: self._gradient_of(each) for each in self._buffers.owned}
        # Buckets run from the last parameter to the first. Norms are added in the order of the model, as one process
        # adds them.
        return {name: owned[name] for name in self._names.trainable if name in owned}

    # [4] ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _close(
        self, losses: Sequence[torch.Tensor], weighting: Weighting, gradients: Mapping[str, torch.Tensor], *, stop: bool
    ) -> tuple[StepExchange, float]:
        """Take the mean of the gradients, and exchange what every rank has to know before any of them updates.

        Returns that, and the norm of the whole gradient.
        """
        everyone, world = self._channels.everyone, self._channels.world
        touched = self._gradients.touched
        # One division, of the sum, before the norm and the clip: k merged microbatches then equal one batch of all
        # their rows.
        divisor = weighting.num_microbatches if self.plan.merge.average else everyone.size
        # What several ranks hold counts once: masters on replicas, parameters that are not cut on all ranks along tp.
        counts = self._channels.replicas.rank == 0
        first = self._channels.tensor.rank == 0
        weighed = [(gradient, counts and (first or name in self._cut)) for name, gradient in gradients.items()]
        # Every gradient is divided, also those that another rank counts: this rank's optimizer updates them.
        squares = divide_and_square(weighed, divisor, everyone.device)
        mine = touched & gradients.keys()
        # One process has no gradient for a parameter that no microbatch used, and its norm then has one term fewer.
        # The zeros that stand here in its place would not change the sum, but may change the order in which torch
        # groups it.
        used = {at: gradients[name] for at, name in enumerate(self._names.trainable) if name in mine}
        # Where gradients are whole, the norm can be that of one process to the last bit.
        are_whole = everyone.size * self._channels.tensor.size == 1
        norms = norms_of(list(used.values())) if are_whole and world.size > 1 else []
        self.counters.exchanges += 1
        closing = exchange_step(
            world,
            loss=weighting.share_of_mean(losses, everyone.rank),
            alike=self._ranks.alike,
            squares=squares,
            norms=dict(zip(used, norms, strict=False)),
            touched=[name in touched for name in self._names.trainable],
            changed_buffers=self._model_buffers.changed(),
            written=self._writes.found(),
            stop=stop,
        )
        # Before the update, and on all ranks: what a forward wrote to a cast of a master would be gone after [6].
        self._writes.check(closing.written)
        if not are_whole:
            return closing, norm_of(closing.squares, self._norm_dtype)
        if world.size == 1:
            return closing, norm_in_one_process(list(used.values()))
        return closing, norm_of_norms(closing.norms, list(self._names.trainable.values()), world.device)

    def _gradient_of(self, owned: Owned) -> torch.Tensor:
        start = owned.segment.start
        flat = self._gradients.reduced_of(owned.segment.name)[start : start + owned.segment.run.num_elements]
        return flat.view(owned.parameter.shape)

    # [5], [6] -------------------------------------------------------------------------------------------------------

    def _update(self, closing: StepExchange, grad_norm: float, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clip, step the optimizers on the owned masters, cast once, gather the working copies."""
        touched = {name for name, flag in zip(self._names.trainable, closing.touched, strict=True) if flag}
        for owned in self._buffers.owned:
            # As in one process: what no microbatch used has no gradient, and the optimizer leaves it alone. Zeros would
            # decay the weights and the moments.
            name = owned.segment.name
            owned.parameter.grad = gradients[name] if name in touched else None
        # Every rank clips its own part by the one norm of the whole gradient.
        if self.plan.clip_grad_norm is not None:
            masters = [owned.parameter for owned in self._buffers.owned if owned.parameter.grad is not None]
            clip(masters, norm=grad_norm, max_norm=self.plan.clip_grad_norm, dtype=self._norm_dtype)
        # The hook that refuses `optimizer.step()` of a user's loop is on the same optimizer.
        with self._plain_calls.engine_step():
            for optimizer in self.optimizers:
                optimizer.step()
        for owned in self._buffers.owned:
            owned.parameter.grad = None  # a view of the arena, which the next update may lay out anew
        self.counters.updates += 1
        # `touched` is the union over all ranks, so that stages 2 and 3 learn on all ranks alike which gradients to
        # wait for.
        self._gradients.expect(touched)
        self._buffers.publish(self.counters)
        # After the owner's working copy has the new values: replicas on other stages are copies of it.
        self._ties.publish()

    def _stopping_peers(self, doing: str) -> AbstractContextManager[None]:
        return stopping_peers(self._channels.world, doing, advice=self._computation.advice)
