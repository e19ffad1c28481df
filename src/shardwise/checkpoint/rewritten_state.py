"""Rewritten state: what ranks hold of a state, under the names of a rewrite. Nothing moves, and nothing is copied."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from shardwise.checkpoint.held import Held
from shardwise.checkpoint.rewritten import (
    Counterpart,
    agree_on_rewrite,
    counterparts,
    differences,
    hops,
    metas_of_pieces,
    ranks_along_tp,
    value_of,
)
from shardwise.checkpoint.sharing import Gathering, merge_ties, pack_pieces, unpack_pieces
from shardwise.comm import Channel
from shardwise.comm.dtypes import torch_dtype
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Checked, Rewrite, TensorMeta
from shardwise.space import Piece

__all__ = ["RewrittenState", "StateRewriting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenState:
    """A state under the names of a rewrite."""

    checked: Checked
    sources: Mapping[str, TensorMeta]
    """What went in."""
    aliases: Mapping[str, str]
    """Other names of what went in (ties)."""
    held: Held
    """What this rank holds of what came out: views, and how they are cast when they are written or sent."""
    texts: list[bytes]
    """What each rank holds, as `pack_pieces` packs it."""


class StateRewriting:
    """Applies a rewrite to what ranks hold, again and again: what it finds out, it keeps for pieces that are alike."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self._gathering = Gathering("pieces of a state under the names of a rewrite")
        self._key: object = None
        self._found: _Found | None = None

    def apply(
        self,
        channel: Channel,
        held: Held,
        texts: Sequence[bytes],
        ties: Sequence[Mapping[str, str]],
        order: Iterable[str] = (),
    ) -> RewrittenState:
        """What the state becomes. All ranks call it together.

        held: what this rank holds. texts: what each rank holds, as `pack_pieces` packs it. ties: other names of
        tensors that each rank knows. order: names of tensors that come first.
        Raises RewriteError, with every finding and the same on all ranks, where the rewrite does not fit, and
        CheckpointError where numbers differ of which it makes one.
        """
        found = self._find(channel, texts, ties, order, ranks_along_tp(held.settings))
        tensors: dict[Piece, torch.Tensor] = {}
        casts: dict[Piece, tuple[str, ...]] = {}
        for piece, ways in found.ways:
            for each in ways:
                tensors[each.piece] = each.view(held.tensors[piece])
                if len(names := hops(each.dtypes)) > 1:
                    casts[each.piece] = names[1:]
        for name, meta in found.checked.outputs.items():
            if 0 in meta.shape:
                whole = Piece(name=name, dtype=meta.dtype, global_shape=meta.shape)
                tensors[whole] = torch.empty(meta.shape, dtype=torch_dtype(meta.dtype))
        new_texts, values_of = self._gathering.gather(
            channel, [pack_pieces(list(tensors)), json.dumps(_values(found.checked.agree, held)).encode()]
        )
        values = {name: value for each in dict.fromkeys(values_of) for name, value in json.loads(each).items()}
        if findings := differences(found.checked.agree, values):
            raise CheckpointError(*findings, about="the state does not fit the rewrite")
        return RewrittenState(
            checked=found.checked,
            sources=found.sources,
            aliases=found.aliases,
            held=Held(tensors=tensors, aliases=dict(found.checked.ties), casts=casts),
            texts=new_texts,
        )

    def _find(
        self,
        channel: Channel,
        texts: Sequence[bytes],
        ties: Sequence[Mapping[str, str]],
        order: Iterable[str],
        num_ranks: int | None,
    ) -> "_Found":
        key = (list(texts), list(map(dict, ties)), list(order), num_ranks)
        if self._found is None or key != self._key:
            pieces_of = {text: unpack_pieces(text) for text in dict.fromkeys(texts)}
            aliases = merge_ties(ties, [pieces_of[text] for text in texts])
            pieces_of = {
                text: [each for each in pieces if each.name not in aliases] for text, pieces in pieces_of.items()
            }
            metas = metas_of_pieces(chain.from_iterable(pieces_of.values()), num_ranks=num_ranks)
            sources = {name: metas[name] for name in dict.fromkeys([*order, *metas]) if name in metas}
            checked = agree_on_rewrite(channel, lambda: self._checked(sources, aliases))
            outputs = checked.outputs
            ways = [
                (piece, counterparts(piece, piece.name, checked.push, outputs))
                for piece in pieces_of[texts[channel.rank]]
            ]
            self._key, self._found = key, _Found(checked, sources, aliases, ways)
        return self._found

    def _checked(self, sources: Mapping[str, TensorMeta], aliases: Mapping[str, str]) -> Checked:
        checked = self._rewrite.apply(sources, aliases=aliases)
        if checked.added:
            raise RewriteError(
                f"{', '.join(sorted(checked.added))}: the rewrite adds what keeps its current value (`_ -> b`), and "
                "there is nothing here that has one; that is for loading into a state"
            )
        return checked


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of a state before its numbers are."""

    checked: Checked
    sources: dict[str, TensorMeta]
    aliases: dict[str, str]
    ways: list[tuple[Piece, list[Counterpart]]]
    """Where the elements of each piece of this rank go."""


def _values(groups: Iterable[Sequence[str]], held: Held) -> dict[str, tuple[str, str]]:
    """Numbers that this rank holds, of those that have to be equal."""
    names = {name for group in groups for name in group}
    return {piece.name: value_of(tensor) for piece, tensor in held.tensors.items() if piece.name in names}
