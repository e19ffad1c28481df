"""Nodes: what variables stand for, as a graph from sources through operations, and as views of sources when asked.

Tensors from the same operations on the same shapes have the same views, except for the names of their sources. So the
views are found once for all of them, as a `Form`, and a node is a form and the names in it. A `Correspondence` answers
which elements of sources are in a box of an output, and the other way round.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from shardwise.rewrite.compiled_ops import CompiledOps, apply_steps
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import (
    Fragment,
    Shapes,
    StridedView,
    ViewedTensor,
    fill_of,
    fragments_of,
    scales_of,
    turned,
    with_scales_named,
)
from shardwise.rewrite.verbs.quantise import Rescaling
from shardwise.space import Box


class Form:
    """How a tensor comes about, with numbers in place of the sources' names. One object for all that are alike."""

    __slots__ = ("_made", "_parts", "_value", "meta")

    def __init__(self, meta: TensorMeta, parts: "_FormParts | None") -> None:
        self.meta = meta
        self._parts = parts
        """Of what it is made; None for a source."""
        # Compiled operations are compared by identity. Instances of a statement share them (`_TaskEvaluator.compiled`),
        # and so thousands of layers share one form and one list of views.
        self._made: dict[_FormParts, tuple[Form, ...]] = {}
        """What was made of this and others, this being the first."""
        self._value: ViewedTensor | None = None

    def through(self, parts: "_FormParts") -> "tuple[Form, ...]":
        """The forms that operations make of this form as the first input."""
        made = self._made.get(parts)
        if made is None:
            # The views stay unknown here. Most variables are temporaries whose views nobody asks for.
            made = self._made[parts] = tuple([Form(meta, parts) for meta in parts[0].results])
        return made

    @property
    def value(self) -> ViewedTensor:
        """The views, whose sources are called by their number."""
        if self._value is None:
            self._find_value()
        assert self._value is not None
        return self._value

    def _find_value(self) -> None:
        """Go through what this depends on without recursion: a variable can be re-assigned any number of times."""
        waiting = [self]
        while waiting:
            form = waiting[-1]
            if form._value is not None:
                waiting.pop()
                continue
            if form._parts is None:
                form._value = ViewedTensor.source("0", form.meta)
                continue
            ops, forms, numbers = form._parts
            missing = [each for each in forms if each._value is None]
            if missing:
                waiting.extend(missing)
                continue
            # Each input numbers its own sources from 0. Joined, they get the numbers that `apply_ops` gave the leaves
            # of all.
            values = [
                _named(each._value, numbering) if numbering else each._value
                for each, numbering in zip(forms, numbers or [()] * len(forms), strict=True)
                if each._value is not None
            ]
            # A split makes all its parts at once: its siblings are found by the way.
            for made, value in zip(forms[0].through(form._parts), apply_steps(ops.steps, values), strict=True):
                made._value = value

    @property
    def is_source(self) -> bool:
        """Whether this is a tensor that was there."""
        return self._parts is None

    @property
    def used(self) -> frozenset[int]:
        """The numbers of the sources with elements here."""
        views = [view for view in self.value.views if fill_of(view.source) is None]
        scales = {scales.source for view in views if (scales := scales_of(view.dtypes)) is not None}
        return frozenset([int(source) for source in {*(view.source for view in views), *scales}])

    @property
    def quantised(self) -> Rescaling | None:
        """By what this is made, where it is quantised elements or their scales."""
        step = self._parts[0].rescaling if self._parts is not None else None
        return step if step is not None and step.quantises else None

    @property
    def is_padded(self) -> bool:
        """Whether there are elements that are in no source."""
        return any(fill_of(view.source) is not None for view in self.value.views)


_FormParts: TypeAlias = tuple[CompiledOps, tuple[Form, ...], tuple[tuple[str, ...], ...]]
"""Operations, what they take, and how the sources of each are numbered in all (nothing for one: as they are)."""


def _named(value: ViewedTensor, names: Sequence[str]) -> ViewedTensor:
    """A tensor with numbers in place of sources, with the sources' names."""
    views = [
        StridedView(
            offset,
            shape,
            source if fill_of(source) is not None else names[int(source)],
            base,
            strides,
            with_scales_named(dtypes, names),
        )
        for offset, shape, source, base, strides, dtypes in value.views
    ]
    return ViewedTensor(value.shape, value.dtype, tuple(views))


