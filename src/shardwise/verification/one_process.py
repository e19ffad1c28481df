"""The one process: each update from the state that the layout had before it, with the layout's rows.

The mean gradient is taken here, in float64, from autograd's gradients of each microbatch. No sum or average of an
engine takes part. The optimizer then gets the gradients of the layout, so that the update is compared apart from its
gradients. If a gradient is nearly zero, Adam makes rounding errors as large as a learning rate.

    load(state-N of the layout)  ->  forward, backward: outputs noted, gradients added up in float64 (hooks)
    just before optimizer.step:      own gradients digested, then overwritten with gradients-N of the layout
    after:                           own state, compared with state-N+1 of the layout
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Catalogue, load
from shardwise.checkpoint import open as open_checkpoint
from shardwise.comm import alone
from shardwise.comm.digests import digest_of_values
from shardwise.engine.forward.batches import Batch, Microbatch, given_microbatches
from shardwise.engine.forward.layers import in_backward
from shardwise.engine.step.reports import StepReport
from shardwise.space import Portion
from shardwise.verification.error_model import Path
from shardwise.verification.layout_run import RankNotes, gradients_folder, notes_file, state_before
from shardwise.verification.program import Subject
from shardwise.verification.run_recording import Notes, wide
from shardwise.verification.watched_program import Enough, WatchedProgram, digests_of


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
    inputs: tuple[str, ...]
    """Digests of the microbatches."""
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


class OneProcess(WatchedProgram):
    """The program in one process."""

    def __init__(self, subject: Subject, folder: FilePath, device: torch.device) -> None:
        """folder: of what the ranks left."""
        super().__init__(subject, subject.one_process_plan, alone(device))
        self.folder = folder
        self._terms: dict[str, Terms] = {}
        self._squares: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        self._buffers: dict[str, str] = {}
        self._inputs: tuple[str, ...] = ()
        self.given_gradients: Catalogue
        """Those of the layout, in the update under way."""

    def made(self, model: nn.Module) -> Sequence[Mapping[str, Portion]]:
        """Put hooks on the model; the portions are those that the ranks say they have."""
        self.model = model
        self.order = [name for name, each in model.named_parameters() if each.requires_grad]
        """The trained parameters, in the order of the model."""
        self.shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        # A hook on the tensor sees the gradient of one microbatch, before the engine adds it to its buffer.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._term_hook(name))
        owner_of = {each: name for name, each in model.named_parameters()}
        for module in model.modules():
            names = [owner_of[each] for each in module._parameters.values() if each in owner_of]
            if names:
                module.register_forward_hook(self._uses_hook(names))
        for optimizer in self.engine.optimizers:
            optimizer.register_step_pre_hook(self._take_gradients)
        count = self.subject.plan.mesh.tp
        ranks = range(count) if count > 1 else ()
        return [RankNotes.read(notes_file(self.folder, 0, rank)).portions for rank in ranks]

    @abstractmethod
    def is_like_layout(self) -> bool:
        """Whether the layout has come as far, before an update; else the program is left."""

    @abstractmethod
    def is_near_layout(self, own: OwnStep) -> bool:
        """Whether an update is that of the layout; else the program is left."""

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, masters, buffers and optimizer state by name."""
        return {piece.name: tensor for piece, tensor in self.engine.state().items()}

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Take over the state of the layout."""
        if not self.is_like_layout():
            raise Enough
        # A checkpoint of any layout loads into one process: masters, buffers and what the optimizer keeps.
        load(str(state_before(self.folder, self.num_updates)), self.engine, channel=self.channel)
        self._inputs, self._buffers = digests_of(microbatches), self._digests_of_buffers()
        self._terms, self._squares, self._digests = {}, {}, {}
        self.given_gradients = open_checkpoint(str(gradients_folder(self.folder, self.num_updates)))
        self.recorder.begin()

    def given(self, batch: Batch, parts: Sequence[Microbatch]) -> Batch:
        """The batch; on a device each microbatch lies in memory as on its rank."""
        # Kernels round by the alignment of what they read, and a device gets a copy of each share.
        ranks, device = self.subject.plan.mesh.num_data_ranks, self.channel.device
        if device.type == "cpu" or given_microbatches(batch) is not None:
            return batch
        return [*chain.from_iterable(self.cut(each, len(parts) // ranks, device) for each in self.shares(batch, ranks))]

    def end(self, report: StepReport) -> None:
        """Compare the update."""
        notes = self.recorder.take()
        for name, square in self._squares.items():
            if name in self._terms:
                self._terms[name].square = square if math.isfinite(square) else 0.0
        paths = [noted.path for noted in notes.outputs.values()]
        before = self._buffers
        own = OwnStep(
            notes=notes,
            report=report,
            inputs=self._inputs,
            terms={name: self._terms[name] for name in self.order if name in self._terms},
            path=max(paths, key=lambda path: path.num_calls, default=Path.beginning()),
            state=self.state(),
            gradient_digests=self._digests,
            written_buffers=frozenset(
                name for name, digest in self._digests_of_buffers().items() if digest != before.get(name)
            ),
        )
        if not self.is_near_layout(own):
            raise Enough

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
        for piece, gradient in self.engine.gradients().items():
            # The first optimizer that steps comes before any write: later ones find gradients of the layout here.
            self._digests.setdefault(piece.name, digest_of_values(gradient))
            theirs = self.given_gradients
            if piece.name in theirs.tensors and theirs.tensors[piece.name].shape == gradient.shape:
                gradient.copy_(theirs.read(piece.name))


def _mean_square(tensor: torch.Tensor) -> float:
    return float(wide(tensor).abs().square().mean()) if tensor.numel() else 0.0
