"""How many heads a module works with: what is cut for it must not go through the middle of one.

A projection whose outputs are viewed as heads is cut between groups: a key-value head with the query heads that read
it. All projections of one attention have a whole number of outputs per group, so that the number of groups is all that
has to be known: the one of query, key, value, a gate per head, a sink per head is the same.
"""

from collections.abc import Iterable, Mapping

from shardwise.plan.tensor_outline import TensorModule

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_head", "nhead", "nheads", "attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups", "n_head_kv")
HEADS_PER_GROUP = ("num_key_value_groups", "n_rep", "num_kv_groups", "num_queries_per_kv")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv")

WORDS = frozenset((*HEADS, *GROUPS, *HEADS_PER_GROUP, *_HEAD_SIZES))
"""Attributes that say how a module works with heads."""

_LEVELS = 2
"""How far around a projection a module of heads is looked for: it holds the projection, or what wraps it."""


def groups_of_heads(around: Iterable[TensorModule]) -> int | None:
    """The number of groups (key-value heads) of the nearest module that works with heads; None where there is none.

    `around`: the module that is cut, and those around it, from the inside out.
    """
    for module, _ in zip(around, range(_LEVELS + 1), strict=False):
        if not WORDS & module.numbers.keys():
            continue
        own, configured = module.numbers, module.configured
        if groups := _first(own, GROUPS):
            return groups
        heads = _first(own, HEADS) or _first(configured, HEADS)
        if heads and (per_group := _first(own, HEADS_PER_GROUP)) and heads % per_group == 0:
            return heads // per_group
        if groups := _first(configured, GROUPS):
            return groups
        if heads:
            return heads
    return None


def _first(numbers: Mapping[str, int], words: Iterable[str]) -> int | None:
    return next((numbers[word] for word in words if numbers.get(word, 0) > 0), None)