# Applications link results to what they were made of. A form cannot do that, for it does not know names.
class Application:
    """One use of compiled operations: what they took and what they gave."""

    __slots__ = ("inputs", "ops", "results")

    def __init__(self, ops: CompiledOps, inputs: "tuple[Node, ...]") -> None:
        self.ops = ops
        self.inputs = inputs
        self.results: tuple[Node, ...] = ()


class Node:
    """What a variable stands for. Two variables have one node when nothing but the name changed on the way."""

    __slots__ = ("form", "leaves", "made_by", "meta")

    def __init__(self, meta: TensorMeta, form: Form, leaves: tuple[str, ...], made_by: Application | None) -> None:
        self.meta = meta
        self.form = form
        self.leaves = leaves
        """The names of the sources that the form numbers."""
        self.made_by = made_by
        """None for a source."""

    @property
    def value(self) -> ViewedTensor:
        """The source element of each element."""
        return _named(self.form.value, self.leaves)

    @property
    def elements_of_scales(self) -> "Node | None":
        """The elements that are quantised with these scales; None where these are none."""
        if self.form.quantised is None or self.made_by is None or self is self.made_by.results[0]:
            return None
        return self.made_by.results[0]

    def value_under(self, aliases: Mapping[str, str]) -> ViewedTensor:
        """The same, with sources that are other names of sources called by their own."""
        if not aliases:
            return self.value
        return _named(self.form.value, [aliases.get(leaf, leaf) for leaf in self.leaves])

    @property
    def used(self) -> set[str]:
        """The sources with elements here, and those without elements."""
        # A tensor without elements has no views that name a source. Its sources count as used all the same: otherwise
        # they would be reported as dropped.
        if len(self.leaves) == 1 or 0 in self.meta.shape:
            return set(self.leaves)
        if (node := self.elements_of_scales) is not None:
            return node.used
        return {self.leaves[number] for number in self.form.used}


def source_node(name: str, meta: TensorMeta, forms: dict[TensorMeta, Form]) -> Node:
    """Return a source. `forms` has those of the sources that there were before."""
    form = forms.get(meta)
    if form is None:
        form = forms[meta] = Form(meta, None)
    return Node(meta, form, (name,), None)


