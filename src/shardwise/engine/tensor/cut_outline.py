"""What a plan of tensor parallelism has to know of a model, read from the model itself.

Names decide nothing: a module is cut as a linear map because it computes one. `Probes` calls an unknown module that
holds a `weight` (r, c), and maybe a `bias`, with random values in their place:

    1. x W^T + b?   weight (r, c), x (1, 3, c)       a linear map
       x W + b?     weight (r, c), x (1, 3, r)       a transposed one (Conv1D of transformers)
    2. the same with one output less: (r - 1, c), once with each attribute that is r (`nf`) set to r - 1
       right -> the forward works with the outputs of one rank; wrong -> whole outputs only, `column_problem`
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept
from shardwise.engine.forward.aside import attributes_set, items_set
from shardwise.engine.forward.inventory import named_places, place_of
from shardwise.engine.forward.layers import has_own_forward
from shardwise.engine.parameter_kinds import is_packed
from shardwise.plan.names import BASE_LAYER, ORIGINAL, base_names
from shardwise.plan.outlines import TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import WORDS

_NUMBERS = WORDS | {"qk_rope_head_dim"}

_CARRIED = ("tp_plan", "_tp_plan", "base_model_tp_plan")
"""Attributes in which a model may carry rules, the first that has any."""


def tensor_outline(model: nn.Module) -> TensorOutline:
    """The outline of `model`, with the rules that it carries itself."""
    # A tied parameter goes by its first name everywhere: it is cut once, for all modules that hold it.
    first_of: dict[object, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    parameter_at: dict[tuple[nn.Module, str], str] = {}
    for module, attribute, name, parameter in named_places(model):
        first = first_of.setdefault(place_of(parameter), name)
        shapes.setdefault(first, tuple(parameter.shape))
        parameter_at.setdefault((module, attribute), first)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    probes = Probes()
    modules = tuple(
        TensorModule(
            name=known[0],
            aliases=tuple(known[1:]),
            kind=type(module).__name__,
            parameters={key: parameter_at[module, key] for key, held in module._parameters.items() if held is not None},
            numbers={key: value for key, value in vars(module).items() if type(value) is int},
            configured=_configured(module),
            **probes.look_at(module),
        )
        for module, known in names.items()
    )
    every = [name for known in names.values() for name in known]
    every += [name for _, _, name, _ in named_places(model)]
    carried = dict(_carried_rules(model, every))
    if {BASE_LAYER, ORIGINAL}.isdisjoint(each.name.rpartition(".")[2] for each in modules):
        return TensorOutline(modules=modules, shapes=shapes, carried=carried)
    from shardwise.plan.adapted_maps import adapters_in

    return TensorOutline(modules=modules, shapes=shapes, carried=carried, adapters=dict(adapters_in(modules)))


def _numbers(attributes: Mapping[str, Any]) -> dict[str, int]:
    return {key: value for key, value in attributes.items() if key in _NUMBERS and type(value) is int}


def _configured(module: nn.Module) -> dict[str, int]:
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        return _numbers(config)
    return {} if config is None else _numbers({word: _read(config, word) for word in sorted(_NUMBERS)})


def _read(config: object, word: str) -> object:
    try:
        return getattr(config, word, None)
    except Exception:
        # Configurations of transformers refuse a number that differs by layer, with errors of their own.
        return None


def _carried_rules(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The rules of the outermost modules that carry any, for the names that they mean."""
    names = list(names)
    known = {*names, *map(_without_numbers, names)}
    carriers: list[tuple[str, Mapping[str, str]]] = []
    for prefix, module in model.named_modules():
        # The plan of a whole model covers the plans that its parts carry for their use alone.
        if any(_is_inside(prefix, outer) for outer, _ in carriers):
            continue
        config = getattr(module, "config", None)
        plans = (getattr(holder, word, None) for holder in (module, config) for word in _CARRIED)
        # A wrapper hands on the attributes of what it wraps, whose plan has other names.
        if plan := next((plan for plan in plans if isinstance(plan, Mapping) and _means(plan, prefix, known)), None):
            carriers.append((prefix, plan))
    packed = set(_packed_maps(model))
    for name in names:
        # Packed weights stay whole, whatever a family's plan says of their module.
        for prefix, plan in carriers if packed.isdisjoint((name, name.rpartition(".")[0])) else ():
            if (rule := _rule_for(plan, prefix, name)) is not None:
                yield name, rule


def _packed_maps(model: nn.Module) -> Iterator[str]:
    """Modules that hold packed weights, and the adapters in whose place they stand."""
    for name, module in model.named_modules(remove_duplicate=False):
        # The model itself is no map: what it holds says nothing of its other parameters.
        if name and any(is_packed(each) for each in module._parameters.values() if each is not None):
            yield name
            while name.endswith(f".{BASE_LAYER}"):
                name = name.removesuffix(f".{BASE_LAYER}")
                yield name


def _means(plan: Mapping[str, str], prefix: str, names: Collection[str]) -> bool:
    starred = _without_numbers(prefix)
    keys = [(".".join(filter(None, (prefix, key))), ".".join(filter(None, (starred, key)))) for key in plan]
    return any(exact in names or glob in names for exact, glob in keys)


