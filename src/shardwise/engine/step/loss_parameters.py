"""Trainable parameters that are not the model's: of the loss function, or of a module that the model does not register.

An optimizer of the user's own updates them between steps, so after a step their gradients are those of one process:

    rank 0   loss --backward--> head.weight.grad  a0   --+
                                                         +-- sum over data ranks --/ as the model's--> both: mean of all
    rank 1   loss --backward--> head.weight.grad  a1   --+

They are found in the graphs of losses: in steps 1, 2, 4, 8 .. everywhere, else between the loss and the model's output.
"""

import json
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.comm.agreement import json_as, understood
from shardwise.comm.collective_calls import CollectiveCalls
from shardwise.comm.digests import digest_of_values
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.forward.batches import Microbatch, MicrobatchLoss
from shardwise.engine.forward.gradient_kinds import resolve
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.step.channels import EngineChannels
from shardwise.engine.tensor.summed_gradients import Traced, sum_over_ranks
from shardwise.engine.torch_private import DisableTorchFunction, base_of
from shardwise.engine.zero.grad_hooks import is_of_engine
from shardwise.engine.zero.masters import GradientElsewhere
from shardwise.errors import MismatchError

WAY_OUT = (
    "Put model and loss into one module, whose forward takes the whole microbatch and gives the loss. Parallelize that "
    "with loss=None, and optimizers over its parameters"
)
_PURPOSE = "trainable parameters of the loss"
_IN_PARTS = (
    "it is of a trainable parameter of the loss (or of a module that the model does not register), and no rank has all "
    f"of it under pp or tp. {WAY_OUT}. Freeze what is not to be trained: requires_grad_(False)"
)
_MOST_NODES = 100
"""Of a graph that are looked at in most steps: each takes Python a microsecond."""


