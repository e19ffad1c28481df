"""One training step of one rank: its forwards and backwards, in any order that a schedule asks for.

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

With several stages per rank, a forward stops between them, and other microbatches have their turn on the rank:

    scheduler   advance ........................ advance ....
    forward             runs ... park                    runs ... end

A forward parks before it works on a stage whose action has not begun. It runs in a thread: grad mode and autocast
belong to a thread in torch, and no other way leaves a forward in the middle of a user's code. What torch keeps for the
caller's thread (modes, autocast, hooks of saved tensors) holds in the threads of forwards too.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.engine.forward.batches import Microbatch, MicrobatchLoss, Weight, scaled_loss
from shardwise.engine.forward.passes import UnevenMicrobatches
from shardwise.engine.forward.randomness import KeyedRandom, Stream
from shardwise.engine.pipeline.crossings import GradientKinds
from shardwise.engine.pipeline.glue import Glue, LossOf
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.ties import Chain, StageTies
from shardwise.engine.pipeline.transfers import MicrobatchFlow
from shardwise.engine.torch_private import (
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    top_saved_hooks,
)
from shardwise.errors import ModelError


# No `Exception`: the user's forward may catch those, and would go on with a step that has failed.
class _Abandoned(BaseException):
    """Unwinds a parked forward that will not be continued."""


class ForwardThread:
    """One forward."""

    def __init__(self, body: Callable[[], None], device: torch.device) -> None:
        self._body = body
        self._error: BaseException | None = None
        # Two semaphores, so that exactly one thread runs at a time: nothing that a rank keeps needs a lock.
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = False
        self._is_abandoned = False
        self._around = _ThreadState(device)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="forward", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Let the forward run until it parks or ends; raises its error again."""
        if self._has_ended:
            return
        self._go.release()
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def park(self) -> None:
        """Called in the forward: let the scheduler go on until it advances this one again."""
        # Nobody advances one that was abandoned, and is still in a `finally` of the user's.
        if self._is_abandoned:
            raise _Abandoned
        self._stop.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End a forward that is parked, or has ended."""
        if not self._has_ended:
            self._is_abandoned = True
            self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                with self._around.taken_over():
                    self._body()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            self._stop.release()


class _ThreadState:
    """The state of a thread in torch that forwards depend on."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        # A new thread has the first device as its current one, and the default stream of each.
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
        self._autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
        self._saving = top_saved_hooks(True)
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """The new thread has the same."""
        torch.set_num_threads(self._num_threads)  # a new thread would take all cores
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                # A stream that is the current one of its device does not make that the current device.
                stack.enter_context(torch.accelerator.device_index(self._stream.device.index))
                stack.enter_context(self._stream)
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for kind, dtype, caches in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            if self._saving is not None:
                # A step inside of `save_on_cpu()` means all of its forwards, those in threads too.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            for mode in self._function_modes:  # pushed, not entered: to enter may begin to count anew
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for each in self._dispatch_modes:
                push_dispatch_mode(each)
                stack.callback(pop_dispatch_mode)
            yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Equipment:
    """The objects that all steps of a rank work with."""

    stages: Stages
    glue: Glue
    random: KeyedRandom
    ties: StageTies
    chains: Sequence[Chain]
    kinds: GradientKinds | None
    """Finds out what gradients are along `tp`, where there are such ranks."""
    recorder: SpanRecorder
    begin_flow: Callable[[int, Stream | None], MicrobatchFlow]
    """From the number and the stream of a microbatch."""


