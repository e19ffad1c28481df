"""Runs a model with the portions of each rank, one rank after the other in this process, and compares with the whole.

No rank waits for another: what a sum or a gathering would give is taken from a run of the whole model.

    whole model   x -> up -> h (12) -> tanh -> a (12) -> down -> y        a hook keeps a and y of `down`
    rank 0        x -> up -> h[0:6] -> tanh -> a'     |  `_Prompter`: a' must be a[0:6]; gives y  |-> as in the whole
    rank 1        x -> up -> h[6:12] -> tanh -> a"    |               a" must be a[6:12]; gives y |-> as in the whole

So everything outside of cuts has the bits of the whole model, and a fault shows in the first module that ends a cut
behind it, or in what the run gives. The inside of a cut is computed for each rank by the forward that will train. Hooks
of the program run in both: what is kept of a module is what its forward gives, before they see it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.nested_values import tensors_in
from shardwise.engine.forward.inventory import named_places
from shardwise.engine.forward.layers import Layer, Place, wrap
from shardwise.engine.forward.outline import innermost_module
from shardwise.engine.forward.trial_runs import aside
from shardwise.engine.parameter_kinds import is_packed
from shardwise.engine.tensor.proof.isolated_runs import NoDropout, differ, factor_of
from shardwise.engine.tensor.styles import SharedInputs, Styled
from shardwise.engine.tensor.tp_collectives import taken
from shardwise.engine.torch_private import forward_hooks, tensor_leaves
from shardwise.errors import in_words
from shardwise.plan.outlines import TensorOutline
from shardwise.plan.tensor_plan import Ranges, Style, TensorPlan

_SPREAD = 0.1
"""The scale of what is added to parameters that are one number throughout."""


class RehearsalError(Exception):
    """A plan under which a module computes something else; `module` is where that shows."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module = module
        self.why = why


class _LossOfPartsError(Exception):
    """A loss asks for the outputs that other ranks have of a module (`VocabularyCrossEntropy`)."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


def that_ask(plan: TensorPlan) -> list[str]:
    """The modules whose styles need an answer of other ranks that no run of the whole model has."""
    asks = {"sum", "once", "hide", "sequence", "split"}
    return [
        name
        for name, styles in plan.styles.items()
        if any(each.kind in asks or each.gather is not None or each.scatter is not None for each in styles)
    ]


def rehearse(model: nn.Module, outline: TensorOutline, plan: TensorPlan, call: Callable[[], Any]) -> None:
    """Run the model, by `call()`, with the portions of each rank. Raises RehearsalError where it computes otherwise.

    It runs in evaluation mode, and in training mode without dropout unless it draws other random numbers there.
    """
    try:
        _rehearse(model, outline, plan, call)
    except _LossOfPartsError as asked:
        # The loss of the parts is that of all of them together.
        whole = tuple(replace(each, gathers=each.kind == "column") for each in plan.styles[asked.module])
        rehearse(model, outline, replace(plan, styles={**plan.styles, asked.module: whole}), call)


def _rehearse(model: nn.Module, outline: TensorOutline, plan: TensorPlan, call: Callable[[], Any]) -> None:
    with aside(model), NoDropout():
        _make_distinct(model)
        for trains in (False, True):
            model.train(trains)
            try:
                heard, result, drew = _hear(model, plan, call)
            except Exception:
                # The whole model fails too: it cannot be trained on the sample, and its evaluation has been rehearsed.
                if trains:
                    return
                raise
            # A model that draws other random numbers than dropout gives each run its own, and no part could be
            # compared.
            if trains and drew:
                return
            for rank in range(plan.num_ranks):
                own = _run_as(model, outline, plan, rank, heard, call)
                for one, whole in zip(own, result, strict=False):
                    # Parts are for a program that asked for them.
                    if one.shape == whole.shape and not _is_alike(one, whole):
                        raise RehearsalError(
                            "", f"what it gives with the portions of rank {rank} is not as in the whole"
                        )


def _run_as(
    model: nn.Module, outline: TensorOutline, plan: TensorPlan, rank: int, heard: "_Calls", call: Callable[[], Any]
) -> list[torch.Tensor]:
    """What the model gives as one rank would run it."""
    # Random numbers, too, begin where those of the whole model began.
    with aside(model):
        _become(model, outline, plan, rank, heard)
        try:
            return tensors_in(call())
        except (RehearsalError, _LossOfPartsError):
            raise
        except Exception as error:
            where = innermost_module(model, error.__traceback__)
            raise RehearsalError(where[0] if where else "", in_words(error).splitlines()[0]) from error


def _make_distinct(model: nn.Module) -> None:
    """Give parameters that are zeros or ones throughout other values, the same on every rank."""
    # Weights of zeros make every output equal, cut or not; norms of ones hide that the wrong part of them is read.
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module, attribute, _, parameter in list(named_places(model)):
        if id(parameter) not in made and not is_packed(parameter) and _is_constant(parameter):
            noise = torch.randn(parameter.shape, generator=generator) * _SPREAD
            made[id(parameter)] = nn.Parameter(parameter + noise.to(parameter), requires_grad=False)
        if id(parameter) in made:
            module._parameters[attribute] = made[id(parameter)]


def _is_constant(parameter: torch.Tensor) -> bool:
    if parameter.is_meta or not parameter.is_floating_point() or parameter.numel() < 2:
        return False
    return bool((parameter == parameter.reshape(-1)[0]).all())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heard:
    """What a module read and gave, call by call."""

    forwards: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    hooks: list[list[torch.Tensor]] = field(default_factory=list)
    """What hooks of the program made of what it gave; empty where it has none."""


_Calls = Mapping[str, _Heard]


def _hear(model: nn.Module, plan: TensorPlan, call: Callable[[], Any]) -> tuple[_Calls, list[torch.Tensor], bool]:
    """What modules that end cuts read and give in the whole model, what it gives, and whether it draws numbers."""
    heard = {name: _Heard() for name, styles in plan.styles.items() if any(_ends(style) for style in styles)}
    with aside(model) as has_drawn:
        for name, calls in heard.items():
            module = model.get_submodule(name)
            if forward_hooks(module):
                module.register_forward_hook(partial(_note_hooks, calls))
            module.register_forward_hook(partial(_note, calls), with_kwargs=True, prepend=True)
        result = [each.clone() for each in tensors_in(call())]
        return heard, result, has_drawn()


def _ends(style: Style) -> bool:
    return style.kind in ("row", "vocab", "gathered") or style.gathers


def _note(calls: _Heard, _module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
    # Copies: the model may write in place to what it reads or gives.
    calls.forwards.append((tensor_leaves((args, kwargs))[0].clone(), output.clone()))


def _note_hooks(calls: _Heard, _module: nn.Module, _args: Any, output: Any) -> None:
    calls.hooks.append([each.clone() for each in tensors_in(output)])


class _Prompter(Layer):
    """Compares what a module reads with what it reads in the whole model, and gives what it gives there."""

    place = Place.TENSOR
    """In the place of a style."""

    def __init__(self, name: str, style: Style, rank: int, calls: _Heard) -> None:
        self._name = name
        self._style = style
        self._rank = rank
        self._calls = iter(calls.forwards)
        self._hooks = iter(calls.hooks)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, output = next(self._calls, (None, None))
        if given is None or output is None:
            raise RehearsalError(self._name, "it runs more often than in the whole model")
        style = self._style
        # A row reads its part. Others that end a cut (tokens of a vocabulary, a column that gathers) read what is
        # whole.
        reads_part = style.kind == "gathered" or (style.kind == "row" and not style.splits)
        self._compare(tensor_leaves((args, kwargs))[0], given, style.ranges if reads_part else None, "reads")
        if style.gathers:
            # Gathered columns: the forward with this rank's portion gives its part of the output, which can be compared
            # here. A row gives a term of a sum, which is nowhere in the whole model.
            self._compare(self.forward(*args, **kwargs), output, style.ranges, "gives")
        return output.clone()

    def see_hooks(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Compare what hooks of the program make of the output with what they make of it in the whole model."""
        for own, whole in zip(tensors_in(output), next(self._hooks, []), strict=False):
            self._compare(own, whole, None, "gives, after the hooks of the program,")

    def _compare(self, own: torch.Tensor, whole: torch.Tensor, ranges: Sequence[Ranges] | None, verb: str) -> None:
        expected = whole if ranges is None else taken(whole, whole.dim() - 1, ranges[self._rank])
        if own.shape != expected.shape:
            raise RehearsalError(
                self._name,
                f"what it {verb} has the shape {tuple(own.shape)} with the portions of rank {self._rank}, and "
                f"{tuple(expected.shape)} is its part",
            )
        if not _is_alike(own, expected):
            raise RehearsalError(
                self._name, f"what it {verb} with the portions of rank {self._rank} is not its part of the whole"
            )


