"""Degrees: for how many ranks along `tp` fused tensors are laid out, where their statements do not say it.

The degree follows the data: forward from the layouts of the sources to what an operation reads, and back from the
layouts of the target to what it makes, through names, stages and whatever else lies between. So all statements are
carried out twice: first with a tensor of its own in the place of each fused one, which shows how that goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardwise.rewrite.expansion import Expanded
from shardwise.rewrite.fragments import Shapes, fragments_of, turned
from shardwise.rewrite.kernels import OPEN, Degrees
from shardwise.rewrite.layouts import Cut, cuts_along, degree_along
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Form, Node, source_node
from shardwise.rewrite.statements import Ffn, Operation, QkvPerRank
from shardwise.rewrite.tiles import Tile, Value

__all__ = ["Fusings", "Laid", "Where", "apart", "leaves_open", "said"]

Where: TypeAlias = tuple[int, Expanded]
"""Which task of a stage, and which instance."""

Laid: TypeAlias = Mapping[Where, Degrees]
"""The degrees of instances that layouts tell."""


Apart: TypeAlias = tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[Operation, ...]]
"""The operations before the one that lays tensors out for ranks, that one (none: there is none), those after it."""


def apart(operations: tuple[Operation, ...]) -> Apart:
    """Take operations apart at the one that lays tensors out for ranks."""
    for at, each in enumerate(operations):
        if isinstance(each, Ffn | QkvPerRank):
            return operations[:at], operations[at : at + 1], operations[at + 1 :]
    return operations, (), ()


def said(operations: Apart) -> Degrees:
    """The degrees that a statement says."""
    fused = operations[1][0] if operations[1] else None
    return (fused.source_degree, fused.target_degree) if isinstance(fused, Ffn | QkvPerRank) else OPEN


def leaves_open(operations: tuple[Operation, ...]) -> bool:
    """Whether a fused tensor is among those of a statement for which it says no degree."""
    return any(
        isinstance(each, Ffn | QkvPerRank)
        and ((each.sources == 1 and each.source_degree is None) or (each.targets == 1 and each.target_degree is None))
        for each in operations
    )


class _Use(NamedTuple):
    """A tensor of the target that has elements of a fused one."""

    form: Form
    number: int
    """Of the fused one, in the form."""
    degrees: tuple[int, ...] | None
    """Of its layout; None where the target has no such tensor."""


@dataclass(slots=True)
class _Fusing:
    """An instance that lays tensors out for ranks."""

    stage: int
    where: Where | None
    """None: optimizer state, which goes with its parameter."""
    operation: Ffn | QkvPerRank
    taken: Node
    """The first tensor that the operation takes."""
    made: TensorMeta
    """The first that it makes."""
    axis: int
    degrees: Degrees

    @property
    def layout(self) -> tuple[int, ...]:
        """Of what it makes."""
        degree = self.degrees[1]
        if degree is None or self.operation.targets > 1:
            return ()
        return tuple([degree if dim == self.axis else 1 for dim in range(len(self.made.shape))])


class Fusings:
    """The instances that lay tensors out for ranks, with a source of its own for each that they make."""

    def __init__(self) -> None:
        self.stage = 0
        """Which is being carried out."""
        self._found: list[_Fusing] = []
        self._of: dict[str, _Fusing] = {}
        """By the names of the sources that stand for what they make."""
        self._sources: dict[TensorMeta, Form] = {}
        self._uses: dict[str, list[_Use]] = {}
        self._degrees: dict[object, int] = {}
        self._parts: dict[Form, dict[str, Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(
        self, where: Where | None, operation: Operation, inputs: Sequence[Node], made: Sequence[TensorMeta]
    ) -> tuple[Node, ...]:
        """Note an instance, and return what stands for the tensors that its operation makes of `inputs`."""
        assert isinstance(operation, Ffn | QkvPerRank)
        taken, rank = inputs[0], len(inputs[0].meta.shape)
        axis = operation.axis if operation.axis is not None else min(1, rank - 1)
        degrees = operation.source_degree, operation.target_degree
        fusing = _Fusing(self.stage, where, operation, taken, made[0], axis % rank, degrees)
        self._found.append(fusing)
        nodes = []
        for place, meta in enumerate(made):
            name = f"\0{len(self._found)} {place}"
            self._of[name] = fusing
            nodes.append(source_node(name, meta, self._sources))
        return tuple(nodes)

    def laid(
        self, outputs: Mapping[str, Node], sources: Mapping[str, TensorMeta], wanted: Mapping[str, TensorMeta]
    ) -> list[dict[Where, Degrees]]:
        """For each stage the degrees of its instances, as the layouts of sources and target tell them."""
        for name, node in outputs.items():
            for number, leaf in enumerate(node.leaves):
                if leaf in self._of:
                    meta = wanted.get(name)
                    use = _Use(node.form, number, None if meta is None else _layout(meta))
                    self._uses.setdefault(leaf, []).append(use)
        for leaf, each in self._of.items():
            if each.operation.targets == 1 and each.degrees[1] is None:
                each.degrees = each.degrees[0], self._made_for(each, self._uses.get(leaf, []))
        found: list[dict[Where, Degrees]] = [{} for _ in range(self.stage + 1)]
        for each in self._found:
            if each.operation.sources == 1 and each.degrees[0] is None:
                each.degrees = self._taken_for(each, sources), each.degrees[1]
            if each.where is not None:
                found[each.stage][each.where] = each.degrees
        return found

    def _made_for(self, fusing: _Fusing, uses: Sequence[_Use]) -> int | None:
        """For how many ranks what is made is laid out, as it lies in the target."""
        if not any(use.degrees for use in uses):
            return None
        key = (fusing.made.shape, fusing.axis, tuple(uses))
        if key not in self._degrees:
            shape = fusing.made.shape
            cuts = [
                cuts_along(fusing.axis, laid, use.degrees, Shapes({str(use.number): fusing.made}))
                for use in uses
                if use.degrees is not None and (laid := self._part(use.form, str(use.number))) is not None
            ]
            self._degrees[key] = degree_along(shape[fusing.axis], cuts)
        return self._degrees[key]

    def _part(self, form: Form, number: str) -> Value | None:
        """What of a form comes of one of its sources."""
        if form not in self._parts:
            tiles: dict[str, list[Tile]] = {}
            for tile in form.value.tiles:
                tiles.setdefault(tile.source, []).append(tile)
            self._parts[form] = {
                source: Value(form.meta.shape, form.meta.dtype, tuple(each)) for source, each in tiles.items()
            }
        return self._parts[form].get(number)

    def _taken_for(self, fusing: _Fusing, sources: Mapping[str, TensorMeta]) -> int | None:
        """For how many ranks what is taken is laid out, as its elements lie in sources and in what was made of them."""
        node, axis = fusing.taken, fusing.axis
        metas = [self._meta_of(leaf, sources) for leaf in node.leaves]
        layouts = tuple(map(_layout, metas))
        if not any(layouts):
            return None
        key = (node.form, axis, layouts)
        if key not in self._degrees:
            if node.form.is_source:
                self._degrees[key] = layouts[0][axis]
            else:
                self._degrees[key] = degree_along(node.meta.shape[axis], _cuts_of_sources(node, metas, axis))
        return self._degrees[key]

    def _meta_of(self, leaf: str, sources: Mapping[str, TensorMeta]) -> TensorMeta:
        fusing = self._of.get(leaf)
        return sources[leaf] if fusing is None else fusing.made._replace(degrees=fusing.layout)


def _layout(meta: TensorMeta) -> tuple[int, ...]:
    """The degrees of a layout; () where none is known."""
    return meta.degrees if len(meta.degrees) == len(meta.shape) else ()


def _cuts_of_sources(node: Node, metas: Sequence[TensorMeta], axis: int) -> Iterator[list[Cut]]:
    """Of each source of a tensor who has which indices of it along a dim."""
    shapes = Shapes({str(number): meta for number, meta in enumerate(metas)})
    here = Shapes({"": node.meta})
    for number, tiles in turned(fragments_of(node.form.value.tiles, shapes), node.meta.shape, "").items():
        meta = metas[int(number)]
        yield cuts_along(axis, Value(meta.shape, meta.dtype, tuple(tiles)), _layout(meta), here)