class TrainingStep:
    """The microbatches of a step, from the beginning of their forwards to the end of their backwards."""

    def __init__(
        self,
        equipment: Equipment,
        parts: Sequence[Microbatch],
        factors: Sequence[Weight],
        loss_of: LossOf,
        streams: Sequence[Stream | None],
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
        rounds: UnevenMicrobatches,
    ) -> None:
        self.flows: dict[int, MicrobatchFlow] = {}
        zeros = torch.zeros(len(parts), device=equipment.stages.device).unbind()
        self.losses = [MicrobatchLoss(each, {}) for each in zeros]
        """Of each microbatch, where this rank has it, else zero."""
        self.peak_in_flight = 0
        """Most microbatches whose activations this rank held at a time."""
        self._equipment = equipment
        self._parts = parts
        self._given: dict[int, Microbatch] = {}
        """Those that had their turn, and are not computed yet."""
        self._factors = factors
        self._loss_of = loss_of
        self._streams = streams
        self._gradient_of = gradient_of
        self._rounds = rounds
        self.goes_one_by_one = rounds.go_one_by_one(equipment.stages.num_chunks)
        """Whether microbatches are computed one after the other, whatever the schedule says."""
        self._turns: dict[int, ForwardThread] = {}
        """The forwards that park between the stages of this rank."""
        # Autograd wants one of the right form for each root, and a departure ignores it.
        self._no_gradient = torch.zeros((), dtype=torch.float32, device=equipment.stages.device)

    def forward(self, number: int, stage: int) -> None:
        """The forward of a microbatch up to the end of its work on a stage."""
        if number not in self.flows:
            self._given[number] = self._parts[number]
        if self.goes_one_by_one:
            self._rounds.begin(number)
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
        # One call for all roots, so that autograd orders their nodes: the last made first, as in one process.
        roots = [root for graph in graphs for root in graph.roots]
        losses = [graph.loss for graph in graphs if graph.loss is not None]
        gradients = [self._no_gradient] * len(roots) + [self._gradient_of(loss) for loss in losses]
        roots += losses
        if roots and equipment.kinds is not None:
            flow.trace = equipment.kinds.trace(graphs)
        with equipment.recorder.noting("B", number, stage), equipment.glue.current(flow):
            if roots:
                try:
                    self._rounds.passes.begin_backward_of(roots)
                    with equipment.random.in_backward_of(roots):
                        torch.autograd.backward(roots, gradients)
                except Exception as error:
                    error.add_note(
                        f"shardwise: in the backward of microbatch {number} of {len(self._parts)} on stage {stage} "
                        f"(rank {equipment.stages.rank} of the pipeline)"
                    )
                    raise
            # A value that arrived and was not used in the end has no node that ran, but its sender waits for an
            # answer.
            flow.return_nothing()
            # Once autograd has returned, this rank adds nothing more to the parameter: the stage before may continue
            # the sum.
            for link in [link for graph in graphs for link in graph.links]:
                flow.return_gradient(link.crossing, equipment.ties.hand_down(link.name))
            if flow.trace is not None and equipment.kinds is not None:
                equipment.kinds.learn(flow.trace)
                flow.trace = None
            if not has_passed:
                self._rounds.done(None if covers_all else stage)
        # The graphs hold activations: they are let go now, not when the next backward overwrites these names.
        roots.clear()
        for graph in graphs:
            graph.clear()
        if not flow.graphs:
            flow.close()

    def close(self) -> None:
        """Let go of everything, also of forwards that will not go on."""
        for number, turn in self._turns.items():
            self.flows[number].ended = _Abandoned()
            turn.abandon()
        for flow in self.flows.values():
            flow.close()

    def _start(self, number: int) -> None:
        in_flight = sum(bool(each.graphs) for each in self.flows.values()) + 1
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        self.flows[number] = flow = self._equipment.begin_flow(number, self._streams[number])
        if self._equipment.stages.num_chunks > 1:
            self._turns[number] = turn = ForwardThread(partial(self._run_apart, number), flow.device)
            flow.park = turn.park

    def _run_apart(self, number: int) -> None:
        """The forward in a new thread."""
        with self._equipment.random.in_this_thread():
            self._run(number)

    def _run(self, number: int) -> None:
        """The user's forward, from its beginning to its loss."""
        equipment, flow, factor = self._equipment, self.flows[number], self._factors[number]
        try:
            found = equipment.glue.run(self._loss_of, self._given.pop(number))
            loss = found.loss
            if not isinstance(loss, StageTensor) or not loss.requires_grad:
                raise ModelError("the loss depends on no trainable parameter; nothing can be learnt from this batch")
            scaled = scaled_loss(loss, factor)
            assert isinstance(scaled, StageTensor)
        except Exception as error:
            error.add_note(
                f"shardwise: in the forward of microbatch {number} of {len(self._parts)}, after {flow.last!r}"
            )
            raise
        # With more microbatches, one process adds all uses of the first one before those of the second; a rank adds
        # the microbatches of its own uses first. The order differs anyway then, and sums travel once per update
        # instead.
        if len(self._parts) == 1 and equipment.stages.num_chunks == 1:
            for chain in equipment.chains:
                flow.link(equipment.ties, chain)
        if equipment.stages.is_local(scaled.value.stage):
            flow.graph(scaled.value.stage).loss = scaled.value.local
        self.losses[number] = here(found, equipment.stages)


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
