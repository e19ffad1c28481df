"""The modules that a plan means to run again in backward, or to keep on the host.

("layers.*",)    layers.0, layers.1     the outermost matches: what is inside of them is theirs
"blocks"         the repeated blocks of `units`, as stage 3 gathers them
"""

from shardwise.errors import PlanError
from shardwise.plan.activations import Modules
from shardwise.plan.outlines import Outline
from shardwise.plan.units import matched_modules, repeated_blocks


def meant_modules(outline: Outline, asked: Modules, *, setting: str) -> list[str]:
    """First names of the modules that a setting means, in the order of the model; none is inside of another.

    Raises PlanError for a model without blocks, and for names of no module that is called.
    """
    chosen = set(repeated_blocks(outline)) if asked == "blocks" else matched_modules(outline, asked, setting=setting)
    if not chosen:
        raise PlanError(f'{setting}: "blocks" asked, but no block of the model repeats; give the names of its modules')
    if found := _without_call(outline, chosen):
        inner, around = found
        raise PlanError(
            f"{setting}: {inner!r} is a part of {around!r}, which computes with its parameters and does not call it; "
            f"name {around!r}"
        )
    return [
        each.name
        for each in outline.modules()
        if each.name in chosen and not any(each.name != other and _is_in(each.name, other) for other in chosen)
    ]


def _is_in(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def _without_call(outline: Outline, chosen: set[str]) -> tuple[str, str] | None:
    """A chosen module that is never called, and the one that computes with it."""
    for around in outline.modules():
        # A layer of a transformer calls what is in it where it trains; attention does not.
        if around.is_indivisible and around.kind == "MultiheadAttention":
            for inner in around.modules():
                if inner is not around and inner.name in chosen:
                    return inner.name, around.name
    return None
