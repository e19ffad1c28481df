"""Runs the microbatches of one rank in the order of a schedule."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import compare
from shardwise.engine.batches import Batch
from shardwise.engine.pipeline.calls import Unit
from shardwise.engine.pipeline.execution import execute
from shardwise.engine.pipeline.flows import Flow
from shardwise.engine.pipeline.glue import Glue, advice_on_loops
from shardwise.engine.pipeline.gradient_kinds import GradientKinds
from shardwise.engine.pipeline.inference import Inference
from shardwise.engine.pipeline.post import SAME_FORWARD, Post
from shardwise.engine.pipeline.steps import LossOf, TrainingStep
from shardwise.engine.pipeline.ties import Chain, StageTies
from shardwise.engine.pipeline.values import StageTensor
from shardwise.engine.randomness import KeyedRandom, Stream
from shardwise.engine.zero.uneven_microbatches import UnevenMicrobatches
from shardwise.errors import ModelError
from shardwise.plan import Pipeline
from shardwise.plan.schedule_check import adapt
from shardwise.plan.schedules import Action, Schedule, make_schedule
from shardwise.plan.stages import Placement
from shardwise.plan.timeline import Span


class PipelineRunner:
    """The stages of one rank, and what it knows of the others."""

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
        """kinds: wants to know what gradients are along `tp`."""
        self.placement = placement
        self.random = random
        self.device = channel.device
        self.rank = channel.rank
        self.num_ranks = channel.size
        self.post = Post(channel)
        self.inference = Inference(channel.device, random)
        self.glue = Glue(self)
        self.flow: Flow | None = None
        """The microbatch that this rank works on."""
        self.is_training = False
        self.is_predicting = False
        self.model = model
        self.spans: list[Span] | None = None
        """What this rank did and when, while it is a list."""
        self.schedule: Schedule | None = None
        """The schedule of the last step, as it was run."""
        self.transfers: tuple[tuple[int, int], ...] | None = None
        """(source stage, target stage) of every value that crosses in one forward, as last seen."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self.ties = ties
        self.chains = chains
        self.kinds = kinds
        self._channel = channel
        self._pipeline = pipeline
        self.num_chunks = placement.num_stages // placement.num_ranks
        self._schedules: dict[tuple[int, tuple[tuple[int, int], ...], bool], Schedule] = {}
        self._steps_back = False
        self._has_news = False
        structures: dict[Any, int] = {}
        self.units = [
            Unit(name, model.get_submodule(name), stage, structures) for name, stage in placement.modules.items()
        ]
        self._stage_of = {each: unit.stage for unit in self.units for each in unit.module.modules()}
        self._places = self._find_places(model)
        self._buffered = [
            (each, key, unit.stage, f"{unit.name}.{key}")
            for unit in self.units
            for each in unit.module.modules()
            for key, buffer in each._buffers.items()
            if buffer is not None
        ]
        self._glue_buffers = [
            (repr(name) if name else "the model", each, key)
            for name, each in model.named_modules()
            for key in each._buffers
            if each not in self._stage_of
        ]
        for unit in self.units:
            vars(unit.module).update(forward=partial(self._forward, unit), _compiled_call_impl=None)

    @staticmethod
    def take_off(model: nn.Module) -> None:
        """Give the modules that an earlier plan placed their own forwards back."""
        for module in model.modules():
            placed = vars(module).get("forward")
            if isinstance(placed, partial) and isinstance(getattr(placed.func, "__self__", None), PipelineRunner):
                placed.args[0].give_back()

    # What flows and glue ask --------------------------------------------------------------------------------------

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return self.placement.rank_of(stage)

    def is_local(self, stage: int) -> bool:
        """Whether this rank has a stage."""
        return self.placement.rank_of(stage) == self.rank

    def place_of(self, parameter: nn.Parameter) -> tuple[int, str] | None:
        """Stage and name of a parameter; None for one that is not the model's."""
        return self._places.get(id(parameter))

    def stage_of(self, module: nn.Module) -> int | None:
        """The stage of a module that is placed, or inside a placed one."""
        return self._stage_of.get(module)

    def placed_buffers(self) -> list[tuple[torch.Tensor, int, str]]:
        """The buffers of placed modules, as they are now."""
        found = ((each._buffers.get(key), stage, name) for each, key, stage, name in self._buffered)
        return [(buffer, stage, name) for buffer, stage, name in found if buffer is not None]

    def is_buffer_of_all(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer of a module that every rank runs."""
        return any(module._buffers.get(key) is tensor for _, module, key in self._glue_buffers)

    def run_glue(self, compute: LossOf, part: Batch) -> torch.Tensor:
        """What the user's program computes of a microbatch, the model's forward in it."""
        with self.glue:
            result = compute(part)
        self._refuse_kept_values()
        return result

    def _refuse_kept_values(self) -> None:
        """Values of a stage must not outlive their forward as buffers of modules that all ranks have."""
        for name, module, key in self._glue_buffers:
            if isinstance(buffer := module._buffers.get(key), StageTensor):
                value = buffer.value
                raise ModelError(
                    f"the forward put what {value.maker!r} made on stage {value.stage} into the buffer {key!r} of "
                    f"{name}, which runs on all ranks; place that module on a stage"
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
        step = TrainingStep(self, parts, factors, loss_of, streams, rounds)
        self.is_training = True
        try:
            order = self._begin(step)
            last = max((at for at, action in enumerate(order) if action.kind == "B"), default=-1)
            for at, action in enumerate(order):
                if at == last:
                    before_last_backward()
                (step.forward if action.kind == "F" else step.backward)(action.microbatch, action.stage)
            self._end(list(step.flows.values()))
            if self.kinds is not None:
                self.kinds.end()
        finally:
            self.is_training = False
            self.flow = None
            step.close()
            self.post.forget()
        return step.losses

    def predict(self, inputs: Batch, output_of: LossOf, *, stream: Stream | None) -> torch.Tensor:
        """What `output_of` makes of the inputs (a tensor, without a graph), given to every rank of the pipeline."""
        flow = Flow(self, 0, stream)
        self.is_predicting = True
        try:
            with self.current(flow):
                output = self.run_glue(output_of, inputs)
                if isinstance(output, StageTensor):
                    output = flow.give_all(output)
            self._end([flow])
        finally:
            self.is_predicting = False
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
                flow = Flow(self, number, stream)
                flows.append(flow)
                with self.current(flow):
                    loss = self.run_glue(loss_of, part)
                rounds.done()
                losses.append(self.detached(loss))
                flow.close()
            self._end(flows)
        finally:
            self.post.forget()
        return losses

    def _begin(self, step: TrainingStep) -> list[Action]:
        """What is left to do, once it is known which values cross: the first forward of all shows it."""
        stages = range(self.rank, self.placement.num_stages, self.num_ranks)
        is_first = self.transfers is None
        if is_first:
            for stage in stages:
                step.forward(0, stage)
            self._observe(step.flows[0])
        assert self.transfers is not None
        key = (len(step.losses), self.transfers, self._steps_back)
        if key not in self._schedules:
            asked = make_schedule(
                self._pipeline.schedule,
                num_ranks=self.num_ranks,
                num_chunks=self.num_chunks,
                num_microbatches=len(step.losses),
            )
            self._schedules[key] = adapt(asked, self.transfers, steps_back=self._steps_back)
        self.schedule = self._schedules[key]
        order = self.schedule.orders[self.rank]
        return [action for action in order if not (is_first and action.kind == "F" and action.microbatch == 0)]

    def _observe(self, flow: Flow) -> None:
        """Note which values cross in a forward, for the schedule of the next step."""
        self.transfers = tuple(flow.transfers)
        # Who waits for news in a forward waits for stages of other ranks, which may come later in their schedules.
        # Where there was news once, there may be again: for values of a new shape.
        self._has_news |= flow.has_news
        self._steps_back = flow.steps_back or self._has_news

    def _end(self, flows: Sequence[Flow]) -> None:
        """Compare what the ranks' programs did."""
        self.post.settle()
        for flow in flows if self.is_training else ():
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

    @contextmanager
    def current(self, flow: Flow) -> Iterator[None]:
        """This rank works on a microbatch, and draws from its stream."""
        outer, self.flow = self.flow, flow
        try:
            with flow.stream or nullcontext():  # in backward too: activations may be recomputed
                yield
        finally:
            self.flow = outer

    def detached(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss where this rank has it, else zero."""
        if not isinstance(loss, StageTensor):
            return loss.detach() if self.rank == 0 else torch.zeros((), device=self.device)
        local = loss.value.local
        return torch.zeros((), device=self.device) if local is None else local.detach()

    # The model ------------------------------------------------------------------------------------------------------

    def _forward(self, unit: Unit, *args: Any, **kwargs: Any) -> Any:
        """In the place of a placed module's forward."""
        flow = self.flow
        if flow is None:
            raise ModelError(
                f"{unit.name!r} is called outside of engine.step, engine.evaluate and engine.predict, and its stage "
                f"{unit.stage} may lie on another rank; {advice_on_loops(self.model) or 'call the model through these'}"
            )
        if self.glue.is_inside:
            if self.is_local(unit.stage):
                return unit.forward(*args, **kwargs)
            raise ModelError(
                f"{unit.name!r}, on stage {unit.stage}, is called inside a module that is placed on another stage, "
                f"after {flow.last!r}; place both on one stage"
            )
        with self.glue.off():
            return execute(self, flow, unit, unit.stage, args, kwargs)

    def _find_places(self, model: nn.Module) -> dict[int, tuple[int, str]]:
        """Stage and name of every parameter object, its first place first."""
        places: dict[int, tuple[int, str]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    stage = self._stage_of.get(module, self.placement.parameters.get(name))
                    if stage is not None:
                        places.setdefault(id(parameter), (stage, name))
        return places

    @contextmanager
    def noting(self, kind: str, microbatch: int, stage: int) -> Iterator[None]:
        """Record what the body takes, where somebody wants to know."""
        if self.spans is None:
            yield
            return
        start_s = self._now_s()
        yield
        self.spans.append(
            Span(
                rank=self.rank,
                kind=kind,
                microbatch=microbatch,
                stage=stage,
                start_s=start_s,
                stop_s=self._now_s(),
            )
        )

    def _now_s(self) -> float:
        """The time once everything that was issued has been computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