def _is_alike(own: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tensors of one shape differ by roundings only: products of other sizes add in another order."""
    if own.is_meta:
        return True
    if not own.is_floating_point():  # whole numbers (tokens) do not round
        return torch.equal(own, expected)
    eps = torch.finfo(own.dtype).eps
    return differ([own], [expected]) <= factor_of(eps) * eps


class _Offline:
    """The collectives of a rank that is alone. Styles that need an answer of others are prompted instead."""

    def __init__(self, module: str, rank: int, num_ranks: int) -> None:
        self.module = module
        self.rank = rank
        self.num_ranks = num_ranks

    def copy_to_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The value."""
        return value

    def scatter(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """This rank's part of the value."""
        return taken(value, dim, ranges[self.rank])

    def all_gather(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """The part, which `_Prompter` compares and completes."""
        return value

    def copy_last_to_ranks(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """The value."""
        return value

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """Nothing: a loss asks."""
        raise _LossOfPartsError(self.module)


def _become(model: nn.Module, outline: TensorOutline, plan: TensorPlan, rank: int, heard: _Calls) -> None:
    """Give the model the portions of one rank; modules that end cuts are prompted."""
    for known in outline.modules:
        module = model.get_submodule(known.name)
        for attribute, name in known.parameters.items():
            if (cut := plan.cuts.get(name)) is not None:
                whole = module._parameters[attribute]
                assert whole is not None
                own = taken(whole.detach(), cut.dim, cut.ranges[rank])
                module._parameters[attribute] = nn.Parameter(own, requires_grad=False)
    shared = SharedInputs()
    for name, styles in plan.styles.items():
        module = model.get_submodule(name)
        offline: Any = _Offline(name, rank, plan.num_ranks)
        for style in styles:
            # What gathers at its end is prompted, and does the rest itself (attributes with the number of outputs).
            if style.gathers or not _ends(style):
                wrap(module, Styled(name, style, offline, shared))
            if _ends(style):
                wrap(module, prompter := _Prompter(name, style, rank, heard[name]))
                if forward_hooks(module):
                    module.register_forward_hook(prompter.see_hooks)
