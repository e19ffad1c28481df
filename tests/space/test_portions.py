"""Portions of cut tensors, against numpy's own slicing."""

import math
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Piece, Portion, check_cover, even_cuts
from tests.properties import tried


@st.composite
def portions(draw: st.DrawFn) -> Portion:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    borders = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6)))
    ranges = [(borders[at], borders[at + 1]) for at in range(0, len(borders) - 1, 2)]
    return Portion(global_shape=shape, dim=dim, ranges=tuple(ranges))


def check_pieces(portion: Portion, run: tuple[int, int] | None) -> None:
    """The pieces of a run hold its elements and no others, where they say."""
    whole = np.arange(math.prod(portion.global_shape)).reshape(portion.global_shape)
    local = np.concatenate([whole.take(range(*each), axis=portion.dim) for each in portion.ranges], axis=portion.dim)
    assert local.shape == portion.shape
    flat = local.reshape(-1) if run is None else local.reshape(-1)[slice(*run)]
    found = []
    for piece, part in portion.pieces("w", "int64", run):
        if part is None:
            held = flat
        else:
            block = flat[part.start : part.start + math.prod(part.block)].reshape(part.block)
            box = tuple(slice(at, at + size) for at, size in zip(part.offset, piece.shape, strict=True))
            held = block[box].reshape(-1)
        expected = whole[piece.box.slices()].reshape(-1)[piece.elements.start : piece.elements.stop]
        np.testing.assert_array_equal(held, expected)
        found.append(held)
    np.testing.assert_array_equal(np.sort(np.concatenate([[], *found])), np.sort(flat))


@tried(40)
@given(portions(), st.data())
def test_pieces_of_a_run_hold_its_elements_and_no_others(portion: Portion, data: st.DataObject) -> None:
    num_elements = math.prod(portion.shape)
    start = data.draw(st.integers(0, num_elements))
    stop = data.draw(st.integers(start, num_elements))
    check_pieces(portion, data.draw(st.sampled_from([None, (start, stop)])))


def test_pieces_of_every_run_of_a_small_portion_hold_its_elements() -> None:
    portion = Portion(global_shape=(3, 5), dim=1, ranges=((0, 1), (3, 5)))
    for run in combinations(range(10), 2):
        check_pieces(portion, run)


@tried(40)
@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_portions_of_all_ranks_cover_a_packed_tensor_once(
    units: int, count: int, unit: int, num_parts: int, width: int
) -> None:
    size = units * unit
    cuts = even_cuts(size, count, unit=unit)
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == size
    lengths = [stop - start for start, stop in cuts]
    assert max(lengths) - min(lengths) <= unit
    assert lengths == sorted(lengths, reverse=True)
    pieces: list[Piece] = []
    for start, stop in cuts:
        ranges = tuple((part * size + start, part * size + stop) for part in range(num_parts))
        portion = Portion(global_shape=(width, num_parts * size), dim=1, ranges=ranges)
        half = math.prod(portion.shape) // 2
        for run in ((0, half), (half, math.prod(portion.shape))):
            pieces += [piece for piece, _ in portion.pieces("w", "float32", run)]
    if size:
        assert check_cover(pieces) == []
