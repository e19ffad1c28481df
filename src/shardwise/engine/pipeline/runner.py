"""Runs the microbatches of one rank in the order of a schedule.

    first step   forward of microbatch 0 through all stages of the rank  -->  transfers  -->  adapt(schedule), the rest
    later steps  the schedule for the paths of the last step, remembered; then the transfers anew
    a new path   which this schedule does not fit: from the end of its forward on, microbatches go one by one

Which values cross is seen in a forward, not declared. So the first microbatch of all goes ahead of any schedule, and
its forwards are left out of the order that follows.

2 stages on 2 ranks, 3 microbatches, `1f1b`; v0 is the value that crosses in microbatch 0, g0 its gradient:

    rank 0 has first                                      rank 1 has second
    F0  h = first(x) executed                             F0  h = first(x) inferred
        y = second(h) inferred             v0 -->             y = second(h) executed, the loss too
    F1  the same                           v1 -->         B0  from the loss to where v0 arrived
    B0  from where v0 departed, waits      <-- g0
    F2  the same                           v2 -->         F1  takes v1, which came long ago;  B1
    B1  waits                              <-- g1
                                                          F2, B2
    B2  waits                              <-- g2         its gradients are complete

`F` runs the program's whole forward on its rank, `B` autograd from the roots of one stage. The loss is on rank 1 only.

A program that is no forward calls the model, or parts of it, as often as it likes (`generate`):

    program, on every rank      embed = model.encoder(ids)        loop: logits = model(ids, cache)    ids = cat(ids, ..)
    outermost call              encoder.forward                   model.forward
    inside of it                values of stages, as in a step    the same
    at its end                  tensors are given to all ranks    the same

Between outermost calls the program has plain tensors, and may decide by their values.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.comm.agreement import compare
from shardwise.comm.nested_values import SeenContainers, transform
from shardwise.engine.forward.batches import Microbatch, MicrobatchLoss, NoMoreMicrobatches, See, Weight, scaled_loss
from shardwise.engine.forward.layers import OfEngine, Place, wrapped
from shardwise.engine.forward.passes import UnevenMicrobatches
from shardwise.engine.forward.randomness import KeyedRandom, Stream
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.pipeline.crossings import GradientKinds
from shardwise.engine.pipeline.forward_threads import Abandoned, ForwardThread, ForwardThreads
from shardwise.engine.pipeline.glue import Glue, LossOf
from shardwise.engine.pipeline.infer import Inference
from shardwise.engine.pipeline.mailbox import SAME_FORWARD, Mailbox
from shardwise.engine.pipeline.nested import Opaque
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.ties import Chain, StageTies
from shardwise.engine.pipeline.transfers import MicrobatchFlow, Paths, Purpose
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.errors import ModelError, StageReadsWarning
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
        self.inference = Inference(channel.device, random, self.stages.of_storages)
        self.schedule: Schedule | None = None
        """The schedule of the last step, as it was run."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self.num_reads = 0
        """Values that programs read between modules so far; the stage of each gave it to all ranks."""
        self.threads = ForwardThreads(channel.device)
        """Of forwards that wait between the stages of this rank."""
        self._glue = Glue(self.stages, self.inference, random)
        self.recorder = SpanRecorder(channel.rank, channel.device)
        """Records this rank's forwards, backwards and waits."""
        self._kinds = kinds
        self._random = random
        self._ties = ties
        self._chains: Sequence[Chain] = chains
        """Of the parameters that are trained at present."""
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
        self._chains = [chain for chain in self.chains if chain.name in trained]
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
        step = TrainingStep(self, parts, factors, loss_of, streams, gradient_of, rounds)
        try:
            self._run(step, before_last_backward)
            self._end(list(step.flows.values()))
            self._warn_of_reads(step.flows.values())
            if self._kinds is not None:
                self._kinds.end()
        except BaseException:
            step.close()
            self.threads.close()  # whoever keeps the error keeps this rank's engine, but no threads
            raise
        finally:
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

    def _run(self, step: "TrainingStep", before_last_backward: Callable[[], None]) -> None:
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


