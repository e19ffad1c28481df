"""Which gradients of whole parameters are complete on each rank, read from the autograd graph of a forward.

A gradient comes down from the loss, which is the same on all ranks. Below a movement that ends what is each rank's own
(an output summed, parts gathered) it belongs to this rank's part; above a movement that begins it (a value shared, a
part taken) it is complete again, since the backward of that movement makes it so:

    loss  ---->  total  ---->  softmax of own heads  ---->  norm of own heads  ---->  share  ---->  norm of all
      complete          own                          own: summed over ranks          complete

So a parameter whose gradient is `own` is to be summed over the ranks, whatever the rules say of it; one that is reached
both ways has a gradient that no sum makes right.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from shardwise.engine.tensor.movements import movement_of
from shardwise.engine.tensor.vocabulary import is_cut_loss
from shardwise.errors import ModelError

Gradient = Literal["complete", "own", "both"]

_ENDS_OWN = frozenset({"total", "whole", "spread", "settle"})
_BEGINS_OWN = frozenset({"share", "part"})

_OPAQUE = ("CheckpointFunction", "CompiledFunction")
"""Nodes that hide a graph of their own."""


def gradients_of_leaves(loss: torch.Tensor) -> dict[torch.Tensor, Gradient] | None:
    """Which gradient each leaf below `loss` gets; None where a part of the graph is hidden."""
    root = loss.grad_fn
    if root is None:
        return {}
    num_consumers: dict[Any, int] = {root: 0}
    pending = [root]
    while pending:
        node = pending.pop()
        if type(node).__name__.startswith(_OPAQUE):
            return None
        for producer in _producers(node):
            if producer not in num_consumers:
                num_consumers[producer] = 0
                pending.append(producer)
            num_consumers[producer] += 1
    found: dict[Any, Gradient] = {root: "complete"}
    leaves: dict[torch.Tensor, Gradient] = {}
    ready = [root]
    while ready:
        node = ready.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[leaf] = found[node]
        given = _given(node, found.pop(node))
        for producer in _producers(node):
            known = found.get(producer, given)
            found[producer] = known if known == given else "both"
            num_consumers[producer] -= 1
            if num_consumers[producer] == 0:
                ready.append(producer)
    return leaves


def find_summed(
    loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], *, cut: Iterable[str], summed: Iterable[str]
) -> frozenset[str]:
    """The whole parameters whose gradients are to be summed over the ranks: `summed`, put right by the graph of `loss`.

    parameters: by name, those of this rank. cut: names of those that are cut. Parameters that the graph does not reach,
    and all where it is hidden (a reentrant activation checkpoint, a compiled module), stay as `summed` has them. Raises
    ModelError for parameters that no sum makes right.
    """
    leaves = gradients_of_leaves(loss)
    if leaves is None:
        return frozenset(summed)
    whole = {name: leaves.get(each) for name, each in parameters.items() if name not in frozenset(cut)}
    both = [name for name, gradient in whole.items() if gradient == "both"]
    if both:
        shown = ", ".join(map(repr, both[:5])) + (f" and {len(both) - 5} more" if len(both) > 5 else "")
        raise ModelError(
            f"tensor.rules: values made with {shown} are read by all ranks alike and also by each rank for its own "
            "part (heads, columns), without a rule between; give the rule 'mla_kv_a_proj(size=...)' to the module "
            "whose last outputs every rank reads, or 'replicate' to the modules that cut what they meet"
        )
    known = {name: gradient == "own" for name, gradient in whole.items() if gradient is not None}
    return frozenset(name for name in parameters if known.get(name, name in frozenset(summed)))


def _given(node: Any, gradient: Gradient) -> Gradient:
    """The gradient that a node gives to what it was made of."""
    kind = movement_of(node)
    if kind in _BEGINS_OWN:
        return "complete"
    return "own" if kind in _ENDS_OWN or is_cut_loss(node) else gradient


def _producers(node: Any) -> list[Any]:
    return [producer for producer, _ in node.next_functions if producer is not None]
