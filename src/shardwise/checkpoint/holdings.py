"""Holdings: what all ranks hold of a state, as they tell each other, and under the names of a rewrite if there is one.

rank                 0                  1                  2
holds                w rows 0, 1        w rows 2, 3        -
tells                these pieces, its ties, the order of its names: equal texts travel once
knows afterwards     who holds what, under which names
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch

from shardwise.checkpoint.comparison import unequal_numbers
from shardwise.checkpoint.contents import Place
from shardwise.checkpoint.renamed_settings import layout_of
from shardwise.checkpoint.rewritten import (
    beside_pieces,
    checked_for_state,
    metas_of_pieces,
    places_in_outputs,
    ranks_along_tp,
    rewritten_held,
)
from shardwise.checkpoint.state_pieces import Held
from shardwise.checkpoint.states import Ordered, State
from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, json_as, understood
from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, MismatchError
from shardwise.moving.piece_exchange import pack_pieces, unpack_alike
from shardwise.plan.names import is_state_name, plain_names
from shardwise.plan.saved_settings import merge_settings
from shardwise.rewrite import Checked, Rewrite
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
    """Who holds what, under the names of a state or under those that a rewrite gives."""

    lists: Sequence[Sequence[Piece]]
    """What each rank holds, under the first name of each tensor."""
    aliases: Mapping[str, str]
    """Other names of tensors: alias -> name."""
    order: Sequence[str]
    """Names in the order of the model, as far as it is known."""
    plain: Mapping[str, str]
    """The names of a model without wrappers around its modules, where they are others."""
    checked: Checked | None = None
    """The rewrite that gave these names."""
    places: Sequence[tuple[Piece, Sequence[Place]]] = ()
    """Of each piece of this rank where its elements go under these names."""

    @classmethod
    def of(cls, facts: RankFacts, own: list[Piece], rewrite: Rewrite | None) -> "Holdings":
        """Nothing moves. own: what this rank holds, as it says in `facts`.

        Raises the same error on all ranks, which know the same: RewriteError, with every finding, if the rewrite does
        not fit.
        """
        mine = pack_pieces(own)
        held = unpack_alike(facts.pieces, mine, own)
        aliases = _merge_ties(facts.ties, [held[text] for text in facts.pieces])
        first = {text: [each for each in pieces if each.name not in aliases] for text, pieces in held.items()}
        if rewrite is None:
            names = dict.fromkeys(piece.name for pieces in held.values() for piece in pieces)
            tied = (alias for alias, name in aliases.items() if name in names)
            plain = plain_names([*names, *tied]) if facts.is_of_model else {}
            lists = [first[text] for text in facts.pieces]
            return cls(lists=lists, aliases=aliases, order=facts.order, plain=plain)
        metas = metas_of_pieces(chain.from_iterable(first.values()), num_ranks=ranks_along_tp(facts.layout))
        # In the model's order where that is known: outputs come in the order of their sources.
        sources = {name: metas[name] for name in dict.fromkeys([*facts.order, *metas]) if name in metas}
        checked = checked_for_state(rewrite, sources, aliases, facts.layout)
        beside = beside_pieces(checked)
        places = dict(zip(first, places_in_outputs(checked, first.values()), strict=True))
        under = {
            text: list(dict.fromkeys([*(each.piece for _, found in known for each in found), *beside]))
            for text, known in places.items()
        }
        return cls(
            lists=[under[text] for text in facts.pieces],
            aliases=dict(checked.ties),
            order=list(checked.outputs),
            plain={},
            checked=checked,
            places=places[mine],
        )

    def held(self, channel: Channel, held: Held) -> Held:
        """What this rank holds, under these names: views of its tensors. All ranks call it together.

        Raises CheckpointError, the same on all ranks, if numbers differ that a rewrite joins into one.
        """
        if self.checked is None:
            return held
        if groups := self.checked.agree:
            # They are few and small: each rank tells those that it holds.
            numbers = {name for group in groups for name in group}
            mine = {piece.name: _value_of(tensor) for piece, tensor in held.tensors.items() if piece.name in numbers}
            purpose = "numbers that a rewrite joins"
            answers = channel.exchange(json.dumps(mine).encode(), purpose=purpose)
            values = dict(chain.from_iterable(each.items() for each in understood(answers, a_table, purpose=purpose)))
            if findings := _unequal(groups, values):
                raise CheckpointError(*findings, about="the state does not fit the rewrite")
        return rewritten_held(self.checked, self.places, held)

    def names(self) -> dict[str, list[str]]:
        """All names of each tensor, plain ones where it has them, by the one that the lists have."""
        found = {piece.name: [piece.name] for pieces in self.lists for piece in pieces}
        for alias, name in self.aliases.items():
            if name in found:
                found[name].append(alias)
        return {name: [self.plain.get(each, each) for each in names] for name, names in found.items()}


def _value_of(element: torch.Tensor) -> tuple[str, str]:
    """Bytes of the element of a tensor in hexadecimal digits, and the element as people write it."""
    plain = element.detach().resolve_conj().resolve_neg().cpu().reshape(1).contiguous()
    return bytes_of(plain.view(torch.uint8)).hex(), str(plain.item())


def _unequal(groups: Iterable[Sequence[str]], values: Mapping[str, tuple[str, str]]) -> list[str]:
    """Findings about numbers that a rewrite joins into one, and that are not equal to the bit."""
    # By bits: NaN is equal to itself, and -0.0 is not 0.0.
    findings = []
    for group in groups:
        one, *others = [name for name in group if name in values] or [""]
        if other := next((each for each in others if values[each][0] != values[one][0]), None):
            findings.append(unequal_numbers(group, (one, values[one][1]), (other, values[other][1])))
    return findings


def _merge_ties(ties: Sequence[Mapping[str, str]], pieces: Sequence[Sequence[Piece]]) -> dict[str, str]:
    """The ties that ranks know together. Raises MismatchError where what is one tensor to a rank is two to another."""
    merged = {alias: name for each in ties for alias, name in each.items()}
    for rank, (own, held) in enumerate(zip(ties, pieces, strict=True)):
        # A rank that holds neither of two names says nothing about them. One that holds both apart contradicts the
        # tie, and so does one that knows the alias under another name.
        names = {piece.name for piece in held}
        for alias, name in merged.items():
            if name in merged or own.get(alias, name) != name or {alias, name} <= names:
                raise MismatchError(
                    f"{alias} and {name} are one tensor on some ranks, but rank {rank} has two, or another order. Tie "
                    "the same tensors on all ranks, and give states in the same order"
                )
    return merged
