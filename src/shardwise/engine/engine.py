"""The engine: a model under a plan, trained one update at a time. What it costs a rank is in `rank_parts`.

One update on two data ranks (numbers as in docs/internals.md):

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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Generic, NoReturn, cast, overload

import torch
from torch import nn
from typing_extensions import TypeVar

from shardwise.comm.agreement import agreed
from shardwise.engine.activations.kept_activations import KeptActivations
from shardwise.engine.forward.batches import (
    Batch,
    GivenMicrobatches,
    LossFunction,
    TrainedBatches,
    Weight,
    check_loss,
    given_microbatches,
    moved_to,
)
from shardwise.engine.forward.inventory import ModelContents, kind_in, refuse_moved
from shardwise.engine.forward.trained_parameters import ALL, TrainedParameters, TrainedSet
from shardwise.engine.guards.forward_writes import ForwardWrites
from shardwise.engine.guards.plain_calls import CHANGED_LINES
from shardwise.engine.model.rank_parts import Asked, RankParts, footprint_of, traffic_of
from shardwise.engine.model.state import EngineRestoration, HandOver, names_of_state, state_of
from shardwise.engine.model.whole import whole_inside
from shardwise.engine.optimizers.known import KnownOptimizer
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.step.channels import stopping_peers
from shardwise.engine.step.closing import StepClosing
from shardwise.engine.step.edges import Gather, Metric, OutputObserver, Prompts, Seeds, StepObserver
from shardwise.engine.step.exchange import factors_on_device
from shardwise.engine.step.loss_entries import exchange_evaluation, parts_of_evaluation
from shardwise.engine.step.loss_scaling import to_settings
from shardwise.engine.step.norm import NormParts, Norms
from shardwise.engine.step.opening import StepOpening
from shardwise.engine.step.reports import EvaluationReport, StepReport, report_on_look
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.engine.zero.flat_params import placed
from shardwise.errors import ModelError, OptimizerError, ShardwiseError, few_of
from shardwise.plan import Footprint, Traffic
from shardwise.plan.optimizer_entries import NumberedParameter
from shardwise.plan.saved_settings import SavedRecord
from shardwise.space import Piece

Value = TypeVar("Value")
Output = TypeVar("Output", default=Any)

Model_co = TypeVar("Model_co", bound=nn.Module, covariant=True, default=nn.Module)


class Engine(Generic[Model_co]):
    """A model that trains under a plan. Built by `shardwise.parallelize`."""

    def __init__(
        self,
        rank: RankParts,
        *,
        rebuild: Callable[[Asked], "Engine[Model_co]"],
        refit: Callable[["Engine[Any]"], None],
    ) -> None:
        """`refit`: see `relayout.refit`."""
        self._rank = rank
        self.model = cast("Model_co", rank.model)
        """The object that was given to `parallelize`. Its parameters are this rank's working copies."""
        self.plan = rank.plan
        """The plan under which it trains."""
        self.optimizers: tuple[torch.optim.Optimizer, ...] = tuple(known.optimizer for known in rank.updates.optimizers)
        """The optimizers over this rank's masters; attach torch's learning-rate schedulers to them."""
        self.counters = rank.updates.counters
        """Updates, collectives and casts since `parallelize` returned."""
        self.rebuild = rebuild
        """Puts the model under a plan once more: `parallelize.parallelize_with`, for `sw.relayout`."""
        self._refit = refit
        self._chosen: tuple[TrainedSet, NormParts | None] = ALL, None
        """What the step that opened last trains, and the parts whose norms it takes."""
        self._added: Mapping[int, Mapping[int, Sequence[str]]] = {}
        """What came into groups of the optimizers since, and is not trained yet."""
        self._computation = rank.computation
        self.channel = rank.channels.world
        """All ranks that train the model; `sw.save`, `sw.load` and `sw.full` go over it where they are given none."""
        self.asked_to_stop = False
        """Whether some rank asked to stop in the last step; the same on all ranks."""
        self.see_losses: Callable[[list[torch.Tensor]], object] | None = None
        """Called in each step with the losses of its microbatches on this rank; zero where another stage has them."""
        self.see_gradients: Callable[[], object] | None = None
        """Called before each update, while `p.grad` of the model is that of a plain program, or refuses to be read."""
        self._asks_to_stop: list[Callable[[], bool]] = []
        self._channels = rank.channels
        self._buffers = rank.tensors.buffers
        self._restore_packed = kind_in(rank.model).kept(rank.model)
        self._gradients = rank.gradients.reduced
        self.tensor_decision = rank.computation.forwards.decision
        """How parameters are cut along tp: the plan, the rules that "auto" inferred, and what it left whole and why."""
        names = rank.names
        self._writes = ForwardWrites(rank.model, names.specs, rank.plan.mesh, rank.channels.world, self._buffers)
        # Where parameters were when the optimizers were built: a module that is put in later has some that nobody
        # trains.
        self._contents = ModelContents(
            rank.model, [rank.tensors.owned, rank.tensors.ties.held], ties=names.ties, trainable=names.trainable
        )
        self._trained = TrainedParameters(names.groups, names.trainable, self._contents)
        self._has_gradients = False
        self.successor: Engine[nn.Module] | None = None
        """The engine to which `sw.relayout` has given the model; this one refuses from there on."""
        self._observer, self._record = StepObserver(), SavedRecord()
        if find_spec("shardwise.engine.telemetry") is not None:
            from shardwise.engine.telemetry import step_meter

            self._observer = step_meter(rank.channels.world)
        if find_spec("shardwise.plan.model_records") is not None:
            from shardwise.plan.model_records import ModelRecord

            self._record = ModelRecord()
        self._opening = StepOpening(rank)
        self._closing = StepClosing(rank, writes=self._writes, observer=self._observer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, where there is one. Raises OptimizerError where the model has several (see `optimizers`)."""
        if len(self.optimizers) != 1:
            raise OptimizerError(f"the model has {len(self.optimizers)} optimizers; use engine.optimizers")
        return self.optimizers[0]

    @cached_property
    def trained_batches(self) -> TrainedBatches:
        """Tells `sw.Data` of each step."""
        return TrainedBatches()

    @property
    def steps(self) -> int:
        """Steps begun so far, those of a run that was loaded included; skipped ones count. Of the successor too."""
        return self._computation.step if self.successor is None else self.successor.steps

    @property
    def pipeline(self) -> PipelineRunner | None:
        """What runs the stages of this rank; None where the model is not cut into stages."""
        return self._computation.runner

    @property
    def activations(self) -> KeptActivations:
        """Which modules run again in backward, and which have saved tensors on the host; see its `report`."""
        return self._computation.activations

    @property
    def recorder(self) -> SpanRecorder:
        """Records forwards, backwards and waits of this rank while its `spans` is a list; on request its updates."""
        return self._computation.recorder

    def ask_in_steps(self, stop: Callable[[], bool]) -> Callable[[], None]:
        """Ask `stop` once in every step from now on, next to the `stop` of `step`; returns what ends that."""
        self._asks_to_stop.append(stop)
        return lambda: self._asks_to_stop.remove(stop)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise ModelError: a loop that calls an engine as its model would train nothing (accelerate's prepare)."""
        raise ModelError(f"an engine is no module: call engine.step(batch) or engine.predict(inputs). {CHANGED_LINES}")

    def step(
        self,
        batch: Batch,
        *,
        microbatches: int | None = None,
        stop: Callable[[], bool] | None = None,
        only: str | Sequence[str] | None = None,
        loss: LossFunction | None = None,
        norms: Norms | None = None,
    ) -> StepReport:
        """Train on this data rank's share of a batch: one update of all parameters. All ranks call it together.

        batch: tensors with equally many rows, in any nesting of dicts, tuples, lists and dataclasses; or a list of
            such, each of them one microbatch of any shape. The same for all ranks along pp and tp. The model gets the
            entries that its forward names, or the first of (inputs, targets).
        microbatches: into how many parts of as equal size as can be the rows are cut; None: the plan's. A list of
            microbatches has its own number, also another one on each data rank.
        stop: asked once per step. Where it is true on any rank, `stop` of the report is true on all, so that a signal
            to one ends all loops after the same step. It costs no message.
        only: the group of parameters that is updated, or several (`groups` of `parallelize`). The others have no
            gradient in this step, and their optimizers do not step. None: all.
        loss: the loss function of this step, as in `parallelize`; None: that of `parallelize`.
        norms: the parts of the gradient whose norms the report has: "groups", "layers" (the modules that hold
            parameters), "parameters", or {name: glob or globs}. It costs no message and no further pass.

        Raises BatchError, and ModelError for a model that was changed since, the same on all ranks and before anything
        is computed; ModelError for a forward without a scalar loss; PeerError when another rank stops.
        """
        self._refuse_inside_averaged("engine.step")
        self._observer.begin()
        parts, weights, weighting = self._opening.open(
            batch,
            microbatches,
            is_step=True,
            purpose="weights of a step",
            begin=lambda: self._choose(only, norms, loss),
        )
        # The most of any rank: they accumulate in one dtype, and reduce alike.
        num_microbatches = len(weighting.joint)
        trained, asked = self._chosen
        if self._contents.unfrozen or self._added:
            self._refit(self)
            return self.step(batch, microbatches=microbatches, stop=stop, only=only, loss=loss, norms=norms)
        self._computation.check_joint(weighting.joint)
        scaling = self._computation.loss_scale
        with self._stopping_peers("a step"), self._computation.autocast.left():
            self._has_gradients = False
            # The arena may be laid out anew, under the views that `gradients()` gave: so it gives none from here on.
            self._closing.begin(num_microbatches, weighting, trained, asked)
            factors: Sequence[Weight] = weighting.factors(self._channels.everyone.rank)
            own_weights = None
            if not weighting.is_known:
                own_weights, factors = factors_on_device(self._channels.everyone, weights, weighting)
            # Launched before the forwards, which may write to the batch.
            digests = self._opening.digests(batch)
            with self._trained.alone(trained):
                losses = self._computation.train(
                    # The last backward differs from those before: what it finishes gets no further terms, so a bucket
                    # that is full may be reduced while backward still runs. Before it, every bucket still waits for the
                    # next microbatch.
                    parts,
                    factors,
                    joint=weighting.joint,
                    before_last_backward=self._gradients.expect_last,
                    trained=trained,
                    loss=loss,
                )
            if self.see_losses is not None:
                self.see_losses([each.loss for each in losses])
            gradients = self._closing.reduce()
            self._has_gradients = True
            gives = self._closing.gives(losses, weighting, own_weights, digests, gradients)
            # Each one in every step, whatever another says: a loop with callbacks also notes the learning rates then.
            asks = [asked() for asked in (stop, *self._asks_to_stop) if asked]
            closing, figures = self._closing.close(gives, stop=any(asks), see=(see := self.see_gradients))
            self.asked_to_stop = closing.flags.stop
            self._closing.update(closing.flags, figures, gradients, see)
            if scaling is not None:
                scaling.learn(figures)
            changed = {
                # A module that two stages use (a tied block) may have changed on both. The first rank, and so the
                # first stage, decides: all ranks choose alike.
                at: self._channels.ranks.stages[rank]
                for at, rank in closing.changed_buffers.items()
            }
            self._rank.tensors.model_buffers.synchronise(
                self._channels.everyone, self._channels.pipeline, changed, self.counters
            )
        self.trained_batches.tell(batch)
        try:
            # Outside of the block: all ranks have the same figures, so all raise, and none has to stop the others.
            self._closing.judge(last=figures)
        except ShardwiseError:
            # Where a peer is lost, transfers end with numbers that mean nothing. Then this raises what has happened.
            self._channels.world.exchange(b"", purpose="verdict on an earlier step")
            raise
        self.activations.settle()
        self._observer.end()
        # What nobody asked for, and what the plan says, is known without a look at the device, and stays as it is.
        shown = None if norms is None else asked
        known: dict[str, Any] = {"norms": None} if shown is None else {}
        if scaling is None or scaling.fixed is not None:
            known["loss_scale"] = None if scaling is None else scaling.fixed
        return report_on_look(
            lambda: {
                "loss": figures.loss,
                "losses": {"loss": figures.loss, **figures.others},
                "grad_norm": figures.grad_norm,
                "skipped": not figures.is_finite,
                "weight": figures.weight,
                "loss_scale": figures.loss_scale,
                "norms": None if shown is None else shown.reported(figures.norms, trained),
                **known,
            },
            **known,
            num_microbatches=len(parts),
            stop=closing.flags.stop,
            times=partial(self._observer.times, closing.times),
        )

    def evaluate(self, batch: Batch, *, metrics: Mapping[str, Metric] | None = None) -> EvaluationReport:
        """The loss on this data rank's share of a batch, without gradients, in evaluation mode; metrics of all shares.

        batch: as in `step`; a list of all batches of a dataset gives the metrics of the dataset.
        metrics: by name f(output, microbatch) -> tensor, which is averaged by rows; a torchmetrics object for batches
            (inputs, target); or (such an object, f(output, microbatch) -> (preds, target)). It stays as it is.

        Ranks may have different numbers of rows, and some of them none. Raises the errors of `step`, and MetricError.
        """
        # Ranks may have unlike numbers of microbatches. The last batch may have rows on some ranks only.
        observer: OutputObserver | None = None
        if metrics is not None and metrics != {}:
            from shardwise.engine.metrics import EvaluationMetrics

            observer = EvaluationMetrics(
                metrics,
                rows=self._computation.loss.rows,
                device=self._channels.world.device,
                speaks=self._channels.tensor.rank == 0,
            )

        def begin() -> str:
            self._computation.check_free("engine.evaluate")
            self._check_model()
            if observer is not None:
                observer.begin()
            return ""

        purpose = "weights of an evaluation"
        parts, _, weighting = self._opening.open(batch, None, is_step=False, purpose=purpose, begin=begin)
        own = weighting.of_rank(self._channels.everyone.rank)
        with self._stopping_peers("an evaluation"), self._writes.refused(), self._computation.autocast.left():
            losses = self._computation.evaluate(parts, own, weighting.joint, observer.see if observer else None)
            self.counters.exchanges += 1
            given = parts_of_evaluation(losses, weighting, self._channels.everyone.rank, observer)
        # Outside of the block: what is refused here is refused by all ranks, and none has to stop the others.
        return exchange_evaluation(
            given, channel=self._channels.world, weighting=weighting, ranks=self._channels.ranks, observer=observer
        )

    @overload
    def predict(
        self, inputs: Mapping[str, Value], output_of: Callable[[dict[str, Value]], Output] | None = None
    ) -> Output: ...
    @overload
    def predict(
        self, inputs: list[dict[str, Value]], output_of: Callable[[dict[str, Value]], Output] | None = None
    ) -> list[Output]: ...
    def predict(self, inputs: Any, output_of: Callable[[Any], Any] | None = None) -> Any:
        """What `output_of` makes of the inputs by calling the model, without gradients, in evaluation mode.

        All ranks along pp and tp call it together, with equal inputs (their tensors are moved to the device), and get
        the same: a tensor, or any nesting of tensors in tuples, lists, dicts and dataclasses. None: the model's
        output, called as in a step. Whatever else `output_of` does runs on each of them as well. Under pp, an object
        that modules of stages are given (a cache) is None in it. Under stage 3 all data ranks call it together, with
        different inputs, and run the same modules in the same order. A list of inputs, such as the microbatches of a
        step, gives the list of their outputs; each data rank may have another number of them, also none. Raises
        ModelError for a forward that asks for what only another rank has, and PeerError.
        """
        self._check_turn()
        self._computation.check_free("engine.predict")
        device = self._channels.everyone.device
        given = given_microbatches(inputs)
        parts = [moved_to(inputs, device)] if given is None else GivenMicrobatches(given, device)
        with self._stopping_peers("a prediction"), self._writes.refused(), self._computation.autocast.left():
            self._buffers.check_masters("engine.predict", has_stages=self.plan.mesh.pp > 1)
            found = self._computation.predict(
                parts, output_of or self._computation.loss.output, is_list=given is not None
            )
        return found if given is not None else found[0]

    def generate(
        self, inputs: Prompts | Sequence[Prompts], *, seed: Seeds = None, gather: Gather = "each", **kwargs: Any
    ) -> Any:
        """What the model's `generate(inputs, **kwargs)` gives in one process, in evaluation mode.

        All ranks along pp and tp call it together, with equal arguments, and get the same. Under stage 3 all data ranks
        call it, each with its own inputs and lengths. A rank without rows gives None, and gets a tensor [0, 0].
        inputs: a tensor, or tensors by name; they are moved to the device. A list of such gives a list of results, as
            a loop over it does; each data rank may have another number of them, also none.
        seed: as by `torch.manual_seed(seed)` before; None: it follows from the engine's, the step and the data rank. A
            list: one for each of the inputs, so that what is drawn for one does not depend on the others.
        gather: under stage 3, "each" gathers for each call of the model, in the memory of an evaluation; "once"
            gathers all parameters first, and each rank holds them until the end.

        Raises ModelError for a model without `generate`, BatchError for other arguments, and PeerError.
        """
        from shardwise.engine.generation import calls_of

        self._check_turn()
        self._computation.check_free("engine.generate")
        device = self._channels.everyone.device
        calls, first_seed = calls_of(self.model, inputs, kwargs, device=device, gather=gather, seed=seed)
        with self._stopping_peers("a generation"), self._writes.refused(), self._computation.autocast.left():
            self._buffers.check_masters("engine.generate", has_stages=self.plan.mesh.pp > 1)
            found = self._computation.generate(calls, seed=first_seed, gathers_once=gather == "once")
        return found if isinstance(inputs, list | tuple) else found[0]

    @property
    def num_averaged(self) -> int:
        """How often weights were averaged, the same on all ranks; 0 for a plan without an average."""
        return 0 if self._rank.updates.averages is None else self._rank.updates.averages.num_averaged

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages of the weights in the place of the weights: `with engine.averaged(): engine.evaluate(..)`.

        All ranks go in and out together. Inside, `evaluate`, `predict`, `sw.full` and the model itself compute with
        the averages. A save inside has the model with them, and neither the state of optimizers nor the step. After
        the block the weights are back to the bit, also after an error on one rank; the others then raise PeerError.
        Raises ModelError, the same on all ranks, for a plan without an average, and for a step, a load or a relayout
        inside.
        """
        from shardwise.engine.averages import check_in_place

        averages = check_in_place(self._rank.updates.averages, self.channel, partial(self._check_model, reads_all=True))
        with averages.in_place(self.channel, partial(self._buffers.adopt_writes, reads_all=True), self._publish):
            yield

    def state(self) -> dict[Piece, torch.Tensor]:
        """What this rank owns, as views: pieces of parameters, masters and optimizer state; the model's buffers.

        Raises OptimizerError for optimizer state that is neither a tensor nor a number.
        """
        self._check_turn()
        self._closing.judge()
        self._restore_packed()
        refuse_moved([*self._buffers.moved(), *self._rank.tensors.ties.moved()])
        self._buffers.adopt_writes(reads_all=True)
        # After `adopt_writes`: masters would be saved without what `load_state_dict` wrote to working copies.
        return state_of(self._rank, self._known_optimizers)

    def gradients(self) -> dict[Piece, torch.Tensor]:
        """The gradients of the last step, of what this rank owns, as the optimizer saw them: averaged and clipped.

        Views, in the dtype of the masters, of the piece's shape, or flat for a piece with a run. They hold until the
        next step begins; before the first there are none. Of parameters that no microbatch used, they are zero; those
        that the step did not train (`only`, frozen) have none.
        """
        spec_of = {spec.name: spec for spec in self._rank.tensors.owned.specs}
        pieces: dict[Piece, torch.Tensor] = {}
        # Views of the arena, not copies: a copy would double the memory of the gradients for a figure in a log.
        gradients = self._gradients.views_of(self._closing.owned) if self._has_gradients else {}
        for owned in self._closing.owned if self._has_gradients else ():
            if (name := owned.segment.name) not in self._closing.trained:
                continue
            pieces |= placed(name, gradients[name], spec_of[name], owned.segment)
        return pieces

    def settings(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps in addition to the state: the plan, ties, random numbers, optimizers, the
        model's configuration if it has one (`config.json`), the rewrite of its load.

        Ranks differ in `plain` and `none` only, which name what is no tensor in the optimizer state that a rank has.
        """
        self._check_turn()
        name_of = self._rank.updates.name_of()
        of_model = {
            "plan": self.plan.text(),
            "ties": self._rank.names.ties,
            **(self._record.settings(self.model) if self.channel.rank == 0 else {}),  # once is enough
        }
        averages = self._rank.updates.averages
        if averages is not None and averages.are_in:
            return of_model  # as `state`: a run does not go on from averages with the moments of other weights
        return of_model | {
            "random": {"seed": self._computation.random.seed, "step": self._computation.step},
            **to_settings(self._computation.loss_scale),
            **({} if averages is None else averages.settings()),
            "optimizers": [known.named(name_of).to_json() for known in self._known_optimizers],
        }

    def hand_over(self, *, doing: str = "sw.relayout", needs_weights: bool = True) -> HandOver:
        """What `relayout` and `whole` take; all ranks call it together.

        Raises, the same on all ranks, ModelError for a model that is no longer this engine's, and OptimizerError.
        """
        world = self._channels.world
        with agreed(world, purpose=f"verdict on the engine before {doing}", doing=doing):
            if needs_weights:
                self._refuse_inside_averaged(doing)
            self._check_model()
            state, settings = self.state(), self.settings()
        return HandOver(
            rank=self._rank,
            state=state,
            settings=settings,
            optimizers=self._known_optimizers,
            frozen=self._contents.frozen,
            unfrozen=self._contents.unfrozen,
        )

    def whole(
        self,
        *,
        optimizer: bool = True,
        rank0_only: bool = False,
        offload: bool = True,
        only: Collection[str] | None = None,
    ) -> AbstractContextManager[None]:
        """Inside, the model and its optimizers are those of the plain program: whole, and without the plan's wrappers.

        `state_dict()`, `parameters()`, `save_pretrained`, `copy.deepcopy(model)` and `torch.save` see masters, in the
        dtypes in which the model came. `load_state_dict` and other writes are taken in at the end, from rank 0.
        All ranks enter and leave it together.
        optimizer: optimizers too. rank0_only: on rank 0 alone; the model of the others stays as it is, and they wait
            at the end. offload: whole tensors are on the CPU, else on the engine's device.
        only: names or globs of parameters and buffers; the others, and the state of optimizers for them, have shapes
            inside, and no values (device "meta").

        A rank that takes part holds all these tensors besides its own. Raises ModelError, the same on all ranks, for a
        model that was changed since, for an error inside, and where not all ranks wrote; CheckpointError for values
        that do not fit.
        """
        # Inside of `averaged` there is no state of optimizers that fits the weights.
        doing = f"engine.whole(optimizer={optimizer})"
        hand_over = partial(self.hand_over, doing=doing, needs_weights=optimizer)
        if isinstance(only, str):
            only = (only,)
        which: Any = {"optimizer": optimizer, "rank0_only": rank0_only, "offload": offload, "only": only}
        restore = partial(self.restore, doing="engine.whole() with writes inside")
        return whole_inside(hand_over, restore, self._rank.updates.plain_calls, **which)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, the thread is its caller's: a forward of a step waits, in another greenlet."""
        return self._rank.updates.plain_calls.reads.turned(self._computation.paused(), on=True)

    def take_charge(self, *, frozen: Collection[str] = ()) -> None:
        """Refuse from here on what would go past the engine: see `PlainCalls`.

        frozen: parameters that are frozen at present, and stay the engine's to train.
        """
        with DisableTorchFunctionSubclass():  # at rest or not
            for name in frozen:
                self._contents.parameters[name].requires_grad_(False)
        self._rank.updates.plain_calls.refuse()

    def names(self) -> list[str]:
        """Names of the model's parameters and persistent buffers in its own order, ties under each of their names."""
        return names_of_state(self.model)

    def numbering(self) -> list[list[list[NumberedParameter]]]:
        """For each optimizer and each of its groups: all its parameters in the order in which torch counts them."""
        shapes = {spec.name: spec.global_shape for spec in self._rank.names.specs}
        trained = {name for known in self._known_optimizers for names in known.parameters for name in names}
        return [
            [
                [
                    NumberedParameter(name=name, shape=shapes[name], trained=name in trained)
                    for name in dict.fromkeys(names)
                ]
                for names in known.given
            ]
            for known in self._known_optimizers
        ]

    def restore(
        self, stored: Mapping[str, Piece], settings: Mapping[str, object], *, doing: str = "sw.load or sw.stream"
    ) -> EngineRestoration:
        """Prepare to take over a checkpoint, without changing anything; `sw.load` calls it and does the rest.

        stored: every tensor of the checkpoint as one piece. settings: as `settings` gave them, from any layout; {}
        for plain weights. Raises ModelError for a model whose parameters were replaced since parallelize, and
        CheckpointError for settings that are not understood.
        """
        self._refuse_inside_averaged(doing)
        self._check_model(reads_all=True)  # what was written from outside would come over the values that are read
        return EngineRestoration(
            self._rank,
            self._known_optimizers,
            stopping_peers=lambda: self._stopping_peers("a load"),
            stored=stored,
            settings=settings,
            take_note=self._record.after(settings),
        )

    def footprint(self, *, microbatches: int | None = None) -> Footprint:
        """Bytes that the plan gives this rank's buffers; microbatches: per update, None: the plan's."""
        return footprint_of(self._rank, self._count(microbatches))

    def traffic(self, *, microbatches: int | None = None) -> Traffic:
        """Bytes of gradients and parameters that this rank sends per update; microbatches: None: the plan's."""
        return traffic_of(self._rank, self._count(microbatches))

    def _count(self, microbatches: int | None) -> int:
        return self.plan.merge.microbatches if microbatches is None else microbatches

    # [1] ------------------------------------------------------------------------------------------------------------

    def _check_turn(self) -> None:
        if self.successor is not None:
            raise ModelError("sw.relayout has given the model of this engine to another; go on with that one")
        self._rank.updates.plain_calls.check_left()

    def _check_model(self, *, reads_all: bool = False) -> None:
        self._check_turn()
        self._restore_packed()
        self._contents.check()
        self._added = self._rank.updates.plain_calls.added(self._contents.parameters)
        refuse_moved([*self._buffers.moved(), *self._rank.tensors.ties.moved()])
        self._buffers.adopt_writes(reads_all=reads_all)

    def _choose(self, only: str | Sequence[str] | None, norms: Norms | None, loss: LossFunction | None) -> str:
        """What a step trains and reports, equal where ranks do the same; empty for the plain case."""
        self._computation.check_free("engine.step")
        self._check_model()
        check_loss(loss)
        if self._contents.unfrozen:
            self._check_unfrozen()
        trained = self._trained.of(only)
        self._chosen = trained, self._closing.norms(norms)
        new = f", with {self._added} new in groups" if self._added else ""
        shown = "" if norms is None else f", with norms of {norms!r}"
        shown += self._closing.hooked.take_in(compares=self.plan.mesh.pp == 1)
        return f"{trained.described or 'all'}{new}{shown}" if trained.described or new or shown else ""

    @property
    def _known_optimizers(self) -> tuple[KnownOptimizer, ...]:  # with what came into their groups since
        known, added = self._rank.updates.optimizers, self._added
        return tuple(each.taking_in(added.get(at, {})) for at, each in enumerate(known)) if added else known

    def _check_unfrozen(self) -> None:
        """Raise OptimizerError where parameters were unfrozen that no optimizer has."""
        held = {name for known in self._known_optimizers for names in known.given for name in names}
        if lost := sorted(self._contents.unfrozen - held):
            raise OptimizerError(
                f"{len(lost)} parameters were unfrozen, and no optimizer has them: {few_of(lost)}. Give them to one, "
                "optimizer.add_param_group({'params': [...]}), or freeze them again (requires_grad_(False))"
            )

    def _refuse_inside_averaged(self, call: str) -> None:
        if self._rank.updates.averages is not None:
            self._rank.updates.averages.refuse_inside(call)

    def _publish(self) -> None:
        """Give all ranks the values that their owners have, as after an update."""
        with self._stopping_peers("engine.averaged()"):
            self._buffers.publish(self.counters)
            self._rank.tensors.ties.publish()

    def _stopping_peers(self, doing: str) -> AbstractContextManager[None]:
        stopping = stopping_peers(self._channels.world, doing, advice=self._computation.advice)
        return self._rank.updates.plain_calls.reads.turned(stopping, on=False)


def full_state_dict(engine: Engine, *, rank0_only: bool = True, offload: bool = True, optimizer: bool = False) -> Any:
    """What `state_dict()` of the plain model gives, as a dict of whole tensors; with `optimizer`, also of optimizers.

    Values are the masters', in the dtypes in which the model came to parallelize. All ranks call it together.
    rank0_only: the other ranks get {}. offload: tensors on the CPU, else on the engine's device.
    optimizer: give (model, optimizer): also what `state_dict()` of the plain optimizer gives, or a list where the
        engine has several. A plain loop that loads both goes on bit for bit.

    A rank that gets tensors holds the whole of them. Raises the errors of `Engine.whole`.
    """
    model: Mapping[str, Any] = {}
    states: list[Mapping[str, Any]] = []
    with engine.whole(optimizer=optimizer, rank0_only=rank0_only, offload=offload):
        if engine.channel.rank == 0 or not rank0_only:
            model = engine.model.state_dict()
            states = [each.state_dict() for each in engine.optimizers] if optimizer else []
    if not optimizer:
        return model
    return model, states[0] if len(states) == 1 else states or {}