@dataclass
class TrainingStep:
    """The microbatches of a step, from the beginning of their forwards to the end of their backwards."""

    runner: PipelineRunner
    parts: Sequence[Microbatch]
    factors: Sequence[Weight]
    loss_of: LossOf
    streams: Sequence[Stream | None]
    gradient_of: Callable[[torch.Tensor], torch.Tensor | None]
    rounds: UnevenMicrobatches

    def __post_init__(self) -> None:
        device = self.runner.stages.device
        self.flows: dict[int, MicrobatchFlow] = {}
        self.losses = [MicrobatchLoss(each, {}) for each in torch.zeros(len(self.parts), device=device).unbind()]
        """Of each microbatch, where this rank has it, else zero."""
        self.goes_one_by_one = self.rounds.go_one_by_one(self.runner.stages.num_chunks)
        """Whether microbatches are computed one after the other, whatever the schedule says."""
        self._given: dict[int, Microbatch] = {}
        """Those that had their turn, and are not computed yet."""
        self._turns: dict[int, ForwardThread] = {}
        """The forwards that park between the stages of this rank."""
        # Autograd wants one of the right form for each root, and a departure ignores it.
        self._no_gradient = torch.zeros((), dtype=torch.float32, device=device)

    def forward(self, number: int, stage: int) -> None:
        """The forward of a microbatch up to the end of its work on a stage."""
        if number not in self.flows:
            self._given[number] = self.parts[number]
        if self.goes_one_by_one:
            self.rounds.begin(number)
        with self.runner.recorder.noting("F", number, stage):
            if number not in self.flows:
                self._start(number)
            flow = self.flows[number]
            flow.begin(stage)
            with self.runner._glue.current(flow):
                if number in self._turns:
                    self._turns[number].advance()
                else:
                    self._run(number)

    def backward(self, number: int, stage: int) -> None:
        """The backward of a microbatch on a stage."""
        runner, flow = self.runner, self.flows[number]
        graphs = flow.take_graphs(stage)
        # Where a rank's stages are one graph, the first backward of the microbatch is that of all of them.
        covers_all, has_passed = flow.steps_back, flow.steps_back and not graphs
        if not has_passed:
            self.rounds.begin(number)
        # One call for all roots, so that autograd orders their nodes: the last made first, as in one process.
        roots = [root for graph in graphs for root in graph.roots]
        losses = [graph.loss for graph in graphs if graph.loss is not None]
        gradients = [self._no_gradient] * len(roots) + [self.gradient_of(loss) for loss in losses]
        roots += losses
        if roots and runner._kinds is not None:
            flow.trace = runner._kinds.trace(graphs)
        with runner.recorder.noting("B", number, stage), runner._glue.current(flow):
            if roots:
                try:
                    self.rounds.passes.begin_backward_of(roots)
                    with runner._random.in_backward_of(roots):
                        torch.autograd.backward(roots, gradients)
                except Exception as error:
                    error.add_note(
                        f"shardwise: in the backward of microbatch {number} of {len(self.parts)} on stage {stage} "
                        f"(rank {runner.stages.rank} of the pipeline)"
                    )
                    raise
            # A value that arrived and was not used in the end has no node that ran, but its sender waits for an
            # answer.
            flow.return_nothing()
            # Once autograd has returned, this rank adds nothing more to the parameter: the stage before may continue
            # the sum.
            for link in [link for graph in graphs for link in graph.links]:
                flow.return_gradient(link.crossing, runner._ties.hand_down(link.name))
            if flow.trace is not None and runner._kinds is not None:
                runner._kinds.learn(flow.trace)
                flow.trace = None
            if not has_passed:
                self.rounds.done(None if covers_all else stage)
        # The graphs hold activations: they are let go now, not when the next backward overwrites these names.
        roots.clear()
        for graph in graphs:
            graph.clear()
        if not flow.graphs:
            flow.close()

    def close(self) -> None:
        """Let go of everything, also of forwards that will not go on."""
        for number, turn in self._turns.items():
            self.flows[number].ended = Abandoned()
            turn.abandon()
        for flow in self.flows.values():
            flow.close()
        self._turns.clear()

    def _start(self, number: int) -> None:
        in_flight = sum(bool(each.graphs) for each in self.flows.values()) + 1
        self.runner.peak_in_flight = max(self.runner.peak_in_flight, in_flight)
        self.flows[number] = flow = self.runner._begin_flow("step", number, self.streams[number])
        if self.runner.stages.num_chunks > 1:
            self._turns[number] = turn = self.runner.threads.begin(partial(self._run_apart, number))
            flow.park = turn.park

    def _run_apart(self, number: int) -> None:
        """The forward in a new thread."""
        with self.runner._random.in_this_thread():
            self._run(number)

    def _run(self, number: int) -> None:
        """The user's forward, from its beginning to its loss."""
        runner, flow, factor = self.runner, self.flows[number], self.factors[number]
        try:
            found = runner._glue.run(self.loss_of, self._given.pop(number))
            loss = found.loss
            if not isinstance(loss, StageTensor) or not loss.requires_grad:
                raise ModelError("the loss depends on no trainable parameter; nothing can be learnt from this batch")
            scaled = scaled_loss(loss, factor)
            assert isinstance(scaled, StageTensor)
        except Exception as error:
            error.add_note(
                f"shardwise: in the forward of microbatch {number} of {len(self.parts)}, after {flow.last!r}"
            )
            raise
        # With more microbatches, one process adds all uses of the first one before those of the second; a rank adds
        # the microbatches of its own uses first. The order differs anyway then, and sums travel once per update
        # instead.
        if len(self.parts) == 1 and runner.stages.num_chunks == 1:
            for chain in runner._chains:
                flow.link(runner._ties, chain)
        if runner.stages.is_local(scaled.value.stage):
            flow.graph(scaled.value.stage).loss = scaled.value.local
        self.losses[number] = here(found, runner.stages)


