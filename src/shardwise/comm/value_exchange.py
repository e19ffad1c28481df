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

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NoReturn

import torch

from shardwise.comm.channel import Signature
from shardwise.comm.frames import garbled
from shardwise.comm.joined_values import check_run, joined, last_rank, one_value, split
from shardwise.comm.messages import Collecting
from shardwise.comm.rank_values import RankValues
from shardwise.comm.switchboard import Switchboard
from shardwise.comm.tree import Place, place_in_tree

_MOST_DIRECT = 4
"""Up to so many ranks give each value directly: no rank sends more messages than in a tree, and all in one step."""


class ValueExchange:
    """How the members of a channel, world ranks in its order, give values to each other. The caller holds the lock."""

    def __init__(self, board: Switchboard, members: tuple[int, ...], lane: int) -> None:
        self._board = board
        self._members = members
        self._peers = [member for member in members if member != board.rank]
        self._lane = lane

    @cached_property
    def _place(self) -> Place:
        return place_in_tree(self._board.rank, self._members, self._board.kernels)

    @property
    def neighbours(self) -> Sequence[int]:
        """The world ranks with which this one exchanges messages."""
        return self._peers if self._is_direct else self._place.neighbours

    def values(self, signature: Signature, parts: Sequence[bytes], share: int = 0) -> tuple[list[RankValues], int]:
        """All values in the order of the ranks, by parts, and the sum of the shares modulo 2**64."""
        own, num_parts = one_value(parts, share, self._board.rank), len(parts)
        if self._is_direct:
            runs = self.trade(signature, own, self._peers, self._peers)[0] | {self._board.rank: own}
            of_members = {member: runs[member] for member in self._members}
            run = self._joined(of_members, signature, num_parts, self._board.rank)
        else:
            run = self._along_tree(signature, own, num_parts)
        try:
            found, total = split(run, len(self._members), num_parts)
        except ValueError as error:
            self._refuse(self.neighbours[0], error, signature)
        if not self._is_direct and self._place.positions is not None:
            found = [part.in_order(self._place.positions) for part in found]
        self._board.has_met(self._lane, self._members, signature)
        return found, total

    def from_each(self, signature: Signature, value: bytes) -> list[bytes]:
        """All values, each straight from its rank: behind what it has sent there before."""
        own = bytearray(value)
        values = self.trade(signature, own, self._peers, self._peers)[0] | {self._board.rank: own}
        self._board.has_met(self._lane, self._members, signature)
        return [bytes(values[member]) for member in self._members]

    @property
    def _is_direct(self) -> bool:
        return len(self._members) <= _MOST_DIRECT

    def _along_tree(self, signature: Signature, own: bytearray, num_parts: int) -> bytearray:
        board, place = self._board, self._place
        # A neighbour in the tree may wait as well. So what is slept counts for the rank that came last of all.
        polled_s, board.counts_waits = board.polled_s, False
        try:
            run = own
            if place.children:
                (below, last) = self.trade(signature, bytearray(), (), place.children)
                # In the order of the tree: this rank, then what is below each child.
                runs = {board.rank: own} | {child: below[child] for child in place.children}
                run = self._joined(runs, signature, num_parts, board.rank if last is None else last)
            if place.parent is not None:
                run = self.trade(signature, run, [place.parent], [place.parent])[0][place.parent]
            if place.children:
                self.trade(signature, run, place.children, ())
        finally:
            board.counts_waits = True
        try:
            last = last_rank(run)
        except ValueError as error:
            self._refuse(self.neighbours[0], error, signature)
        board.tally.waited(self.neighbours[0] if last == board.rank else last, board.polled_s - polled_s)
        return run

    def trade(
        self, signature: Signature, content: bytearray, destinations: Sequence[int], sources: Sequence[int]
    ) -> tuple[dict[int, bytearray], int | None]:
        """Send these bytes to some ranks, and take what others send, by world rank.

        Also the rank that came last; None where all had come before this one.
        """
        intake = Collecting([self._board.expect(source, self._lane, signature) for source in sources])
        given = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        outbounds = self._board.send(given, destinations, self._lane, signature) if destinations else []
        work = self._board.start(signature, outbounds, intake)
        last_is_here = work.is_done
        work.wait()
        return intake.values, None if last_is_here else intake.last

    def _joined(self, runs: Mapping[int, bytearray], signature: Signature, num_parts: int, last: int) -> bytearray:
        for rank, run in runs.items():
            try:
                check_run(run, len(self._members), num_parts)
            except ValueError as error:
                self._refuse(rank, error, signature)
        return joined(list(runs.values()), list(runs).index(last))

    def _refuse(self, rank: int, error: ValueError, signature: Signature) -> NoReturn:
        self._board.fail(garbled(rank, f"values that are none ({error})"))
        self._board.check(signature)
        raise AssertionError("a board that has failed raises")
