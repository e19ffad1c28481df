"""Degrees: for how many ranks along `tp` fused tensors are laid out, where their statements do not say it.

The degree follows the data, through all names and sections. It goes forward to an operation's inputs, from the layouts
of the sources and from what other operations make. It goes back to an operation's outputs, from the layouts of the
target and from what other operations take for a degree that they say. So all statements are carried out twice, first
with a new tensor instead of each fused one, which shows its way.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from shardwise.rewrite.compiled_ops import CompiledOps
from shardwise.rewrite.expansion import Expanded
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Form, Node, source_node
from shardwise.rewrite.strided_views import Shapes, StridedView, ViewedTensor, fragments_of, turned
from shardwise.rewrite.verbs.fused import Fused
from shardwise.rewrite.verbs.operation import Degrees, Operation
from shardwise.space import Box

InstanceKey: TypeAlias = tuple[int, Expanded]
"""Which task of a section, and which instance."""

KnownDegrees: TypeAlias = Mapping[InstanceKey, Degrees]
"""The degrees of instances, as layouts tell them."""


def fused_in(operations: Iterable[Operation]) -> Fused | None:
    """The one of a statement's operations that lays tensors out for ranks; None where there is none."""
    # What joins or splits does so once in a statement.
    return next((each for each in operations if isinstance(each, Fused) and each.is_per_rank), None)


def degrees_in(operations: Iterable[Operation]) -> Iterator[int | None]:
    """The degrees of the fused tensors among those of a statement; None where it says none."""
    if (fused := fused_in(operations)) is not None:
        yield from [fused.source_degree] * (fused.sources == 1) + [fused.target_degree] * (fused.targets == 1)


class _UseOfFused(NamedTuple):
    """A tensor of the target, or one that an operation takes, that has elements of a fused one."""

    form: Form
    number: int
    """Of the fused one, in the form."""
    degrees: tuple[int, ...] | None
    """Of its layout; None where the target has no such tensor."""


@dataclass(slots=True)
class _Fusing:
    """An instance that lays tensors out for ranks."""

    section: int
    key: InstanceKey | None
    """None: optimizer state, which goes with its parameter."""
    operation: Fused
    taken: Node
    """The first tensor that the operation takes."""
    made: TensorMeta
    """The first that it makes."""
    degrees: Degrees

    @property
    def axis(self) -> int:
        """Along which it lays out."""
        assert self.operation.axis is not None, "operations that were carried out say it"
        return self.operation.axis

    @property
    def layout_taken(self) -> tuple[int, ...]:
        """Of what it takes, as far as it is known."""
        return self._layout(self.degrees[0], self.operation.sources, self.taken.meta)

    @property
    def layout_made(self) -> tuple[int, ...]:
        """Of what it makes, as far as it is known."""
        return self._layout(self.degrees[1], self.operation.targets, self.made)

    @property
    def layout_lasting(self) -> tuple[int, ...]:
        """Of what it makes, which is now made: what nothing tells is 1."""
        return self._layout(self.degrees[1] or 1, self.operation.targets, self.made)

    def _layout(self, degree: int | None, count: int, meta: TensorMeta) -> tuple[int, ...]:
        # Several tensors are not fused, and are laid out for nobody.
        if degree is None or count > 1:
            return ()
        return tuple([degree if dim == self.axis else 1 for dim in range(len(meta.shape))])


