"""Which gradients of whole parameters each rank has only in part, read from the autograd graph; and their sum.

Backward begins at the loss, which all ranks have alike: gradients there are `complete`. Two kinds of collectives change
that. Behind one that ends what is each rank's own (parts gathered, terms summed) gradients are the rank's `own`. Behind
one that begins it (a value copied to the ranks, a part taken) they are complete again, because its backward adds:

    loss --> all_reduce --> o --> attention --> norm of heads --> q, k, v --> copy_to_ranks --> norm --> embedding
        complete         |----------------- own -----------------------|                complete

    norm of heads, one weight for 4 heads, 2 ranks:    rank 0 has dL/dw from heads 0 1,  rank 1 from heads 2 3:  summed
    norm before q, k, v:                               both ranks have the whole dL/dw:                          left

So a parameter with an own gradient is summed over the ranks, whatever the rules say of it. A parameter reached in both
ways has a gradient that no sum makes right, and is refused. So is a collective whose output is read in another way than
it gives it: all ranks read alike what a module gives whole, each rank reads for itself what a module leaves cut.

Hooks of the user on parameters that are cut get the whole gradient, as in one process:

    rank 0   gradient of rows 0:6  --+                                       +-->  rows 0:6
                                     +-->  hook(gradient of all 12 rows)  -->+
    rank 1   gradient of rows 6:12 --+     on both ranks                     +-->  rows 6:12

Of a whole parameter whose gradient is a sum over ranks, each has a term: the hook gets the sum, and rank 0 keeps what
it gives. `p.grad` of a cut parameter has the shape of the part: hooks behind the accumulation have a `PartWatch`.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.forward.gradient_kinds import Gradient, Sources, resolve
from shardwise.engine.forward.layers import is_ours
from shardwise.engine.forward.part_watch import PartWatch
from shardwise.engine.forward.trained_parameters import ALL, MOST_TRAINED, TrainedSet
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.tensor.tp_collectives import TpCollectives, collective_of, module_of
from shardwise.engine.tensor.vocabulary import is_cut_loss
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, backward_hooks, gradient_hooks
from shardwise.errors import ModelError, few_of
from shardwise.plan.tensor_plan import TensorPlan

# Behind these in backward a gradient is of this rank's part or term. `gather_to_ranks` and `reduce_scatter` stand
# between two own values: the gradient that they get is own too.
_ENDS_OWN = frozenset({"all_reduce", "all_gather", "gather_to_ranks", "reduce_scatter"})
_BEGINS_OWN = frozenset({"copy_to_ranks", "copy_last_to_ranks", "scatter"})

# copy_to_ranks is not here: a loss of the program's own may bring the parts of a cut head together without a collective
# that the graph shows, and the gradient that arrives is complete then.
_TAKES: Mapping[str, Gradient] = {
    "all_reduce": "complete",
    "all_gather": "complete",
    "reduce_scatter": "own",
    "scatter": "own",
    "own_part": "own",
}
"""The gradient that a collective has to get; the others take both kinds."""

_HIDING = "CheckpointFunction"
"""A node of a reentrant activation checkpoint, whose graph is made in backward only."""

_BLURRING = "CompiledFunction"
"""A node that stands for many operations; collectives are never among them."""

_COMPLETE: Sources = frozenset({"complete"})
_OWN: Sources = frozenset({"own"})
_HIDDEN: Sources = frozenset({"hidden"})
_BLURRED: Sources = frozenset({"blurred"})


class Traced:
    """What the gradients of the leaves of a graph are made of."""

    def __init__(self, roots: Iterable[tuple[Any, str | int]]) -> None:
        """roots: nodes where backward begins; with each "complete", or the number of the crossing that it waits for."""
        self.leaves: dict[torch.Tensor, Sources] = {}
        self.taken: dict[Any, Sources] = {}
        """What comes to movements that take one kind only."""
        self.is_hidden = False
        """Whether a part of the graph cannot be seen: leaves may be missing."""
        self._ends: list[Any] = []
        found: dict[Any, Sources] = {node: frozenset({source}) for node, source in roots}
        # Nodes are taken in the order of backward: a node's sources are known once all nodes that send it a gradient
        # are done (Kahn's algorithm). A plain search from the loss would visit a residual's sum before its second
        # branch.
        num_consumers = self._count_consumers(found)
        ready = [node for node in found if not num_consumers[node]]
        while ready:
            node = ready.pop()
            sources = found.pop(node)
            # Only AccumulateGrad nodes have a `variable`: the parameter itself, or the anchor of a crossing.
            if (leaf := getattr(node, "variable", None)) is not None:
                self.leaves[leaf] = sources
            if collective_of(node) in _TAKES:
                self.taken[node] = sources
            given = _given(node, sources)
            for producer in _producers(node):
                found[producer] = found.get(producer, frozenset()) | given
                num_consumers[producer] -= 1
                if num_consumers[producer] == 0:
                    ready.append(producer)

    def readers(self, target: Any) -> list[str]:
        """The modules that bring together what each rank makes of a parameter, or of a collective's output."""
        found = set()
        for node in self._ends:
            pending, seen = _producers(node), set()
            while pending:
                producer = pending.pop()
                if producer is target or getattr(producer, "variable", None) is target:
                    found.add(module_of(node))
                # Not past another collective: behind it the value is another one, and naming that reader would mislead.
                elif producer not in seen and collective_of(producer) not in _BEGINS_OWN | _ENDS_OWN:
                    pending += _producers(producer)
                seen.add(producer)
        return sorted(found)

    def _count_consumers(self, roots: Iterable[Any]) -> dict[Any, int]:
        counts: dict[Any, int] = dict.fromkeys(roots, 0)
        pending = list(counts)
        while pending:
            node = pending.pop()
            if collective_of(node) in _ENDS_OWN:
                self._ends.append(node)
            self.is_hidden |= type(node).__name__.startswith(_HIDING)
            for producer in _producers(node):
                if producer not in counts:
                    counts[producer] = 0
                    pending.append(producer)
                counts[producer] += 1
        return counts


