"""Virtual contents: a checkpoint as it would be under the names of a rewrite, and where its elements really lie.

[1] ask      what all ranks have in the target, which says what placeholders stand for and how tensors are cut
[2] check    the rewrite against what is stored: every rank finds the same outputs, or the same error
[3] match    (whoever loads) compares the outputs with what is wanted, as if they were stored
[4] locate   every rank finds the stored pieces of what it wants, and all tell each other
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.held import hold
from shardwise.checkpoint.matching import Kind
from shardwise.checkpoint.read_plan import Wanted, missing
from shardwise.checkpoint.renamed_settings import names_state, record_of, recorded_metas, renamed_settings
from shardwise.checkpoint.rewritten import (
    Late,
    agree_on_rewrite,
    counterparts,
    differences,
    metas_of_contents,
    metas_of_pieces,
    ranks_along_tp,
    room_for,
    value_of,
)
from shardwise.checkpoint.sharing import Gathering, gather_findings, pack_pieces, unpack_alike
from shardwise.checkpoint.states import State
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.windows import PieceReader
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.plan.model_settings import origin_of
from shardwise.plan.state_names import MASTER, is_state_name, split_state_name, state_name
from shardwise.rewrite import Checked, Rewrite, TensorMeta
from shardwise.space import Piece

__all__ = ["Located", "VirtualContents", "rewrite_contents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where everything that ranks want lies, and the tensors that take what this rank wants."""

    names: list[str]
    """The stored tensors."""
    sources: list[list[Wanted]]
    """For each rank, pieces as they are stored."""
    tensors: list[torch.Tensor]
    """One for each piece of this rank: views of its target, mostly."""
    late: list[Late] = field(default_factory=list)
    """What is to be cast once all is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualContents:
    """What a checkpoint would hold if it had been saved under the names of a rewrite. The same on all ranks."""

    contents: Contents
    """The outputs; they have no pieces, for they lie nowhere."""
    checked: Checked
    sources: Mapping[str, TensorMeta]
    """The tensors that are stored, as far as the rewrite applies to them."""
    findings: tuple[str, ...]
    """What of the stored settings cannot be carried over."""

    def keeps(self, name: str) -> bool:
        """Whether a wanted tensor is not to be read: it, or the parameter whose state it is, keeps what it has."""
        split = split_state_name(name)
        return name in self.checked.added or (split is not None and split[0] in self.checked.added)

    @property
    def dropped(self) -> tuple[str, ...]:
        """What the rewrite drops; optimizer state goes with its parameter."""
        return _without_followers(self.checked.dropped)

    @property
    def added(self) -> tuple[str, ...]:
        """What keeps the values that it has."""
        return _without_followers(self.checked.added)

    def without_place(self, wanted: Collection[str]) -> list[str]:
        """Findings about what is added, and is not among the names in the target."""
        return [
            f"{name}: the rewrite adds it, and the target has no such tensor"
            for name in self.added
            if name not in wanted
        ]

    def locate(
        self,
        channel: Channel,
        wanted: Sequence[Piece],
        source: Mapping[Kind, str],
        tensors: Mapping[Piece, torch.Tensor],
    ) -> Located:
        """Find the stored pieces of what this rank wants, and learn what the others want. All ranks call it together.

        source: the output from which a wanted tensor is read.
        """
        own: list[Piece] = []
        rooms: list[torch.Tensor] = []
        late: list[Late] = []
        for piece in wanted:
            name = source[Kind.of(piece)]
            for each in counterparts(piece, name, self.checked.resolve, self.sources):
                room, cast = room_for(each.view(tensors[piece]), (*each.dtypes, piece.dtype))
                own.append(each.piece)
                rooms.append(room)
                if cast is not None:
                    late.append(cast)
        text = pack_pieces(own)
        texts = Gathering("stored pieces of the target").gather(channel, [text])[0]
        pieces_of = unpack_alike(texts, text, own)
        sources = [[Wanted(piece, piece.name) for piece in pieces_of[each]] for each in texts]
        names = dict.fromkeys(piece.name for pieces in pieces_of.values() for piece in pieces)
        return Located(names=list(names), sources=sources, tensors=rooms, late=late)

    def compare(self, channel: Channel, store: Store, contents: Contents, readers: Collection[int]) -> int:
        """Compare the stored numbers of which the rewrite makes one; how many bytes this rank has read to do so.

        readers: the ranks that read. Raises CheckpointError, the same on all ranks, where numbers differ.
        """
        if not self.checked.agree:
            return 0
        turn = sorted(readers).index(channel.rank) if channel.rank in readers else None
        findings, num_bytes = ([], 0) if turn is None else self._unequal(store, contents, turn, len(readers))
        if findings := gather_findings(channel, findings, purpose="numbers that a rewrite makes one"):
            raise CheckpointError(*findings, about=f"{contents.location} does not fit the rewrite")
        return num_bytes

    def _unequal(self, store: Store, contents: Contents, turn: int, turns: int) -> tuple[list[str], int]:
        """Findings about each group of numbers whose turn it is, and bytes that were read to find them."""
        groups = self.checked.agree[turn::turns]
        names = list(dict.fromkeys(chain.from_iterable(groups)))
        tensors = [contents.tensors[name] for name in names]
        lacking = [each.name for each in tensors if missing(each.pieces, each.whole)]
        if lacking or not names:
            return [f"{name}: its element is in no file; the checkpoint is incomplete" for name in lacking], 0
        reader = PieceReader(store, contents)
        try:
            elements = reader.read([each.whole for each in tensors])
        except CheckpointError as error:
            return list(error.problems), reader.read_bytes
        values = {name: value_of(each) for name, each in zip(names, elements, strict=True)}
        return differences(groups, values), reader.read_bytes


def rewrite_contents(channel: Channel, contents: Contents, state: State, rewrite: Rewrite) -> VirtualContents:
    """What `contents` are under the names of a rewrite, for a load into `state`. All ranks call it together.

    Raises RewriteError, with every finding and the same on all ranks, where the rewrite does not fit what is stored.
    """
    live = _Live.of(channel, state)
    sources = metas_of_contents(contents)
    says_state = names_state(rewrite)
    if not (live.takes_state or says_state):
        sources = {name: meta for name, meta in sources.items() if not is_state_name(name) or _is_master(name)}
    known = {name: meta for name, meta in live.metas.items() if says_state or not is_state_name(name)}

    def check() -> tuple[Checked, tuple[dict[str, Any], list[str]]]:
        recorded = {**recorded_metas(contents.settings, rewrite), **known}
        checked = rewrite.apply(sources, wanted=live.wanted(sources), recorded=recorded, aliases=contents.aliases)
        return checked, renamed_settings(contents.settings, checked, contents.aliases)

    checked, (settings, findings) = agree_on_rewrite(channel, check)
    settings |= origin_of(record_of(rewrite, sources))
    virtual = replace(
        contents,
        tensors={
            name: StoredTensor(name=name, dtype=meta.dtype, shape=meta.shape, pieces=())
            for name, meta in checked.outputs.items()
        },
        aliases=checked.ties,
        settings=settings,
    )
    return VirtualContents(contents=virtual, checked=checked, sources=sources, findings=tuple(findings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """What all ranks together have in the target of a load."""

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
        known = [json.loads(each) for each in dict.fromkeys(gathered.texts[1])]
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


def _without_followers(names: Collection[str]) -> tuple[str, ...]:
    """The names, sorted, without optimizer state whose parameter is among them."""
    split = {name: split_state_name(name) for name in names}
    return tuple(sorted(name for name, parts in split.items() if parts is None or parts[0] not in names))


def _is_master(name: str) -> bool:
    split = split_state_name(name)
    return split is not None and split[1] == MASTER
