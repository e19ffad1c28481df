"""Reads that ranks plan alone, against a count of every block and every element."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.contents import StoredPiece
from shardwise.checkpoint.read_plan import (
    BlockSpan,
    ReadPlan,
    count_exact_ranges,
    exact_ranges,
    missing,
    plan_reads,
)
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import BlockPart, Box, Move, Piece
from tests.properties import tried
from tests.space.plain import Shape, elements_of_box, elements_of_piece, pieces_of, runs_within, shapes

proven = tried(25)


@dataclass(frozen=True, kw_only=True)
class Case:
    stored: list[StoredPiece]
    wanted: list[list[Piece]]
    readers: frozenset[int]
    block_bytes: int

    def plan(self, rank: int) -> ReadPlan:
        return plan_reads(self.stored, self.wanted, rank, block_bytes=self.block_bytes, readers=self.readers)

    def plans(self) -> list[ReadPlan]:
        return [self.plan(rank) for rank in range(len(self.wanted))]

    def elements_of_span(self, span: BlockSpan) -> list[int]:
        """The elements of the tensor that the span has, in the order of its bytes."""
        piece = self.stored[span.ordinal].piece
        per_block = self.block_bytes // itemsize_bytes(piece.dtype)
        return elements_of_piece(piece)[span.first_block * per_block : span.last_block * per_block]

    def needers_of_blocks(self) -> dict[tuple[int, int], set[int]]:
        """Who needs each block (ordinal, block) that anybody needs, found element by element."""
        needers: dict[tuple[int, int], set[int]] = {}
        for ordinal, stored in enumerate(self.stored):
            per_block = self.block_bytes // itemsize_bytes(stored.piece.dtype)
            block_of = {element: at // per_block for at, element in enumerate(elements_of_piece(stored.piece))}
            for rank, wants in enumerate(self.wanted):
                for want in wants:
                    if want.name == stored.piece.name:
                        for element in elements_of_piece(want):
                            if element in block_of:
                                needers.setdefault((ordinal, block_of[element]), set()).add(rank)
        return needers


def stored_in_files(pieces: Sequence[Piece], num_files: int = 1) -> list[StoredPiece]:
    """The pieces one after the other in files, by turns."""
    ends = [0] * num_files
    stored = []
    for at, piece in enumerate(pieces):
        file = at % num_files
        stored.append(StoredPiece(piece=piece, file=f"file{9 - file}", start=ends[file], checksums=None))
        ends[file] += stored[-1].num_bytes
    return stored


@st.composite
def disjoint_pieces(draw: st.DrawFn, name: str, dtype: str, shape: Shape) -> list[Piece]:
    """Pieces with elements that are cut from a tensor, and mostly make it up; in any order."""
    todo = [Box((0,) * len(shape), shape)]
    pieces: list[Piece] = []
    while todo:
        box = todo.pop()
        dim = draw(st.integers(-2, len(shape) - 1))
        if dim >= 0 and len(todo) + len(pieces) < 8:
            at = draw(st.integers(0, box.shape[dim]))
            sizes = [
                tuple(n if d == dim else size for d, size in enumerate(box.shape)) for n in (at, box.shape[dim] - at)
            ]
            after = tuple(start + at * (d == dim) for d, start in enumerate(box.offset))
            todo += [Box(box.offset, sizes[0]), Box(after, sizes[1])]
            continue
        at = draw(st.integers(0, box.num_elements))
        runs = draw(st.sampled_from([(None,), ((0, at), (at, box.num_elements))]))
        pieces += [
            Piece(name=name, dtype=dtype, global_shape=shape, offset=box.offset, shape=box.shape, run=run)
            for run in runs
        ]
    pieces = [piece for piece in draw(st.permutations(pieces)) if piece.num_elements]
    return pieces[draw(st.sampled_from([0, 0, 0, 1])) :]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pieces: list[Piece] = []
    tensors: dict[str, Shape] = {}
    for name in ("w", "optimizer/w/master", "step")[: draw(st.integers(1, 3))]:
        tensors[name] = draw(shapes().filter(lambda shape: 0 not in shape))
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "complex64"]))
        pieces += draw(disjoint_pieces(name, dtype, tensors[name]))
    stored = stored_in_files(pieces, draw(st.integers(1, 3)))
    known = sorted({piece.name for piece in pieces})
    wanted: list[list[Piece]] = []
    for _ in range(draw(st.integers(1, 6))):
        if len(wanted) > 0 and draw(st.booleans()):
            wanted.append(wanted[draw(st.integers(0, len(wanted) - 1))])  # a replica
            continue
        names = draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
        held = [draw(pieces_of(tensors[name], name)) for name in names]
        wanted.append([piece for piece in held if piece.num_elements])
    ranks = st.integers(0, len(wanted) - 1)
    readers = set(range(len(wanted))) if draw(st.booleans()) else draw(st.sets(ranks, min_size=1))
    block_bytes = draw(st.sampled_from([8, 16, 24, 64, 4096]))
    return Case(stored=stored, wanted=wanted, readers=frozenset(readers), block_bytes=block_bytes)


@proven
@given(cases())
def test_every_needed_block_is_read_once_by_a_reader_that_needs_it_and_no_other_block(case: Case) -> None:
    needers = case.needers_of_blocks()
    reader_of: dict[tuple[int, int], int] = {}
    for rank, plan in enumerate(case.plans()):
        for span in plan.reads:
            for block in range(span.first_block, span.last_block):
                assert (span.ordinal, block) not in reader_of
                reader_of[span.ordinal, block] = rank
    assert reader_of.keys() == needers.keys()
    for place, rank in reader_of.items():
        assert rank in (needers[place] & case.readers or case.readers)


@proven
@given(cases())
def test_reads_are_in_order_of_file_and_byte_and_as_long_as_possible(case: Case) -> None:
    for plan in case.plans():
        places = [
            (case.stored[span.ordinal].file, case.stored[span.ordinal].start + span.first_block * case.block_bytes)
            for span in plan.reads
        ]
        assert places == sorted(places)
        for spans in (plan.own_reads, plan.handed_reads):
            assert all(a.ordinal != b.ordinal or a.last_block < b.first_block for a, b in pairwise(spans))
        assert plan.read_bytes == sum(
            min(case.block_bytes, case.stored[span.ordinal].num_bytes - block * case.block_bytes)
            for span in plan.reads
            for block in range(span.first_block, span.last_block)
        )


@proven
@given(cases())
def test_what_a_rank_reads_for_itself_nobody_else_needs(case: Case) -> None:
    needers = case.needers_of_blocks()
    for rank, plan in enumerate(case.plans()):
        for spans, alone in ((plan.own_reads, True), (plan.handed_reads, False)):
            for span in spans:
                for block in range(span.first_block, span.last_block):
                    assert (needers[span.ordinal, block] <= {rank}) == alone


def places(part: BlockPart, shape: Shape) -> list[int]:
    return [part.start + element for element in elements_of_box(part.block, Box(part.offset, shape))]


def arrive(held: list[list[int]], elements: list[int], moved: list[Move]) -> None:
    """Put what arrives with the moves where it goes, behind what arrived there before."""
    for move in moved:
        for a, b in zip(places(move.source, move.shape), places(move.target, move.shape), strict=True):
            held[b].append(elements[a])


@proven
@given(cases(), st.booleans())
def test_every_wanted_element_arrives_exactly_once_and_all_ranks_agree(case: Case, in_blocks: bool) -> None:
    plans = case.plans()
    spans = [span for plan in plans for span in plan.reads]
    if in_blocks:  # whoever executes the plan may cut spans
        spans = [
            BlockSpan(span.ordinal, at, at + 1) for span in spans for at in range(span.first_block, span.last_block)
        ]
    ranks = range(len(case.wanted))
    held: list[list[list[list[int]]]] = [
        [[[] for _ in range(want.num_elements)] for want in wants] for wants in case.wanted
    ]
    for span in spans:
        elements = case.elements_of_span(span)
        per_rank = [plans[0].transfers(span, rank) for rank in ranks]
        assert all(plan.transfers(span, rank) == per_rank[rank] for rank in ranks for plan in plans)
        needers = tuple(rank for rank in ranks if per_rank[rank])
        assert needers
        assert all(plan.needers(span) == needers for plan in plans)
        for rank, transfers in enumerate(per_rank):
            assert [index for index, _ in transfers] == sorted({index for index, _ in transfers})
            for index, moved in transfers:
                assert moved
                arrive(held[rank][index], elements, moved)
    for rank, wants in enumerate(case.wanted):
        for index, want in enumerate(wants):
            there = {e for each in case.stored if each.piece.name == want.name for e in elements_of_piece(each.piece)}
            wanted = [[element] if element in there else [] for element in elements_of_piece(want)]
            assert held[rank][index] == wanted


@proven
@given(cases())
def test_exact_ranges_bring_every_wanted_element_once(case: Case) -> None:
    for wants in case.wanted:
        held: list[list[list[int]]] = [[[] for _ in range(want.num_elements)] for want in wants]
        found = list(exact_ranges(case.stored, wants))
        num_bytes = sum(source.num_elements * itemsize_bytes(case.stored[at].piece.dtype) for at, source, _, _ in found)
        num_ranges, counted_bytes = count_exact_ranges(case.stored, wants)
        assert counted_bytes == num_bytes
        assert num_ranges >= len(found), "runs that meet may be counted apart"
        assert found == sorted(found, key=lambda each: (each[2], each[0], each[1]))
        for ordinal, source, index, target in found:
            assert case.stored[ordinal].piece.name == wants[index].name
            for a, b in zip(range(*source), range(*target), strict=True):
                held[index][b].append(elements_of_piece(case.stored[ordinal].piece)[a])
        for want, elements in zip(wants, held, strict=True):
            there = {e for each in case.stored if each.piece.name == want.name for e in elements_of_piece(each.piece)}
            assert elements == [[element] if element in there else [] for element in elements_of_piece(want)]


@st.composite
def maybe_overlapping(draw: st.DrawFn) -> tuple[list[Piece], Piece]:
    if draw(st.booleans()):
        shape = draw(shapes())
        some = disjoint_pieces("w", "float32", shape) | st.lists(pieces_of(shape), max_size=4)
        return draw(some), draw(pieces_of(shape))
    shape = draw(st.sampled_from([(5, 6), (4, 3, 5)]))  # boxes in the middle of it, which leave a rest on every side
    boxes = st.tuples(*map(runs_within, shape)).filter(lambda spans: all(start < stop for start, stop in spans))
    pieces = [
        Piece(
            name="w",
            dtype="float32",
            global_shape=shape,
            offset=[start for start, _ in spans],
            shape=[stop - start for start, stop in spans],
        )
        for spans in draw(st.lists(boxes, min_size=2, max_size=4))
    ]
    return pieces, Piece(name="w", dtype="float32", global_shape=shape)


@proven
@given(maybe_overlapping())
def test_missing_elements_are_counted_one_by_one_also_where_stored_pieces_overlap(
    case: tuple[list[Piece], Piece],
) -> None:
    pieces, wanted = case
    there = {element for piece in pieces for element in elements_of_piece(piece)}
    expected = sum(element not in there for element in elements_of_piece(wanted))
    assert missing(stored_in_files(pieces), wanted) == expected


def box(shape: Shape, offset: Shape, size: Shape) -> Piece:
    return Piece(name="w", dtype="int8", global_shape=shape, offset=offset, shape=size)


def test_strips_read_only_the_blocks_that_they_touch() -> None:
    strip = box((100, 4000), (0, 40), (100, 20))
    stored = stored_in_files([box((100, 4000), (0, 0), (100, 4000))])
    case = Case(stored=stored, wanted=[[strip]], readers=frozenset({0}), block_bytes=80)
    assert case.plan(0).reads == tuple(BlockSpan(0, 50 * row, 50 * row + 1) for row in range(100))
    coarse = Case(stored=stored, wanted=case.wanted, readers=case.readers, block_bytes=4000)
    assert coarse.plan(0).reads == (BlockSpan(0, 0, 100),)


def test_what_all_need_is_read_in_equal_parts_by_all_who_see_the_storage() -> None:
    large = Piece(name="large", dtype="int8", global_shape=(1000 * 8,))
    small = [Piece(name=f"small{at}", dtype="int8", global_shape=(5,)) for at in range(400)]
    wants = [large, *small]
    stored = stored_in_files([large, *small])
    for readers in ({0, 1, 2, 3}, {1, 3}, {2}):
        case = Case(stored=stored, wanted=[wants] * 4, readers=frozenset(readers), block_bytes=8)
        for rank, plan in enumerate(case.plans()):
            of_large = [span for span in plan.reads if span.ordinal == 0]
            num_small = len(plan.reads) - len(of_large)
            if rank in readers:
                assert [span.last_block - span.first_block for span in of_large] == [1000 // len(readers)]
                assert abs(num_small - 400 // len(readers)) <= 2, "they are scattered, not counted off"
            else:
                assert plan.reads == ()


def test_a_wanted_tensor_that_is_not_stored_is_an_error() -> None:
    piece = Piece(name="w", dtype="int8", global_shape=(8,))
    with pytest.raises(KeyError, match="v"):
        plan_reads(stored_in_files([piece]), [[replace(piece, name="v")]], 0, block_bytes=8, readers={0})
