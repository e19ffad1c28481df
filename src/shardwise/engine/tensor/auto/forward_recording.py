"""Runs a forward once and writes down which features of its linear maps have to be on one rank.

    q = Linear(6, 4)   the layer `_Followed` runs it paused, and gives its output 4 fresh atoms     a b c d
    view, q @ k^T      `_see` applies the rule of each operation to the atoms                         a b | c d
    o = Linear(4, 6)   `_Followed` notes the atoms that it reads, and gives its output fresh ones     reads a b c d
    afterwards         `_TraceReader` numbers the groups: q gives 1 1 3 3, o reads 1 1 3 3            a `ForwardTrace`

A linear map separates: its outputs are any sums of its inputs, so nothing of its inputs ties its outputs. Operations
inside of it are not looked at.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.engine.forward.inventory import named_places
from shardwise.engine.forward.layers import Layer, Place, wrap
from shardwise.engine.forward.observe import Observed
from shardwise.engine.forward.trial_runs import aside, watch_calls
from shardwise.engine.tensor.auto.atoms import WHOLE, Atoms, TensorFlow, TracedOperation, slim, varies
from shardwise.engine.tensor.auto.operation_rules import follow, moved
from shardwise.engine.torch_private import schema_of, tensor_leaves
from shardwise.plan.outlines import AdaptedMap, TensorModule, TensorOutline, parents
from shardwise.plan.tensor_inference import ForwardTrace, Groups, TracedMap, TracedParameter


def record(model: nn.Module, outline: TensorOutline, call: Callable[[], Any]) -> ForwardTrace:
    """The trace of `call()`, which runs the model; afterwards the model is as before."""
    followed = {
        name: _Followed(replace(known, name=name), model.get_submodule(known.name), model.get_submodule(name))
        for name, known in _followed_maps(outline)
    }
    names: dict[int, str] = {}
    of_module = {each.holder: name for name, each in followed.items()}
    owners: dict[int, str] = {}
    for module, _, name, parameter in named_places(model):
        names.setdefault(id(parameter), name)
        owners[id(parameter)] = of_module.get(module) or owners.get(id(parameter), "")
    flow = TensorFlow(Atoms(), owners, followed)
    given: list[torch.Tensor] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        for numbers in [flow.numbers[each] for each in flow.cut(_tensors_in(output))]:
            given.append(numbers)
            # A program reads what the model gives, and expects the whole. A head over a vocabulary is recognized by
            # this, and gets the rule `vocab`, which gathers.
            flow.atoms.forbid(numbers, "the model gives it")

    # Without dropout and without a graph: atoms do not depend on values, and gradients are followed as levels.
    with aside(model):
        model.eval()
        for each in followed.values():
            each.flow = flow
            wrap(each.called, each)
        model.register_forward_hook(note)
        for name, module in model.named_modules():
            watch_calls(module, partial(flow.where.append, name), partial(flow.where.__delitem__, -1))
        with Observed(partial(_see, flow)):
            call()
    return _TraceReader(flow, followed, outline, given, names=names).trace()


def _followed_maps(outline: TensorOutline) -> Iterator[tuple[str, TensorModule]]:
    """The maps and embeddings that a forward calls, by the module that is called: an adapter stands for its map."""
    bases = {name: each.base if isinstance(each, AdaptedMap) else each[0] for name, each in outline.adapters.items()}
    for each in outline.modules:
        known = bases.get(each.name, each)
        if known.computes != "other" and bases.keys().isdisjoint(parents(each.name)):
            yield each.name, known


def _tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, dict):  # an output of transformers is one, whatever torch knows of it
        output = dict(output)
    return tensor_leaves(output)


@dataclass(eq=False)
class _Followed(Layer):
    """A linear map or an embedding, and what it read and gave."""

    known: TensorModule
    """Under the name of what is called."""
    holder: nn.Module
    """It holds the weight."""
    called: nn.Module
    """It, or the adapter around it."""
    flow: TensorFlow | None = field(init=False, default=None)
    atoms: torch.Tensor | None = field(init=False, default=None)
    inputs: list[torch.Tensor] = field(init=False, default_factory=list)
    has_whole_input: bool = field(init=False, default=False)
    problem: str = field(init=False, default="")
    is_lookup: bool = field(init=False, default=True)
    order: int = field(init=False, default=-1)

    place = Place.WATCH

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow = self.flow
        assert flow is not None
        # A count, not a flag: a followed module may call another one (an adapter around its base layer).
        flow.paused += 1
        try:
            output = self.forward(*args, **kwargs)
        finally:
            flow.paused -= 1
        if flow.paused:
            return output
        given = _tensors_in((args, kwargs))
        if self.order < 0:
            self.order = flow.atoms.count
        self._note(flow, given, output)
        return output

    def _note(self, flow: TensorFlow, given: list[torch.Tensor], output: Any) -> None:
        numbers = [each for each in map(flow.numbers.get, given) if each is not None]
        if len(given) != 1 or not isinstance(output, torch.Tensor) or not self._is_plain(given[0], output):
            self.problem = "it is called with other things than one tensor"
            for each in numbers:
                flow.atoms.forbid(each, f"{self.known.name!r}, which is called with other things than one tensor")
            for each in _tensors_in(output):
                flow.give(each, None)
            return
        if numbers and _varies_inside(numbers[0]):
            # Atoms that are tied by now are one group, which may not vary any more.
            numbers = [slim(flow.atoms.groups()[numbers[0]])]
            if not bool(numbers[0].any()):
                numbers = []  # by now it is whole
        if not numbers:
            self.has_whole_input = True
        elif self.known.computes == "embedding":
            flow.atoms.forbid(numbers[0], f"the embedding {self.known.name!r}")
        elif _varies_inside(numbers[0]):
            self._work_inside(flow, numbers[0], output)
            return
        else:
            self.inputs.append(numbers[0])
        # Once per map: a map that is called twice gives the same features, which have to be on one rank in both calls.
        if self.atoms is None:
            self.atoms = flow.atoms.fresh(output.shape[-1])
        flow.give(output, self.atoms.expand(output.shape))

    def _work_inside(self, flow: TensorFlow, numbers: torch.Tensor, output: torch.Tensor) -> None:
        """Each head, say, is mapped alike: the map is whole on every rank, and works on what the rank has."""
        self.problem = "it maps each part of a cut value alike"
        last = numbers.dim() - 1
        flow.atoms.tie_along(numbers, last, f"{self.known.name!r}, which maps each part alike")
        flow.give(output, numbers.narrow(last, 0, 1).expand(output.shape))

    def _is_plain(self, given: torch.Tensor, output: torch.Tensor) -> bool:
        weight = self.holder._parameters["weight"]
        assert weight is not None
        if self.known.computes != "embedding":
            outputs = weight.shape[0 if self.known.computes == "linear" else 1]
            return output.shape == (*given.shape[:-1], outputs) and output.dim() > 0
        own = type(self.holder).forward is not nn.Embedding.forward
        self.is_lookup &= not own or _is_lookup(weight, given, output)
        return not given.is_floating_point() and output.shape == (*given.shape, weight.shape[1])


def _varies_inside(numbers: torch.Tensor) -> bool:
    """Whether it varies along another dim than the last."""
    return any(varies(numbers, dim) for dim in range(numbers.dim() - 1))


def _is_lookup(weight: torch.Tensor, tokens: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether an embedding with a custom forward gives rows, scaled."""
    if weight.is_meta or tokens.is_floating_point() or tokens.shape != output.shape[:-1] or tokens.numel() == 0:
        return False
    if int(tokens.min()) < 0 or int(tokens.max()) >= weight.shape[0]:
        return False
    rows, given = weight[tokens].double(), output.double()
    square = float(rows.square().sum())
    # The least-squares factor: embeddings of some models are scaled by the square root of the width, in half precision.
    scale = float((rows * given).sum()) / square if square else 1.0
    return torch.allclose(given, rows * scale, rtol=1e-2, atol=1e-6)