def here(found: MicrobatchLoss, stages: Stages) -> MicrobatchLoss:
    """A loss, and what else is reported with it, where this rank has them, else zero; without a graph."""

    def value_here(value: Any) -> Any:
        if isinstance(value, StageTensor):
            local = value.value.local
            return torch.zeros((), device=stages.device) if local is None else local.detach()
        # What is no value of a stage (a constant) is the same on all ranks: one of them counts it.
        if stages.rank:
            return torch.zeros((), device=stages.device)
        return value.detach() if isinstance(value, torch.Tensor) else value

    return found.detached(value_here)


class OutermostCalls:
    """The calls of one program, which runs in one flow."""

    def __init__(self, flow: MicrobatchFlow, streams: Callable[[int], Stream]) -> None:
        """streams: what the n-th call draws from."""
        self.flow = flow
        self.streams = streams
        self.number = 0
        """Of calls so far."""
        self.is_inside = False

    @contextmanager
    def seen(self, stages: Stages) -> Iterator[None]:
        """The modules of the model that hold placed ones say when they are called."""
        holders = [
            each
            for each in stages.model.modules()
            if each not in stages.modules and any(inner in stages.modules for inner in each.modules())
        ]
        # Placed modules too: a program may call one by itself.
        with ExitStack() as stack:
            for each in [*holders, *(unit.module for unit in stages.units)]:
                stack.enter_context(wrapped(each, _Outermost(self)))
            yield


class _Outermost(OfEngine):
    """Around one of the modules."""

    place = Place.PROGRAM

    def __init__(self, calls: OutermostCalls) -> None:
        self._calls = calls

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls
        if calls.is_inside:
            return self.forward(*args, **kwargs)
        calls.is_inside = True
        calls.number += 1
        try:
            # The loop draws from its own numbers, which no call of a module may change: another rank skips it.
            with calls.streams(calls.number):
                output = self.forward(*args, **kwargs)
            return given_to_all(calls.flow, output)
        finally:
            calls.is_inside = False


def given_to_all(flow: MicrobatchFlow, output: Any) -> Any:
    """The output with plain tensors, without a graph, in the place of values of stages.

    Objects that ranks have in parts (a cache, in a prediction) become None.
    """

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            is_in_parts = isinstance(leaf, Opaque) or id(leaf) in flow.opaque or id(leaf) in flow.given_objects
            return None if is_in_parts and flow.purpose == "prediction" else leaf
        leaf = flow.adopted(leaf)
        return (flow.give_all(leaf) if isinstance(leaf, StageTensor) else leaf).detach()

    return transform(output, given, seen=SeenContainers())
