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

from shardwise.plan.names import BASE_LAYER, COPIES, ORIGINAL, TOKENS
from shardwise.plan.outlines import AdaptedMap, TensorModule

_DOWN, _UP = "lora_A", "lora_B"

_LOOKED_UP = frozenset({"lora_embedding_A", "lora_embedding_B"})
"""Parameters of an adapter of an embedding, which looks tokens up in them and never reads the base layer's."""


def adapters_in(modules: Sequence[TensorModule]) -> Iterator[tuple[str, AdaptedMap | tuple[TensorModule, ...]]]:
    """The `adapters` of an outline with these modules."""
    by_name = {each.name: each for each in modules}
    for each in modules:
        if found := _adapted_in(by_name, each) or _copies_in(by_name, each):
            yield each.name, found


def _adapted_in(modules: Mapping[str, TensorModule], module: TensorModule) -> AdaptedMap | None:
    around = next(
        (each for each in (module.name, f"{module.name}.{TOKENS}") if f"{each}.{BASE_LAYER}" in modules), None
    )
    base = modules.get(f"{around}.{BASE_LAYER}")
    if base is None or base.computes == "other":
        return None
    inside = [each for each in modules.values() if each is module or each.name.startswith(f"{module.name}.")]

    def of(name: str) -> tuple[TensorModule, ...]:
        within = f"{around}.{name}."
        return tuple(each for each in inside if each.name.startswith(within) and each.computes == "linear")

    downs, ups = of(_DOWN), of(_UP)
    known = {each.name for each in (base, *downs, *ups)}
    others = tuple((each, key) for each in inside if each.name not in known for key in each.parameters)
    if not (downs or ups or others):
        others = ((base, "weight"),)  # its parameters are another adapter's (ties), so it may compute anything
    held = (each.parameters[key] for each, key in others)
    foreign = next((name for name in held if _LOOKED_UP.isdisjoint(name.split("."))), None)
    return AdaptedMap(base=base, downs=downs, ups=ups, others=others, foreign=foreign)


def _copies_in(modules: Mapping[str, TensorModule], module: TensorModule) -> tuple[TensorModule, ...]:
    if (original := modules.get(f"{module.name}.{ORIGINAL}")) is None:
        return ()
    around = f"{module.name}.{COPIES}"
    return (original, *(each for name, each in modules.items() if name.rpartition(".")[0] == around))
