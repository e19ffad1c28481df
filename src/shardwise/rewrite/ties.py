"""Ties: outputs that are one tensor since their sources are, which the sources' other names tell."""

from collections.abc import Collection, Mapping

from shardwise.rewrite.nodes import Node
from shardwise.rewrite.tiles import Value

__all__ = ["ties_of"]


def ties_of(outputs: Mapping[str, Node], aliases: Mapping[str, str], wanted: Collection[str] | None) -> dict[str, str]:
    """Return alias -> output for outputs that have the same elements as another only through a tie of the sources.

    A statement that copies a tensor makes a tensor of its own. Of tied outputs the one that the target wants stands for
    the others, else the one whose sources are no aliases.
    """
    tied = set(aliases.values())
    groups: list[tuple[Value, dict[tuple[str, ...], str]]] = []
    for name, node in outputs.items():
        if tied.isdisjoint([aliases.get(leaf, leaf) for leaf in node.leaves]):
            continue
        value = node.value_under(aliases)
        for other, members in groups:
            if other.same_elements(value):
                members.setdefault(node.leaves, name)
                break
        else:
            groups.append((value, {node.leaves: name}))
    ties = {}
    for _, members in groups:

        def rank(each: tuple[tuple[str, ...], str]) -> tuple[bool, bool]:
            leaves, name = each
            return wanted is not None and name not in wanted, any(leaf in aliases for leaf in leaves)

        (_, first), *others = sorted(members.items(), key=rank)
        ties.update({name: first for _, name in others})
    return ties
