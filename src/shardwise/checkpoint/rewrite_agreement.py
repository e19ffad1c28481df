"""Rewrite agreement: what all ranks together find out about a rewrite of a state that they save, or load into.

             save                                          load
[1] check    the rewrite against what ranks hold           against what is stored, and what the target has
[2] rename   pieces of the state, as views of its tensors  the contents, as if they were stored
[3] compare  numbers that the rewrite joins into one       the same
[4] gather   what every rank holds of the outputs          which stored pieces every rank wants

Every rank finds the same outputs, or all raise the same error.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shardwise.checkpoint.comparison import unequal_numbers
from shardwise.checkpoint.contents import Contents, Place, model_name_of_master
from shardwise.checkpoint.renamed_settings import names_state, recorded_metas, with_degrees
from shardwise.checkpoint.rewritten import (
    metas_of_contents,
    metas_of_pieces,
    outputs_with,
    padding_of,
    ranks_along_tp,
    rewritten_contents,
)
from shardwise.checkpoint.state_pieces import Held, hold, merge_ties
from shardwise.checkpoint.states import State
from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, agreed, json_as, understood_once
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError, RewriteError
from shardwise.moving.piece_exchange import Gathering, pack_pieces, unpack_alike, unpack_pieces
from shardwise.plan.names import is_state_name, split_state_name, state_name
from shardwise.rewrite import Checked, Rewrite, TensorMeta
from shardwise.rewrite.metas import needed_casts
from shardwise.space import Piece

_NOT_HERE = "Save or load without it, and convert (shardwise ckpt convert) with it"

# States that are saved


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenState:
    """A state under the names of a rewrite."""

    checked: Checked
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
        self._found: tuple[Checked, list[tuple[Piece, list[Place]]]] | None = None

    def apply(
        self,
        channel: Channel,
        held: Held,
        texts: Sequence[bytes],
        ties: Sequence[Mapping[str, str]],
        layout: Mapping[str, Any],
        order: Iterable[str] = (),
    ) -> RewrittenState:
        """What the state becomes. All ranks call it together; nothing moves, and nothing is copied.

        held: what this rank holds. texts: what each rank holds, as `pack_pieces` packs it. ties: other names of
        tensors that each rank knows. layout: `layout_of` the settings of all ranks. order: names of tensors that come
        first.
        Raises RewriteError, with every finding and the same on all ranks, if the rewrite does not fit. Raises
        CheckpointError if numbers differ that it joins into one.
        """
        checked, counterparts = self._find(channel, texts, ties, layout, order)
        tensors: dict[Piece, torch.Tensor] = {}
        casts: dict[Piece, tuple[str, ...]] = {}
        for piece, found in counterparts:
            for each in found:
                # A view of the state's own memory: nothing is copied before it is written or sent.
                tensors[each.piece] = each.view(held.tensors[piece])
                if len(dtypes := needed_casts(each.dtypes)) > 1:
                    casts[each.piece] = dtypes[1:]
        # Every rank holds all padding, as it holds what has no elements.
        tensors.update(padding_of(checked))
        for name, meta in checked.outputs.items():
            if 0 in meta.shape:  # whole tensors without elements, which every rank holds
                whole = Piece(name=name, dtype=meta.dtype, global_shape=meta.shape)
                tensors[whole] = torch.empty(meta.shape, dtype=torch_dtype(meta.dtype))
        # Numbers that become one have to be equal. They are few and small: each rank tells those that it holds.
        numbers = {name for group in checked.agree for name in group}
        mine = {piece.name: _value_of(tensor) for piece, tensor in held.tensors.items() if piece.name in numbers}
        new_texts, values_of = self._gathering.gather(channel, [pack_pieces(list(tensors)), json.dumps(mine).encode()])
        tables = understood_once(values_of, a_table, purpose="numbers that a rewrite joins")
        values = {name: value for each in tables for name, value in each.items()}
        if findings := _unequal(checked.agree, values):
            raise CheckpointError(*findings, about="the state does not fit the rewrite")
        return RewrittenState(
            checked=checked, held=Held(tensors=tensors, aliases=dict(checked.ties), casts=casts), texts=new_texts
        )

    def _find(
        self,
        channel: Channel,
        texts: Sequence[bytes],
        ties: Sequence[Mapping[str, str]],
        layout: Mapping[str, Any],
        order: Iterable[str],
    ) -> tuple[Checked, list[tuple[Piece, list[Place]]]]:
        """What is known of a state before its numbers are: where the elements of each piece of this rank go."""
        key = (list(texts), list(map(dict, ties)), layout, list(order))
        # A trainer saves the same state again and again: only numbers, such as the step, are looked at anew.
        if self._found is None or key != self._key:
            pieces_of = unpack_alike(texts, texts[channel.rank], unpack_pieces(texts[channel.rank]))
            aliases = merge_ties(ties, [pieces_of[text] for text in texts])
            pieces_of = {
                text: [each for each in pieces if each.name not in aliases] for text, pieces in pieces_of.items()
            }
            every = chain.from_iterable(pieces_of.values())
            metas = metas_of_pieces(every, num_ranks=ranks_along_tp(layout))
            # In the model's order where that is known: outputs come in the order of their sources.
            sources = {name: metas[name] for name in dict.fromkeys([*order, *metas]) if name in metas}
            with agreed(channel, purpose="verdict on a rewrite"):
                checked = self._checked(with_degrees(sources, layout), layout, aliases)
            mine = pieces_of[texts[channel.rank]]
            self._key, self._found = key, (checked, outputs_with(checked, mine))
        return self._found

    def _checked(
        self, sources: Mapping[str, TensorMeta], layout: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> Checked:
        # A live state that was loaded through a rewrite knows what that was applied to, as its save will.
        recorded = recorded_metas(layout, self._rewrite)
        checked = self._rewrite.apply(sources, recorded=recorded, aliases=aliases)
        if checked.quantises or checked.scales:
            raise RewriteError(f"the rewrite quantises or dequantises, and ranks hold parts of blocks. {_NOT_HERE}")
        if checked.added:
            raise RewriteError(
                f"{', '.join(sorted(checked.added))}: the rewrite adds a tensor that keeps its current value (`_ -> "
                "b`), and nothing here has one. Use it for loads into a state"
            )
        return checked


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


# States that are loaded into


def rewritten_for_load(channel: Channel, contents: Contents, state: State, rewrite: Rewrite) -> Contents:
    """What `contents` are under the names of a rewrite, for a load into `state`. All ranks call it together.

    Raises RewriteError, with every finding and the same on all ranks, where the rewrite does not fit what is stored.
    """
    live = _Live.of(channel, state)
    sources = metas_of_contents(contents)
    says_state = names_state(rewrite)
    # Stored optimizer state is nothing to a target without optimizers, and must not refuse its load. Masters stay: a
    # parameter and its master stand for each other.
    if not (live.takes_state or says_state):
        sources = {
            name: meta
            for name, meta in sources.items()
            if not is_state_name(name) or model_name_of_master(name) is not None
        }
    known = {name: meta for name, meta in live.metas.items() if says_state or not is_state_name(name)}
    wanted = live.wanted(sources)
    with agreed(channel, purpose="verdict on a rewrite"):
        made = rewritten_contents(contents, rewrite, sources=sources, wanted=wanted, recorded=known)
        if made.checked.quantises:
            raise RewriteError(f"the rewrite quantises, and ranks want parts of blocks. {_NOT_HERE}")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """What all ranks together have in the target of a load: it says what placeholders stand for, and how it is cut."""

    metas: Mapping[str, TensorMeta]
    """Its tensors, those that are tied under every name."""
    takes_state: bool
    """Whether it takes over the state of optimizers."""

    @classmethod
    def of(cls, channel: Channel, state: State) -> "_Live":
        """All ranks call it together; raises the same error on all."""
        with Gathering("tensors of the target of a rewrite").agreed(channel) as gathered:
            held = hold(state, what="the target")
            pieces = list(held.tensors)
            facts = held.aliases, bool(held.settings.get("optimizers")), ranks_along_tp(held.settings)
            text = pack_pieces(pieces)
            gathered.own = [text, json.dumps(facts).encode()]
        pieces_of = unpack_alike(gathered.texts[0], text, pieces)
        form = json_as(tuple[dict[str, str], bool, int | None])
        known = understood_once(gathered.texts[1], form, purpose="ties of the target of a rewrite")
        degrees = {num_ranks for _, _, num_ranks in known}
        metas = metas_of_pieces(
            chain.from_iterable(pieces_of.values()), num_ranks=degrees.pop() if len(degrees) == 1 else None
        )
        aliases = {alias: name for ties, _, _ in known for alias, name in ties.items()}
        tied = {alias: metas[name] for alias, name in aliases.items() if name in metas}
        takes_state = any(takes for _, takes, _ in known) or any(map(is_state_name, metas))
        return cls(metas={**metas, **tied}, takes_state=takes_state)

    def wanted(self, sources: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        """All that the target may want: the state of its optimizers is made when it is loaded, if it is not there."""
        keys = {split[1]: None for split in map(split_state_name, sources) if split is not None}
        state = {
            state_name(name, key): meta for name, meta in self.metas.items() if not is_state_name(name) for key in keys
        }
        return {**state, **self.metas}
