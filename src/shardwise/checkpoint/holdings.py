"""Holdings: what all ranks hold of a state, as they tell each other, and under the names of a rewrite if there is one.

rank                 0                  1                  2
holds                w rows 0, 1        w rows 2, 3        -
tells                these pieces, its ties, the order of its names: equal texts travel once
knows afterwards     who holds what, under which names
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from shardwise.checkpoint.renamed_settings import layout_of
from shardwise.checkpoint.rewrite_agreement import StateRewriting
from shardwise.checkpoint.state_pieces import Held, merge_ties
from shardwise.checkpoint.states import Ordered, State
from shardwise.comm import Channel
from shardwise.comm.agreement import json_as, understood
from shardwise.moving.piece_exchange import pack_pieces, unpack_alike
from shardwise.plan.names import is_state_name, plain_names
from shardwise.plan.saved_settings import merge_settings
from shardwise.rewrite import Checked
from shardwise.space import Piece

_FACTS = tuple[dict[str, str], list[str], bool, dict[str, Any]]
"""Ties, names in order, whether they are those of a module, and the layout."""

_NOTHING = pack_pieces([])
"""What a rank without pieces tells of them."""


def facts_of(state: State, held: Held) -> list[bytes]:
    """What a rank tells of what it holds: two texts."""
    # A mapping has the names that its maker gave it.
    is_of_model = isinstance(state, Ordered)
    facts = held.aliases, _order(state), is_of_model, layout_of(held.settings)
    return [pack_pieces(list(held.tensors)), json.dumps(facts).encode()]


def _order(state: State) -> list[str]:
    """Names in the order that the state has for them."""
    if isinstance(state, Ordered):
        return list(state.names())
    return [key for key in state if isinstance(key, str)] if isinstance(state, Mapping) else []


def without_state(held: Held) -> Held:
    """The model's tensors alone."""
    tensors = {piece: tensor for piece, tensor in held.tensors.items() if not is_state_name(piece.name)}
    return replace(held, tensors=tensors)


def compared_replicas(
    channel: Channel, state: State, held: Held, layout: Mapping[str, Any], checked: Checked | None
) -> dict[Piece, torch.Tensor]:
    """What of `held` is compared with the replicas of other ranks. checked: the rewrite that made it of the state."""
    # An engine keeps its replicas equal.
    if channel.size == 1 or "plan" in layout:
        return {}
    left_out: set[str] = getattr(state, "differing", set)()
    if checked is not None:
        left_out = {name for name in checked.outputs if not left_out.isdisjoint(checked.sources_of(name))}
    return {piece: tensor for piece, tensor in held.tensors.items() if piece.name not in left_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What all ranks say of what they hold."""

    pieces: Sequence[bytes]
    """What each rank holds, as `pack_pieces` packs it."""
    ties: Sequence[Mapping[str, str]]
    """Other names of tensors that each rank knows."""
    order: Sequence[str]
    """Names in the order of the model, as far as it is known."""
    is_of_model: bool
    """Whether the names are those of a module."""
    layout: Mapping[str, Any]
    """See `layout_of`."""

    @classmethod
    def of(cls, pieces: Sequence[bytes], facts: Sequence[bytes], *, purpose: str) -> "RankFacts":
        """pieces, facts: the texts of `facts_of` of all ranks."""
        known = understood(facts, cache(json_as(_FACTS)), purpose=purpose)
        # Ranks of a pipeline have parts of the model each; the first that knows a name says where it stands.
        order = list(dict.fromkeys(name for _, names, _, _ in known for name in names))
        # A rank that holds nothing knows no mesh.
        layouts = [each[3] for each, text in zip(known, pieces, strict=True) if text != _NOTHING]
        return cls(
            pieces=pieces,
            ties=[aliases for aliases, *_ in known],
            order=order,
            is_of_model=any(is_of_model for _, _, is_of_model, _ in known),
            layout=merge_settings(layouts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who holds what."""

    held: Held
    """What this rank holds."""
    lists: Sequence[Sequence[Piece]]
    """What each rank holds, under the first name of each tensor."""
    aliases: Mapping[str, str]
    """Other names of tensors: alias -> name."""
    order: Sequence[str]
    """Names in the order of the model, as far as it is known."""
    plain: Mapping[str, str]
    """The names of a model without wrappers around its modules, where they are others."""
    checked: Checked | None
    """The rewrite that gave these names."""

    @classmethod
    def of(cls, channel: Channel, held: Held, facts: RankFacts, rewriting: StateRewriting | None) -> "Holdings":
        """All ranks call it together; raises the same error on all. held: what this rank holds, as it says."""
        texts, ties, order, checked = facts.pieces, facts.ties, facts.order, None
        if rewriting is not None:
            became = rewriting.apply(channel, held, texts, ties, facts.layout, order)
            held, texts, ties = became.held, became.texts, [became.held.aliases] * channel.size
            checked = became.checked
            order = list(checked.outputs)
        own = list(held.tensors)
        pieces_of = unpack_alike(texts, pack_pieces(own), own)
        aliases = merge_ties(ties, [pieces_of[text] for text in texts])
        lists = [[each for each in pieces_of[text] if each.name not in aliases] for text in texts]
        names = dict.fromkeys(piece.name for pieces in pieces_of.values() for piece in pieces)
        tied = (alias for alias, name in aliases.items() if name in names)
        plain = plain_names([*names, *tied]) if facts.is_of_model and rewriting is None else {}
        return cls(held=held, lists=lists, aliases=aliases, order=order, plain=plain, checked=checked)

    def names(self) -> dict[str, list[str]]:
        """All names of each tensor, plain ones where it has them, by the one that the lists have."""
        found = {piece.name: [piece.name] for pieces in self.lists for piece in pieces}
        for alias, name in self.aliases.items():
            if name in found:
                found[name].append(alias)
        return {name: [self.plain.get(each, each) for each in names] for name, names in found.items()}
