"""The one process: each update from the state that the layout had before it, with the layout's rows.

The mean gradient is taken here, in float64, from autograd's gradients of each microbatch. No sum or average of an
engine takes part. The optimizer then gets the gradients of the layout, so that the update is compared apart from its
gradients. If a gradient is nearly zero, Adam makes rounding errors as large as a learning rate.

    load(state-N of the layout)  ->  forward, backward: outputs noted, gradients added up in float64 (hooks)
    just before optimizer.step:      own gradients digested, then overwritten with gradients-N of the layout
    after:                           own state, compared with state-N+1 of the layout
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Catalogue, load
from shardwise.comm import alone
from shardwise.comm.digests import digest_of_values
from shardwise.engine.forward.batches import LossOfModel
from shardwise.engine.forward.layers import in_backward
from shardwise.engine.step.reports import StepReport
from shardwise.engine.tensor.tensor_decision import decide
from shardwise.space import Portion
from shardwise.verification.error_model import Path
from shardwise.verification.program import Program
from shardwise.verification.run_recording import NotedLosses, Notes, Recorder, wide


@dataclass(kw_only=True)
class Terms:
    """The terms of the gradient of one parameter, over all microbatches."""

    total: torch.Tensor
    """The sum."""
    sizes: torch.Tensor
    """The sum of absolute values."""
    square: float = 0.0
    """Expected square of an element, had all terms of all microbatches random signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStep:
    """One update in one process."""

    notes: Notes
    report: StepReport
    terms: dict[str, Terms]
    """By parameter, in the order of the model; those without a gradient are left out."""
    path: Path
    """Of a whole forward."""
    state: dict[str, torch.Tensor]
    """After the update with the layout's gradients; views that hold until the next one."""
    gradient_digests: dict[str, str]
    """Of the mean gradients as an engine in one process adds them up, to find gradients that are equal to the bit."""
    written_buffers: frozenset[str]
    """The names of buffers that the forwards of this update have changed."""


