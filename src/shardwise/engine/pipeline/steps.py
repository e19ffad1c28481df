"""One training step of one rank: its forwards and backwards, in whatever order they are asked for."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.engine.batches import Batch
from shardwise.engine.pipeline.flows import Flow
from shardwise.engine.pipeline.turns import Turn
from shardwise.engine.pipeline.values import StageTensor
from shardwise.engine.randomness import Stream
from shardwise.engine.zero.uneven_microbatches import UnevenMicrobatches
from shardwise.errors import ModelError

if TYPE_CHECKING:
    from shardwise.engine.pipeline.runner import PipelineRunner

LossOf = Callable[[Batch], torch.Tensor]


class TrainingStep:
    """The microbatches of a step, from the beginning of their forwards to the end of their backwards."""

    def __init__(
        self,
        runner: "PipelineRunner",
        parts: Sequence[Batch],
        factors: Sequence[float],
        loss_of: LossOf,
        streams: Sequence[Stream | None],
        rounds: UnevenMicrobatches,
    ) -> None:
        self.flows: dict[int, Flow] = {}
        self.losses = [torch.zeros((), device=runner.device) for _ in parts]
        """Of each microbatch, where this rank has it, else zero."""
        self._runner = runner
        self._parts = parts
        self._factors = factors
        self._loss_of = loss_of
        self._streams = streams
        self._rounds = rounds
        self._turns: dict[int, Turn] = {}
        """The forwards that park between the stages of this rank."""

    def forward(self, number: int, stage: int) -> None:
        """The forward of a microbatch up to the end of its work on a stage."""
        with self._runner.noting("F", number, stage):
            if number not in self.flows:
                self._start(number)
            flow = self.flows[number]
            flow.begin(stage)
            with self._runner.current(flow):
                if number in self._turns:
                    self._turns[number].advance()
                else:
                    self._run(number)

    def backward(self, number: int, stage: int) -> None:
        """The backward of a microbatch on a stage."""
        runner, flow = self._runner, self.flows[number]
        graphs = flow.take_graphs(stage)
        # Where a rank's stages are one graph, the first backward of the microbatch is that of all of them.
        covers_all, has_passed = flow.steps_back, flow.steps_back and not graphs
        if not has_passed:
            self._rounds.begin(number)
        roots = [root for graph in graphs for root in graph.roots]
        roots += [graph.loss for graph in graphs if graph.loss is not None]
        if roots and runner.kinds is not None:
            flow.trace = runner.kinds.trace(graphs)
        with runner.noting("B", number, stage), runner.current(flow):
            if roots:
                try:
                    with runner.random.in_backward_of(roots):
                        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                except Exception as error:
                    error.add_note(
                        f"shardwise: in the backward of microbatch {number} of {len(self._parts)} on stage {stage} "
                        f"(rank {runner.rank} of the pipeline)"
                    )
                    raise
            flow.return_nothing()
            for link in [link for graph in graphs for link in graph.links]:
                flow.return_gradient(link.crossing, runner.ties.hand_down(link.name))
            if flow.trace is not None and runner.kinds is not None:
                runner.kinds.learn(flow.trace)
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
        runner = self._runner
        in_flight = sum(bool(each.graphs) for each in self.flows.values()) + 1
        runner.peak_in_flight = max(runner.peak_in_flight, in_flight)
        self.flows[number] = flow = Flow(runner, number, self._streams[number])
        if runner.num_chunks > 1:
            self._turns[number] = turn = Turn(partial(self._run_apart, number), runner.device)
            flow.park = turn.park

    def _run_apart(self, number: int) -> None:
        """The forward in a thread of its own."""
        with self._runner.random.in_this_thread():
            self._run(number)

    def _run(self, number: int) -> None:
        """The user's forward, from its beginning to its loss."""
        runner, flow, factor = self._runner, self.flows[number], self._factors[number]
        try:
            loss = runner.run_glue(self._loss_of, self._parts[number])
            if not isinstance(loss, StageTensor) or not loss.requires_grad:
                raise ModelError("the loss depends on no trainable parameter; nothing can be learnt from this batch")
            scaled = loss if factor == 1.0 else loss * factor
            assert isinstance(scaled, StageTensor)
        except Exception as error:
            error.add_note(
                f"shardwise: in the forward of microbatch {number} of {len(self._parts)}, after {flow.last!r}"
            )
            raise
        if len(self._parts) == 1 and runner.num_chunks == 1:
            for chain in runner.chains:
                flow.link(runner.ties, chain)
        if runner.is_local(scaled.value.stage):
            flow.graph(scaled.value.stage).loss = scaled.value.local
            self.losses[number] = runner.detached(loss)
