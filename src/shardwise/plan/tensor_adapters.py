"""Modules that put an adapter beside a linear map: the map is `base_layer`, the adapter is up(down(x)) (LoRA).

Columns: `base_layer` and `up` have this rank's outputs, `down` is whole. Rows: `base_layer` and `down` have this rank's
inputs and sum, `up` is whole. So the sum of both sides is what the map alone would give (Hu et al., 2021, LoRA,
arXiv:2106.09685; the names are those of the library peft).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.tensor_outline import TensorModule

_BASE, _DOWN, _UP = "base_layer", "lora_A", "lora_B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """A map and its adapters."""

    base: TensorModule
    downs: tuple[TensorModule, ...]
    ups: tuple[TensorModule, ...]
    others: tuple[str, ...]
    """Parameters that belong to none of these."""


def adapted_in(modules: Mapping[str, TensorModule], module: TensorModule) -> Adapted | None:
    """What a module adapts; None for one that holds no `base_layer`. `modules`: by first name."""
    base = modules.get(f"{module.name}.{_BASE}")
    if base is None or base.computes == "other":
        return None

    def inside(name: str) -> tuple[TensorModule, ...]:
        within = f"{module.name}.{name}."
        return tuple(each for each in modules.values() if each.name.startswith(within) and each.parameters)

    downs, ups = inside(_DOWN), inside(_UP)
    known = {each.name for each in (base, *downs, *ups)}
    others = [
        f"{each.name}.{attribute}"
        for each in modules.values()
        if (each is module or each.name.startswith(f"{module.name}.")) and each.name not in known
        for attribute in each.parameters
    ]
    odd = [
        f"{each.name}.{attribute}"
        for each in (*downs, *ups)
        if each.computes != "linear"
        for attribute in each.parameters
    ]
    return Adapted(base=base, downs=downs, ups=ups, others=(*others, *odd))