def apply_ops(ops: CompiledOps, inputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return what operations make of tensors: without steps, these.

    What undoes operations on exactly their results gives the tensors back, unless a cast has lost something on the way.
    """
    # A way there and back ends at the very nodes where it began: a proof sees that before it compares views.
    #     a, b --join--> ab --split--> a, b       the nodes `a` and `b` again, not equal ones
    if not ops.steps:
        return inputs
    before = inputs[0].made_by
    if before is not None and before.results == inputs and before.ops.undone_by(ops):
        return before.inputs
    # What follows makes new tensors.
    application = Application(ops, inputs)
    first = inputs[0]
    # One input keeps its numbering. This is the common case, and needs no dict.
    if len(inputs) == 1:
        leaves = first.leaves
        forms = first.form.through((ops, (first.form,), ()))
    else:
        # A source that goes in twice has one number, so that what was parted and is joined again is one view.
        number_of = {
            leaf: str(number) for number, leaf in enumerate(dict.fromkeys([x for node in inputs for x in node.leaves]))
        }
        leaves = tuple(number_of)
        numbers = tuple([tuple([number_of[leaf] for leaf in node.leaves]) for node in inputs])
        forms = first.form.through((ops, tuple([node.form for node in inputs]), numbers))
    application.results = tuple([Node(form.meta, form, leaves, application) for form in forms])
    return application.results


_KNOWN_FRAGMENTS = 1 << 13
"""Answers of about so many fragments in all are kept; when there are more, all are forgotten.

Ranks ask for the same boxes of tensors that come about alike.
"""

_MOST_FRAGMENTS = 1 << 10
"""An answer of more is not kept."""

_Template = list[tuple[int | None, Fragment]]
"""The number of the source in its form, and the fragment, whose name is of no account; None: padding, of no source."""


class Correspondence:
    """Sources, and the outputs that have their elements."""

    def __init__(
        self, *, sources: Mapping[str, TensorMeta], nodes: Mapping[str, Node], aliases: Mapping[str, str]
    ) -> None:
        self.sources = sources
        """What goes in, by name; without ties."""
        self.aliases = aliases
        """Other names of sources: alias -> source."""
        self._nodes = nodes
        # Answers are kept by form and box. What a rank asks about layer 0 answers the same question about layers 1 to
        # 31.
        self._templates: dict[tuple[Form, Box], _Template] = {}
        self._num_known = 0
        """Fragments of the templates, and one for each."""
        self._pushed: dict[str, list[ViewedTensor]] | None = None
        self._target_shapes = Shapes(self.outputs)

    @property
    def outputs(self) -> Mapping[str, TensorMeta]:
        """Shape and dtype of what comes out, by name."""
        return {name: node.meta for name, node in self._nodes.items()}

    def value(self, name: str) -> ViewedTensor:
        """An output as views of sources."""
        # Views are named on demand: a model has 100,000 tensors, and a rank asks for the few that it holds.
        return self._nodes[name].value_under(self.aliases)

    def resolve(self, name: str, box: Box) -> list[Fragment]:
        """Where the elements of a box of an output come from: fragments that cover it once, of sources or padding.

        Of scales a box of their elements is asked about. Raises KeyError for what is no output.
        """
        node = self._nodes[name].elements_of_scales or self._nodes[name]
        template = self._templates.get((node.form, box))
        if template is None:
            template = self._template(node, box)
        # Only the names differ from one tensor of the form to the next.
        leaves, aliases = node.leaves, self.aliases
        if aliases:
            leaves = tuple([aliases.get(leaf, leaf) for leaf in leaves])
        return [
            each
            if number is None
            else each._replace(other=leaves[number], dtypes=with_scales_named(each.dtypes, leaves))
            for number, each in template
        ]

    def quantised(self, name: str) -> Rescaling | None:
        """How an output is quantised: elements, or scales if its dtype is that of these. None: it is not."""
        return self._nodes[name].form.quantised

    def is_scales(self, name: str) -> bool:
        """Whether an output is the scales of quantised elements."""
        return self._nodes[name].elements_of_scales is not None

    def elements_of(self, name: str) -> TensorMeta:
        """Of an output that is scales those of its elements, else of the output."""
        node = self._nodes[name]
        return (node.elements_of_scales or node).meta

    def padding(self, name: str) -> list[Fragment]:
        """The elements of an output that are in no source. Raises KeyError for what is no output."""
        node = self._nodes[name]
        if not node.form.is_padded:
            return []
        shape = node.meta.shape
        return [each for each in self.resolve(name, Box((0,) * len(shape), shape)) if fill_of(each.other) is not None]

    def _template(self, node: Node, box: Box) -> _Template:
        """The answer for all tensors that come about as this one does."""
        met = list(node.form.value.meeting(box))
        # Shapes of sources are part of the form, so those of this node's sources serve for all.
        numbers = {view.source: int(view.source) for view in met if fill_of(view.source) is None}
        metas = {source: self._source(node.leaves[number]) for source, number in numbers.items()}
        found = [(numbers.get(each.other), each) for each in fragments_of(met, Shapes(metas))]
        # A box that falls into thousands of fragments would push out everything else, and is seldom asked for twice.
        if len(found) > _MOST_FRAGMENTS:
            return found
        if self._num_known >= _KNOWN_FRAGMENTS:
            self._templates.clear()
            self._num_known = 0
        self._templates[node.form, box] = found
        self._num_known += 1 + len(found)
        return found

    def _source(self, leaf: str) -> TensorMeta:
        return self.sources[self.aliases.get(leaf, leaf)]

    def push(self, name: str, box: Box) -> list[Fragment]:
        """Where the elements of a box of a source go: boxes of outputs. In several for copies, in none when dropped."""
        # Loads and conversions ask the other way round, and never pay for this.
        if self._pushed is None:
            self._pushed = self._turned()
        # A source may go into several outputs, each of which has its own views.
        met = chain.from_iterable(value.meeting(box) for value in self._pushed.get(name, ()))
        return fragments_of(met, self._target_shapes)

    def sources_of(self, name: str) -> frozenset[str]:
        """The sources from which an output has elements. Raises KeyError for what is no output."""
        return frozenset(self.aliases.get(leaf, leaf) for leaf in self._nodes[name].used)

    def _turned(self) -> dict[str, list[ViewedTensor]]:
        """For each source what of it goes into each output, as views whose sources are the outputs."""
        found: dict[str, list[ViewedTensor]] = {}
        for target, node in self._nodes.items():
            # Scales have no element of a source.
            if self.is_scales(target):
                continue
            shape = node.meta.shape
            views = turned(self.resolve(target, Box((0,) * len(shape), shape)), shape, target)
            for source, parts in views.items():
                value = ViewedTensor(self.sources[source].shape, node.meta.dtype, tuple(parts))
                found.setdefault(source, []).append(value)
        return found
