"""One training step of one rank: its forwards and backwards, in whatever order they are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.engine.batches import Batch
from shardwise.engine.pipeline.flows import MicrobatchFlow
from shardwise.engine.pipeline.glue import Glue, LossOf
from shardwise.engine.pipeline.gradient_kinds import GradientKinds
from shardwise.engine.pipeline.local_stages import Stages
from shardwise.engine.pipeline.recorded_spans import SpanRecorder
from shardwise.engine.pipeline.stage_ties import Chain, StageTies
from shardwise.engine.pipeline.stage_values import StageTensor
from shardwise.engine.pipeline.turns import Turn
from shardwise.engine.randomness import KeyedRandom, Stream
from shardwise.engine.zero.uneven_microbatches import UnevenMicrobatches
from shardwise.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Equipment:
    """What all steps of a rank work with."""

    stages: Stages
    glue: Glue
    random: KeyedRandom
    ties: StageTies
    chains: Sequence[Chain]
    kinds: GradientKinds | None
    """Wants to know what gradients are along `tp`."""
    recorder: SpanRecorder
    begin_flow: Callable[[int, Stream | None], MicrobatchFlow]
    """From the number and the stream of a microbatch."""


class TrainingStep:
    """The microbatches of a step, from the beginning of their forwards to the end of their backwards."""

    def __init__(
        self,
        equipment: Equipment,
        parts: Sequence[Batch],
        factors: Sequence[float],
        loss_of: LossOf,
        streams: Sequence[Stream | None],
        rounds: UnevenMicrobatches,
    ) -> None:
        self.flows: dict[int, MicrobatchFlow] = {}
        self.losses = [torch.zeros((), device=equipment.stages.device) for _ in parts]
        """Of each microbatch, where this rank has it, else zero."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self._equipment = equipment
        self._parts = parts
        self._factors = factors
        self._loss_of = loss_of
        self._streams = streams
        self._rounds = rounds
        self._turns: dict[int, Turn] = {}
        """The forwards that park between the stages of this rank."""

    def forward(self, number: int, stage: int) -> None:
        """The forward of a microbatch up to the end of its work on a stage."""
        with self._equipment.recorder.noting("F", number, stage):
            if number not in self.flows:
                self._start(number)
            flow = self.flows[number]
            flow.begin(stage)
            with self._equipment.glue.current(flow):
                if number in self._turns:
                    self._turns[number].advance()
                else:
                    self._run(number)

    def backward(self, number: int, stage: int) -> None:
        """The backward of a microbatch on a stage."""
        equipment, flow = self._equipment, self.flows[number]
        graphs = flow.take_graphs(stage)
        # Where a rank's stages are one graph, the first backward of the microbatch is that of all of them.
        covers_all, has_passed = flow.steps_back, flow.steps_back and not graphs
        if not has_passed:
            self._rounds.begin(number)
        roots = [root for graph in graphs for root in graph.roots]
        roots += [graph.loss for graph in graphs if graph.loss is not None]
        if roots and equipment.kinds is not None:
            flow.trace = equipment.kinds.trace(graphs)
        with equipment.recorder.noting("B", number, stage), equipment.glue.current(flow):
            if roots:
                try:
                    with equipment.random.in_backward_of(roots):
                        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                except Exception as error:
                    error.add_note(
                        f"shardwise: in the backward of microbatch {number} of {len(self._parts)} on stage {stage} "
                        f"(rank {equipment.stages.rank} of the pipeline)"
                    )
                    raise
            flow.return_nothing()
            for link in [link for graph in graphs for link in graph.links]:
                flow.return_gradient(link.crossing, equipment.ties.hand_down(link.name))
            if flow.trace is not None and equipment.kinds is not None:
                equipment.kinds.learn(flow.trace)
                flow.trace = None
            if not has_passed:
                self._rounds.done(None if covers_all else stage)
        roots.clear()
        for graph in graphs:
            graph.clear()
        if not flow.graphs:
            flow.close()

    def close(self) -> None:
        """Let go of everything, also of forwards that will not go on."""
        for turn in self._turns.values():
            turn.abandon()
        for flow in self.flows.values():
            flow.close()

    def _start(self, number: int) -> None:
        in_flight = sum(bool(each.graphs) for each in self.flows.values()) + 1
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        self.flows[number] = flow = self._equipment.begin_flow(number, self._streams[number])
        if self._equipment.stages.num_chunks > 1:
            self._turns[number] = turn = Turn(partial(self._run_apart, number), flow.device)
            flow.park = turn.park

    def _run_apart(self, number: int) -> None:
        """The forward in a thread of its own."""
        with self._equipment.random.in_this_thread():
            self._run(number)

    def _run(self, number: int) -> None:
        """The user's forward, from its beginning to its loss."""
        equipment, flow, factor = self._equipment, self.flows[number], self._factors[number]
        try:
            loss = equipment.glue.run(self._loss_of, self._parts[number])
            if not isinstance(loss, StageTensor) or not loss.requires_grad:
                raise ModelError("the loss depends on no trainable parameter; nothing can be learnt from this batch")
            scaled = loss if factor == 1.0 else loss * factor
            assert isinstance(scaled, StageTensor)
        except Exception as error:
            error.add_note(
                f"shardwise: in the forward of microbatch {number} of {len(self._parts)}, after {flow.last!r}"
            )
            raise
        if len(self._parts) == 1 and equipment.stages.num_chunks == 1:
            for chain in equipment.chains:
                flow.link(equipment.ties, chain)
        if equipment.stages.is_local(scaled.value.stage):
            flow.graph(scaled.value.stage).loss = scaled.value.local
            self.losses[number] = detached(loss, equipment.stages)


def detached(loss: torch.Tensor, stages: Stages) -> torch.Tensor:
    """The loss where this rank has it, else zero."""
    if not isinstance(loss, StageTensor):
        return loss.detach() if stages.rank == 0 else torch.zeros((), device=stages.device)
    local = loss.value.local
    return torch.zeros((), device=stages.device) if local is None else local.detach()
