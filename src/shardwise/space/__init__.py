"""Space: which elements of a logical tensor are where. Pure arithmetic, no tensors, no ranks that run.

A `Box` is an n-d region of indices and a `Run` a range of row-major elements; each becomes the other exactly. A `Mesh`
names the axes along which ranks lie, a `Layout` says how a tensor is placed on them, and a `Piece` says what one holder
has. What moves data goes from pieces to pieces along `overlap` (contiguous copies) or `moves` (few strided ones), found
among many by a `PieceIndex`; `check_cover` proves that pieces make up a tensor.
"""

from shardwise.space.boxes import Box
from shardwise.space.meshes import AXES, Mesh
from shardwise.space.moves import BlockPart, Move, PieceIndex, moves, overlap
from shardwise.space.pieces import Piece, check_cover
from shardwise.space.portions import Portion, even_cuts
from shardwise.space.runs import Run, boxes_of_run, boxes_of_run_in_box

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
    "boxes_of_run_in_box",
    "check_cover",
    "even_cuts",
    "moves",
    "overlap",
]
