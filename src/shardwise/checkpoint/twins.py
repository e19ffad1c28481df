"""Twins: what a target has as one tensor under several names, and a checkpoint holds once for each of them.

Such are the saves of tied models by writers that do not look for ties. They fit if their bytes are equal.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.name_matching import apart
from shardwise.checkpoint.read_plan import missing
from shardwise.checkpoint.rewrite_view import RewriteView
from shardwise.checkpoint.state_pieces import gather_findings
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.windows import WINDOW_BYTES, PieceReader, part_of_piece, windows
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece

__all__ = ["compare_in_turns", "compare_twins"]


def compare_twins(
    channel: Channel,
    store: Store,
    contents: Contents,
    view: RewriteView | None,
    twins: Sequence[tuple[str, str]],
    readers: Collection[int],
) -> int:
    """Compare the bytes of twins, in windows that the ranks which read share; how many bytes this rank has read.

    view: what a rewrite makes of the contents, whose names the twins then have; None without one.
    Raises CheckpointError, the same on all ranks, with all that are not equal.
    """
    if not twins:
        return 0
    return compare_in_turns(
        channel,
        readers,
        lambda turn, turns: _differences(store, contents, view, twins, turn, turns),
        purpose="tensors that the target ties",
        about=f"{contents.location} does not fit the target",
    )


def compare_in_turns(
    channel: Channel,
    readers: Collection[int],
    compare: Callable[[int, int], tuple[list[str], int]],
    *,
    purpose: str,
    about: str,
) -> int:
    """Let each rank that reads compare its part of what is stored; how many bytes this rank has read.

    compare(i, n): findings about each n-th part from the i-th on, and the bytes that were read.
    Raises CheckpointError, the same on all ranks, with the findings of all.
    """
    findings: list[str] = []
    num_bytes = 0
    if channel.rank in readers:
        try:
            findings, num_bytes = compare(sorted(readers).index(channel.rank), len(readers))
        except CheckpointError as error:
            findings = list(error.problems)
    if findings := gather_findings(channel, findings, purpose=purpose):
        raise CheckpointError(*findings, about=about)
    return num_bytes


def _differences(
    store: Store,
    contents: Contents,
    view: RewriteView | None,
    twins: Sequence[tuple[str, str]],
    turn: int,
    turns: int,
) -> tuple[list[str], int]:
    """Findings about the windows whose turn it is, and the bytes that were read."""
    named = contents if view is None else view.contents
    pairs = [
        (named.tensors[one].whole, named.tensors[other].whole)
        for one, other in twins
        if not (contents.verifiable and view is None and _have_equal_checksums(contents, one, other))
    ]
    lacking = [
        f"{each}: its elements are in no file; the checkpoint is incomplete"
        for each in dict.fromkeys(_sources(view, pairs))
        if missing(contents.tensors[each].pieces, contents.tensors[each].whole)
    ]
    if lacking:
        return lacking, 0
    reader = PieceReader(store, contents, None if view is None else view.read_targets)
    different: dict[str, None] = {}
    sizes = [(one.num_elements, itemsize_bytes(one.dtype)) for one, _ in pairs]
    for number, window in enumerate(windows(sizes, max_bytes=WINDOW_BYTES // 2)):
        if number % turns != turn:
            continue
        parts = [part_of_piece(each, start, stop) for at, start, stop in window for each in pairs[at]]
        elements = reader.read(parts)
        for (at, _, _), mine, yours in zip(window, elements[::2], elements[1::2], strict=True):
            if not torch.equal(mine.reshape(-1).view(torch.uint8), yours.reshape(-1).view(torch.uint8)):
                one, other = pairs[at]
                different[apart(one.name, other.name, "have different values")] = None
    return list(different), reader.read_bytes


def _have_equal_checksums(contents: Contents, one: str, other: str) -> bool:
    return contents.tensors[one].checksums == contents.tensors[other].checksums


def _sources(view: RewriteView | None, pairs: Sequence[tuple[Piece, Piece]]) -> Iterator[str]:
    """The stored tensors of which the pairs have elements."""
    for piece in (each for pair in pairs for each in pair):
        if view is None:
            yield piece.name
        else:
            yield from view.checked.sources_of(piece.name)
