"""Runs the microbatches of one rank in the order of a schedule.

    first step   forward of microbatch 0 through all stages of the rank  -->  transfers  -->  adapt(schedule), the rest
    later steps  the schedule of (number of microbatches, transfers, steps back), remembered; then the transfers anew

Which values cross is seen in a forward, not declared. So the first microbatch of all goes ahead of any schedule, and
its forwards are left out of the order that follows. The last microbatch of a step decides on the next schedule.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import compare
from shardwise.engine.batches import Batch
from shardwise.engine.pipeline.call_inference import CallInference
from shardwise.engine.pipeline.crossings import GradientKinds
from shardwise.engine.pipeline.flows import MicrobatchFlow, Purpose, SpanRecorder
from shardwise.engine.pipeline.glue import Glue, LossOf, advice_on_loops
from shardwise.engine.pipeline.post import SAME_FORWARD, Post
from shardwise.engine.pipeline.stage_contents import Stages
from shardwise.engine.pipeline.stage_ties import Chain, StageTies
from shardwise.engine.pipeline.stage_values import StageTensor
from shardwise.engine.pipeline.staged_calls import PlacedModule
from shardwise.engine.pipeline.training_steps import Equipment, TrainingStep, detached
from shardwise.engine.randomness import KeyedRandom, Stream
from shardwise.engine.zero.uneven_microbatches import UnevenMicrobatches
from shardwise.errors import ModelError
from shardwise.plan import Pipeline
from shardwise.plan.schedule_check import adapt
from shardwise.plan.schedules import Action, Schedule, make_schedule
from shardwise.plan.stages import Placement
from shardwise.plan.timeline import TimeSpan


class PipelineRunner:
    """The stages of one rank, and their training, evaluation and prediction."""

    def __init__(
        self,
        *,
        model: nn.Module,
        placement: Placement,
        pipeline: Pipeline,
        channel: Channel,
        random: KeyedRandom,
        ties: StageTies,
        chains: Sequence[Chain],
        kinds: GradientKinds | None = None,
    ) -> None:
        """kinds: finds out what gradients are along `tp`, where there are such ranks."""
        self.stages = Stages.of(model, placement, channel)
        self.placement = placement
        self.chains = chains
        self.post = Post(channel)
        self.inference = CallInference(channel.device, random)
        self.schedule: Schedule | None = None
        """The schedule of the last step, as it was run."""
        self.transfers: tuple[tuple[int, int], ...] | None = None
        """(source stage, target stage) of every value that crosses in one forward, as last seen."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self._glue = Glue(self.stages, self.inference, random)
        self._recorder = SpanRecorder(channel.rank, channel.device)
        self._kinds = kinds
        self._channel = channel
        self._pipeline = pipeline
        self._schedules: dict[tuple[int, tuple[tuple[int, int], ...], bool], Schedule] = {}
        self._steps_back = False
        self._has_news = False
        self._equipment = Equipment(
            stages=self.stages,
            glue=self._glue,
            random=random,
            ties=ties,
            chains=chains,
            kinds=kinds,
            recorder=self._recorder,
            begin_flow=partial(self._begin_flow, "step"),
        )
        for unit in self.stages.units:
            # On the object, not in a wrapper module: names of parameters, `isinstance` and the user's hooks stay as
            # they are. `module.compile()` compiles the whole call, hooks included; its code is run by `PlacedModule`
            # inside of them.
            vars(unit.module).update(forward=partial(self._forward, unit), _compiled_call_impl=None)

    @property
    def flow(self) -> MicrobatchFlow | None:
        """The microbatch that this rank works on."""
        return self._glue.flow

    @property
    def spans(self) -> list[TimeSpan] | None:
        """The recorded spans of this rank, while it is a list."""
        return self._recorder.spans

    @spans.setter
    def spans(self, spans: list[TimeSpan] | None) -> None:
        self._recorder.spans = spans

    @staticmethod
    def take_off(model: nn.Module) -> None:
        """Give the modules that an earlier plan placed their own forwards back."""
        for module in model.modules():
            placed = vars(module).get("forward")
            # A copy of a placed model, and a model under a new plan, still have the forwards that this class gave
            # them.
            if isinstance(placed, partial) and isinstance(getattr(placed.func, "__self__", None), PipelineRunner):
                placed.args[0].give_back()

    def _begin_flow(self, purpose: Purpose, number: int, stream: Stream | None) -> MicrobatchFlow:
        return MicrobatchFlow(
            self.stages,
            self.post,
            self._recorder,
            self._glue.on_call,
            purpose=purpose,
            number=number,
            stream=stream,
        )

    # Steps ----------------------------------------------------------------------------------------------------------

    def train(
        self,
        parts: Sequence[Batch],
        factors: Sequence[float],
        loss_of: LossOf,
        *,
        streams: Sequence[Stream | None],
        before_last_backward: Callable[[], None],
        rounds: UnevenMicrobatches,
    ) -> list[torch.Tensor]:
        """Forward and backward of all microbatches; the loss of each where this rank has it, and zero elsewhere.

        factors: what each loss is multiplied by. Raises what a module raises, with notes that say where; ModelError
        for a forward that asks for what only another rank has; MismatchError where ranks run different programs.
        """
        if not parts:
            return []
        step = TrainingStep(self._equipment, parts, factors, loss_of, streams, rounds)
        try:
            order = self._begin(step)
            last = max((at for at, action in enumerate(order) if action.kind == "B"), default=-1)
            for at, action in enumerate(order):
                # From here on, gradients of buckets are final as they come, and their reductions may begin within
                # backward.
                if at == last:
                    before_last_backward()
                (step.forward if action.kind == "F" else step.backward)(action.microbatch, action.stage)
            self._end(list(step.flows.values()))
            if self._kinds is not None:
                self._kinds.end()
        finally:
            self.peak_in_flight = max(self.peak_in_flight, step.peak_in_flight)
            self._glue.flow = None
            # After an error too: parked forwards are threads that would wait forever, and graphs hold all
            # activations.
            step.close()
            self.post.forget()
        return step.losses

    def predict(self, inputs: Batch, output_of: LossOf, *, stream: Stream | None) -> torch.Tensor:
        """The output of `output_of` for the inputs (a tensor, without a graph), on every rank of the pipeline."""
        flow = self._begin_flow("prediction", 0, stream)
        try:
            with self._glue.current(flow):
                output = self._glue.run(output_of, inputs)
                # To all ranks, because the caller's next decision depends on it and the same program runs on all of
                # them.
                if isinstance(output, StageTensor):
                    output = flow.give_all(output)
            self._end([flow])
        finally:
            flow.close()
            self.post.forget()
        return output.detach()

    def evaluate(
        self, parts: Sequence[Batch], loss_of: LossOf, *, streams: Sequence[Stream | None], rounds: UnevenMicrobatches
    ) -> list[torch.Tensor]:
        """Forward of all microbatches; losses as `train` gives them."""
        losses = []
        flows = []
        try:
            for number, (part, stream) in enumerate(zip(parts, streams, strict=True)):
                rounds.begin(number)
                flow = self._begin_flow("evaluation", number, stream)
                flows.append(flow)
                with self._glue.current(flow):
                    loss = self._glue.run(loss_of, part)
                rounds.done()
                losses.append(detached(loss, self.stages))
                flow.close()
            self._end(flows)
        finally:
            self.post.forget()
        return losses

    def _begin(self, step: TrainingStep) -> list[Action]:
        """The actions that are left, once it is known which values cross: the first forward of all shows it."""
        rank, num_ranks = self.stages.rank, self.stages.num_ranks
        is_first = self.transfers is None
        if is_first:
            for stage in range(rank, self.placement.num_stages, num_ranks):
                step.forward(0, stage)
            self._observe(step.flows[0])
        assert self.transfers is not None
        # All three are the same on all ranks, so all choose the same schedule without a message.
        key = (len(step.losses), self.transfers, self._steps_back)
        if key not in self._schedules:
            asked = make_schedule(
                self._pipeline.schedule,
                num_ranks=num_ranks,
                num_chunks=self.stages.num_chunks,
                num_microbatches=len(step.losses),
            )
            self._schedules[key] = adapt(asked, self.transfers, steps_back=self._steps_back)
        self.schedule = self._schedules[key]
        order = self.schedule.orders[rank]
        return [action for action in order if not (is_first and action.kind == "F" and action.microbatch == 0)]

    def _observe(self, flow: MicrobatchFlow) -> None:
        """Note which values cross in a forward, for the schedule of the next step."""
        self.transfers = tuple(flow.transfers)
        # Who waits for news in a forward waits for stages of other ranks, which may come later in their schedules.
        # Where there was news once, there may be again: for values of a new shape.
        self._has_news |= flow.has_news
        self._steps_back = flow.steps_back or self._has_news

    def _end(self, flows: Sequence[MicrobatchFlow]) -> None:
        """Compare the programs of the ranks."""
        self.post.settle()
        for flow in flows:
            if flow.purpose == "step":
                self._observe(flow)
        compare(
            self._channel,
            [
                f"in microbatch {flow.number} calls with the checksum {flow.progress:08x}, the last one {flow.last!r}"
                for flow in flows
            ],
            subject="forwards",
            hint=f"{SAME_FORWARD[0].upper()}{SAME_FORWARD[1:]}.",
        )

    # The model ------------------------------------------------------------------------------------------------------

    def _forward(self, unit: PlacedModule, *args: Any, **kwargs: Any) -> Any:
        """In the place of a placed module's forward."""
        flow = self.flow
        if flow is None:
            advice = advice_on_loops(self.stages.model) or "call the model through these"
            raise ModelError(
                f"{unit.name!r} is called outside of engine.step, engine.evaluate and engine.predict, and its stage "
                f"{unit.stage} may lie on another rank; {advice}"
            )
        if self._glue.is_inside:
            if self.stages.is_local(unit.stage):
                return unit.forward(*args, **kwargs)
            raise ModelError(
                f"{unit.name!r}, on stage {unit.stage}, is called inside a module that is placed on another stage, "
                f"after {flow.last!r}; place both on one stage"
            )
        with self._glue.off():
            return self._glue.executor.execute(flow, unit, unit.stage, args, kwargs)