class OneProcess:
    """The program in one process."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._channel, self._program = alone(device), program
        self.model = program.build()
        # Before `parallelize`: which parameters tp cuts is read from the plain model.
        portions = portions_along_tp(self.model, program)
        self._noted, self._turns, self._num_steps = NotedLosses(), program.turns_of(self.model), 0
        self._engine = program.parallelized(self.model, program.one_process_plan, self._channel, self._noted)
        self._noted.recorder = self._recorder = Recorder(self.model, portions=portions)
        self._schedulers = [program.scheduler(each) for each in self._engine.optimizers] if program.scheduler else []
        self._terms: dict[str, Terms] = {}
        self._squares: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        self._theirs: Catalogue | None = None
        self.order = [name for name, each in self.model.named_parameters() if each.requires_grad]
        """The trained parameters, in the order of the model."""
        self.shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        # A hook on the tensor sees the gradient of one microbatch, before the engine adds it to its buffer.
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._term_hook(name))
        owner_of = {each: name for name, each in self.model.named_parameters()}
        for module in self.model.modules():
            names = [owner_of[each] for each in module._parameters.values() if each in owner_of]
            if names:
                module.register_forward_hook(self._uses_hook(names))
        for optimizer in self._engine.optimizers:
            optimizer.register_step_pre_hook(self._take_gradients)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, masters, buffers and optimizer state by name."""
        return {piece.name: tensor for piece, tensor in self._engine.state().items()}

    def step(self, batch: Any, state: FilePath, gradients: Catalogue) -> OwnStep:
        """One update from a state of the layout. `gradients`: those that the layout's optimizer was given."""
        # A checkpoint of any layout loads into one process: masters, buffers and what the optimizer keeps.
        load(str(state), self._engine, channel=self._channel)
        buffers = self._digests_of_buffers()
        self._terms, self._squares, self._digests, self._theirs = {}, {}, {}, gradients
        self._recorder.begin()
        self._num_steps += 1
        given = self._program.as_ranks_have_it(batch, self._channel.device)
        report = self._engine.step(given, **self._noted.turn(self._turns(self._num_steps)))
        notes = self._recorder.take()
        self._theirs = None
        if not report.skipped:
            for scheduler in self._schedulers:
                scheduler.step()
        for name, square in self._squares.items():
            if name in self._terms:
                self._terms[name].square = square if math.isfinite(square) else 0.0
        paths = [noted.path for noted in notes.outputs.values()]
        return OwnStep(
            notes=notes,
            report=report,
            terms={name: self._terms[name] for name in self.order if name in self._terms},
            path=max(paths, key=lambda path: path.num_calls, default=Path.beginning()),
            state=self.state(),
            gradient_digests=self._digests,
            written_buffers=frozenset(
                name for name, digest in self._digests_of_buffers().items() if digest != buffers.get(name)
            ),
        )

    def _digests_of_buffers(self) -> dict[str, str]:
        held = self.model.named_buffers(remove_duplicate=False)
        return {name: digest_of_values(buffer) for name, buffer in held}

    # Hooks ----------------------------------------------------------------------------------------------------------

    def add_term(self, name: str, gradient: torch.Tensor) -> None:
        """A microbatch gave a gradient."""
        # In float64, where adding any number of float32 gradients rounds so little that it does not count.
        dense = wide(gradient.to_dense() if gradient.layout != torch.strided else gradient)
        if (terms := self._terms.get(name)) is None:
            self._terms[name] = Terms(total=dense.clone(), sizes=dense.abs())
            return
        terms.total += dense
        terms.sizes += dense.abs()

    def note_uses(self, names: Sequence[str], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A module was called: how large its gradients would be if their terms had random signs."""
        # A recomputation in backward calls the module again: its uses were noted in the forward.
        if in_backward() or not torch.is_grad_enabled():
            return
        if not isinstance(output, torch.Tensor) or not output.requires_grad or not output.ndim:
            return
        floating = [each.detach() for each in inputs if isinstance(each, torch.Tensor) and each.is_floating_point()]
        held = dict(self.model.named_parameters(remove_duplicate=False))
        # Of a vector each output is a term; of a matrix, outputs times inputs; a token stands for a vector with one 1.
        of_input = {
            name: _mean_square(floating[0]) if floating else 1 / max(1, held[name].shape[0])
            for name in names
            if held[name].ndim > 1
        }
        scales = {name: of_input.get(name, 1.0) for name in names}

        # Terms of a weight's gradient are products of an input and a gradient of the output. With random signs the
        # square of their sum is the sum of their squares. What is left after cancelling may be far smaller, but
        # rounds like these.
        def note(gradient: torch.Tensor) -> None:
            square = float(wide(gradient.detach()).abs().square().sum()) / max(1, gradient.shape[-1])
            for name, scale in scales.items():
                self._squares[name] = self._squares.get(name, 0.0) + square * scale

        output.register_hook(note)

    def _term_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self.add_term(name, gradient)

    def _uses_hook(self, names: Sequence[str]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda module, inputs, output: self.note_uses(names, module, inputs, output)

    def _take_gradients(self, *_: Any) -> None:
        """Just before an optimizer steps: give it the gradients of the layout."""
        if self._theirs is None:
            return
        for piece, gradient in self._engine.gradients().items():
            # The first optimizer that steps comes before any write: later ones find gradients of the layout here.
            self._digests.setdefault(piece.name, digest_of_values(gradient))
            if piece.name in self._theirs.tensors and self._theirs.tensors[piece.name].shape == gradient.shape:
                gradient.copy_(self._theirs.read(piece.name))


def _mean_square(tensor: torch.Tensor) -> float:
    return float(wide(tensor).abs().square().mean()) if tensor.numel() else 0.0


def portions_along_tp(model: nn.Module, program: Program) -> list[Mapping[str, Portion]]:
    """For each rank along tp, the portions of the parameters that are cut."""
    plan = program.plan
    if plan.mesh.tp == 1 or plan.tensor.rules is None:
        return []
    loss = LossOfModel(model, program.loss_of(model), program.rows)
    decision = decide(model, plan, loss=loss, sample=program.share(program.batches[0], 0))
    return [decision.plan.portions(rank) for rank in range(plan.mesh.tp)]
