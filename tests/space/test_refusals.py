"""Boxes, runs, pieces, portions and meshes that cannot be, or do not fit together, are refused with what they are."""

from functools import partial
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.space import Box, Mesh, Piece, PieceIndex, Portion, Run, boxes_of_run, even_cuts, moves, overlap
from tests.refusals import Refusals

ANY: Any = Mesh
"""What is given wrongly is not what its type says."""
MESH = Mesh(dp_shard=2, tp=2)


def piece(name: str = "w", of: tuple[int, ...] = (4,), **place: Any) -> Piece:
    return Piece(name=name, dtype="float32", global_shape=of, **place)


REFUSED = Refusals(
    "space",
    {
        "a box of other dims": lambda: Box((0,), (1, 2)),
        "a box that begins before the first": lambda: Box((-1,), (2,)),
        "a box of a negative size": lambda: Box((0,), (-2,)),
        "boxes of other dims": lambda: Box((0,), (2,)).intersect(Box((0, 0), (2, 2))),
        "an origin of other dims": lambda: Box((0,), (2,)).relative_to((0, 0)),
        "an origin behind the box": lambda: Box((0,), (2,)).relative_to((1,)),
        "a run before the first": lambda: Run(-1, 2),
        "a run that goes backwards": lambda: Run(3, 2),
        "a run outside the tensor": lambda: boxes_of_run((3, 4), Run(3, 13)),
        "a piece outside its tensor": lambda: piece(of=(4, 8), offset=(3, -1), shape=(2, 8)),
        "a piece of other dims": lambda: piece(of=(4, 8), offset=(0,)),
        "a run outside its piece": lambda: piece(of=(4, 8), run=(0, 33)),
        "overlap of two tensors": lambda: overlap(piece("a"), piece("b")),
        "overlap of two shapes": lambda: overlap(piece("a"), piece("a", (5,))),
        "moves between two tensors": lambda: moves(piece(), piece("v")),
        "an index of another tensor": lambda: PieceIndex([piece(run=(0, 1))]).overlapping(piece("v", run=(2, 3))),
        "a portion along no dim": lambda: Portion(global_shape=(4, 2), dim=2, ranges=((0, 1),)),
        "a portion outside the tensor": lambda: Portion(global_shape=(4, 2), dim=0, ranges=((0, 1), (3, 5))),
        "cuts of broken units": lambda: even_cuts(10, 2, unit=4),
        "sizes of a mesh": lambda: ANY(pp=0, dp_shard=2.0, tp=True),
        "a text with all faults of a mesh": lambda: Mesh.parse("tp=0,dp_shrad=2,pp=2,pp=3,dp_shard=two,dp_replicate"),
        **{
            f"a mesh {text!r}": partial(Mesh.parse, text)
            for text in ("", "single,tp=2", "tp=2,", "tp=-2", "tp=2=2", "tp=\u0662")
        },
        "a world that the mesh divides": lambda: MESH.check_world(8),
        "a world that it does not": lambda: MESH.check_world(5),
        "a rank outside the mesh": lambda: MESH.coordinates(4),
        "a negative rank": lambda: MESH.coordinates(-1),
        "coordinates outside the mesh": lambda: MESH.rank(pp=1, tp=-1),
        "peers along no axis": lambda: MESH.peers(0, ["dp_shards"]),
        **{f"a rank {rank!r}": partial(ANY.data_rank, MESH, rank) for rank in (-1, 4, 1.0, True, "0", None)},
    },
    kind=PlanError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    REFUSED.check(case)