class Fusings:
    """The instances that lay tensors out for ranks, with a new source for each tensor that they make."""

    def __init__(self) -> None:
        self.section = 0
        """Which is being carried out."""
        self._found: list[_Fusing] = []
        self._of: dict[str, _Fusing] = {}
        """By the names of the sources that stand for what they make."""
        self._sources: dict[TensorMeta, Form] = {}
        self._uses: dict[str, list[_UseOfFused]] = {}
        self._degrees: dict[object, int] = {}
        self._parts: dict[Form, dict[str, ViewedTensor]] = {}
        self._layouts: dict[object, list[tuple[int, ...]]] = {}
        self._tells = False, False
        """Whether layouts of sources, and of the target, are known."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(self, key: InstanceKey | None, ops: CompiledOps, inputs: Sequence[Node]) -> tuple[Node, ...]:
        """Note an instance, and return what stands for the tensors that its operation makes of `inputs`."""
        back = ops.inverse.join_or_split
        assert isinstance(back, Fused), "others lay nothing out"
        assert ops.making is not None, "it was carried out"
        operation, made = back.undone(), ops.making.made
        fusing = _Fusing(self.section, key, operation, inputs[0], made[0], operation.degrees)
        self._found.append(fusing)
        nodes = []
        for place, meta in enumerate(made):
            # NUL: no tensor has such a name.
            name = f"\0{len(self._found)} {place}"
            self._of[name] = fusing
            nodes.append(source_node(name, meta, self._sources))
        return tuple(nodes)

    def found_degrees(
        self, outputs: Mapping[str, Node], sources: Mapping[str, TensorMeta], wanted: Mapping[str, TensorMeta]
    ) -> list[dict[InstanceKey, Degrees]]:
        """For each section the degrees of its instances, as the layouts of sources and target tell them."""
        self._tells = any(meta.degrees for meta in sources.values()), any(meta.degrees for meta in wanted.values())
        # Back from the target: in which outputs do elements of each stand-in come out?
        for name, node in outputs.items():
            meta = wanted.get(name)
            self._note_use(node, None if meta is None else _layout_wanted(meta, node))
        # And from what other statements take for a degree that they say: it leaves no other trace in the outputs.
        for each in self._found:
            if layout := each.layout_taken:
                self._note_use(each.taken, layout)
        # What was made first, for it may be taken by another statement, which then knows its layout.
        for leaf, each in self._of.items():
            if each.operation.targets == 1 and each.degrees[1] is None:
                each.degrees = each.degrees[0], self._made_for(each, self._uses.get(leaf, []))
        found: list[dict[InstanceKey, Degrees]] = [{} for _ in range(self.section + 1)]
        for each in self._found:
            if each.operation.sources == 1 and each.degrees[0] is None:
                each.degrees = self._taken_for(each, sources), each.degrees[1]
            # Optimizer state has no say of its own: it is laid out like its parameter, whose degree it gets.
            if each.key is not None:
                found[each.section][each.key] = each.degrees
        return found

    def lasting(
        self, outputs: Mapping[str, Node], sources: Mapping[str, TensorMeta], wanted: Mapping[str, TensorMeta]
    ) -> dict[str, tuple[int, ...]]:
        """For how many ranks the dims of outputs with elements of fused tensors are laid out, whatever cuts them later.

        To be asked after `found_degrees`. 0: this cannot be said of the whole dim.
        """
        found = {}
        for name, node in outputs.items():
            # Optimizer state that goes along is laid out like its parameter, whose statement says it.
            fused = {leaf: self._of[leaf] for leaf in node.leaves if leaf in self._of}
            fused = {leaf: each for leaf, each in fused.items() if each.key is not None and each.layout_lasting}
            kept = {leaf for leaf in node.leaves if leaf not in self._of and sources[leaf].recorded}
            if not node.meta.shape or not (fused or kept):
                continue
            # Laid out for the target: the way back asks the same layout, and so finds the same degrees.
            wanted_layouts = [
                _layout_wanted(wanted[name], node) if name in wanted else ()
                for each in fused.values()
                if each.operation.target_degree is None
            ]
            layouts = [each or (1,) * len(node.meta.shape) for each in wanted_layouts[:1]]
            # Others came with their degrees: those are seen in each dim of the output.
            metas = [
                fused[leaf].made._replace(degrees=fused[leaf].layout_lasting)
                if leaf in fused and fused[leaf].operation.target_degree is not None
                else sources[leaf]
                if leaf in kept
                else None
                for leaf in node.leaves
            ]
            layouts += self._layouts_of_sources(node, metas)
            # Where they say different things of a dim, as neighbouring parts may, it is none of them.
            if layouts:
                found[name] = tuple([dim[0] if len(set(dim)) == 1 else 0 for dim in zip(*layouts, strict=True)])
        return found

    def _layouts_of_sources(self, node: Node, metas: Sequence[TensorMeta | None]) -> list[tuple[int, ...]]:
        """The degrees of each dim of a tensor, as each of the sources with a meta shows them alone."""
        key = (node.form, tuple(metas))
        if key not in self._layouts:
            shape, dims = node.meta.shape, range(len(node.meta.shape))
            known = {str(number): meta for number, meta in enumerate(metas) if meta is not None}
            cuts = [dict(_cuts_of_sources(node, known, axis)) for axis in dims]
            self._layouts[key] = [
                tuple([_degree_along(shape[axis], [cuts[axis][number]]) for axis in dims])
                for number in known
                if number in cuts[0]
            ]
        return self._layouts[key]

    def _note_use(self, node: Node, degrees: tuple[int, ...] | None) -> None:
        for number, leaf in enumerate(node.leaves):
            if leaf in self._of:
                self._uses.setdefault(leaf, []).append(_UseOfFused(node.form, number, degrees))

    def _made_for(self, fusing: _Fusing, uses: Sequence[_UseOfFused]) -> int | None:
        """For how many ranks the tensors are laid out that have what an operation makes."""
        # No layout, no degree. The statement then means 1, but stays open for the way back.
        if not any(use.degrees for use in uses):
            return None
        # All layers ask the same question, and forms are shared: one answer serves them all.
        key = (fusing.made.shape, fusing.axis, tuple(uses))
        if key not in self._degrees:
            shape = fusing.made.shape
            cuts = [
                _cuts_along(fusing.axis, part, use.degrees, Shapes({str(use.number): fusing.made}))
                for use in uses
                if use.degrees is not None and (part := self._part(use.form, str(use.number))) is not None
            ]
            self._degrees[key] = _degree_along(shape[fusing.axis], cuts)
        is_open = not self._tells[1] and not all(use.degrees for use in uses)
        return _unless_open(self._degrees[key], is_open=is_open)

    def _part(self, form: Form, number: str) -> ViewedTensor | None:
        """What of a form comes of one of its sources."""
        if form not in self._parts:
            views: dict[str, list[StridedView]] = {}
            for view in form.value.views:
                views.setdefault(view.source, []).append(view)
            self._parts[form] = {
                source: ViewedTensor(form.meta.shape, form.meta.dtype, tuple(each)) for source, each in views.items()
            }
        return self._parts[form].get(number)

    def _taken_for(self, fusing: _Fusing, sources: Mapping[str, TensorMeta]) -> int | None:
        """For how many ranks the inputs are laid out, by the places of their elements in sources and in tensors made of
        them.
        """
        node, axis = fusing.taken, fusing.axis
        metas = [self._meta_of(leaf, sources) for leaf in node.leaves]
        layouts = tuple(map(_layout, metas))
        if not any(layouts):
            return None
        key = (node.form, axis, layouts)
        if key not in self._degrees:
            # Read as it is stored: its layout says the degree without any geometry.
            if node.form.is_source:
                self._degrees[key] = layouts[0][axis]
            else:
                cuts = _cuts_of_sources(node, {str(number): meta for number, meta in enumerate(metas)}, axis)
                self._degrees[key] = _degree_along(node.meta.shape[axis], [each for _, each in cuts])
        is_open = not self._tells[0] and not all(leaf in self._of for leaf in node.leaves)
        return _unless_open(self._degrees[key], is_open=is_open)

    def _meta_of(self, leaf: str, sources: Mapping[str, TensorMeta]) -> TensorMeta:
        fusing = self._of.get(leaf)
        return sources[leaf] if fusing is None else fusing.made._replace(degrees=fusing.layout_made)


def _unless_open(degree: int, *, is_open: bool) -> int | None:
    """A degree; None for the 1 of tensors of whose layouts nothing is known: with them it may be another."""
    return None if is_open and degree == 1 else degree


def _layout(meta: TensorMeta) -> tuple[int, ...]:
    """The degrees of a layout; () where none is known."""
    return meta.degrees if len(meta.degrees) == len(meta.shape) else ()


def _layout_wanted(meta: TensorMeta, node: Node) -> tuple[int, ...]:
    """The degrees of an output's layout in the target; () also where the target has another number of dims."""
    return _layout(meta) if len(meta.shape) == len(node.meta.shape) else ()


