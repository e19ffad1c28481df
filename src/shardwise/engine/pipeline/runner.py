"""Runs the microbatches of one rank in the order of a schedule.

    first step   forward of microbatch 0 through all stages of the rank  -->  transfers  -->  adapt(schedule), the rest
    later steps  the schedule for the paths of the last step, remembered; then the transfers anew
    a new path   which this schedule does not fit: from the end of its forward on, microbatches go one by one

Which values cross is seen in a forward, not declared. So the first microbatch of all goes ahead of any schedule, and
its forwards are left out of the order that follows.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import compare
from shardwise.engine.forward.batches import Microbatch, MicrobatchLoss, NoMoreMicrobatches, See, Weight
from shardwise.engine.forward.passes import UnevenMicrobatches
from shardwise.engine.forward.randomness import KeyedRandom, Stream
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.pipeline.call_replay import CallReplay
from shardwise.engine.pipeline.crossings import GradientKinds
from shardwise.engine.pipeline.glue import Glue, LossOf
from shardwise.engine.pipeline.infer import CallInference
from shardwise.engine.pipeline.mailbox import SAME_FORWARD, Mailbox
from shardwise.engine.pipeline.outermost_calls import OutermostCalls, given_to_all
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.ties import Chain, StageTies
from shardwise.engine.pipeline.training_steps import Equipment, TrainingStep, here
from shardwise.engine.pipeline.transfers import MicrobatchFlow, Paths, Purpose
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.errors import StageReadsWarning
from shardwise.plan import Pipeline
from shardwise.plan.schedule_check import adapt, one_by_one_after
from shardwise.plan.schedules import Action, Schedule, make_schedule
from shardwise.plan.stages import Placement


class PipelineRunner:
    """The stages of one rank, and their training, evaluation, prediction and generation."""

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
        self.stages = Stages(model, placement, channel)
        self.placement = placement
        """Which module and parameter is on which stage."""
        self.chains = chains
        self.mailbox = Mailbox(channel)
        self.inference = CallInference(channel.device, random)
        self.replay = CallReplay(channel.device)
        self.schedule: Schedule | None = None
        """The schedule of the last step, as it was run."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self.num_reads = 0
        """Values that programs read between modules so far; the stage of each gave it to all ranks."""
        self._glue = Glue(self.stages, self.inference, self.replay, random)
        self.recorder = SpanRecorder(channel.rank, channel.device)
        """Records this rank's forwards, backwards and waits."""
        self._kinds = kinds
        self._channel = channel
        self._pipeline = pipeline
        self._schedules: dict[tuple[int, Paths, bool], Schedule] = {}
        self._paths: Paths = ()
        """The transfers of the forwards of the last step, each path once."""
        self._steps_back = False
        self._has_news = False
        self._trained = ALL
        self._has_warned = False
        self._memories: dict[TrainedSet, tuple[Paths, bool, bool]] = {}
        """What was known of the forwards when another set of parameters was trained: they may take other paths."""
        self._equipment = Equipment(
            stages=self.stages,
            glue=self._glue,
            random=random,
            ties=ties,
            chains=chains,
            kinds=kinds,
            recorder=self.recorder,
            begin_flow=partial(self._begin_flow, "step"),
        )
        random.skipped = {each.module for each in self.stages.units if not self.stages.is_local(each.stage)}
        for unit in self.stages.units:
            unit.put_on(self._glue.on_module)

    @property
    def transfers(self) -> tuple[tuple[int, int], ...] | None:
        """(source stage, target stage) of every value that crosses in one forward, as last seen."""
        return self._paths[-1] if self._paths else None

    @property
    def flow(self) -> MicrobatchFlow | None:
        """The microbatch that this rank works on."""
        return self._glue.flow

    def microbatch(self) -> int:
        """The number of the one that calls of modules belong to now; -1 outside of all."""
        return -1 if self.flow is None else self.flow.number

    def paused(self) -> AbstractContextManager[None]:
        """Inside, no program over stages runs in this thread."""
        return self._glue.paused()

    def _begin_flow(self, purpose: Purpose, number: int, stream: Stream | None) -> MicrobatchFlow:
        return MicrobatchFlow(
            self.stages,
            self.mailbox,
            self.recorder,
            self._glue.on_call,
            purpose=purpose,
            number=number,
            stream=stream,
            known=(self._paths, self._steps_back) if purpose == "step" and self._paths else None,
        )

    def turn_to(self, trained: TrainedSet) -> None:
        """The next steps train these parameters; `requires_grad` of all says so already."""
        if trained is self._trained:
            return
        if len(self._memories) > MOST_TRAINED:
            self._memories.clear()
        self._memories[self._trained] = self._paths, self._steps_back, self._has_news
        self._paths, self._steps_back, self._has_news = self._memories.get(trained, ((), False, False))
        self._trained = trained
        for unit in self.stages.units:
            with DisableTorchFunctionSubclass():  # at rest or not
                unit.frozen = tuple(name for name, each in unit.module.named_parameters() if not each.requires_grad)
        self._equipment = replace(self._equipment, chains=[chain for chain in self.chains if chain.name in trained])
        if self._kinds is not None:
            self._kinds.turn_to(trained)

    # Steps ----------------------------------------------------------------------------------------------------------

    def train(
        self,
        parts: Sequence[Microbatch],
        factors: Sequence[Weight],
        loss_of: LossOf,
        *,
        streams: Sequence[Stream | None],
        before_last_backward: Callable[[], None],
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
        rounds: UnevenMicrobatches,
    ) -> list[MicrobatchLoss]:
        """Forward and backward of all microbatches; the loss of each where this rank has it, and zero elsewhere.

        factors: what each loss is multiplied by. gradient_of: what its backward begins with; None: 1. Raises the errors
            of modules, with notes that say where. Raises ModelError for a forward that asks for a value of another
            rank, and MismatchError where ranks run different programs.
        """
        if not parts:
            return []
        self.mailbox.begin(len(parts))
        step = TrainingStep(self._equipment, parts, factors, loss_of, streams, gradient_of, rounds)
        try:
            self._run(step, before_last_backward)
            self._end(list(step.flows.values()))
            self._warn_of_reads(step.flows.values())
            if self._kinds is not None:
                self._kinds.end()
        finally:
            self.peak_in_flight = max(self.peak_in_flight, step.peak_in_flight)
            self._glue.flow = None
            # After an error too: parked forwards are threads that would wait forever, and graphs hold all
            # activations.
            step.close()
            self.mailbox.forget()
        return step.losses

    def predict(self, inputs: Microbatch, output_of: Callable[[Microbatch], Any], *, stream: Stream | None) -> Any:
        """The output of `output_of` for the inputs, whose tensors every rank of the pipeline gets, without graphs."""
        with self._one_flow("prediction", stream) as flow:
            # To all ranks, because the caller's next decision depends on it and the same program runs on all of them.
            return given_to_all(flow, self._glue.run(output_of, inputs))

    def generate(self, run: Callable[[], Any], streams: Callable[[int], Stream]) -> Any:
        """What a program gives that calls the model as often as it likes. `streams`: what the n-th call draws from."""
        with self._one_flow("generation", None) as flow, OutermostCalls(flow, streams).seen(self.stages):
            return given_to_all(flow, self._glue.run(lambda _: run(), {}))

    @contextmanager
    def _one_flow(self, purpose: Purpose, stream: Stream | None) -> Iterator[MicrobatchFlow]:
        flow = self._begin_flow(purpose, 0, stream)
        try:
            with self._glue.current(flow):
                yield flow
            self._end([flow])
        finally:
            flow.close()
            self.mailbox.forget()

    def evaluate(
        self,
        parts: Iterable[Microbatch],
        loss_of: LossOf,
        *,
        streams: Sequence[Stream | None],
        rounds: UnevenMicrobatches,
        see: See | None = None,
    ) -> list[MicrobatchLoss]:
        """Forward of all microbatches; losses as `train` gives them. see: is shown outputs, where they are."""
        shows = None if see is None else self._glue.showing(see)
        losses = []
        flows = []
        try:
            for number, (part, stream) in enumerate(zip(parts, streams, strict=True)):
                rounds.begin(number)
                flow = self._begin_flow("evaluation", number, stream)
                flows.append(flow)
                with self._glue.current(flow):
                    found = self._glue.run(loss_of, part, shows)
                rounds.done()
                losses.append(here(found, self.stages))
                flow.close()
            self._end(flows)
        finally:
            self.mailbox.forget()
        return losses

    def _run(self, step: TrainingStep, before_last_backward: Callable[[], None]) -> None:
        """All actions of this rank in a step."""
        rank, k, in_turn = self.stages.rank, len(step.losses), step.goes_one_by_one
        stages = range(rank, self.placement.num_stages, self.stages.num_ranks)
        # The first forward of all shows which values cross.
        done = {Action("F", 0, stage) for stage in stages if not self._paths and not in_turn}
        for action in sorted(done, key=lambda each: each.stage):
            step.forward(0, action.stage)
        if done:
            self._observe([step.flows[0]])
        fitting = self._schedule_for(k, self._paths, self._steps_back)
        self.schedule = fitting = one_by_one_after(fitting, -1) if in_turn else fitting
        order = [action for action in fitting.orders[rank] if action not in done]
        num_backwards = len(stages) * k
        while order:
            action = order.pop(0)
            done.add(action)
            if action.kind == "F":
                try:
                    step.forward(action.microbatch, action.stage)
                except NoMoreMicrobatches:
                    order = [each for each in order if each.microbatch < action.microbatch]
                    num_backwards = sum(each.kind == "B" for each in order)
                    continue
                if action.stage == stages[-1] and self.schedule is fitting and not in_turn:
                    # What a forward needs that took another path is known to all ranks at its end, without a message.
                    paths, steps_back = self._with(step.flows[action.microbatch])
                    if self._schedule_for(k, paths, steps_back).orders != fitting.orders:
                        self.schedule = one_by_one_after(fitting, action.microbatch)
                        order = [each for each in self.schedule.orders[rank] if each not in done]
            else:
                num_backwards -= 1
                # From here on, gradients of buckets are final as they come, and their reductions may begin within
                # backward.
                if num_backwards == 0:
                    before_last_backward()
                step.backward(action.microbatch, action.stage)
        self._observe(list(step.flows.values()))

    def _schedule_for(self, num_microbatches: int, paths: Paths, steps_back: bool) -> Schedule:
        # All arguments are the same on all ranks, so all choose the same schedule without a message.
        key = (num_microbatches, paths, steps_back)
        if key not in self._schedules:
            asked = make_schedule(
                self._pipeline.schedule,
                num_ranks=self.stages.num_ranks,
                num_chunks=self.stages.num_chunks,
                num_microbatches=num_microbatches,
            )
            self._schedules[key] = adapt(asked, *paths, steps_back=steps_back)
        return self._schedules[key]

    def _with(self, flow: MicrobatchFlow) -> tuple[Paths, bool]:
        """The paths that are known, and whether ranks step back, with those of one forward more."""
        path = tuple(flow.transfers)
        paths = self._paths if path in self._paths else (*self._paths, path)
        return paths, self._steps_back or flow.steps_back or flow.has_news

    def _observe(self, flows: Sequence[MicrobatchFlow]) -> None:
        """Note which values cross in the forwards of a step, for the schedule of the next one."""
        self._paths = tuple(dict.fromkeys(tuple(flow.transfers) for flow in flows))
        # Who waits for news in a forward waits for stages of other ranks, which may come later in their schedules.
        # Where there was news once, there may be again: for values of a new shape.
        self._has_news |= any(flow.has_news for flow in flows)
        self._steps_back = self._has_news or any(flow.steps_back for flow in flows)

    def _end(self, flows: Sequence[MicrobatchFlow]) -> None:
        """Compare the programs of the ranks."""
        self.mailbox.settle()
        self.num_reads += sum(flow.num_reads for flow in flows)
        compare(
            self._channel,
            [
                f"in microbatch {flow.number} calls with the checksum {flow.progress:08x}, the last one {flow.last!r}"
                for flow in flows
            ],
            subject="forwards",
            hint=f"{SAME_FORWARD[0].upper()}{SAME_FORWARD[1:]}.",
        )

    def _warn_of_reads(self, flows: Collection[MicrobatchFlow]) -> None:
        """Tell, once, what it costs that a training program reads values between modules."""
        reads = sum(flow.num_reads for flow in flows)
        if not reads or len(flows) == 1 or self._has_warned:
            return
        self._has_warned = True
        if self._channel.rank == 0:
            first = next(flow.first_read for flow in flows if flow.num_reads)
            warnings.warn(
                f"{first}: this reads a value of a stage (one of {reads} such reads in this step). All ranks wait "
                "there until the microbatch has come to that stage, so that forwards overlap less. To keep the overlap "
                "of mesh.pp, read in a placed module, or give the loss as a dict: report.losses has its entries",
                StageReadsWarning,
                stacklevel=4,
            )
