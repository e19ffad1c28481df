"""What a rewrite looks like: each output, its cells in the colours of the sources' elements that they hold."""

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import mul

from shardwise.pictures.svg import MUTED, Picture, colour, shortened
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.rewrites import Checked
from shardwise.rewrite.strided_views import fill_of
from shardwise.space import Box
from shardwise.space.boxes import row_major_strides

_SHOWN_OUTPUTS = 12


def rewrite_picture(checked: Checked, names: Sequence[str] = ()) -> Picture:
    """Sources at the left and outputs at the right. A source's colour grows darker from its first element to its last.

    names: which outputs; none given: the first ones that are more than a source under another name.
    """
    outputs = checked.outputs
    shown = list(names) or [name for name in outputs if _is_changed(checked, name)] or list(outputs)
    picture = Picture("the sources of the elements of outputs", width=720)
    for words, said in (("dropped", checked.dropped), ("not in a source: these keep their value", checked.added)):
        if said:
            more = f" and {len(said) - 4} more" if len(said) > 4 else ""
            picture.text(16, picture.y, f"{words}: {', '.join(sorted(said)[:4])}{more}", fill=MUTED)
            picture.y += 24
    for name in shown[:_SHOWN_OUTPUTS]:
        _add_output(picture, checked, name)
    picture.more(len(shown) - _SHOWN_OUTPUTS, "outputs")
    return picture


def _add_output(picture: Picture, checked: Checked, name: str) -> None:
    sources = sorted(checked.sources_of(name))

    def shade(source: str, index: Sequence[int]) -> str:
        """By the source, and by where in it the element is."""
        shape = checked.sources[source].shape
        element = sum(map(mul, index, row_major_strides(shape)))
        return colour(sources.index(source), element / max(1, prod(shape) - 1))

    def origin(index: tuple[int, ...]) -> str | None:
        found = checked.resolve(name, Box(index, (1,) * len(index)))
        # Padding is in no source, and has no colour.
        return shade(found[0].other, found[0].offset) if found and fill_of(found[0].other) is None else None

    meta, top = checked.outputs[name], picture.y
    picture.text(400, top, _label(name, meta, width=310))
    picture.tensor(400, top + 8, meta.shape, origin)
    for source in sources:
        given = checked.sources[source]
        picture.text(16, picture.y, _label(source, given, width=370))
        picture.tensor(16, picture.y + 8, given.shape, partial(shade, source))
        picture.y += 128
    picture.y = max(picture.y, top + 128)


def _label(name: str, meta: TensorMeta, *, width: float) -> str:
    kind = f" {list(meta.shape)} {meta.dtype}"
    return shortened(name, width - 7 * len(kind)) + kind


def _is_changed(checked: Checked, name: str) -> bool:
    """Whether an output is more than one whole source with every element in its place."""
    shape = checked.outputs[name].shape
    if 0 in shape:
        return False
    found = checked.resolve(name, Box((0,) * len(shape), shape))
    if len(found) != 1 or fill_of(found[0].other) is not None or checked.sources[found[0].other].shape != shape:
        return True
    steps = [step for size, step in zip(shape, found[0].dims, strict=True) if size > 1]
    return steps != [(dim, 1) for dim, size in enumerate(shape) if size > 1]
