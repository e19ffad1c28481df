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


class SummedGradients:
    """The whole parameters of a rank whose gradients are to be summed over the ranks along `tp`.

    It begins with what the rules say, and is put right by the graphs of losses. What no graph has reached yet, and all
    where a part is hidden (a reentrant activation checkpoint, a compiled module), stays as the rules have it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, cut: Iterable[str], summed: Iterable[str]) -> None:
        """parameters: by name, those of this rank. cut: names of those that are cut. summed: what the rules say."""
        cut = frozenset(cut)
        self.names = frozenset(summed)
        self._unseen = {name: each for name, each in parameters.items() if name not in cut and each.requires_grad}

    def look_at(self, loss: torch.Tensor) -> None:
        """Learn from the graph of a loss. Raises ModelError for parameters that no sum makes right."""
        if not self._unseen or (leaves := gradients_of_leaves(loss)) is None:
            return
        found = {name: gradient for name, each in self._unseen.items() if (gradient := leaves.get(each)) is not None}
        if both := [name for name, gradient in found.items() if gradient == "both"]:
            shown = ", ".join(map(repr, both[:5])) + (f" and {len(both) - 5} more" if len(both) > 5 else "")
            raise ModelError(
                f"tensor.rules: values made with {shown} are read by all ranks alike and also by each rank for its own "
                "part (heads, columns), without a rule between; give the rule 'mla_kv_a_proj(size=...)' to the module "
                "whose last outputs every rank reads, or 'replicate' to the modules that cut what they meet"
            )
        own = {name for name, gradient in found.items() if gradient == "own"}
        self.names = self.names - found.keys() | own
        for name in found:
            del self._unseen[name]


def _given(node: Any, gradient: Gradient) -> Gradient:
    """The gradient that a node gives to what it was made of."""
    kind = movement_of(node)
    if kind in _BEGINS_OWN:
        return "complete"
    return "own" if kind in _ENDS_OWN or is_cut_loss(node) else gradient


def _producers(node: Any) -> list[Any]:
    return [producer for producer, _ in node.next_functions if producer is not None]
