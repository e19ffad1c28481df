"""The plan of tensor parallelism as a value, and its regions: the modules whose inputs and outputs are whole.

A plan says how each parameter is cut and what is done around the forward of each module (`Style`). A region is a module
that holds what begins a cut and what ends it. Its output is that of the uncut module, so the two can be compared:

    layer      [ norm ]  [ attention: q k v (begin)  o (ends) ]  [ norm ]  fc1 (begins)  fc2 (ends)
    regions              [---------------- 1 ----------------]
               [----------------------------------- 2 ------------------------------------------]

    what is open on the way out:   q, k, v begin + o ends -> attention is needed, nothing is open behind it
                                   fc1 begins + fc2 ends  -> their parent, the layer, is needed
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Literal

from shardwise.plan.outlines import inside_of, parents
from shardwise.plan.specs import toml_text
from shardwise.space import Portion

Ranges = tuple[tuple[int, int], ...]
"""Ranges of one dim, from and to, that a rank has side by side."""

StyleKind = (
    Literal["column", "row", "vocab", "channels", "sum", "once", "hide", "tail", "sequence", "split", "heads"]
    | Literal["taken", "gathered"]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCut:
    """How one parameter is cut over the ranks."""

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    ranges: tuple[Ranges, ...]
    """Of each rank along `dim`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """What is done around the forward of one module.

    column: the input is whole, each rank computes its outputs. row: each rank has its inputs, the outputs are summed.
    vocab: each rank looks up its tokens, the rows are summed. channels: each rank looks up its columns.
    sum: each rank computes a part of a sum. once: only the first rank computes, the others give zeros.
    hide: as `once`, for single parameters. tail: the last `size` outputs are read by the heads of all ranks.
    sequence: each rank computes its positions, which are gathered. split: each rank goes on with its positions.
    heads: attributes of the module count the heads of this rank.
    taken, gathered: the module is whole amid columns and rows. Of its outputs each rank goes on with its own, or the
    inputs of all ranks are put together before.
    """

    kind: StyleKind
    ranges: tuple[Ranges, ...] = ()
    """Of each rank: its outputs (column, channels, taken), inputs (row, gathered), tokens (vocab), groups of heads."""
    gathers: bool = False
    """The outputs of all ranks are put together."""
    splits: bool = False
    """The input is whole, and this rank's part of it is taken."""
    gather: int | None = None
    """The input is this rank's part along this dim; it is gathered before."""
    scatter: int | None = None
    """The sum is left as this rank's part along this dim."""
    dim: int = 0
    """Of the positions (sequence, split)."""
    size: int = 0
    """Last outputs (tail); groups of heads on all ranks (heads)."""
    attributes: tuple[str, ...] = ()
    """column: attributes with the number of outputs, which forward reads. hide: attributes with the parameters.
    heads: attributes that grow with the number of heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """How the parameters of a model are cut over the ranks along `tp`, and how its modules work with the parts."""

    num_ranks: int
    cuts: Mapping[str, ParameterCut] = field(default_factory=dict)
    """Parameter, by its first name -> its cut; the others are whole on every rank."""
    styles: Mapping[str, tuple[Style, ...]] = field(default_factory=dict)
    """Module, by its first name -> what is done around its forward, from the inside out."""
    summed: frozenset[str] = frozenset()
    """Whole parameters that see other activations on each rank: their gradients are summed over the ranks."""
    named: frozenset[str] = frozenset()
    """Whole parameters that have a rule, or are in a module that has one."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Modules that are whole though a rule would cut them -> why. It is no part of the text."""

    def portions(self, coordinate: int) -> dict[str, Portion]:
        """What the rank at this coordinate of `tp` has of each parameter that is cut."""
        return {name: Portion(cut.shape, cut.dim, cut.ranges[coordinate]) for name, cut in self.cuts.items()}

    def text(self) -> str:
        """The plan as TOML, a line for each parameter and module in the order of the model."""
        lines = [f"num_ranks = {self.num_ranks}"]
        lines += [f"{key} = {toml_text(tuple(sorted(getattr(self, key))))}" for key in ("summed", "named")]
        for name, cut in self.cuts.items():
            written = {"dim": cut.dim, "ranges": cut.ranges, "shape": cut.shape}
            lines.append(f"cuts.{toml_text(name)} = {toml_text(written)}")
        for name, styles in self.styles.items():
            # Defaults are left out, so a new field of `Style` does not change the texts of plans that do not use it.
            tables = tuple(
                {each.name: value for each in fields(style) if (value := getattr(style, each.name)) != each.default}
                for style in styles
            )
            lines.append(f"styles.{toml_text(name)} = {toml_text(tables)}")
        return "\n".join(lines) + "\n"


End = Literal["begins", "ends", "bare"]
"""What a module leaves open; `bare`: it holds a parameter that is cut without it."""

CUTS_THE_MODULE = frozenset({"column", "row", "vocab", "channels"})
"""Kinds of rules, and of styles, for modules whose own parameters are cut with them."""

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
    # From the inside out: what a module leaves open is handed to the one around it, until a beginning and an end meet.
    for name in sorted(within, key=_depth, reverse=True):
        here = opened.pop(name, set())
        kinds = {end for _, end in here}
        # A sum closes whatever is open in it, also bare parameters (experts), which no module ends.
        is_sum = any(style.kind == "sum" for style in plan.styles.get(name, ()))
        if is_sum or ("ends" in kinds and len(kinds) > 1):
            needed.add(name)
        elif name:
            opened.setdefault(_parent(name), set()).update(here)
        else:
            # Nothing ends what is open at the model (a head whose logits stay cut): the module that holds the cut is
            # compared. Where that is the model, its name is "" and nothing is added.
            needed |= {holder for each, end in here if (holder := each if end == "bare" else _parent(each))}
    inside = inside_of(plan.styles)
    return tuple(
        _region(plan, name, inside.get(name, ()), is_needed=name in needed) for name in sorted(within, key=_depth)
    )


def _ends(plan: TensorPlan) -> list[tuple[str, End]]:
    """The modules that leave something open."""
    found: list[tuple[str, End]] = []
    for name, styles in plan.styles.items():
        for style in styles:
            # What gathers or splits inside itself (vocab too, by a sum) takes and gives whole values: nothing is open.
            if style.kind in ("column", "channels", "taken") and not style.gathers:
                found.append((name, "begins"))
            elif style.kind in ("row", "gathered") and not style.splits:
                found.append((name, "ends"))
    for parameter in plan.cuts:
        holder = parameter.rpartition(".")[0]
        if not any(style.kind in CUTS_THE_MODULE for style in plan.styles.get(holder, ())):
            found.append((holder, "bare"))
    return found


def _region(plan: TensorPlan, name: str, inside: Iterable[str], *, is_needed: bool) -> CutRegion:
    styles = {each: plan.styles[each] for each in chain([name] if name in plan.styles else (), inside)}
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
