"""Tensors: one tensor between two layouts, with autograd. The cross-mesh reshard of pipelines.

forward    every element of a target is read from one holder
backward   its gradient goes back to that holder. Replicas that were not read get zeros, so that the gradients of all
           holders together are the gradient of the tensor; where several targets got an element, their gradients are
           added up in rank order
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import Channel
from shardwise.comm.given_channel import given_or_default
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import MismatchError, PlanError
from shardwise.moving.live_states import findings_of, stored_shape
from shardwise.moving.mover import carry_out_plan
from shardwise.moving.piece_exchange import consent
from shardwise.routes.reshard import DEFAULT_MAX_BYTES
from shardwise.routes.reshard_plan import ReshardPlan
from shardwise.space import Piece

_TRACKS, _WATCHES, _IGNORES = "gradient", "no gradient", "gradients off"
"""What autograd does on a rank: its tensors need a gradient, or they do not, or nothing is recorded there."""


@overload
def reshard_tensor(
    tensor: torch.Tensor, source: Piece, target: Piece, channel: Channel, *, max_bytes: int = ...
) -> torch.Tensor: ...


@overload
def reshard_tensor(
    tensor: Sequence[torch.Tensor],
    source: Sequence[Piece],
    target: Sequence[Piece],
    channel: Channel,
    *,
    max_bytes: int = ...,
) -> tuple[torch.Tensor, ...]: ...


def reshard_tensor(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    source: Piece | Sequence[Piece],
    target: Piece | Sequence[Piece],
    channel: Channel,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return this rank's `target` piece of a tensor; it holds the piece `source`. Gradients go back the same way.

    tensor: this rank's share, of the piece's shape or flat. source, target: its piece, or a sequence of pieces with a
        sequence of tensors. A rank that holds or wants nothing gives a piece without elements: `piece.within(0, 0)`.
    channel: the ranks that take part. All call this, and where a tensor of one of them needs a gradient, all go back
        through their results, also those without elements. It is not closed before the last has gone back.
    max_bytes: how much a rank has in memory of messages.

    Results are new tensors on the channel's device. Dtypes are kept, and a second derivative is not there.
    Raises PlanError, with every problem in it, or MismatchError, the same on all ranks, before anything is moved.
    """
    # One piece in, one tensor out; sequences give tuples.
    alone = isinstance(target, Piece)
    tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
    sources = [source] if isinstance(source, Piece) else list(source)
    targets = [target] if isinstance(target, Piece) else list(target)
    with given_or_default(channel, "a reshard of a tensor") as used:
        findings = _findings(tensors, sources, targets)
        tracks = any(each.requires_grad for each in tensors)
        # Whether gradients flow is known on each rank alone, and a backward takes all: so the word goes along.
        word = _IGNORES if not torch.is_grad_enabled() else _TRACKS if tracks else _WATCHES
        plan, words = consent(
            used,
            [] if findings else sources,
            [] if findings else targets,
            max_bytes=max_bytes,
            cast=False,
            refusal=PlanError(*findings) if findings else None,
            word=word if targets else f"{word}, no target",
        )
        passage = _Passage(plan=plan, channel=used, sources=sources, targets=targets)
        if not _needs_gradients(words):
            results = passage.forward([each.detach() for each in tensors])
        else:
            # On ranks whose own tensors need no gradient there has to be a way back all the same.
            anchor = torch.empty(0, device=used.device, requires_grad=True)
            results = _Reshard.apply(passage, anchor, *tensors)  # type: ignore[no-untyped-call]
        return results[0] if alone else tuple(results)


def _needs_gradients(words: Sequence[str]) -> bool:
    """Whether a rank has a tensor that needs a gradient. Raises the same error on all ranks where that cannot be."""
    kinds = [word.split(", no target")[0] for word in words]
    if _TRACKS not in kinds:
        return False
    first = kinds.index(_TRACKS)
    if _IGNORES in kinds:
        raise MismatchError(
            f"the tensor of rank {first} needs a gradient, but rank {kinds.index(_IGNORES)} records none (no_grad); "
            "reshard in the same mode on all ranks"
        )
    if lacking := [rank for rank, (word, kind) in enumerate(zip(words, kinds, strict=True)) if word != kind]:
        raise PlanError(
            f"the tensor of rank {first} needs a gradient, but rank {lacking[0]} wants no piece, and backward would "
            "not reach it. Let it want a piece without elements, piece.within(0, 0), and go back through that"
        )
    return True


def _findings(tensors: Sequence[torch.Tensor], sources: Sequence[Piece], targets: Sequence[Piece]) -> list[str]:
    findings = []
    if len(tensors) != len(sources):
        findings.append(f"{len(tensors)} tensors were given for {len(sources)} pieces; give one for each")
    for how, pieces in (("held", sources), ("wanted", targets)):
        findings += [f"{piece} is {how} twice" for piece in dict.fromkeys(pieces) if pieces.count(piece) > 1]
    names = sorted({piece.name for piece in (*sources, *targets)})
    if len(names) > 1:
        findings.append(f"pieces of {len(names)} tensors were given, {names[0]} and {names[1]}; reshard each alone")
    found = findings_of(dict(zip(sources, tensors, strict=False)), dict.fromkeys(targets))
    return findings + found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    """There and back."""

    plan: ReshardPlan
    channel: Channel
    sources: Sequence[Piece]
    targets: Sequence[Piece]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The targets."""
        held = dict(zip(self.sources, tensors, strict=True))
        wanted = {piece: self._empty(piece) for piece in self.targets}
        carry_out_plan(
            self.plan,
            self.channel,
            sources=self.sources,
            targets=self.targets,
            take=held.__getitem__,
            room=wanted.__getitem__,
            purpose=self._purpose,
        )
        return tuple(wanted.values())

    def backward(self, gradients: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
        """The gradients of the sources, in the shapes of their tensors."""
        held = dict(zip(self.targets, gradients, strict=True))
        wanted = {
            # Zeros: replicas that were not read get no gradient, and elements that several targets got are sums.
            piece: self._empty(piece).zero_().view(shape)
            for piece, shape in zip(self.sources, shapes, strict=True)
        }
        # Backward runs outside the forward's context: an error there has to reach the peers too.
        with given_or_default(self.channel, f"the gradient of {self._purpose}"):
            carry_out_plan(
                self.plan.reversed(),
                self.channel,
                sources=self.targets,
                targets=self.sources,
                take=held.__getitem__,
                room=wanted.__getitem__,
                # In the order of the shares, which is that of the ranks: sums of floats depend on it, and are the same
                # in each run.
                adds=True,
                purpose=f"gradient of {self._purpose}",
            )
        return tuple(wanted.values())

    @property
    def _purpose(self) -> str:
        return f"reshard of {next((name for name, _ in self.plan.tensors), 'nothing')}"

    def _empty(self, piece: Piece) -> torch.Tensor:
        return torch.empty(stored_shape(piece), dtype=torch_dtype(piece.dtype), device=self.channel.device)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: _Passage, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passage = passage
        ctx.places = [(tensor.shape, tensor.device) for tensor in tensors]
        return passage.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = ctx.passage.backward(gradients, [shape for shape, _ in ctx.places])
        return None, None, *(each.to(device) for each, (_, device) in zip(back, ctx.places, strict=True))
