"""Trainable parameters that are not the model's: of the loss function, or of a module that the model does not register.

An optimizer of the user's own updates them between steps, so after a step their gradients are those of one process:

    rank 0   loss --backward--> head.weight.grad  a0   --+
                                                         +-- sum over data ranks --/ as the model's--> both: mean of all
    rank 1   loss --backward--> head.weight.grad  a1   --+

They are found in the graphs of losses: in each step between the loss and the model's output, and behind the output in
steps 1, 2, 4, 8 .., because that is Python over every node.
"""

import json
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import a_list, digest_of_values, understood
from shardwise.comm.collective_calls import CollectiveCalls
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.batches import Microbatch, MicrobatchLoss
from shardwise.engine.channels import EngineChannels
from shardwise.engine.pipeline.stage_values import StageTensor
from shardwise.engine.tensor.summed_gradients import Traced, resolve, sum_over_ranks
from shardwise.engine.zero.grad_reduce import is_of_engine
from shardwise.errors import MismatchError, ModelError

WAY_OUT = (
    "Put model and loss into one module, whose forward takes the whole microbatch and gives the loss. Parallelize that "
    "with loss=None, and optimizers over its parameters"
)
_PURPOSE = "trainable parameters of the loss"


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
        self._before: list[torch.Tensor | None] = []
        """The gradients that those of `_known` had before the step."""
        self._found: dict[int, _Found] = {}
        """What the step has shown besides, by id."""

    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        self._found = {}
        self._before = [each.grad for each in self._known]
        for each in self._known:
            each.grad = None

    def watching(
        self, loss_of: Callable[..., MicrobatchLoss], *, sees_output: bool
    ) -> Callable[[Microbatch], MicrobatchLoss]:
        """`loss_of`, whose losses are looked at. sees_output: whether it shows what the model gives."""

        def watched(microbatch: Microbatch) -> MicrobatchLoss:
            outputs: list[torch.Tensor] = []

            def see(output: Any, _: Microbatch) -> None:
                outputs.extend(each for _, each in named_leaves(output) if isinstance(each, torch.Tensor))

            given = (microbatch, see) if sees_output else (microbatch,)
            found = self._calls.noticed(loss_of, *given) if self._steps == 1 else loss_of(*given)
            loss = found.loss.value.local if isinstance(found.loss, StageTensor) else found.loss
            with torch._C.DisableTorchFunction():
                if loss is not None and loss.grad_fn is not None:
                    self._look_at(loss.grad_fn, [each.grad_fn for each in outputs if each.grad_fn is not None])
            return found

        return watched

    def _look_at(self, root: Any, outputs: Sequence[Any]) -> None:
        """outputs: where the graph of the model begins; empty where that is not known."""
        is_due = not self._steps & (self._steps - 1)
        seen: set[Any] = set()
        # In a forward leaves of other kinds come and go, and are no business of an optimizer.
        leaves = [*_leaves(root, seen, stops=outputs)] if outputs or is_due else []
        if is_due:
            leaves += [each for at in outputs for each in _leaves(at, seen) if isinstance(each, nn.Parameter)]
        known = {*self._own, *self._found, *map(id, self._known)}
        # Those of another engine are whole for its step, which takes their gradients.
        fresh = [each for each in leaves if id(each) not in known and not is_of_engine(each)]
        if fresh:
            self._own = {id(each) for each in self._model.parameters()}
        trace = None
        for leaf in fresh:
            if id(leaf) in self._own:
                continue
            if self._channels.tensor.size > 1:
                trace = trace or Traced([(root, "complete")])
            is_whole = trace is None or resolve(trace.leaves.get(leaf, frozenset()), {}) == "complete"
            self._found[id(leaf)] = _Found(leaf, is_whole)

    def flags(self) -> list[bool]:
        """For the message that closes a step: whether there are more of them; which have a gradient."""
        self._found = {key: each for key, each in self._found.items() if each.leaf() is not None}
        return [bool(self._found), *(each.grad is not None for each in self._known)]

    def reduce(self, anywhere: Sequence[bool], divisor: int, scale: torch.Tensor | None) -> None:
        """Make the gradients those of one process. anywhere: the flags of all ranks. The others: see `StepClosing`.

        Raises, the same on all ranks, ModelError and MismatchError for those whose gradients cannot be made whole.
        """
        has_more, *used = anywhere
        if has_more:
            used += self._agree()
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
        """Take in what was found; for each whether it has a gradient."""
        found = [(each, leaf) for each in self._found.values() if (leaf := each.leaf()) is not None]
        mine = [
            [isinstance(leaf, nn.Parameter), each.is_whole, list(leaf.shape), str(leaf.dtype), digest_of_values(leaf)]
            for each, leaf in found
        ]
        world = self._channels.world
        answers = understood(world.exchange(json.dumps(mine).encode(), purpose=_PURPOSE), a_list, purpose=_PURPOSE)
        parameters = [[entry for entry in answer if entry[0]] for answer in answers]
        first = next(filter(None, parameters), [])
        what = f"{len(first)} trainable parameters of the loss (or of modules that the model does not register)"
        if first and (self._channels.pipeline.size > 1 or not all(entry[1] for each in parameters for entry in each)):
            why = "only the last stage computes the loss" if self._channels.pipeline.size > 1 else "ranks have parts"
            raise ModelError(
                f"{what} are not the model's, the first of shape {first[0][2]}, and no rank has their whole gradients "
                f"under pp or tp ({why}). {WAY_OUT}"
            )
        for rank, entries in enumerate(parameters):
            if entries != first:
                raise MismatchError(
                    f"{what} are not the model's, and rank {rank} has others, or other values. Build the loss from the "
                    f"same seed on every rank, before the first step. Or: {WAY_OUT[0].lower()}{WAY_OUT[1:]}"
                )
        num_known = len(self._known)
        for (each, leaf), entry in zip(found, mine, strict=True):
            # Any other tensor may be a rank's own, an input for whose gradient a loss asks, say: its values show that.
            if entry[0] or len({answer.count(entry) for answer in answers}) == 1:
                self._known.append(leaf)
                self._before.append(each.before)
            elif each.before is not None:
                leaf.grad = each.before if leaf.grad is None else each.before + leaf.grad
        return [True] * (len(self._known) - num_known)


class _Found:
    """A leaf of a graph that may be one."""

    def __init__(self, leaf: torch.Tensor, is_whole: bool) -> None:
        """is_whole: whether its gradient is, as far as ranks along tp go."""
        # Not held: what ends with the forward is no parameter.
        self.leaf = weakref.ref(leaf)
        self.is_whole = is_whole
        self.before = leaf.grad
        leaf.grad = None


def _leaves(root: Any, seen: set[Any], *, stops: Collection[Any] = ()) -> Iterator[torch.Tensor]:
    """The leaves of a graph up to `stops`, without nodes that were `seen`."""
    pending = [] if root in stops else [root]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if not (producers := node.next_functions) and (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        pending += [each for each, _ in producers if each is not None and each not in stops]