class SummedGradients:
    """The whole parameters of a rank whose gradients are summed over the ranks along `tp`.

    It begins with what the rules say, and the graphs of losses correct it. A parameter that no graph has reached yet
    stays as the rules have it. Where a part of a graph is hidden, the rules decide, and have to name the parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        cut: Iterable[str],
        summed: Iterable[str],
        named: Iterable[str] = (),
    ) -> None:
        """parameters: by name, those of this rank. cut: names of those that are cut. summed: what the rules say. named:
        those that have a rule."""
        cut = frozenset(cut)
        self.parameters = parameters
        self._by_rules = frozenset(summed)
        self._named = self._by_rules | frozenset(named)
        self._whole = {name: each for name, each in parameters.items() if name not in cut and each.requires_grad}
        self._trained = ALL
        self._memories: dict[TrainedSet, tuple[frozenset[str], dict[str, Gradient], dict[str, nn.Parameter], bool]] = {}
        self._begin()

    def _begin(self) -> None:
        self.names = self._by_rules
        self.seen: dict[str, Gradient] = {}
        """What graphs have shown so far."""
        self._has_learned = False
        self._unseen = {name: each for name, each in self._whole.items() if name in self._trained}

    def turn_to(self, trained: TrainedSet) -> None:
        """The next steps train these parameters, perhaps by another loss: what graphs show is known of each."""
        if trained is self._trained:
            return
        if len(self._memories) > MOST_TRAINED:
            self._memories.clear()
        self._memories[self._trained] = self.names, self.seen, self._unseen, self._has_learned
        self._trained = trained
        if (known := self._memories.get(trained)) is None:
            self._begin()
        else:
            self.names, self.seen, self._unseen, self._has_learned = known

    @property
    def is_settled(self) -> bool:
        """Whether graphs have reached all parameters."""
        return not self._unseen

    def may_change(self, names: Iterable[str]) -> bool:
        """Whether the gradients of some of these are summed over ranks, as far as is known now."""
        return not self.is_settled or not self.names.isdisjoint(names)

    def look_at(self, loss: torch.Tensor) -> None:
        """Learn from the graph of a loss. Raises ModelError for gradients that no sum makes right."""
        # Once all parameters are known, the graphs of later steps are not walked: the walk is Python over every node.
        # One graph is always walked, for the collectives in it (`_check_collectives`).
        if (self._unseen or not self._has_learned) and loss.grad_fn is not None:
            self.learn(Traced([(loss.grad_fn, "complete")]), {})

    def trace(self, roots: Iterable[tuple[Any, str | int]]) -> Traced:
        """What the gradients of the leaves of a graph are made of. roots: see `Traced`."""
        return Traced(roots)

    def learn(self, traced: Traced, came: Mapping[int, Gradient | None]) -> None:
        """Learn from a graph; `came`: what came back for its crossings. Raises as `look_at`."""
        self._has_learned = True
        _check_collectives(traced, came)
        found: dict[str, Gradient] = {}
        for name, each in self._unseen.items():
            gradient = resolve(traced.leaves.get(each, frozenset()), came)
            # Unreached in a graph with a hidden part: it may be a parameter inside of the hidden part.
            if gradient is None and traced.is_hidden:
                gradient = "hidden"
            if gradient is not None:
                found[name] = gradient
        if both := [name for name, gradient in found.items() if gradient == "both"]:
            readers = traced.readers(self._unseen[both[0]])
            raise ModelError(
                f"tensor.rules: values made with {_shown(both)} are read by all ranks alike, and by each rank for its "
                f"own part (heads, columns){_before(readers)}, without a rule; {_REMEDY}"
            )
        if hidden := [name for name, gradient in found.items() if gradient == "hidden" and name not in self._named]:
            raise ModelError(
                f"tensor.rules: {_shown(hidden)} are whole along tp, and a reentrant activation checkpoint or a "
                "compiled module hides their gradients on each rank. Use checkpoints with use_reentrant=False. Or "
                "give each a rule: 'replicate' for equal use on all ranks, 'replicated_with_grad_allreduce' if each "
                "rank computes its own part (heads, columns)"
            )
        for name, gradient in found.items():
            if gradient != "hidden":
                self.settle(name, gradient)

    def settle(self, name: str, gradient: Gradient) -> None:
        """Note what the gradient of a parameter is on each rank, as a graph here or on another stage shows."""
        self.names = self.names | {name} if gradient == "own" else self.names - {name}
        self.seen[name] = gradient
        self._unseen.pop(name, None)


_REMEDY = (
    "leave the values that meet them whole (the rule 'replicate' for the modules that cut them). If every rank reads "
    "the last outputs of a linear map, give that map 'mla_kv_a_proj(size=...)'"
)


def _check_collectives(traced: Traced, came: Mapping[int, Gradient | None]) -> None:
    """Raise ModelError where what a module gives is read in another way than it gives it."""
    for node, sources in traced.taken.items():
        kind = collective_of(node)
        assert kind is not None
        gradient = resolve(sources, came)
        if gradient in (None, "hidden", _TAKES[kind]):
            continue
        name = f"what {module_of(node)!r}" if module_of(node) else "a value that the model itself"
        if _TAKES[kind] == "complete":
            also = "also " if gradient == "both" else ""
            raise ModelError(
                f"tensor.rules: {name} gives is whole along tp, and {also}each rank reads it for its own part (heads, "
                f"columns, positions){_before(traced.readers(node))}, without a rule; {_REMEDY}"
            )
        verb = "leaves" if kind == "reduce_scatter" else "takes"
        raise ModelError(
            f"tensor.rules: {name} {verb} is this rank's part along tp, and is read as if it were whole. Give its "
            "reader a rule that gathers it (column(gather=1), or 'sequence' instead of 'split'), or leave it whole"
        )


def _before(readers: list[str]) -> str:
    return f", before {_shown(readers)} brings them together" if readers else ""


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _given(node: Any, sources: Sources) -> Sources:
    """The sources that a node hands to its inputs."""
    kind = collective_of(node)
    if kind in _BEGINS_OWN:
        return _COMPLETE
    if kind in _ENDS_OWN or is_cut_loss(node):
        return _OWN
    name = type(node).__name__
    if name.startswith(_HIDING):
        return _HIDDEN
    return sources | _BLURRED if name.startswith(_BLURRING) else sources


def _producers(node: Any) -> list[Any]:
    return [producer for producer, _ in node.next_functions if producer is not None]


@torch.no_grad()
def sum_over_ranks(
    gradients: Sequence[torch.Tensor], channel: Channel, what: str = "parameters that are whole along tp"
) -> None:
    """Replace each gradient by its sum over the ranks of `channel`, which all give the same ones in the same order."""
    if channel.size == 1 or not gradients:
        return
    collectives = TpCollectives(channel, f"gradients of {what}")
    # One message per dtype, not one per gradient: norms of heads are many and small, and latency would dominate.
    # Neighbours only, so that the order of messages is that of the gradients on every rank.
    for _, group in groupby(gradients, key=lambda gradient: gradient.dtype):
        alike = list(group)
        lengths = [gradient.numel() for gradient in alike]
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        for gradient, total in zip(alike, collectives.sum_of(flat).split(lengths), strict=True):
            gradient.copy_(total.view(gradient.shape))


_Hook: TypeAlias = Callable[[torch.Tensor], Any]


class WholeGradients:
    """Stands around the hooks that users put on the parameters of one rank."""

    def __init__(self, summed: SummedGradients, plan: TensorPlan, channel: Channel) -> None:
        """summed: knows the parameters, and whose gradients are terms. Takes off what an earlier plan has put there."""
        self.summed = summed
        self.channel = channel
        self.portions = [plan.portions(rank) for rank in range(channel.size)]
        for _, hooks in self._hooks():
            for key, hook in list(hooks.items()):
                hooks[key] = getattr(hook, "hook", hook) if isinstance(hook, _AroundHook) else hook

    def take_in(self, *, compares: bool) -> str:
        """Stand around hooks that came since. Returns, to be compared, the parameters that have some: in words."""
        if self.channel.size == 1:
            return ""
        found = set()
        for name, hooks in self._hooks():
            for key, hook in list(hooks.items()):
                # Those of this package know parts.
                if not is_ours(hook):
                    hooks[key] = _AroundHook(hook, name, self)
                if isinstance(hooks[key], _AroundHook):
                    found.add(name)
        return f", with hooks on {few_of(sorted(found))}" if found and compares else ""

    def _hooks(self) -> list[tuple[str, MutableMapping[int, Any]]]:
        with DisableTorchFunctionSubclass():  # between steps a part follows what is asked of it
            return [
                (name, hooks)
                for name, each in self.summed.parameters.items()
                for hooks in (backward_hooks(each), gradient_hooks(each))
                if hooks
            ]


class _AroundHook:
    def __init__(self, hook: _Hook, name: str, gradients: WholeGradients) -> None:
        self.hook = hook
        self._name = name
        self._channel = gradients.channel
        self._summed = gradients.summed
        self._portions = [each.get(name) for each in gradients.portions]

    def __call__(self, given: torch.Tensor) -> Any:
        is_accumulated = given.is_leaf and given.requires_grad  # the parameter itself
        gradient = given.grad if is_accumulated else given
        if gradient is None:
            return self.hook(given)
        if self._portions[0] is None and self._name not in self._summed.names:
            return self.hook(given)
        if self._portions[0] is not None and is_accumulated:
            watch = PartWatch([(given, True, 0), (gradient, True, 0)])
            watch.turn(True)
            try:
                return self.hook(given)
            finally:
                watch.turn(False)
        with torch.no_grad():
            whole = self._whole(gradient)
        if is_accumulated:
            given.grad = whole
            self.hook(given)
            found = given.grad
        else:
            found = self.hook(whole)
        own = self._own(whole if found is None else found)
        if not is_accumulated:
            return own
        given.grad = own
        return None

    def _whole(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._portions[0] is None:
            whole = gradient.clone()
            sum_over_ranks([whole], self._channel)
            return whole
        portions = [each for each in self._portions if each is not None]
        collectives = TpCollectives(self._channel, f"gradient of {self._name!r} for a hook")
        return collectives.all_gather(gradient, portions[0].dim, [each.ranges for each in portions])

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        portion = self._portions[self._channel.rank]
        if portion is not None:
            return portion_of(whole, portion).contiguous()
        return whole if self._channel.rank == 0 else torch.zeros_like(whole)
