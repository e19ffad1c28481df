"""Correspondence: which element of which source every element of every output is, and the other way round."""

from collections.abc import Iterator, Mapping
from itertools import chain

from shardwise.rewrite.fragments import Fragment, Shapes, fragments_of, turned
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Form, Node
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.space import Box

__all__ = ["Correspondence", "ViewedTensors"]

_KNOWN_FRAGMENTS = 1 << 13
"""Answers of about so many fragments in all are kept; when there are more, all are forgotten.

Ranks ask for the same boxes of tensors that come about alike.
"""

_MOST_FRAGMENTS = 1 << 10
"""An answer of more is not kept."""

_Template = list[tuple[int, Fragment]]
"""The number of the source in its form, and the fragment, whose name is of no account."""


class ViewedTensors(Mapping[str, ViewedTensor]):
    """Viewed tensors by name, found when they are asked for."""

    def __init__(self, nodes: Mapping[str, Node], aliases: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._aliases = aliases
        self._values: dict[str, ViewedTensor] = {}

    def __getitem__(self, name: str) -> ViewedTensor:
        found = self._values.get(name)
        if found is None:
            found = self._values[name] = self._nodes[name].value_under(self._aliases)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


class Correspondence:
    """Sources, and the outputs that have their elements."""

    def __init__(
        self, *, sources: Mapping[str, TensorMeta], nodes: Mapping[str, Node], aliases: Mapping[str, str]
    ) -> None:
        self.sources = sources
        """What goes in, by name; without ties."""
        self.values: Mapping[str, ViewedTensor] = ViewedTensors(nodes, aliases)
        """What comes out, by name, as views of sources; without ties."""
        self.aliases = aliases
        """Other names of sources: alias -> source."""
        self._nodes = nodes
        self._templates: dict[tuple[Form, Box], _Template] = {}
        self._num_known = 0
        """Fragments of the templates, and one for each."""
        self._pushed: dict[str, list[ViewedTensor]] | None = None
        self._target_shapes = Shapes(self.outputs)

    @property
    def outputs(self) -> Mapping[str, TensorMeta]:
        """Shape and dtype of what comes out, by name."""
        return {name: node.meta for name, node in self._nodes.items()}

    def resolve(self, name: str, box: Box) -> list[Fragment]:
        """Where the elements of a box of an output come from: fragments that cover it once, boxes of sources.

        Raises KeyError for what is no output.
        """
        node = self._nodes[name]
        template = self._templates.get((node.form, box))
        if template is None:
            template = self._template(node, box)
        leaves, aliases = node.leaves, self.aliases
        if aliases:
            return [each._replace(other=aliases.get(leaves[number], leaves[number])) for number, each in template]
        return [each._replace(other=leaves[number]) for number, each in template]

    def _template(self, node: Node, box: Box) -> _Template:
        """The answer for all tensors that come about as this one does."""
        met = list(node.form.value.meeting(box))
        metas = {view.source: self._source(node.leaves[int(view.source)]) for view in met}
        found = [(int(each.other), each) for each in fragments_of(met, Shapes(metas))]
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
        """Where the elements of a box of a source go: boxes of outputs; in several for copies, in none when dropped."""
        # Loads and conversions ask the other way round, and never pay for this.
        if self._pushed is None:
            self._pushed = self._turned()
        met = chain.from_iterable(value.meeting(box) for value in self._pushed.get(name, ()))
        return fragments_of(met, self._target_shapes)

    def sources_of(self, name: str) -> frozenset[str]:
        """The sources from which an output has elements. Raises KeyError for what is no output."""
        return frozenset(self.aliases.get(leaf, leaf) for leaf in self._nodes[name].used)

    def _turned(self) -> dict[str, list[ViewedTensor]]:
        """For each source what of it goes into each output, as views whose sources are the outputs."""
        found: dict[str, list[ViewedTensor]] = {}
        for target, node in self._nodes.items():
            shape = node.meta.shape
            views = turned(self.resolve(target, Box((0,) * len(shape), shape)), shape, target)
            for source, parts in views.items():
                value = ViewedTensor(self.sources[source].shape, node.meta.dtype, tuple(parts))
                found.setdefault(source, []).append(value)
        return found