class LossParameters:
    """Those of one engine."""

    def __init__(self, model: nn.Module, channels: EngineChannels) -> None:
        self._model = model
        self._channels = channels
        self._calls = CollectiveCalls(channels.world, channels.everyone)
        self._steps = 0
        self._own: set[int] = set()
        """The parameters of the model, by id."""
        self._known: list[torch.Tensor] = []
        """In the same order on all ranks."""
        self._parts: list[torch.Tensor] = []
        """Those that have parts of their gradients on this rank."""
        self._before: list[torch.Tensor | None] = []
        """The gradients that those of `_known` had before the step."""
        self._found: dict[int, _Found] = {}
        """What the step has shown besides, by id."""

    def watching(
        self, loss_of: Callable[..., MicrobatchLoss], *, sees_output: bool
    ) -> Callable[[Microbatch], MicrobatchLoss]:
        """A step begins: `loss_of`, whose losses are looked at. sees_output: whether it shows what the model gives."""
        self._steps += 1
        self._found = {}
        if self._known or self._parts:
            self._before = [each.grad for each in self._known]
            for each in (*self._known, *self._parts):
                each.grad = None

        def watched(microbatch: Microbatch) -> MicrobatchLoss:
            outputs: dict[str, Any] = {}
            given = (microbatch, lambda output, _: outputs.update(output=output)) if sees_output else (microbatch,)
            found = self._calls.noticed(loss_of, *given) if self._steps == 1 else loss_of(*given)
            if isinstance(found.loss, StageTensor):
                self._take_parts(found.loss.flow.leaves)
            loss = found.loss.value.local if type(found.loss) is StageTensor else found.loss
            if loss is not None:
                with DisableTorchFunction():
                    self._look_at(loss.grad_fn, outputs, microbatch)
            return found

        return watched

    def _take_parts(self, leaves: Collection[torch.Tensor]) -> None:
        """leaves: what the code between stages computed with, on every rank. The last stage alone has the loss."""
        known = {*map(id, self._parts)}
        for leaf in leaves:
            if id(leaf) not in known and isinstance(leaf, nn.Parameter) and not is_of_engine(leaf):
                self._found.setdefault(id(leaf), _Found(weakref.ref(leaf), leaf.grad, is_whole=False))
                leaf.grad = None

    def _look_at(self, root: Any, outputs: Any, microbatch: Microbatch) -> None:
        """outputs: what the model gave; empty where that is not known."""
        is_due = not self._steps & (self._steps - 1)
        # Where the graph of the model begins.
        stops = []
        for _, each in () if is_due else named_leaves(outputs):
            here = each.value.local if type(each) is StageTensor else each  # none of a value of another rank
            if isinstance(here, torch.Tensor):
                stops.append(here.grad_fn)
        if root is None or root in stops:
            return
        known = self._own.union(self._found, map(id, self._known), map(id, self._parts))
        leaves = _leaves(root, stops, math.inf if is_due else _MOST_NODES)
        # Other leaves than parameters come and go in a forward, and are rarely trained.
        # Those of another engine are whole for its step, which takes their gradients.
        fresh = [
            each
            for each in leaves
            if id(each) not in known and (is_due or isinstance(each, nn.Parameter)) and not is_of_engine(each)
        ]
        if not fresh:
            return
        self._own = {id(each) for each in self._model.parameters()}
        given = [each for _, each in named_leaves(microbatch) if torch.is_tensor(each)]
        inputs = {id(each) for tensor in given for each in (tensor, base_of(tensor))}
        trace = None
        for leaf in fresh:
            if id(leaf) in self._own or id(leaf) in inputs:
                continue
            if self._channels.tensor.size > 1:
                trace = trace or Traced([(root, "complete")])
            is_whole = trace is None or resolve(trace.leaves.get(leaf, frozenset()), {}) == "complete"
            # Not held: what ends with the forward is no parameter.
            self._found[id(leaf)] = _Found(weakref.ref(leaf), leaf.grad, is_whole)
            leaf.grad = None

    def flags(self) -> list[bool]:
        """For the message that closes a step: whether there are more of them; which have a gradient."""
        has_more = bool(self._found) and any(each.leaf() is not None for each in self._found.values())
        return [has_more, *(each.grad is not None for each in self._known)]

    def reduce(self, anywhere: Sequence[bool], divisor: int, scale: torch.Tensor | None) -> None:
        """Make the gradients those of one process. anywhere: the flags of all ranks. The others: see `StepClosing`.

        Where no rank has them whole they refuse to be read. Raises MismatchError, on all ranks, for unlike parameters.
        """
        has_more, *used = anywhere
        if has_more:
            used += self._agree()
        for leaf in self._parts:
            leaf.grad = GradientElsewhere.of(leaf, _IN_PARTS)
        if not used:
            return
        gradients = {}
        for leaf, before, is_used in zip(self._known, self._before, used, strict=True):
            if is_used:
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                is_sent = self._channels.everyone.size > 1
                gradients[leaf] = gradient.to_dense() if gradient.is_sparse and is_sent else gradient
            leaf.grad = before
        sum_over_ranks([*gradients.values()], self._channels.everyone, _PURPOSE)
        for leaf, gradient in gradients.items():
            gradient.div_(divisor if scale is None else divisor * scale)
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def _agree(self) -> list[bool]:
        """Take in what was found; for each that is known now, whether it has a gradient."""
        found = [(each, leaf) for each in self._found.values() if (leaf := each.leaf()) is not None]
        mine = [
            (isinstance(leaf, nn.Parameter), list(leaf.shape), str(leaf.dtype), digest_of_values(leaf), each.is_whole)
            for each, leaf in found
        ]
        answers: list[Any] = [[]]
        if self._channels.pipeline.size == 1:  # else the last stage alone has the loss
            told = self._channels.world.exchange(json.dumps(mine).encode(), purpose=_PURPOSE)
            answers = understood(told, json_as(list[tuple[bool, list[int], str, str, bool]]), purpose=_PURPOSE)
        parameters = [[entry for entry in answer if entry[0]] for answer in answers]
        for rank, entries in enumerate(parameters):
            if [entry[:-1] for entry in entries] != [entry[:-1] for entry in parameters[0]]:
                raise MismatchError(
                    f"{len(max(parameters, key=len))} trainable parameters of the loss (or of modules that the model "
                    f"does not register) are not the model's, and rank {rank} has others than rank 0, or other values. "
                    "Build the loss from the same seed on every rank, before the first step. A hook in backward finds "
                    "the gradient of this rank's rows alone: step their optimizer after engine.step(batch). Or: "
                    f"{WAY_OUT[0].lower()}{WAY_OUT[1:]}"
                )
        are_whole = (all(entry[-1] for entry in of_ranks) for of_ranks in zip(*parameters, strict=True))
        num_known = len(self._known)
        for (each, leaf), entry in zip(found, mine, strict=True):
            # Any other tensor may be a rank's own, an input for whose gradient a loss asks, say: its values show that.
            if next(are_whole, False) if entry[0] else entry[-1] and all(entry in answer for answer in answers):
                self._known.append(leaf)
                self._before.append(each.before)
            elif entry[0]:
                self._parts.append(leaf)
            elif each.before is not None:
                leaf.grad = each.before if leaf.grad is None else each.before + leaf.grad
        return [True] * (len(self._known) - num_known)


class _Found(NamedTuple):
    """A leaf of a graph that may be one."""

    leaf: weakref.ref[torch.Tensor]
    before: torch.Tensor | None
    """The gradient that it had."""
    is_whole: bool
    """Whether its gradient is, as far as ranks along tp go."""


def _leaves(root: Any, stops: Collection[Any], most: float) -> list[torch.Tensor]:
    """The leaves among the first nodes of a graph, as far as `stops`."""
    nodes, seen = [root], {root, *stops}
    found = []
    for node in nodes:  # in breadth, and so the loss before the model
        if not (producers := node.next_functions) and (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        if len(nodes) < most:
            for each, _ in producers:
                if each is not None and each not in seen:
                    seen.add(each)
                    nodes.append(each)
    return found
