"""The engine: a model under a plan, trained one update at a time.

One update on one rank (numbers as in docs/life-of-a-parameter.md):

    [1] agree       split the batch, weigh the microbatches, exchange the weights; here all ranks refuse a bad batch
    [2] compute     forward and backward of k microbatches; gradients go into the arena as they appear
    [3] reduce      one reduce-scatter per bucket
    [4] agree       exchange losses, sums of squares, which parameters have a gradient, which buffers changed
    [5] update      divide, clip, optimizer on the owned masters; or skip on all ranks
    [6] publish     cast owned elements once into the working copy, one all-gather per bucket
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.batches import Batch, LossOfModel, LossWeight, count_rows, split_batch
from shardwise.engine.buffers import FlatBuffers, Owned
from shardwise.engine.closing import Closing, exchange_closing, exchange_sum
from shardwise.engine.counters import Counters
from shardwise.engine.gradients import Gradients
from shardwise.engine.inventory import Inventory, torch_dtype
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.norm import clip, divide_and_square, norm_dtype, norm_in_one_process
from shardwise.engine.optimizer_state import KnownOptimizer
from shardwise.engine.reports import EvaluationReport, StepReport
from shardwise.engine.restore import EngineRestoration
from shardwise.engine.state import state_of
from shardwise.engine.weights import Weighting, agree_on_weights, weigh
from shardwise.errors import ModelError, OptimizerError, PeerError, ShardwiseError
from shardwise.plan import Footprint, Plan, Traffic, footprint, traffic
from shardwise.space import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class DataChannels:
    """The channels of data parallelism, seen from one rank."""

    everyone: Channel
    """All ranks that hold this part of the model and see other samples."""
    owners: Channel
    """The ranks over which masters are cut."""
    replicas: Channel
    """The ranks that hold the same masters."""


class Engine:
    """A model that trains under a plan. Built by `shardwise.parallelize`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        loss: LossOfModel,
        loss_weight: LossWeight | None,
        channels: DataChannels,
        buffers: FlatBuffers,
        gradients: Gradients,
        model_buffers: ModelBuffers,
        optimizers: tuple[KnownOptimizer, ...],
        counters: Counters,
    ) -> None:
        self.model = model
        self.plan = plan
        self.optimizers = tuple(known.optimizer for known in optimizers)
        """The optimizers over this rank's masters; attach torch's learning-rate schedulers to them."""
        self.counters = counters
        self._known_optimizers = optimizers
        self._inventory = inventory
        self._loss = loss
        self._loss_weight = loss_weight
        self._channels = channels
        self._buffers = buffers
        self._gradients = gradients
        self._model_buffers = model_buffers
        self._norm_dtype = norm_dtype(torch_dtype(spec.master) for spec in inventory.specs if spec.trainable)
        self._names = [spec.name for spec in inventory.specs if spec.trainable]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, where there is one. Raises OptimizerError where the model has several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise OptimizerError(f"the model has {len(self.optimizers)} optimizers; use engine.optimizers")
        return self.optimizers[0]

    def step(self, batch: Batch, *, microbatches: int | None = None) -> StepReport:
        """Train on this data rank's share of a batch: one update of all parameters.

        `batch` is a dict of tensors with rows in dim 0; it is cut into `microbatches` (default: the plan's) of as equal
        size as can be. All data ranks call it together. Raises BatchError, the same on all ranks, before anything is
        computed; PeerError when another rank stops.
        """
        num_microbatches = self._count(microbatches)
        parts, weighting = self._open(batch, num_microbatches, purpose="weights of a step")
        with self._stopping_peers("a step"):
            self._gradients.begin(num_microbatches)
            losses = self._accumulate(parts, weighting)
            gradients = self._reduce()
            closing = self._close(losses, weighting, gradients)
            skipped = not math.isfinite(closing.grad_norm)
            if skipped:
                self.counters.skipped += 1
            else:
                self._update(closing, gradients)
            self._model_buffers.synchronise(self._channels.everyone, closing.changed_buffers, self.counters)
        return StepReport(
            loss=closing.loss,
            grad_norm=closing.grad_norm,
            skipped=skipped,
            weight=weighting.total,
            num_microbatches=num_microbatches,
        )

    def evaluate(self, batch: Batch) -> EvaluationReport:
        """The loss on this data rank's share of a batch, without gradients, in evaluation mode.

        Ranks may have different numbers of rows, and some of them none.
        """
        parts, weighting = self._open(batch, None, purpose="weights of an evaluation")
        own = weighting.by_rank[self._channels.everyone.rank]
        with self._stopping_peers("an evaluation"):
            with torch.no_grad(), _evaluating(self.model):
                nothing = torch.zeros((), device=self._channels.everyone.device)
                losses = [self._loss(part) if weight else nothing for part, weight in zip(parts, own, strict=True)]
            self.counters.exchanges += 1
            loss = exchange_sum(self._channels.everyone, self._share_of_loss(losses, weighting), purpose="loss")
        return EvaluationReport(loss=loss, weight=weighting.total)

    def state(self) -> dict[Piece, torch.Tensor]:
        """What this rank owns, as views: pieces of parameters, masters and optimizer state; the model's buffers.

        Raises OptimizerError for optimizer state that is neither a tensor nor a number.
        """
        self._buffers.adopt_writes()
        return state_of(self._inventory, self.model, self._buffers, self._known_optimizers)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, as JSON values: the plan, ties, and the optimizers' settings.

        Ranks differ in `plain` and `none` only, which name what is no tensor in the optimizer state that a rank has.
        """
        name_of = self._buffers.name_of()
        return {
            "plan": self.plan.text(),
            "ties": self._inventory.ties(),
            "optimizers": [known.named_with_state(name_of).to_json() for known in self._known_optimizers],
        }

    def restore(self, stored: Mapping[str, Piece], settings: Mapping[str, Any]) -> EngineRestoration:
        """Prepare to take over a checkpoint, without changing anything; `sw.load` calls it and does the rest.

        stored: every tensor of the checkpoint as one piece. settings: as `settings` gave them, from any layout; {}
        for plain weights. Raises ModelError for a model whose parameters were replaced since parallelize, and
        CheckpointError for settings that are not understood.
        """
        self._check_model()  # also adopts writes from outside, which would otherwise come over the values that are read
        return EngineRestoration(
            inventory=self._inventory,
            model=self.model,
            buffers=self._buffers,
            model_buffers=self._model_buffers,
            optimizers=self._known_optimizers,
            counters=self.counters,
            stopping_peers=lambda: self._stopping_peers("a load"),
            stored=stored,
            settings=settings,
        )

    def footprint(self, *, microbatches: int | None = None) -> Footprint:
        """Bytes that the plan gives this rank's buffers."""
        k = self._count(microbatches)
        return footprint(self._buffers.ownership, self._buffers.owner, self.plan.precision, num_microbatches=k)

    def traffic(self, *, microbatches: int | None = None) -> Traffic:
        """Bytes that this rank sends per update."""
        k = self._count(microbatches)
        return traffic(self._buffers.ownership, self._buffers.owner, self.plan.precision, num_microbatches=k)

    def _count(self, microbatches: int | None) -> int:
        return self.plan.merge.microbatches if microbatches is None else microbatches

    # [1] ------------------------------------------------------------------------------------------------------------

    def _open(self, batch: Batch, num_microbatches: int | None, *, purpose: str) -> tuple[Sequence[Batch], Weighting]:
        """Split and weigh the batch; every rank raises the same error when one cannot."""
        parts: Sequence[Batch] = []
        weights: list[float] = []
        refusal: ShardwiseError | None = None
        with self._stopping_peers("splitting a batch"):
            try:
                self._check_model()
                wanted = num_microbatches
                if wanted is None:
                    wanted = min(self.plan.merge.microbatches, count_rows(batch))
                if wanted or num_microbatches is not None:
                    parts = split_batch(batch, wanted, self._channels.everyone.device)
                weights = weigh(parts, self._loss_weight)
            except ShardwiseError as error:
                refusal = error
        self.counters.exchanges += 1
        same_count = num_microbatches is not None
        weighting = agree_on_weights(self._channels.everyone, weights, refusal, purpose=purpose, same_count=same_count)
        return parts, weighting

    def _check_model(self) -> None:
        if replaced := self._inventory.replaced():
            raise ModelError(
                f"{len(replaced)} parameters were replaced, frozen or unfrozen after parallelize, among them "
                f"{replaced[0]!r}; do that before parallelize, which decides who owns what"
            )
        if moved := self._buffers.moved():
            raise ModelError(
                f"{len(moved)} parameters were given other storage after parallelize, among them {moved[0]!r}; write "
                "values in place (load_state_dict, copy_), and move or convert the model before parallelize"
            )
        self._buffers.adopt_writes()

    # [2] ------------------------------------------------------------------------------------------------------------

    def _accumulate(self, parts: Sequence[Batch], weighting: Weighting) -> list[torch.Tensor]:
        """Forward and backward of every microbatch that counts; the losses, without a graph."""
        losses = []
        factors = weighting.factors(self._channels.everyone.rank)
        last = max((at for at, factor in enumerate(factors) if factor), default=-1)
        for at, (part, factor) in enumerate(zip(parts, factors, strict=True)):
            if not factor:
                # It does not count, and is not computed: a mean over nothing is nan in many models.
                losses.append(torch.zeros((), device=self._channels.everyone.device))
                continue
            try:
                loss = self._loss(part)
                if not loss.requires_grad:
                    raise ModelError(
                        "the loss depends on no trainable parameter; nothing can be learnt from this batch"
                    )
                if at == last:
                    self._gradients.expect_last()
                (loss if factor == 1.0 else loss * factor).backward()
            except Exception as error:
                error.add_note(f"shardwise: on rank {self._channels.everyone.rank}, in microbatch {at} of {len(parts)}")
                raise
            losses.append(loss.detach())
        return losses

    # [3] ------------------------------------------------------------------------------------------------------------

    def _reduce(self) -> dict[str, torch.Tensor]:
        """Sum over all data ranks; the owned gradients by name, in the order of the model's parameters."""
        self._gradients.reduce()
        owned = {each.segment.name: self._gradient_of(each) for each in self._buffers.owned}
        return {name: owned[name] for name in self._names if name in owned}

    # [4] ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _close(
        self, losses: Sequence[torch.Tensor], weighting: Weighting, gradients: Mapping[str, torch.Tensor]
    ) -> Closing:
        """Take the mean of the gradients, and exchange what every rank has to know before any of them updates."""
        everyone = self._channels.everyone
        touched = self._gradients.touched
        divisor = weighting.num_microbatches if self.plan.merge.average else everyone.size
        squares = divide_and_square(gradients.values(), divisor, everyone.device)
        counts = self._channels.replicas.rank == 0  # replicas hold the same elements: one of them counts
        self.counters.exchanges += 1
        closing = exchange_closing(
            everyone,
            loss=self._share_of_loss(losses, weighting),
            squares=squares if counts else 0.0,
            norm_dtype=self._norm_dtype,
            touched=[name in touched for name in self._names],
            changed_buffers=self._model_buffers.changed(),
        )
        if everyone.size > 1:
            return closing
        used = [gradient for name, gradient in gradients.items() if name in touched]
        return replace(closing, grad_norm=norm_in_one_process(used))

    def _share_of_loss(self, losses: Sequence[torch.Tensor], weighting: Weighting) -> float:
        """This rank's part of the weighted mean."""
        values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
        weights = weighting.by_rank[self._channels.everyone.rank]
        return math.fsum(w * value for w, value in zip(weights, values, strict=True) if w) / weighting.total

    def _gradient_of(self, owned: Owned) -> torch.Tensor:
        start = owned.segment.start
        flat = self._gradients.reduced_of(owned.segment.name)[start : start + owned.segment.run.num_elements]
        return flat.view(owned.parameter.shape)

    # [5], [6] -------------------------------------------------------------------------------------------------------

    def _update(self, closing: Closing, gradients: Mapping[str, torch.Tensor]) -> None:
        """Clip, step the optimizers on the owned masters, cast once, gather the working copies."""
        touched = {name for name, flag in zip(self._names, closing.touched, strict=True) if flag}
        for owned in self._buffers.owned:
            # Like in one process: what no microbatch used has no gradient, and the optimizer leaves it alone.
            name = owned.segment.name
            owned.parameter.grad = gradients[name] if name in touched else None
        if self.plan.clip_grad_norm is not None:
            masters = [owned.parameter for owned in self._buffers.owned if owned.parameter.grad is not None]
            clip(masters, norm=closing.grad_norm, max_norm=self.plan.clip_grad_norm, dtype=self._norm_dtype)
        for optimizer in self.optimizers:
            optimizer.step()
        for owned in self._buffers.owned:
            owned.parameter.grad = None  # a view of the arena, which the next update may lay out anew
        self.counters.updates += 1
        self._buffers.publish(self.counters)

    @contextmanager
    def _stopping_peers(self, doing: str) -> Iterator[None]:
        """Tell the other ranks when this one stops, so that none of them waits for it."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self._channels.everyone.abort(f"{type(error).__name__} in {doing}: {error}")
            raise


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