# Into how many equal boxes ranks along `tp` cut a tensor along a dim, seen from tensors that it has become. A rewrite
# may do anything between a fused tensor and the one whose layout is known: another name, a transpose, a stack. Which
# rank has which indices of the fused tensor shows where its elements are in boxes of the other.


class _BoxOwner(NamedTuple):
    """Who has some indices: a box of a layout."""

    degrees: tuple[int, ...] = ()
    """Into how many boxes each dim that is cut is cut."""
    ranks: tuple[int, ...] = ()
    """Which of them it is."""
    places: tuple[int, ...] = ()
    """Its place along dims with an unknown cut."""


_WHOLE = _BoxOwner()
_UNKNOWN = _BoxOwner(degrees=(0,))


class _OwnedIndices(NamedTuple):
    """Indices along a dim, and the ranks with elements there."""

    start: int
    stop: int
    owner: _BoxOwner


_BoxOwners: TypeAlias = frozenset[_BoxOwner]


def _cuts_along(axis: int, tensor: ViewedTensor, degrees: Sequence[int], shapes: Shapes) -> list[_OwnedIndices]:
    """The ranks of the indices along dim `axis` of the one source of `tensor`, which is in boxes.

    degrees: of its layout, see `TensorMeta`; shapes: of the source, by its name in the views.
    """
    # Figure 1. `gu` is transposed, and the target cuts `dim 1` of the result over two ranks. Seen along dim 0 of `gu`:
    #
    #     result   [:, 0:3] rank 0   [:, 3:6] rank 1
    #     gu       [0:3]    rank 0   [3:6]    rank 1       two equal stretches in the order of ranks: degree 2
    #
    known = [dim for dim, degree in enumerate(degrees) if degree > 1]
    unknown = [dim for dim, degree in enumerate(degrees) if degree == 0]
    cuts = []
    for ranks in product(*[range(degrees[dim]) for dim in known]):
        offset, stop = [0] * len(tensor.shape), list(tensor.shape)
        for dim, rank in zip(known, ranks, strict=True):
            offset[dim] = rank * tensor.shape[dim] // degrees[dim]
            stop[dim] = (rank + 1) * tensor.shape[dim] // degrees[dim]
        box = Box(tuple(offset), tuple([b - a for a, b in zip(offset, stop, strict=True)]))
        for each in fragments_of(tensor.meeting(box), shapes):
            start, size = each.offset[axis], each.shape[axis]
            owner = _BoxOwner(
                tuple([degrees[dim] for dim in known]), ranks, tuple([each.first[dim] for dim in unknown])
            )
            # Along this dim something cuts the tensor, and nobody knows where.
            if size > 1 and each.dims[axis][0] in unknown:
                owner = _UNKNOWN
            cuts.append(_OwnedIndices(start, start + size, owner))
    return cuts


