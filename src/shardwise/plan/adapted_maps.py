"""What the library peft puts around a map or an embedding, as the planner of tensor parallelism sees it.

    q_proj                       the adapter; a rule for q_proj cuts what is in it
      base_layer                 the map, frozen
      lora_A.default             down, to a low rank (Hu et al., 2021, LoRA, arXiv:2106.09685)
      lora_B.default             up
      lora_magnitude_vector...   one number for each output (DoRA, IA3), or for each input (IA3)
    head
      original_module            a copy of it is trained whole
      modules_to_save.default

Columns: the map, `up` and numbers of outputs have this rank's outputs. Rows: the map, `down` and numbers of inputs have
this rank's inputs. The sum of both is that of the uncut module. Anything else leaves the module whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.names import BASE_LAYER, COPIES, ORIGINAL, TOKENS
from shardwise.plan.outlines import TensorModule, TensorOutline, inside_of, parents

_DOWN, _UP = "lora_A", "lora_B"

_LOOKED_UP = frozenset({"lora_embedding_A", "lora_embedding_B"})
"""Parameters of an adapter of an embedding, which looks tokens up in them and never reads the base layer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMap:
    """A map and its adapters."""

    base: TensorModule
    downs: tuple[TensorModule, ...]
    ups: tuple[TensorModule, ...]
    others: tuple[tuple[TensorModule, str], ...]
    """Parameters of none of these: the module that holds one, and its attribute."""

    def foreign(self) -> str | None:
        """A parameter that shows that the adapter may read the base layer's weight; None where there is none."""
        return next(
            (
                each.parameters[attribute]
                for each, attribute in self.others
                if _LOOKED_UP.isdisjoint(each.parameters[attribute].split("."))
            ),
            None,
        )


def adapted_in(
    modules: Mapping[str, TensorModule], names_inside: Mapping[str, Sequence[str]], module: TensorModule
) -> AdaptedMap | None:
    """What a module adapts; None for one that is no adapter. `modules`: by first name; `names_inside`: `inside_of`."""
    around = next(
        (each for each in (module.name, f"{module.name}.{TOKENS}") if f"{each}.{BASE_LAYER}" in modules), None
    )
    base = modules.get(f"{around}.{BASE_LAYER}")
    if base is None or base.computes == "other":
        return None
    inside = [module, *(modules[name] for name in names_inside[module.name])]

    def of(name: str) -> tuple[TensorModule, ...]:
        within = f"{around}.{name}."
        return tuple(each for each in inside if each.name.startswith(within) and each.computes == "linear")

    downs, ups = of(_DOWN), of(_UP)
    known = {each.name for each in (base, *downs, *ups)}
    others = tuple((each, key) for each in inside if each.name not in known for key in each.parameters)
    if not (downs or ups or others):
        others = ((base, "weight"),)  # its parameters are another adapter's (ties), so it may compute anything
    return AdaptedMap(base=base, downs=downs, ups=ups, others=others)


def copies_in(
    modules: Mapping[str, TensorModule], names_inside: Mapping[str, Sequence[str]], module: TensorModule
) -> list[TensorModule]:
    """The original and the copies of a module that are trained in its place; nothing for any other module."""
    if (original := modules.get(f"{module.name}.{ORIGINAL}")) is None:
        return []
    around = f"{module.name}.{COPIES}"
    return [original, *(modules[name] for name in names_inside.get(around, ()) if name.rpartition(".")[0] == around)]


def followed_maps(outline: TensorOutline) -> Iterator[tuple[str, TensorModule]]:
    """The maps and embeddings that a forward calls, by the module that is called: an adapter stands for its map."""
    modules = {each.name: each for each in outline.modules}
    names_inside = inside_of(modules)
    adapters: dict[str, TensorModule] = {}
    for each in outline.modules:
        if (adapted := adapted_in(modules, names_inside, each)) is not None:
            adapters[each.name] = adapted.base
        elif copies := copies_in(modules, names_inside, each):
            adapters[each.name] = copies[0]
    for each in outline.modules:
        known = adapters.get(each.name, each)
        if known.computes != "other" and adapters.keys().isdisjoint(parents(each.name)):
            yield each.name, known
