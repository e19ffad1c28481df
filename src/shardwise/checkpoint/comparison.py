"""Comparison: how pairs of tensors differ, read side by side in windows, each element bit for bit.

    two checkpoints                 what `diff` shows; what an average does not average; what quantising changes
    two tensors of one checkpoint   twins, which a target ties; numbers that a rewrite joins into one

What differs has its first difference. Equal tensors are not in what is returned.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.elements import Elements, compare, joined
from shardwise.checkpoint.read_plan import missing
from shardwise.checkpoint.reading import DataFiles
from shardwise.checkpoint.windows import WINDOW_BYTES, PieceReader, Read, part_of_piece, windows
from shardwise.comm import Channel
from shardwise.comm.agreement import texts_in, understood_once
from shardwise.errors import CheckpointError
from shardwise.moving.piece_exchange import Gathering
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece

K = TypeVar("K")


def compared(
    pairs: Mapping[K, tuple[Piece, Piece]],
    a: Read,
    b: Read,
    *,
    is_mine: Callable[[K, int], bool] = lambda key, part: True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[K, Elements]:
    """How the elements of pairs differ, by the key of the pair, counted in the whole pieces.

    Pieces of a pair have equally many elements; `a` reads the first ones, and `b`, maybe the same reader, the others.
    is_mine: whether a part of a pair is compared here, by its number. Each part fits into a window.
    progress: called with the bytes of `a` that are done, and those in all, after each window.
    """
    found: dict[K, Elements] = {}
    # By elements, not bytes: dtypes may differ, and both sides read the same range of elements. The wider one decides
    # how many fit.
    sizes = {
        key: (one.num_elements, max(itemsize_bytes(one.dtype), itemsize_bytes(other.dtype)))
        for key, (one, other) in pairs.items()
    }
    most = WINDOW_BYTES // 2 if a == b else WINDOW_BYTES
    parts = [
        (key, start, stop)
        for key, size in sizes.items()
        for part, cut in enumerate(windows([size], max_bytes=most))
        for _, start, stop in cut
        if is_mine(key, part)
    ]
    done, total = 0, sum(one.num_elements * itemsize_bytes(one.dtype) for one, _ in pairs.values())
    for cuts in windows([(stop - start, sizes[key][1]) for key, start, stop in parts], max_bytes=most):
        window = [(parts[n][0], parts[n][1] + first, parts[n][1] + last) for n, first, last in cuts]
        ours, theirs = (
            [part_of_piece(pairs[key][side], start, stop) for key, start, stop in window] for side in (0, 1)
        )
        if a == b:
            both = a([*ours, *theirs])
            read = zip(window, both[: len(window)], both[len(window) :], strict=True)
        else:
            read = zip(window, a(ours), b(theirs), strict=True)
        for (key, start, _), mine, yours in read:
            if (elements := compare(mine, yours)) is not None:
                # Counted from the start of the window, and wanted from the start of the tensor.
                here = replace(elements, first=elements.first + start)
                found[key] = joined(found[key], here) if key in found else here
            done += mine.nbytes
        progress(done, total)
    return found


def equal_unread(a: Contents, one: str, b: Contents, other: str) -> bool:
    """Whether checksums say that a tensor of one checkpoint has the bytes of one of another."""
    # Each checksum covers one block: with blocks of two sizes no two checksums cover the same bytes.
    comparable = a.verifiable and b.verifiable and a.block_bytes == b.block_bytes
    return comparable and a.tensors[one].checksums == b.tensors[other].checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPairs:
    """Tensors of one checkpoint that have to be equal, by their names."""

    files: DataFiles
    contents: Contents
    pairs: Sequence[tuple[str, str]]
    say: Callable[[int, Elements], str]
    """The finding on a pair, by its number, that is not equal."""
    purpose: str
    """What they are, in words."""
    about: str
    """What does not fit where some are not equal."""

    def findings(self, turn: int = 0, turns: int = 1) -> list[str]:
        """Findings about what is its turn, one for each first of a pair."""
        contents, stored = self.contents, self.contents.stored
        pairs = {
            at: (contents.tensors[one].whole, contents.tensors[other].whole)
            for at, (one, other) in enumerate(self.pairs)
            # A rewrite makes other bytes, and no checksum of these is known.
            if contents is not stored or not equal_unread(stored, one, stored, other)
        }
        places = (each for pair in pairs.values() for whole in pair for each in contents.places(whole, whole.name))
        names = dict.fromkeys(name for place in places for name in place.names)
        lacking = [
            f"{each.name}: its {'element is' if each.whole.num_elements == 1 else 'elements are'} in no file; the "
            "checkpoint is incomplete"
            for each in (stored.tensors[name] for name in names)
            if missing(each.pieces, each.whole)
        ]
        if lacking:
            return lacking
        read = PieceReader(self.files, contents).read
        # What has the same first is one finding. Parts of large tensors are shared, and so are many small ones.
        firsts = {one: number for number, one in enumerate(dict.fromkeys(one for one, _ in self.pairs))}
        different = compared(
            pairs, read, read, is_mine=lambda at, part: (firsts[self.pairs[at][0]] + part) % turns == turn
        )
        found: dict[str, str] = {}
        for at, elements in different.items():
            found.setdefault(self.pairs[at][0], self.say(at, elements))
        return list(found.values())

    def compare(self, channel: Channel, readers: Collection[int]) -> None:
        """Compare them, the ranks that read in turns. All ranks call it together.

        Raises CheckpointError, the same on all ranks, with the findings of all.
        """
        if not self.pairs:
            return
        findings: list[str] = []
        if channel.rank in readers:
            try:
                # All meet below, whether they read or not: a finding of one is an error on all.
                findings = self.findings(sorted(readers).index(channel.rank), len(readers))
            except CheckpointError as error:
                findings = list(error.problems)
        (texts,) = Gathering(self.purpose).gather(channel, [json.dumps(findings).encode()])
        if found := dict.fromkeys(chain.from_iterable(understood_once(texts, texts_in, purpose=self.purpose))):
            raise CheckpointError(*found, about=self.about)


def joined_numbers(files: DataFiles, contents: Contents, groups: Iterable[Sequence[str]]) -> StoredPairs:
    """Stored numbers that a rewrite joins into one. groups: some of those of the rewritten contents."""
    members = [(group, other) for group in groups for other in group[1:]]

    def say(at: int, elements: Elements) -> str:
        group, other = members[at]
        return unequal_numbers(group, (group[0], elements.a), (other, elements.b))

    pairs = [(group[0], other) for group, other in members]
    return StoredPairs(
        files=files,
        contents=contents.stored,
        pairs=pairs,
        say=say,
        purpose="numbers that a rewrite makes one",
        about=f"{contents.location} does not fit the rewrite",
    )


def unequal_numbers(group: Sequence[str], one: tuple[str, object], other: tuple[str, object]) -> str:
    """The finding that two numbers of a group, with their values, are not equal, and a rewrite makes one of all."""
    return (
        f"{one[0]} is {one[1]} and {other[0]} is {other[1]}, and the rewrite makes one number of {', '.join(group)}; "
        "they have to be equal"
    )
