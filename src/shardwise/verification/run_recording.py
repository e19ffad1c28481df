"""The values of a model in an update, noted by hooks: outputs of modules, losses, gradients of each microbatch.

Of a tensor with many elements a sample is kept, at places that depend on their number alone, and a digest of all. The
digest says whether two tensors are equal to the bit, the sample how far apart they are where they are not.

    begin -> forward of microbatch 0: OutputKey(0, "layers.3", call 0, "") ...  backward: GradientKey(0, "layers.3.w")
          -> forward of microbatch 1: ...                                       -> take: the notes of one update
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.forward.batches import LossFunction
from shardwise.engine.forward.layers import in_backward
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.space import Portion
from shardwise.verification.error_model import Path

SAMPLED_ELEMENTS = 1 << 12
"""So many elements of a tensor are kept."""

LOSS = "the loss"
"""In the place of a module's name."""


class OutputKey(NamedTuple):
    """Which tensor of a forward."""

    microbatch: int
    module: str
    """Its name, or LOSS."""
    call: int
    """Of the module in this microbatch, counted from 0."""
    place: str
    """Where in the output: "", "0", "logits"."""


class GradientKey(NamedTuple):
    """Which gradient of a backward."""

    microbatch: int
    parameter: str
    part: int = -1
    """The rank along tp that has it, of a parameter that is cut over these ranks; -1: all of it."""


class Noted(NamedTuple):
    """A tensor, as far as it is kept."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    """Of all elements; empty for a sum of several tensors."""
    sample: torch.Tensor
    """The elements at `places(num_elements)`, in float64 or complex128, on the CPU."""
    path: Path
    """The calls before the tensor in its forward."""

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """The tensors of one rank in one update, in its order; microbatches are counted as the rank computes them."""

    outputs: dict[OutputKey, Noted]
    gradients: dict[GradientKey, Noted]


@lru_cache(maxsize=256)
def places(num_elements: int) -> torch.Tensor:
    """The row-major elements that are kept of so many: all, or as many as can be kept, spread at random."""
    if num_elements <= SAMPLED_ELEMENTS:
        return torch.arange(num_elements)
    # Seeded by the number of elements: ranks and the one process choose the same places without a word between them.
    # At random, because regular places would hit the same columns of a matrix in each row.
    generator = torch.Generator().manual_seed(num_elements)
    drawn: torch.Tensor = torch.randint(num_elements, (SAMPLED_ELEMENTS,), generator=generator).unique()
    return drawn


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_number(dtype: str) -> bool:
    """Whether values of a dtype are rounded."""
    return dtype.startswith(("float", "bfloat", "complex"))


class Recorder:
    """Notes the outputs and gradients of one model, from `begin` to `take`."""

    def __init__(
        self,
        model: nn.Module,
        runner: PipelineRunner | None = None,
        *,
        portions: Sequence[Mapping[str, Portion]] = (),
    ) -> None:
        """`runner`: of the stages on this rank, where the model is cut into stages. `portions`: for each rank along tp,
        those of the parameters that it has a part of. Their gradients are noted apart."""
        self._runner = runner
        self._portions = portions
        self._model = model
        self._is_on = False
        self._microbatch = -1
        self._clear()
        # Closures, not `functools.partial`: the pipeline knows hooks of this package by `__module__` and runs them with
        # their module, on its stage. Hooks of others it calls on all ranks, after the module, with values of stages.
        self._handles = [model.register_forward_pre_hook(lambda *_: self.enter_model(), prepend=True)]
        self._handles += [
            module.register_forward_hook(self._output_hook(name)) for name, module in model.named_modules()
        ]
        self._handles += [
            parameter.register_hook(self._gradient_hook(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def begin(self) -> None:
        """An update begins."""
        self._clear()
        self._microbatch = -1
        self._is_on = True

    def take(self) -> Notes:
        """The notes of the update, which has ended."""
        self._is_on = False
        notes = Notes(outputs=self._outputs, gradients=self._gradients)
        self._clear()
        return notes

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def enter_model(self) -> None:
        """The model is called: the next microbatch, where the schedule of a pipeline does not say which."""
        if self._is_on and torch.is_grad_enabled() and not in_backward():
            self._microbatch += 1

    def note_output(self, name: str, module: nn.Module | None, output: Any) -> None:
        """A module gave an output."""
        if not self._is_on or in_backward():  # what is computed again in backward was noted
            return
        found = list(_tensors(output))
        # A pipeline tries a call on fake tensors on every rank, and runs hooks of this package in the trial too.
        if any(isinstance(each, FakeTensor) for _, each in found):  # only its shape is asked for
            return
        number = self._number()
        call = self._calls.get((number, name), 0)
        self._calls[number, name] = call + 1
        held = [] if module is None else [each for each in module._parameters.values() if each is not None]
        sizes = [size for each in (*held, *(tensor for _, tensor in found)) for size in each.shape]
        # Calls in a row are taken for a chain: a bound that is too wide for a branch, never too narrow.
        before = self._paths.get(number, Path.beginning())
        path = before.after(length=max(sizes, default=1), dtypes=[dtype_name(tensor.dtype) for _, tensor in found])
        self._paths[number] = path
        for place, tensor in found:
            # The path goes on for outputs of other ranks too: their descriptions are known here, and calls count
            # alike.
            if (local := local_of(tensor)) is not None:
                key = OutputKey(number, name, call, place)
                self._outputs[key] = noted_of(local, path)

    def note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Backward has a gradient for a parameter."""
        if not self._is_on:
            return
        key = GradientKey(self._number(), name)
        dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
        path = self._paths.get(key.microbatch, Path.beginning())
        noted = noted_of(dense, path)
        # The one process has the whole gradient: it is noted part by part as well, to be compared with what each
        # rank has.
        for rank, portions in enumerate(self._portions):
            if name in portions:
                part = portion_of(dense.detach(), portions[name])
                self._gradients[key._replace(part=rank)] = noted_of(part, path)
        if (before := self._gradients.get(key)) is not None:  # of another stage on this rank
            # No digest of the sum exists: the two parts have been seen at different times.
            noted = noted._replace(sample=before.sample + noted.sample, digest="")
        self._gradients[key] = noted

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, _, output: self.note_output(name, module, output)

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self.note_gradient(name, gradient)

    def _number(self) -> int:
        # A pipeline works on microbatches in the order of its schedule, several at a time: the model's calls cannot
        # be counted.
        if self._runner is not None and (flow := self._runner.flow) is not None:
            return flow.number
        return self._microbatch

    def _clear(self) -> None:
        self._outputs: dict[OutputKey, Noted] = {}
        self._gradients: dict[GradientKey, Noted] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._paths: dict[int, Path] = {}


