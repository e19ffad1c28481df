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
from shardwise.plan.outlines import AdaptedMap, TensorModule, inside_of

_DOWN, _UP = "lora_A", "lora_B"

_LOOKED_UP = frozenset({"lora_embedding_A", "lora_embedding_B"})
"""Parameters of an adapter of an embedding, which looks tokens up in them and never reads the base layer's."""


def adapters_in(modules: Sequence[TensorModule]) -> Iterator[tuple[str, AdaptedMap | tuple[TensorModule, ...]]]:
    """The `adapters` of an outline with these modules."""
    by_name = {each.name: each for each in modules}
    within = {around: [by_name[name] for name in names] for around, names in inside_of(by_name).items()}
    for each in modules:
        if found := _adapted_in(by_name, within, each) or _copies_in(by_name, within, each):
            yield each.name, found


_Modules = Mapping[str, TensorModule]
_Within = Mapping[str, Sequence[TensorModule]]


def _adapted_in(modules: _Modules, within: _Within, module: TensorModule) -> AdaptedMap | None:
    around = module.name if f"{module.name}.{BASE_LAYER}" in modules else f"{module.name}.{TOKENS}"
    base = modules.get(f"{around}.{BASE_LAYER}")
    if base is None or base.computes == "other":
        return None
    downs, ups = (
        tuple(each for each in within.get(f"{around}.{name}", ()) if each.computes == "linear") for name in (_DOWN, _UP)
    )
    own = {each.name for each in (base, *downs, *ups)}
    others = tuple((it, key) for it in (module, *within[module.name]) if it.name not in own for key in it.parameters)
    if not (downs or ups or others):
        others = ((base, "weight"),)  # its parameters are another adapter's (ties), so it may compute anything
    held = (each.parameters[key] for each, key in others)
    foreign = next((name for name in held if _LOOKED_UP.isdisjoint(name.split("."))), None)
    return AdaptedMap(base=base, downs=downs, ups=ups, others=others, foreign=foreign)


def _copies_in(modules: _Modules, within: _Within, module: TensorModule) -> tuple[TensorModule, ...]:
    if (original := modules.get(f"{module.name}.{ORIGINAL}")) is None:
        return ()
    around = f"{module.name}.{COPIES}"
    return (original, *(each for each in within.get(around, ()) if each.name.rpartition(".")[0] == around))
