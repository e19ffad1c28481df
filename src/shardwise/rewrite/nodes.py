"""Nodes: what variables stand for, as a graph from sources through operations, and as views of sources when asked.

Tensors that come about in the same way (the same operations on the same shapes) have the same views but for the names
of their sources. So the views are found once for all of them, as a `Form`, and a node is a form and the names in it.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shardwise.rewrite.compiled_ops import CompiledOps
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.op_steps import apply_steps
from shardwise.rewrite.strided_views import StridedView, ViewedTensor

__all__ = ["Application", "Form", "Node", "apply_ops", "source_node"]


class Form:
    """How a tensor comes about, with numbers in place of the sources' names. One object for all that are alike."""

    __slots__ = ("_made", "_parts", "_value", "meta")

    def __init__(self, meta: TensorMeta, parts: "_FormParts | None") -> None:
        self.meta = meta
        self._parts = parts
        """Of what it is made; None for a source."""
        self._made: dict[_FormParts, tuple[Form, ...]] = {}
        """What was made of this and others, this being the first."""
        self._value: ViewedTensor | None = None

    def through(self, parts: "_FormParts") -> "tuple[Form, ...]":
        """The forms that operations make of forms of which this is the first."""
        made = self._made.get(parts)
        if made is None:
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
            values = [
                _named(each._value, numbering) if numbering else each._value
                for each, numbering in zip(forms, numbers or [()] * len(forms), strict=True)
                if each._value is not None
            ]
            for made, value in zip(forms[0].through(form._parts), apply_steps(ops.steps, values), strict=True):
                made._value = value

    @property
    def is_source(self) -> bool:
        """Whether this is a tensor that was there."""
        return self._parts is None

    @property
    def used(self) -> frozenset[int]:
        """The numbers of the sources of which elements are there."""
        return frozenset([int(view.source) for view in self.value.views])


_FormParts: TypeAlias = tuple[CompiledOps, tuple[Form, ...], tuple[tuple[str, ...], ...]]
"""Operations, what they take, and how the sources of each are numbered in all (nothing for one: as they are)."""


def _named(value: ViewedTensor, names: Sequence[str]) -> ViewedTensor:
    """A tensor with numbers in place of sources, with the sources' names."""
    views = [
        StridedView(offset, shape, names[int(number)], base, strides, dtypes)
        for offset, shape, number, base, strides, dtypes in value.views
    ]
    return ViewedTensor(value.shape, value.dtype, tuple(views))


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
        """Which element of which source each element is."""
        return _named(self.form.value, self.leaves)

    def value_under(self, aliases: Mapping[str, str]) -> ViewedTensor:
        """The same, with sources that are other names of sources called by their own."""
        if not aliases:
            return self.value
        return _named(self.form.value, [aliases.get(leaf, leaf) for leaf in self.leaves])

    @property
    def used(self) -> set[str]:
        """The sources of which elements are there; also those that have none."""
        if len(self.leaves) == 1 or 0 in self.meta.shape:
            return set(self.leaves)
        return {self.leaves[number] for number in self.form.used}


def source_node(name: str, meta: TensorMeta, forms: dict[TensorMeta, Form]) -> Node:
    """Return a source. `forms` has those of the sources that there were before."""
    form = forms.get(meta)
    if form is None:
        form = forms[meta] = Form(meta, None)
    return Node(meta, form, (name,), None)


def apply_ops(ops: CompiledOps, inputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return what operations make of tensors.

    What undoes operations on exactly their results gives the tensors back, unless a cast has lost something on the way.
    """
    # A way there and back ends at the very nodes where it began: a proof sees that before it compares views.
    before = inputs[0].made_by
    if before is not None and before.results == inputs and before.ops.undone_by(ops):
        return before.inputs
    application = Application(ops, inputs)
    first = inputs[0]
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
