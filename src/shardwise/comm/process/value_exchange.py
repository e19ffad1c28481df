"""Small values of all ranks of a channel to all its ranks, along a tree: few messages per rank, however many ranks.

Values go up to the root and come down as one piece (`joined_values`), along the tree of `tree`::

        0 1 2 3        (2) down: all values                   rank 0 takes 2 messages and sends 2
       /       \\
    0: 1       0: 2    (1) up: what is below, in one piece     rank 1 takes 2 and sends 2
       |
       3

In a tree two ranks find that their calls differ where it has an edge between them, and between any two ranks there is
a path of edges: somewhere on it two neighbours differ. All others hear of it from those.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn, TypeAlias

import numpy as np
import torch

from shardwise.comm.channel import Signature
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.frames import garbled
from shardwise.comm.process.intakes import Collecting
from shardwise.comm.process.joined_values import JoinedValues, joined
from shardwise.comm.process.tree import Place, place_in_tree
from shardwise.comm.rank_values import Index, RankValues

Content: TypeAlias = bytearray | memoryview
"""Joined values, as they travel."""

_MOST_DIRECT = 4
"""Up to so many ranks give each value directly: no rank sends more messages than in a tree, and all in one step."""


class ValueExchange:
    """How the members of a channel, world ranks in its order, give values to each other. The caller holds the lock."""

    def __init__(self, board: Switchboard, members: tuple[int, ...], lane: int) -> None:
        self.board = board
        self._members = members
        self._peers = [member for member in members if member != board.rank]
        self._lane = lane

    @cached_property
    def _place(self) -> Place:
        return place_in_tree(self.board.rank, self._members, self.board.kernels)

    @cached_property
    def _positions(self) -> Index | None:
        positions = self._place.positions
        return None if positions is None else np.array(positions)

    @property
    def neighbours(self) -> Sequence[int]:
        """The world ranks with which this one exchanges messages."""
        return self._peers if self._is_direct else self._place.neighbours

    def values(self, signature: Signature, parts: Sequence[bytes], share: int = 0) -> tuple[list[RankValues], int]:
        """All values in the order of the ranks, by parts, and the sum of the shares modulo 2**64."""
        own = JoinedValues.of_one(parts, share, self.board.rank)
        if self._is_direct:
            rank = self.board.rank
            (taken, _) = self.trade(signature, joined([own], rank), self._peers, self._peers)
            of_members = {peer: self._parsed(peer, taken[peer], signature, len(parts)) for peer in self._peers}
            of_members[rank] = own
            content = joined([of_members[member] for member in self._members], rank)
            found = self._parsed(rank, content, signature, len(parts))
        else:
            found = self._along_tree(signature, own)
        if found.num_ranks != (count := len(self._members)):
            self._refuse(self.neighbours[0], ValueError(f"{found.num_ranks} values of {count} ranks"), signature)
        of_parts = list(found.parts)
        if not self._is_direct and self._positions is not None:
            of_parts = [part.in_order(self._positions) for part in of_parts]
        self.board.has_met(self._lane, self._members, signature)
        return of_parts, found.share

    def from_each(self, signature: Signature, value: bytes) -> list[bytes]:
        """All values, each straight from its rank: behind what it has sent there before."""
        own = bytearray(value)
        values = self.trade(signature, own, self._peers, self._peers)[0] | {self.board.rank: own}
        self.board.has_met(self._lane, self._members, signature)
        return [bytes(values[member]) for member in self._members]

    @property
    def _is_direct(self) -> bool:
        return len(self._members) <= _MOST_DIRECT

    def _along_tree(self, signature: Signature, own: JoinedValues) -> JoinedValues:
        board, place, num_parts = self.board, self._place, len(own.parts)
        # A neighbour in the tree may wait as well. So what is slept counts for the rank that came last of all.
        polled_s, board.counts_waits = board.polled_s, False
        try:
            # In the order of the tree: this rank, then what is below each child.
            runs, last = {board.rank: own}, None
            if place.children:
                (below, last) = self.trade(signature, bytearray(), (), place.children)
                runs |= {child: self._parsed(child, below[child], signature, num_parts) for child in place.children}
            content: Content = joined([*runs.values()], runs[board.rank if last is None else last].last)
            if place.parent is not None:
                content = self.trade(signature, content, [place.parent], [place.parent])[0][place.parent]
            giver = board.rank if place.parent is None else place.parent
            found = self._parsed(giver, content, signature, num_parts)
            if place.children:
                self.trade(signature, content, place.children, ())
        finally:
            board.counts_waits = True
        board.tally.waited(self.neighbours[0] if found.last == board.rank else found.last, board.polled_s - polled_s)
        return found

    def trade(
        self, signature: Signature, content: Content, destinations: Sequence[int], sources: Sequence[int]
    ) -> tuple[dict[int, Content], int | None]:
        """Send these bytes, which stay as they are, to some ranks, and take what others send, by world rank.

        Also the rank that came last; None where all had come before this one.
        """
        intake = Collecting([self.board.expect(source, self._lane, signature) for source in sources])
        given = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        outbounds = self.board.send(given, destinations, self._lane, signature, constant=True) if destinations else []
        work = self.board.start(signature, outbounds, intake)
        last_is_here = work.is_done
        work.wait()
        return intake.values, None if last_is_here else intake.last

    def _parsed(self, rank: int, content: Content, signature: Signature, num_parts: int) -> JoinedValues:
        try:
            return JoinedValues.parsed(content, len(self._members), num_parts)
        except ValueError as error:
            self._refuse(rank, error, signature)

    def _refuse(self, rank: int, error: ValueError, signature: Signature) -> NoReturn:
        self.board.fail(garbled(rank, f"values that are none ({error})", self.board.names))
        self.board.check(signature)
        raise AssertionError("a board that has failed raises")
