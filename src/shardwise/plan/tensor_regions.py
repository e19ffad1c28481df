"""Regions of a plan of tensor parallelism: modules whose inputs and outputs are whole on every rank along `tp`.

A region holds what begins a cut and what ends it, so that its output can be compared with that of the uncut module:

    layer      [ norm ]  [ attention: q k v (begin)  o (ends) ]  [ norm ]  fc1 (begins)  fc2 (ends)
    regions              [---------------- 1 ----------------]
               [----------------------------------- 2 ------------------------------------------]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.plan.outlines import parents
from shardwise.plan.tensor_plan import Style, TensorPlan

End = Literal["begins", "ends", "bare"]
"""What a module leaves open; `bare`: it holds a parameter that is cut without it."""

CUTS_THE_MODULE = frozenset({"column", "row", "vocab", "channels"})
"""Styles of modules whose own parameters are cut with them."""

_CLOSED = frozenset({"sum", "sequence", "split"})
"""Styles of modules that take and give what is whole (or, `split`, what is cut in a known way)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRegion:
    """One module to compare."""

    name: str
    is_needed: bool
    """Whether it is the smallest around some cut; the others are those around it."""
    styles: Mapping[str, tuple[Style, ...]]
    """Module -> its styles; of those in the region."""
    dims: tuple[int, ...]
    """Dims of positions along which its inputs or outputs may be cut."""


def regions_of(plan: TensorPlan) -> tuple[CutRegion, ...]:
    """The regions of a plan, and all modules around them, from the outside in.

    A cut that nothing ends (a head whose logits stay cut) is looked at in the module that holds it, unless that is
    the model itself.
    """
    opened: dict[str, set[tuple[str, End]]] = {}
    for name, end in _ends(plan):
        opened.setdefault(name, set()).add((name, end))
    needed = {name for name, styles in plan.styles.items() if any(style.kind in _CLOSED for style in styles)}
    within = {each for name in (*plan.styles, *opened) for each in _around(name)}
    for name in sorted(within, key=_depth, reverse=True):
        here = opened.pop(name, set())
        kinds = {end for _, end in here}
        is_sum = any(style.kind == "sum" for style in plan.styles.get(name, ()))
        if is_sum or ("ends" in kinds and len(kinds) > 1):
            needed.add(name)
        elif name:
            opened.setdefault(_parent(name), set()).update(here)
        else:
            needed |= {holder for each, end in here if (holder := each if end == "bare" else _parent(each))}
    return tuple(_region(plan, name, is_needed=name in needed) for name in sorted(within, key=_depth))


def _ends(plan: TensorPlan) -> list[tuple[str, End]]:
    """The modules that leave something open."""
    found: list[tuple[str, End]] = []
    for name, styles in plan.styles.items():
        for style in styles:
            if style.kind in ("column", "channels") and not style.gathers:
                found.append((name, "begins"))
            elif style.kind == "row" and not style.splits:
                found.append((name, "ends"))
    for parameter in plan.cuts:
        holder = parameter.rpartition(".")[0]
        if not any(style.kind in CUTS_THE_MODULE for style in plan.styles.get(holder, ())):
            found.append((holder, "bare"))
    return found


def _region(plan: TensorPlan, name: str, *, is_needed: bool) -> CutRegion:
    styles = {each: held for each, held in plan.styles.items() if name in _around(each)}
    dims = {
        dim
        for held in styles.values()
        for style in held
        for dim in (style.gather, style.scatter, style.dim if style.kind == "split" else None)
        if dim is not None
    }
    return CutRegion(name=name, is_needed=is_needed, styles=styles, dims=tuple(sorted(dims)))


def _around(name: str) -> tuple[str, ...]:
    """A module and those around it."""
    return (name, *parents(name), "") if name else ("",)


def _parent(name: str) -> str:
    return next(parents(name), "")


def _depth(name: str) -> tuple[int, str]:
    return (name.count(".") + 1 if name else 0, name)
