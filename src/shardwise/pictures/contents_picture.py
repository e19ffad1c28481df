"""What a checkpoint looks like: its tensors, each cell in the colour of the file that holds the element."""

from collections.abc import Sequence
from functools import partial

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.pictures.svg import Picture, colour, shortened
from shardwise.space import Piece, PieceIndex

_SHOWN_TENSORS = 24
_COLUMNS = 3


def contents_picture(contents: Contents, names: Sequence[str] = ()) -> Picture:
    """The tensors of a checkpoint of any format. names: which ones; none given: the first."""
    tensors = [contents.tensors[name] for name in names] if names else list(contents.tensors.values())
    files = sorted({piece.file for tensor in tensors for piece in tensor.pieces})
    picture = Picture(f"{contents.location}: tensors {len(contents.tensors)}, files {len(contents.file_sizes)}")
    picture.legend([(colour(number), file.rpartition("/")[2]) for number, file in enumerate(files)])
    for place, tensor in enumerate(tensors[:_SHOWN_TENSORS]):
        x, y = 16 + place % _COLUMNS * 312, picture.y + place // _COLUMNS * 132
        shape, index = f" {list(tensor.shape)}", PieceIndex([each.piece for each in tensor.pieces])
        picture.text(x, y + 4, shortened(tensor.name, 290 - 7 * len(shape), size=11) + shape, size=11)
        picture.tensor(x, y + 12, tensor.shape, partial(_file_colour, tensor, index, files))
    picture.y += -(-min(len(tensors), _SHOWN_TENSORS) // _COLUMNS) * 132
    picture.more(len(tensors) - _SHOWN_TENSORS, "tensors")
    return picture


def _file_colour(tensor: StoredTensor, index: PieceIndex, files: Sequence[str], at: tuple[int, ...]) -> str | None:
    """By the file that has the element; None where no file has it."""
    element = Piece(name=tensor.name, dtype=tensor.dtype, global_shape=tensor.shape, offset=at, shape=(1,) * len(at))
    found = index.overlapping(element)
    return colour(files.index(tensor.pieces[found[0]].file)) if found else None