class NotedLoss:
    """A loss function whose values are noted. A model that gives its own loss notes it as its output."""

    def __init__(self, loss: LossFunction, recorder: "Callable[[], Recorder | None]") -> None:
        """recorder: asked in each call, because the engine takes the loss before the model has its hooks."""
        self._loss: Callable[..., torch.Tensor | Mapping[str, Any]] = loss
        self.__signature__ = inspect.signature(loss)  # whether it takes the output of the model
        self._recorder = recorder

    def __call__(self, *given: Any) -> torch.Tensor | Mapping[str, Any]:
        """The loss of a microbatch."""
        value = self._loss(*given)
        loss = value.get("loss") if isinstance(value, Mapping) else value
        if (recorder := self._recorder()) is not None and isinstance(loss, torch.Tensor):
            recorder.note_output(LOSS, None, loss)
        return value


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of an output; None where another rank has them."""
    local = tensor.value.local if isinstance(tensor, StageTensor) else tensor
    return None if local is None or local.is_meta else local.detach()


def noted_of(tensor: torch.Tensor, path: Path) -> Noted:
    """A tensor as it is kept: a digest and a sample."""
    dense = tensor.detach()
    # On the device of the tensor: only the sample is copied to the CPU.
    kept = dense.reshape(-1)[places(dense.numel()).to(dense.device)]
    return Noted(
        shape=tuple(dense.shape),
        dtype=dtype_name(dense.dtype),
        digest=digest_of_values(dense),
        sample=wide(kept).cpu(),
        path=path,
    )


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an output, each with its place."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield place, value
        return
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, tuple | list):
        children = list(enumerate(value))
    for key, child in children:
        yield from _tensors(child, f"{place}.{key}" if place else str(key))
