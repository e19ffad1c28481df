"""Forward and backward of a rank's microbatches: of the whole model in turn, or of its stages by a schedule.

Streams of random numbers, 2 data ranks with k = 3, step 5: microbatches are numbered over all data ranks, so that masks
belong to the rows and not to the rank.

    data rank 0    microbatches 0 1 2      streams (seed, 5, 0) (seed, 5, 1) (seed, 5, 2)
    data rank 1    microbatches 0 1 2      streams (seed, 5, 3) (seed, 5, 4) (seed, 5, 5)

A microbatch of weight 0 is not computed. `UnevenMicrobatches` lets this rank join what the others reduce or gather
meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.engine.activations.kept_activations import KeptActivations
from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.batches import (
    LossFunction,
    LossOfModel,
    Microbatch,
    MicrobatchLoss,
    NoMoreMicrobatches,
    See,
    Weight,
    scaled_loss,
)
from shardwise.engine.forward.passes import Joint, Passes, UnevenMicrobatches
from shardwise.engine.forward.precision import AutocastRegions, dtypes_explained
from shardwise.engine.forward.randomness import EVALUATION, KeyedRandom, Stream
from shardwise.engine.forward.trained_parameters import ALL, TrainedSet
from shardwise.engine.model.batch_statistics import synchronised_in
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.step.channels import EngineChannels
from shardwise.engine.step.edges import ModelCall, RegionProof
from shardwise.engine.step.loss_parameters import LossParameters
from shardwise.engine.step.loss_scaling import LossScale
from shardwise.engine.tensor.styles import module_noted
from shardwise.engine.tensor.tensor_decision import TensorDecision
from shardwise.errors import ModelError
from shardwise.plan import Plan

_ADVICE_ON_CHUNKS = (
    "with several stages per rank, data ranks reduce gradients in the order of their schedules. Forwards that read "
    "values, or take another path, on some data ranks only change that order there. Set pipeline.schedule to 1f1b, or "
    "sharding.stage to 1"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwards:
    """What a plan has put around the forwards of one rank."""

    random: KeyedRandom
    runner: PipelineRunner | None
    """Of the stages of this rank; None: the whole model is here."""
    passes: Passes
    """What data ranks do together around microbatches."""
    activations: KeptActivations
    """What becomes of the tensors that forwards save for backward."""
    decision: TensorDecision
    """How modules are cut along tp."""
    proof: RegionProof | None
    """Of that."""
    on_loss: Sequence[Callable[[torch.Tensor], None]]
    """See each loss before its backward, where the whole model is here."""


class Computation:
    """What a rank computes of each batch.

    Each microbatch has its own stream of random numbers, numbered over all data ranks: its draws do not depend on its
    rank.
    """

    def __init__(self, loss: LossOfModel, plan: Plan, channels: EngineChannels, forwards: Forwards) -> None:
        channel, runner, passes = channels.world, forwards.runner, forwards.passes
        self.forwards = forwards
        self.random = forwards.random
        self.step = 0
        """The steps begun so far."""
        self.runner = runner
        self.recorder = SpanRecorder(channel.rank, channel.device) if runner is None else runner.recorder
        """Records forwards, backwards and updates of this rank, while somebody wants to know."""
        self._model = loss.model
        self.loss = loss
        self.autocast = AutocastRegions(channel.device)
        """The caller's region of torch.autocast. Forwards and losses run in one like it."""
        self._loss_inside = self.autocast.inside(loss.measured)
        self._device = channel.device
        self._rank = channel.rank
        self._data_rank = plan.mesh.data_rank(channel.rank)
        self._precision = plan.precision
        scale = plan.precision.loss_scale
        self.loss_scale = None if scale is None else LossScale(scale, channel.device)
        """What losses are multiplied by before their backward."""
        self._passes = passes
        self.advice = passes.advice
        """What to do where ranks make other calls than their peers."""
        if runner is not None and runner.stages.num_chunks > 1 and passes.moves_in_step:
            self.advice = "\n".join(filter(None, [_ADVICE_ON_CHUNKS, passes.advice]))
        self._judging = _unjudged if forwards.proof is None else forwards.proof.judging
        self.activations = forwards.activations
        self.loss_parameters = LossParameters(loss.model, channels)
        """What is trained and is not the model's."""
        self._running = ""
        """The call of the engine that goes on."""

    def check_free(self, call: str) -> None:
        """Raise ModelError where the program makes a call of the engine inside of another that has no room for it."""
        # Under pp and stage 3 a call sets up what ranks do together; an update changes the weights of any other call.
        if self._running and (call == "engine.step" or self.runner is not None or self._passes.gathers):
            raise ModelError(
                f"{call} was called inside of {self._running}, by a loss function or another function that it runs. "
                "Ranks go through one call at a time: make the inner call first, and give its result with the batch"
            )

    def check_joint(self, joint: Sequence[Joint]) -> None:
        """Raise ModelError, the same on all ranks, where data ranks would wait for each other's rows."""
        if Joint.SOME in joint and synchronised_in(self._model):
            raise ModelError(
                "some data ranks skip a microbatch (it has no weight, or the list is shorter), and SyncBatchNorm takes "
                "the rows of all. Give all data ranks the same number of microbatches with a weight, or use BatchNorm"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The thread is its caller's inside: the forward that goes on waits, in another greenlet."""
        stream = self.random.active
        with nullcontext() if self.runner is None else self.runner.paused():
            if stream is not None:
                stream.__exit__()
            try:
                yield
            finally:
                if stream is not None:
                    stream.__enter__()

    def _during(self, call: str) -> AbstractContextManager[None]:
        """The call goes on in the body."""
        return attributes_set(self, {"_running": call})

    def train(
        self,
        parts: Sequence[Microbatch],
        factors: Sequence[Weight],
        *,
        joint: Sequence[Joint],
        before_last_backward: Callable[[], None],
        trained: TrainedSet = ALL,
        loss: LossFunction | None = None,
    ) -> list[MicrobatchLoss]:
        """Forward and backward of every microbatch whose factor is not 0; the losses, without a graph.

        What does not count is not computed: a mean over nothing is nan in many models. A loss that another rank has
        is zero here. `joint`: which data ranks compute each. `trained`: what gets
        gradients; the others' `requires_grad` is off. `loss`: in the place of that of the engine. Raises ModelError
        where nothing can be learnt from a loss.
        """
        # Streams are numbered by all microbatches, not by the counted ones: a weight of 0 shifts no other
        # microbatch's masks.
        streams = self._streams(self.step, len(parts), len(joint))
        # Counts skipped updates too: the batch after one that overflowed draws masks of its own.
        self.step += 1
        # A factor that is on the device is not read, and its microbatch is computed.
        counted = [at for at, factor in enumerate(factors) if isinstance(factor, torch.Tensor) or factor]
        if self.runner is not None:
            self.runner.turn_to(trained)
        with (
            self._during("engine.step"),
            self._judging(by_all=True),
            UnevenMicrobatches(self._passes, counted, joint) as rounds,
            self._explained(),
            self.activations.measuring(len(counted), trained),
        ):
            asked = self.loss.with_loss(loss)
            loss_of = self.loss_parameters.watching(
                self._loss_inside if loss is None else self.autocast.inside(asked.measured),
                sees_output=asked.takes_output,
            )
            computed = self._train_counted(loss_of, parts, factors, streams, counted, rounds, before_last_backward)
        if len(computed) == len(parts):
            return computed
        found = dict(zip(counted, computed, strict=False))
        zero = MicrobatchLoss(torch.zeros((), device=self._device), {})
        return [found.get(at, zero) for at in range(len(parts))]

    def _train_counted(
        self,
        loss_of: Callable[[Microbatch], MicrobatchLoss],
        parts: Sequence[Microbatch],
        factors: Sequence[Weight],
        streams: Sequence[Stream],
        counted: Sequence[int],
        rounds: UnevenMicrobatches,
        before_last_backward: Callable[[], None],
    ) -> list[MicrobatchLoss]:
        if self.runner is not None:
            return self.runner.train(
                parts if len(counted) == len(parts) else [parts[at] for at in counted],
                [factors[at] for at in counted],
                loss_of,
                streams=[streams[at] for at in counted],
                before_last_backward=before_last_backward,
                gradient_of=self._gradient_of,
                rounds=rounds,
            )
        losses = []
        for number, at in enumerate(counted):
            try:
                part = parts[at]
                rounds.begin(number)
                self.activations.number = number
                with streams[at]:  # around backward too, which may compute activations again
                    is_last = at == counted[-1]
                    losses.append(
                        self._train(loss_of, at, part, factors[at], before_last_backward if is_last else None)
                    )
            except NoMoreMicrobatches:
                rounds.end()
                break
            except Exception as error:
                # A note, not another error: ranks and tests go by its class.
                error.add_note(f"shardwise: on rank {self._rank}, in microbatch {at} of {len(parts)}")
                raise
            rounds.done()
        return losses

    def evaluate(
        self,
        parts: Sequence[Microbatch],
        weights: Sequence[float],
        joint: Sequence[Joint],
        see: See | None = None,
    ) -> list[MicrobatchLoss]:
        """The losses of every microbatch whose weight is not 0, in evaluation mode; `joint`: see `train`.

        see: is shown the model's outputs, where they are.
        """
        # Ranks may have different numbers of microbatches here: numbers start at a multiple of the largest of them.
        streams = self._streams(EVALUATION, len(parts), len(joint))
        counted = [at for at, weight in enumerate(weights) if weight]
        losses = [MicrobatchLoss(torch.zeros((), device=self._device), {})] * len(parts)
        with (
            self._evaluating("engine.evaluate", by_all=True),
            UnevenMicrobatches(self._passes, counted, joint, trains=False) as rounds,
        ):
            if self.runner is not None:
                computed = self.runner.evaluate(
                    (parts[at] for at in counted),
                    self._loss_inside,
                    streams=[streams[at] for at in counted],
                    rounds=rounds,
                    see=see,
                )
                for at, loss in zip(counted, computed, strict=True):
                    losses[at] = loss
                return losses
            for number, at in enumerate(counted):
                rounds.begin(number)
                with streams[at]:
                    losses[at] = self._loss_inside(parts[at], see)
                rounds.done()
        return losses

    def predict(
        self, parts: Sequence[Microbatch], output_of: Callable[[Microbatch], Any], *, is_list: bool
    ) -> list[Any]:
        """What `output_of` makes of each of the inputs, in evaluation mode, without a graph.

        is_list: each data rank has another number of them, maybe; else all have one.
        """
        joint = self._passes.joint_of(len(parts)) if is_list else [Joint.ALL]
        output_of = self.autocast.inside(output_of)
        found = []
        with (
            self._evaluating("engine.predict", by_all=False),
            UnevenMicrobatches(self._passes, range(len(parts)), joint, trains=False, is_agreed=is_list) as rounds,
        ):
            for number, part in enumerate(parts):
                (stream,) = self._streams(EVALUATION, 1, 0)
                rounds.begin(number)
                if self.runner is not None:
                    found.append(self.runner.predict(part, output_of, stream=stream))
                else:
                    with stream:
                        found.append(output_of(part))
                rounds.done()
        return found

    def generate(self, calls: Sequence[ModelCall], *, seed: int | None, gathers_once: bool) -> list[Any]:
        """What calls of the model's own `generate` give, in evaluation mode; see `Engine.generate`.

        seed: with which the first begins, where it has none itself. gathers_once: before all, at stage 3.
        """
        if seed is None:
            seed = self.random.number("generation", self.step, self._data_rank)
        with (
            self._evaluating("engine.generate", by_all=False),
            self._passes.generating(once=gathers_once),
            self.random.seeded(seed),
        ):
            return [self._generate(*call) for call in calls]

    def _generate(self, call: Callable[[], Any] | None, seed: int | None) -> Any:
        if call is None:
            return torch.empty((0, 0), dtype=torch.int64, device=self._device)
        run = self.autocast.inside(call)
        with nullcontext() if seed is None else self.random.seeded(seed):
            if self.runner is not None:
                return self.runner.generate(run, partial(self.random.stream, EVALUATION))
            return run()

    def _train(
        self,
        loss_of: Callable[[Microbatch], MicrobatchLoss],
        number: int,
        part: Microbatch,
        factor: Weight,
        before_last_backward: Callable[[], None] | None,
    ) -> MicrobatchLoss:
        with self.recorder.noting("F", number, 0):
            found = loss_of(part)
        loss = found.loss
        if not loss.requires_grad:
            raise ModelError("the loss depends on no trainable parameter; nothing can be learnt from this batch")
        # They read the autograd graph of this loss, which backward frees.
        for watch in self.forwards.on_loss:
            watch(loss)
        if before_last_backward is not None:
            before_last_backward()
        root = scaled_loss(loss, factor)
        # Activation checkpoints run forwards again in backward, on an accelerator in a thread of autograd's own. They
        # must draw from this microbatch's stream.
        self._passes.begin_backward_of([root])
        with self.recorder.noting("B", number, 0), self.random.in_backward_of([root]):
            root.backward(self._gradient_of(root))
        # With its graph, each loss would keep the activations of its microbatch to the end of the step.
        return found.detached()

    def _gradient_of(self, loss: torch.Tensor) -> torch.Tensor | None:
        """What the backward of a loss begins with; None: with 1."""
        # Not a product in the graph: the graph stays that of the plain program.
        return None if self.loss_scale is None else self.loss_scale.gradient_of(loss)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of forwards say what the plan has to do with them."""
        with dtypes_explained(self._model, self._precision), module_noted(self._model):
            yield

    @contextmanager
    def _evaluating(self, call: str, *, by_all: bool) -> Iterator[None]:
        """The call goes on in the body, in evaluation mode. by_all: see `Proof.judging`."""
        # Each module's own mode: `model.train()` afterwards would wake modules that the user froze in evaluation mode.
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with self._during(call), torch.no_grad(), self._judging(by_all=by_all), self._explained():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _streams(self, step: int, count: int, count_of_all: int) -> list[Stream]:
        first = self._data_rank * count_of_all
        return [self.random.stream(step, first + at) for at in range(count)]


def _unjudged(*, by_all: bool) -> AbstractContextManager[None]:
    return nullcontext()
