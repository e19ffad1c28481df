"""The plan of tensor parallelism as a value: how each parameter is cut, and what each module does with its values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from shardwise.plan.toml_text import toml_text
from shardwise.space import Portion

Ranges = tuple[tuple[int, int], ...]
"""Stretches of one dim, from and to, that a rank has side by side."""

StyleKind = Literal["column", "row", "vocab", "channels", "sum", "once", "hide", "tail", "sequence", "split", "heads"]


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
    """

    kind: StyleKind
    ranges: tuple[Ranges, ...] = ()
    """Of each rank: its outputs (column, channels), inputs (row), tokens (vocab), groups of heads (heads)."""
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


_DEFAULTS = {each.name: each.default for each in fields(Style)}


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
    """Whole parameters that have a rule, or lie in a module that has one."""

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
            tables = tuple({key: value for key, value in _items(style) if value != _DEFAULTS[key]} for style in styles)
            lines.append(f"styles.{toml_text(name)} = {toml_text(tables)}")
        return "\n".join(lines) + "\n"


def _items(style: Style) -> list[tuple[str, object]]:
    return [(name, getattr(style, name)) for name in _DEFAULTS]