def _rule_for(plan: Mapping[str, str], prefix: str, name: str) -> str | None:
    if not _is_inside(name, prefix):
        return None
    local = name[len(prefix) + 1 :] if prefix else name
    return next(
        (plan[key] for each in (local, *base_names(local)) for key in (each, _without_numbers(each)) if key in plan),
        None,
    )


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _without_numbers(name: str) -> str:
    """Numbers of layers are stars in the plans that models carry: `layers.3.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


_ROWS = 3
"""Positions of a probe: a forward that mixes them is no linear map."""


class Probes:
    """Probes modules. Of modules with one class, shape and settings, such as the layers of a model, one is called."""

    def __init__(self) -> None:
        self._known: dict[object, dict[str, Any]] = {}

    def look_at(self, module: nn.Module) -> dict[str, Any]:
        """`computes`, `output_sizes` and problems of its `TensorModule`."""
        if any(map(is_packed, (each for each in module._parameters.values() if each is not None))):
            return {"problem": "it holds a packed weight, whose codes and scales are not cut; leave it out"}
        if isinstance(module, nn.Embedding):
            # An embedding is known by its class. `max_norm` renormalizes the rows that tokens read,
            # `scale_grad_by_freq` counts tokens: a rank that has other tokens masked out would do both otherwise.
            settings = " and ".join(key for key in ("max_norm", "scale_grad_by_freq") if getattr(module, key))
            problem = "which depend on the tokens of the other ranks; leave them out, or it whole"
            own = type(module).forward is not nn.Embedding.forward or has_own_forward(module)
            return {
                "computes": "embedding",
                "problem": f"it has {settings}, {problem}" if settings else "",
                "column_problem": "its forward does more than to look up rows" if own else "",
            }
        held = {key: value for key, value in module._parameters.items() if value is not None}
        weight = held.get("weight")
        if weight is None or weight.dim() != 2 or not held.keys() <= {"weight", "bias"}:
            return {}
        if type(module).forward is nn.Linear.forward and not has_own_forward(module):
            return {"computes": "linear"}
        if any(True for _ in module.children()):
            return {}
        numbers = {key: value for key, value in vars(module).items() if type(value) is int}
        alike = (type(module), tuple(weight.shape), tuple(held), tuple(numbers.items()))
        if alike not in self._known:
            # What a forward draws must not move the generators: initial values that are made later, and what training
            # draws, have to be what they are without a probe.
            with torch.no_grad(), random_numbers_kept(weight.device):
                self._known[alike] = _probe(module, held, numbers)
        return self._known[alike]


def _probe(module: nn.Module, held: Mapping[str, nn.Parameter], numbers: Mapping[str, int]) -> dict[str, Any]:
    rows, columns = held["weight"].shape
    for computes, outputs, inputs in (("linear", rows, columns), ("transposed linear", columns, rows)):
        if not _is_linear(module, held, outputs, inputs, computes):
            continue
        # The rank's own number of outputs is known only when the plan is made. One less stands for all.
        for attributes in _candidates(outputs, numbers):
            with attributes_set(module, dict.fromkeys(attributes, outputs - 1)):
                if _is_linear(module, held, outputs - 1, inputs, computes):
                    return {"computes": computes, "output_sizes": attributes}
        problem = f"its forward works with all {outputs} outputs only, and no attribute says how many there are"
        return {"computes": computes, "column_problem": problem}
    return {}


def _candidates(outputs: int, numbers: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Sets of attributes that may be the number of outputs: none, each, all."""
    yield ()
    named = tuple(key for key, value in numbers.items() if value == outputs)
    yield from ((key,) for key in named)
    yield named


def _is_linear(module: nn.Module, held: Mapping[str, nn.Parameter], outputs: int, inputs: int, computes: str) -> bool:
    """Whether the module, with random parameters of these sizes, maps a random input as it should."""
    # Not the module's own values: zeros (an adapter's B), and meta tensors without any, would prove nothing. A seed of
    # its own gives every rank the same numbers, and so the same verdict. The plans of all ranks are compared later.
    given = held["weight"]
    device = torch.device("cpu") if given.is_meta else given.device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight = random(outputs, inputs) if computes == "linear" else random(inputs, outputs)
    bias = random(outputs) if "bias" in held else None
    value = random(1, _ROWS, inputs)
    expected = value @ (weight.t() if computes == "linear" else weight)
    expected = expected if bias is None else expected + bias
    try:
        # `module.forward`, not the call: hooks of a program must not see a probe.
        values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        with items_set((module._parameters, key, value) for key, value in values.items()):
            output = module.forward(value)
    except Exception:
        # A forward that wants another input raises what it likes. It is no linear map then.
        return False
    if not isinstance(output, torch.Tensor) or output.shape != expected.shape:
        return False
    # Both add `inputs` products of order 1 in float32, in some order.
    tolerance = max(inputs, 1) * torch.finfo(torch.float32).eps * 8
    return torch.allclose(output.float(), expected, rtol=tolerance, atol=tolerance)
