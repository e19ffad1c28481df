"""Space: which elements of a logical tensor are where. Pure arithmetic, no tensors, no ranks that run.

A `Box` is an n-d region of indices and a `Run` a range of row-major elements. Each becomes the other exactly. A `Mesh`
names the axes of the ranks. A `Piece` is one holder's part of a tensor, and a `Portion` is the part with which a rank
along tp computes. Data moves from pieces to pieces along `overlap` (contiguous copies) or `moves` (few strided ones),
and a `PieceIndex` finds the pieces among many. `check_cover` proves that pieces make up a tensor::

    Box((1, 0), (2, 4))      . . . .     Run(2, 7)  . . 2 3     boxes_of_run((4, 4), Run(2, 7)):
    of a tensor (4, 4)       x x x x                4 5 6 .     Box((0, 2), (1, 2)), Box((1, 0), (1, 3))
                             x x x x                . . . .
                             . . . .                . . . .
"""

from shardwise.space.boxes import Box, Run, boxes_of_run
from shardwise.space.meshes import AXES, Mesh
from shardwise.space.moves import BlockPart, Move, PieceIndex, moves, overlap
from shardwise.space.pieces import Piece, check_cover
from shardwise.space.portions import Portion, even_cuts

__all__ = [
    "AXES",
    "BlockPart",
    "Box",
    "Mesh",
    "Move",
    "Piece",
    "PieceIndex",
    "Portion",
    "Run",
    "boxes_of_run",
    "check_cover",
    "even_cuts",
    "moves",
    "overlap",
]
