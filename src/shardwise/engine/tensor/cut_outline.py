"""What a plan of tensor parallelism has to know of a model, read from the model itself."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.engine.inventory import named_places, place_of
from shardwise.engine.tensor.probing import Probes
from shardwise.plan.outlines import TensorModule, TensorOutline
from shardwise.plan.tensor_cuts import WORDS

_NUMBERS = WORDS | {"qk_rope_head_dim"}

_CARRIED = ("tp_plan", "_tp_plan", "base_model_tp_plan")
"""Attributes in which a model may carry rules, the first that has any."""


def tensor_outline(model: nn.Module) -> TensorOutline:
    """The outline of `model`, with the rules that it carries itself.

    Modules of torch are known; others that hold a weight and a bias are called with random ones, to see whether they
    are linear maps.
    """
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
    return TensorOutline(modules=modules, shapes=shapes, carried=carried)


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
    except Exception:  # a configuration may refuse what has another value for each layer
        return None


def _carried_rules(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The rules of the outermost modules that carry any, for the names that they mean."""
    names = list(names)
    known = {*names, *map(_without_numbers, names)}
    carriers: list[tuple[str, Mapping[str, str]]] = []
    for prefix, module in model.named_modules():
        if any(_is_inside(prefix, outer) for outer, _ in carriers):
            continue
        config = getattr(module, "config", None)
        plans = (getattr(holder, word, None) for holder in (module, config) for word in _CARRIED)
        # A wrapper hands on the attributes of what it wraps, whose plan has other names.
        if plan := next((plan for plan in plans if isinstance(plan, Mapping) and _means(plan, prefix, known)), None):
            carriers.append((prefix, plan))
    for name in names:
        for prefix, plan in carriers:
            if (rule := _rule_for(plan, prefix, name)) is not None:
                yield name, rule


def _means(plan: Mapping[str, str], prefix: str, names: Collection[str]) -> bool:
    starred = _without_numbers(prefix)
    keys = [(".".join(filter(None, (prefix, key))), ".".join(filter(None, (starred, key)))) for key in plan]
    return any(exact in names or glob in names for exact, glob in keys)


def _rule_for(plan: Mapping[str, str], prefix: str, name: str) -> str | None:
    if not _is_inside(name, prefix):
        return None
    local = name[len(prefix) + 1 :] if prefix else name
    return plan.get(local, plan.get(_without_numbers(local)))


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _without_numbers(name: str) -> str:
    """Numbers of layers are stars in the plans that models carry: `layers.3.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
