"""The one process: each update from the state that the layout had before it, with the layout's rows.

The mean gradient is taken here, in float64, from what autograd gives for each microbatch: nothing of what adds up and
averages in an engine takes part. The optimizer then gets the gradients of the layout, so that an update is compared
apart from what it was given: where a gradient is nearly zero, Adam makes rounding errors as large as a learning rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Catalogue, load
from shardwise.comm import alone
from shardwise.comm.agreement import digest_of_values
from shardwise.engine.autograd_state import in_backward
from shardwise.engine.batches import LossOfModel
from shardwise.engine.parallelize import parallelize
from shardwise.engine.reports import StepReport
from shardwise.engine.tensor.tensor_decision import decide
from shardwise.space import Portion
from shardwise.train.verification.error_model import Path
from shardwise.train.verification.program import Program
from shardwise.train.verification.run_recording import NotedLoss, Notes, Recorder, wide


@dataclass(kw_only=True)
class Terms:
    """What the gradient of one parameter is added up from, over all microbatches."""

    total: torch.Tensor
    """The sum."""
    sizes: torch.Tensor
    """The sum of absolute values."""
    square: float = 0.0
    """Expected square of an element, had all terms of all microbatches random signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStep:
    """What one process made of one update."""

    notes: Notes
    report: StepReport
    terms: dict[str, Terms]
    """By parameter, in the order of the model; those without a gradient are left out."""
    path: Path
    """Of a whole forward."""
    state: dict[str, torch.Tensor]
    """After the update with the layout's gradients; views that hold until the next one."""
    gradient_digests: dict[str, str]
    """Of the mean gradients as an engine in one process adds them up: what is equal to these is equal to the bit."""
    written_buffers: frozenset[str]
    """The names of buffers that the forwards of this update have changed."""


class OneProcess:
    """The program in one process."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._channel = alone(device)
        self.model = program.build()
        portions = portions_along_tp(self.model, program)
        loss = None if program.loss is None else NotedLoss(program.loss)
        self._engine = parallelize(
            self.model,
            program.one_process_plan,
            optimizer=program.optimizer,
            loss=loss,
            loss_weight=program.loss_weight,
            channel=self._channel,
            seed=program.seed,
        )
        self._recorder = Recorder(self.model, portions=portions)
        if loss is not None:
            loss.recorder = self._recorder
        self._schedulers = [program.scheduler(each) for each in self._engine.optimizers] if program.scheduler else []
        self._terms: dict[str, Terms] = {}
        self._squares: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        self._theirs: Catalogue | None = None
        self.order = [name for name, each in self.model.named_parameters() if each.requires_grad]
        """The trained parameters, in the order of the model."""
        self.shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(_AddTerm(self, name))
        owner_of = {each: name for name, each in self.model.named_parameters()}
        for module in self.model.modules():
            names = [owner_of[each] for each in module._parameters.values() if each in owner_of]
            if names:
                module.register_forward_hook(_NoteUses(self, names))
        for optimizer in self._engine.optimizers:
            optimizer.register_step_pre_hook(self._take_gradients)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, masters, buffers and optimizer state by name."""
        return {piece.name: tensor for piece, tensor in self._engine.state().items()}

    def step(self, batch: Any, state: FilePath, gradients: Catalogue) -> OwnStep:
        """One update from a state of the layout. `gradients`: what the layout's optimizer was given."""
        load(str(state), self._engine, channel=self._channel)
        buffers = self._digests_of_buffers()
        self._terms, self._squares, self._digests, self._theirs = {}, {}, {}, gradients
        self._recorder.begin()
        report = self._engine.step(batch)
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
        dense = wide(gradient.to_dense() if gradient.layout != torch.strided else gradient)
        if (terms := self._terms.get(name)) is None:
            self._terms[name] = Terms(total=dense.clone(), sizes=dense.abs())
            return
        terms.total += dense
        terms.sizes += dense.abs()

    def note_uses(self, names: Sequence[str], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A module was called: how large its gradients would be if their terms had random signs."""
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

        def note(gradient: torch.Tensor) -> None:
            square = float(wide(gradient.detach()).abs().square().sum()) / max(1, gradient.shape[-1])
            for name, scale in scales.items():
                self._squares[name] = self._squares.get(name, 0.0) + square * scale

        output.register_hook(note)

    def _take_gradients(self, *_: Any) -> None:
        """Just before an optimizer steps: give it what the layout's was given."""
        if self._theirs is None:
            return
        for piece, gradient in self._engine.gradients().items():
            self._digests.setdefault(piece.name, digest_of_values(gradient))
            if piece.name in self._theirs.tensors and self._theirs.tensors[piece.name].shape == gradient.shape:
                gradient.copy_(self._theirs.read(piece.name))


class _AddTerm:
    def __init__(self, process: OneProcess, name: str) -> None:
        self._process = process
        self._name = name

    def __call__(self, gradient: torch.Tensor) -> None:
        self._process.add_term(self._name, gradient)


class _NoteUses:
    def __init__(self, process: OneProcess, names: Sequence[str]) -> None:
        self._process = process
        self._names = names

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._process.note_uses(self._names, module, inputs, output)


def _mean_square(tensor: torch.Tensor) -> float:
    return float(wide(tensor).abs().square().mean()) if tensor.numel() else 0.0


def portions_along_tp(model: nn.Module, program: Program) -> list[Mapping[str, Portion]]:
    """For each rank along tp, the portions of the parameters that are cut."""
    plan = program.plan
    if plan.mesh.tp == 1 or plan.tensor.rules is None:
        return []
    loss = LossOfModel(model, program.loss)
    decision = decide(model, plan, loss=loss, sample=program.share(program.batches[0], 0))
    return [decision.plan.portions(rank) for rank in range(plan.mesh.tp)]