_CONSTANTS = frozenset({"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"})
"""Operations that give tensors with all elements alike."""


def _see(flow: TensorFlow, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Apply the rule of an operation to the flow, but for those inside of followed modules."""
    if flow.paused:
        return 0
    given = _tensors_in((args, kwargs))
    for each in given:
        flow.read(each)
    name = schema_of(func).name.removeprefix("aten::")
    operation = TracedOperation(func, name, args, kwargs, given, output, _tensors_in(output))
    flow.set_levels(operation)
    # Most operations of a forward see nothing that is cut, and need no rule.
    if not flow.cut(given):
        _follow_whole(flow, operation)
    elif any(each.numel() for each in operation.made):
        follow(flow, operation)
    return 0


def _follow_whole(flow: TensorFlow, operation: TracedOperation) -> None:
    """Keep what is known of dims along which a whole tensor is alike."""
    given, made = operation.given, operation.made
    if operation.name in _CONSTANTS:
        for each in made:
            flow.set_alike(each, torch.zeros((), dtype=torch.int64).expand(each.shape))
    elif len(given) == 1 and not operation.is_writing and (alike := flow.alike(given[0])) is not None:
        for each, own in zip(made, moved(operation, alike), strict=False):
            flow.set_alike(each, own)


class _TraceReader:
    """From what was noted to a trace."""

    def __init__(
        self,
        flow: TensorFlow,
        followed: dict[str, _Followed],
        outline: TensorOutline,
        given: list[torch.Tensor],
        *,
        names: dict[int, str],
    ) -> None:
        self._flow = flow
        self._followed = sorted(followed.values(), key=lambda each: each.order)
        self._outline = outline
        self._names = names
        self._groups = flow.atoms.groups()
        self._reasons = flow.atoms.reasons(self._groups)
        self._given = [torch.unique(each) for each in given]
        self._holders: dict[str, int] = {}
        for module in outline.modules:
            for name in module.parameters.values():
                self._holders[name] = self._holders.get(name, 0) + 1

    def trace(self) -> ForwardTrace:
        """The trace."""
        ran = [each for each in self._followed if each.order >= 0]
        parameters = [self._bare(parameter, numbers) for parameter, numbers in self._flow.bare.values()]
        return ForwardTrace(
            maps=tuple(map(self._map, ran)),
            parameters=tuple(each for each in parameters if each is not None),
            reasons={group: why for group, why in self._reasons.items() if group > 0},
            not_run=tuple(each.known.name for each in self._followed if each.order < 0),
        )

    def _map(self, each: _Followed) -> TracedMap:
        known = each.known
        weight = known.parameters["weight"]
        outside = "another module reads its parameters" if known.name in self._flow.read_outside else ""
        bias = known.parameters.get("bias")
        tied = "its bias is shared with another module" if bias and self._holders[bias] > 1 else ""
        problem = known.problem or each.problem or outside
        atoms: Groups = () if each.atoms is None else _tuple(each.atoms)
        outputs = tuple(self._groups[list(atoms)].tolist())
        inputs = [slim(self._groups[numbers]) for numbers in each.inputs]
        mixed = any(map(_varies_inside, inputs))
        is_head = each.atoms is not None and any(torch.equal(given, each.atoms) for given in self._given)
        is_embedding = known.computes == "embedding"
        rows = self._outline.shapes[weight][0] if is_embedding else len(outputs)
        fits = not (problem or tied) and each.atoms is not None and (each.is_lookup if is_embedding else is_head)
        return TracedMap(
            module=known.name,
            is_embedding=is_embedding,
            outputs=outputs,
            inputs=tuple(dict.fromkeys(_tuple(numbers[(0,) * (numbers.dim() - 1)]) for numbers in inputs)),
            has_whole_input=each.has_whole_input,
            column_problem=problem or tied or known.column_problem,
            row_problem=problem or ("its input is not cut by features alone" if mixed else ""),
            why_whole=next((why for atom in atoms if (why := self._reasons.get(-atom))), ""),
            is_head=is_head,
            vocabulary=rows if fits else 0,
            weight=weight,
            num_holders=self._holders[weight],
        )

    def _bare(self, parameter: nn.Parameter, numbers: torch.Tensor) -> TracedParameter | None:
        """The groups of a parameter, and their dim; None where it meets nothing that is cut."""
        groups = self._groups[numbers]
        # An atom that is tied to nothing was never used (positions behind the last token): it may go anywhere.
        alone = torch.bincount(self._groups)[groups] == 1
        groups = groups.masked_fill(alone, -1)
        if not bool((groups > WHOLE).any()):
            return None
        name = self._names[id(parameter)]
        largest = groups.masked_fill(groups < 0, torch.iinfo(groups.dtype).max)
        for dim in range(groups.dim()):
            highest = groups.movedim(dim, 0).reshape(groups.shape[dim], -1).amax(1)
            lowest = largest.movedim(dim, 0).reshape(groups.shape[dim], -1).amin(1)
            if bool((highest == lowest).all()) and (groups.shape[dim] > 1):
                return TracedParameter(name=name, dim=dim, groups=_tuple(highest))
        return TracedParameter(name=name, dim=None, groups=_tuple(torch.unique(groups)))


def _tuple(numbers: torch.Tensor) -> Groups:
    return tuple(numbers.tolist())