def _degree_along(size: int, cuts: Iterable[Sequence[_OwnedIndices]]) -> int:
    """For how many ranks a tensor is laid out along a dim of this size; 0 where that is not known.

    cuts: for each tensor in boxes, the ranks of its indices. Where each rank has one stretch of equal size, in the
    order of ranks, that is their number. If a rank has parts of several stretches, these follow one another as they do
    without ranks: 1.
    """
    runs = list(_runs([cut for each in cuts for cut in _alone(each)], size))
    owners = [each for _, each in runs]
    # The order of these questions matters: each excludes what the next ones could not tell apart.
    if any(_UNKNOWN in each for each in owners):
        return 0
    # All ranks have all of it, or only one has: nothing is laid out for ranks here.
    if len({each for each in owners if each}) <= 1:
        return 1
    # Some indices belong to two boxes or to none: tensors that disagree, such as copies that are cut differently.
    if any(len(each) != 1 for each in owners):
        return 0
    single = [next(iter(each)) for each in owners]
    if len({(each.degrees, each.places) for each in single} - {(_WHOLE.degrees, _WHOLE.places)}) > 1:
        return 0
    if len(set(single)) < len(single) or _WHOLE in single:
        return 1
    # Equal stretches that ascend with the ranks are what tensor parallelism makes. Anything else is refused, not
    # guessed.
    is_even = len({length for length, _ in runs}) == 1
    return len(single) if is_even and single == sorted(single) else 0


def _alone(cuts: Sequence[_OwnedIndices]) -> Sequence[_OwnedIndices]:
    """The cuts of one tensor: where it is cut along other dims only, it is whole along this one."""
    owners = {each for _, each in _runs(cuts, 0) if each}
    # Every rank has all indices along this dim: they have different columns of each row.
    if len(owners) == 1 and len(*owners) > 1 and _UNKNOWN not in next(iter(owners)):
        return [each._replace(owner=_WHOLE) for each in cuts]
    return cuts


def _runs(cuts: Sequence[_OwnedIndices], size: int) -> Iterator[tuple[int, _BoxOwners]]:
    """Stretches of indices up to `size`: their lengths, and the ranks with a part of each. No rank if none is known."""
    # A sweep over the ends of all cuts: its cost is the number of cuts, not the size of the dim.
    events: dict[int, list[tuple[_BoxOwner, int]]] = {0: [], size: []}
    for cut in cuts:
        events.setdefault(cut.start, []).append((cut.owner, 1))
        events.setdefault(cut.stop, []).append((cut.owner, -1))
    here: Counter[_BoxOwner] = Counter()
    length, owners, before = 0, frozenset[_BoxOwner](), 0
    for index in sorted(events):
        now = frozenset(owner for owner, count in here.items() if count)
        # Stretches that touch and have the same owners are one.
        if now != owners and length:
            yield length, owners
            length = 0
        length, owners, before = length + index - before, now, index
        for owner, change in events[index]:
            here[owner] += change
    if length:
        yield length, owners


def _cuts_of_sources(
    node: Node, metas: Mapping[str, TensorMeta], axis: int
) -> Iterator[tuple[str, list[_OwnedIndices]]]:
    """Of each source of a tensor who has which indices of it along a dim. `metas`: of sources, by their numbers."""
    shapes = Shapes(metas)
    here = Shapes({"": node.meta})
    views = [each for each in node.form.value.views if each.source in metas]
    for number, there in turned(fragments_of(views, shapes), node.meta.shape, "").items():
        meta = metas[number]
        yield number, _cuts_along(axis, ViewedTensor(meta.shape, meta.dtype, tuple(there)), _layout(meta), here)
