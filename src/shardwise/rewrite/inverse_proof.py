"""Proof: what undoes a rewrite is carried out on what the rewrite made, and must give every source back.

This is a check of this library, not of its user: whoever sees it fail has found a fault of ours.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.rewrite.applied_statements import AppliedInstance, StatementTask
from shardwise.rewrite.compiled_ops import CompiledOps
from shardwise.rewrite.evaluation import evaluate
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.op_steps import apply_steps
from shardwise.rewrite.statements import Statement
from shardwise.rewrite.strided_views import ViewedTensor

__all__ = ["Claim", "gives_back", "prove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That of what came out the sources can be made again."""

    sources: Mapping[str, Node]
    outputs: Mapping[str, Node]
    agree: Sequence[tuple[Node, ...]]
    """Nodes of which any stands for all."""
    lost: Collection[str]
    """Sources that need not come back."""
    aliases: Mapping[str, str]
    """Other names of sources."""

    def failing(self, tasks: Iterable[StatementTask]) -> list[str]:
        """The sources that tasks, carried out on the outputs, do not give back, or what else is wrong."""
        returned = evaluate(tasks, self.outputs)
        if returned.findings:
            return [str(returned.findings[0])]
        standing = _standing(self.agree)
        back = returned.outputs
        return [
            name
            for name, node in self.sources.items()
            if name not in self.lost and not _same(back.get(name), node, standing, self.aliases)
        ]


def prove(claim: Claim, applied_instances: Iterable[AppliedInstance], tasks: Iterable[StatementTask]) -> None:
    """Carry out the tasks that undo instances. Raises AssertionError naming the sources that do not come back."""
    for applied in applied_instances:
        if applied.ops is not None and not applied.ops.proved:
            _prove_ops(applied.ops, [variable.node.meta for variable in applied.left if variable.node is not None])
    wrong = claim.failing(tasks)
    assert not wrong, f"what undoes a rewrite does not give back {', '.join(wrong[:10])} ({len(wrong)} findings)"


def gives_back(claim: Claim, statements: Iterable[Statement]) -> bool:
    """Whether statements, carried out on the outputs, give each source as it was."""
    return not claim.failing([StatementTask.of(each) for each in statements])


def _prove_ops(ops: CompiledOps, metas: Sequence[TensorMeta]) -> None:
    """Carry operations and what undoes them out on tensors of these metas."""
    values = [ViewedTensor.source(str(place), meta) for place, meta in enumerate(metas)]
    returned = apply_steps(ops.undo, apply_steps(ops.steps, values))
    same = all(
        back.dtype == value.dtype and _bare(back).same_elements(_bare(value))
        for back, value in zip(returned, values, strict=True)
    )
    assert same, f"what undoes {ops.steps} does not lead back"
    ops.proved = True


def _standing(agree: Sequence[tuple[Node, ...]]) -> dict[Node, Node]:
    """For each node that another stands for: one that stands for all of its group."""
    standing: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while node in standing:
            node = standing[node]
        return node

    for group in agree:
        first = head(group[0])
        for node in group[1:]:
            other = head(node)
            if other is not first:
                standing[other] = first
    return {node: head(node) for node in standing}


def _same(returned: Node | None, node: Node, standing: Mapping[Node, Node], aliases: Mapping[str, str]) -> bool:
    """Whether a source came back."""
    if returned is None:
        return False
    if returned is node or standing.get(returned, returned) is standing.get(node, node):
        return True
    one, other = (_bare(each.value_under(aliases)) for each in (returned, node))
    return returned.meta.dtype == node.meta.dtype and one.same_elements(other)


def _bare(value: ViewedTensor) -> ViewedTensor:
    """A tensor as elements alone: without dtypes, which casts led through, and without views that have no elements."""
    views = [view._replace(dtypes=()) for view in value.views if 0 not in view.shape]
    return ViewedTensor(value.shape, "", tuple(views))
