"""Moving state between layouts on simulated ranks: every byte, and how many at a time."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm import Work
from shardwise.moving.piece_exchange import pack_pieces, unpack_pieces
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.routes.reshard import plan_reshard
from shardwise.routes.reshard_plan import ReshardPlan
from shardwise.space import Mesh, Piece
from tests.engine.refusals import same_error_everywhere
from tests.moving.layouts import TENSORS, WHOLES, Side, State, bits, empty_state, sides, state_of, strided, whole_values
from tests.moving.watched import COLUMNS, LAYERS, RUNS, Watched, of_layers, piece_of
from tests.plan.strategies import proven
from tests.refusals import Refusals
from tests.space.layouts import Cut, Layout, Shard


def layouts(num_ranks: int) -> st.SearchStrategy[tuple[Side, Side]]:
    tensors = st.lists(st.sampled_from(TENSORS), min_size=1, max_size=4, unique=True)

    def twice(chosen: list[tuple[str, str, tuple[int, ...]]]) -> st.SearchStrategy[Side]:
        """Two layouts at a time: pieces that overlap."""
        both = st.tuples(sides(num_ranks, chosen), sides(num_ranks, chosen))
        return both.map(lambda pair: [list(dict.fromkeys(one + other)) for one, other in zip(*pair, strict=True)])

    return tensors.flatmap(
        lambda chosen: st.tuples(sides(num_ranks, chosen) | twice(chosen), sides(num_ranks, chosen) | twice(chosen))
    )


@proven
@given(st.integers(1, 4).flatmap(layouts), st.sampled_from([64, 100, 1000, 1 << 20]), st.data())
def test_any_layout_becomes_any_other_bit_for_bit(both: tuple[Side, Side], max_bytes: int, data: st.DataObject) -> None:
    held, wanted = both
    is_strided, is_given = data.draw(st.booleans()), data.draw(st.booleans())

    def move(channel: sw.Channel) -> None:
        source = state_of(held[channel.rank], WHOLES)
        target: dict[Piece, torch.Tensor | None] = dict(empty_state(wanted[channel.rank]))
        if is_strided:
            source = {piece: strided(tensor) for piece, tensor in source.items()}
            target = {piece: strided(tensor) for piece, tensor in target.items() if tensor is not None}
        before = dict(source)
        given_target = target if is_given else dict.fromkeys(target)
        result = sw.reshard(source, given_target, channel, max_bytes=max_bytes)
        assert source == before
        assert list(result) == list(target)
        for piece, expected in state_of(wanted[channel.rank], WHOLES).items():
            assert (result[piece].dtype, result[piece].shape) == (expected.dtype, expected.shape)
            assert bits(result[piece]) == bits(expected)
            assert not is_given or result[piece] is target[piece]

    sw.simulate(len(held), move)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("max_bytes", [64, 100, 1 << 20])
def test_every_dtype_that_can_be_named_arrives_whole(max_bytes: int) -> None:
    wholes = {dtype: whole_values(dtype, (100,)) for dtype in ITEMSIZE_BYTES}
    pieces = [Piece(name=dtype, dtype=dtype, global_shape=(100,)) for dtype in wholes]

    def move(channel: sw.Channel) -> list[str]:
        source = {piece: wholes[piece.name] for piece in pieces} if channel.rank == 0 else {}
        came = sw.reshard(source, dict.fromkeys(pieces), channel, max_bytes=max_bytes)
        return [piece.name for piece in pieces if bits(came[piece]) != bits(wholes[piece.name])]

    assert sw.simulate(2, move) == [[], []]


@pytest.mark.parametrize("max_bytes", [64, 1024, 4096, 1 << 20])
def test_no_rank_has_more_bytes_under_way_than_asked_for(max_bytes: int) -> None:
    def move(channel: sw.Channel) -> tuple[int, int, int]:
        watched = Watched(channel)
        source = state_of(of_layers(RUNS, channel.rank), LAYERS)
        wanted = dict.fromkeys(of_layers(COLUMNS, channel.rank))
        result = sw.reshard(source, wanted, watched, max_bytes=max_bytes)
        assert all(bits(result[piece]) == bits(expected) for piece, expected in state_of(list(wanted), LAYERS).items())
        assert watched.under_way == 0
        return watched.most_under_way, watched.largest, watched.num_messages

    for most, largest, num_messages in sw.simulate(4, move):
        assert 0 < most <= max_bytes
        assert largest <= max_bytes // 4
        assert num_messages <= 6 or max_bytes < 1 << 20  # one message per pair and way


def test_sources_go_as_they_leave() -> None:
    """Each layer goes from rank 0 to rank 1: rank 0 never has more than the model once."""
    alive: list[int] = []

    def move(channel: sw.Channel) -> None:
        pieces = of_layers(Layout(Mesh(), {}), 0)
        source: State = state_of(pieces, LAYERS) if channel.rank == 0 else {}
        source |= {Piece(name="unwanted", dtype="float32", global_shape=(4,)): torch.zeros(4)}
        held = [weakref.ref(tensor) for tensor in source.values()]

        def look() -> None:
            alive.extend([sum(each() is not None for each in held)] * (channel.rank == 0))

        target: dict[Piece, torch.Tensor | None] = dict.fromkeys(pieces) if channel.rank == 1 else {}
        result = sw.reshard(source, target, Watched(channel, look), free_sources=True, max_bytes=4096)
        assert source == {}
        assert not any(each() is not None for each in held)
        assert all(bits(result[piece]) == bits(LAYERS[piece.name]) for piece in target)

    gc.collect()
    sw.simulate(2, move)
    assert alive == [10, 8, 6, 4, 2, 0]  # before each message leaves its two layers are gone, and the unwanted


def test_pieces_of_several_tensors_come_in_any_order() -> None:
    wholes = {"a": torch.arange(6.0), "b": -torch.arange(6.0)}
    parts = [piece_of(name, (6,), run=(at, at + 2)) for at in (0, 2, 4) for name in wholes]
    assert unpack_pieces(pack_pieces(parts)) == parts

    def move(channel: sw.Channel) -> None:
        mine = parts if channel.rank == 0 else parts[::-1]
        source = {piece: wholes[piece.name][slice(*piece.elements)].clone() for piece in mine}
        result = sw.reshard(source if channel.rank == 0 else {}, dict.fromkeys(mine), channel)
        assert list(result) == mine
        assert all(torch.equal(each, source[piece]) for piece, each in result.items())

    sw.simulate(2, move)


def test_subsets_of_ranks_that_do_not_overlap_trainer_to_inference() -> None:
    """Two ranks train with uneven runs; the two others serve: columns, and a narrower dtype."""
    runs = Layout(Mesh(dp_shard=2), {"dp_shard": Cut((0, 50, 128))})
    columns = Layout(Mesh(tp=2), {"tp": Shard(1)})

    def served(rank: int) -> list[Piece]:
        return [columns.piece(rank, name=name, dtype="bfloat16", global_shape=(8, 16)) for name in LAYERS]

    finite = {name: torch.arange(128.0).view(8, 16) / 7 + at for at, name in enumerate(LAYERS)}

    def move(channel: sw.Channel) -> int:
        recorded = sw.Recorded(channel)
        source = state_of(of_layers(runs, channel.rank), finite) if channel.rank < 2 else {}
        target = dict.fromkeys(served(channel.rank - 2)) if channel.rank >= 2 else {}
        result = sw.reshard(source, target, recorded, cast=True)
        for piece, tensor in result.items():
            assert torch.equal(tensor, finite[piece.name].bfloat16()[piece.box.slices()])
        return recorded.bytes_sent("send")

    sent = sw.simulate(4, move)
    assert sum(sent[:2]) <= 12 * (128 * 2 + 4 * 16)  # cast before it travels; parts start at whole 16 bytes
    assert sent[2:] == [0, 0]


def over(memory: torch.Tensor, first: int, size: int, step: int) -> torch.Tensor:
    return memory[first : first + size * step : step]


A, B, C = (Piece(name=name, dtype="float32", global_shape=(4,)) for name in "abc")
KEPT = piece_of("kept")


def move(source: dict[int, Any], target: dict[int, Any], *, on: int | None = None, **options: Any) -> None:
    """A move of two ranks, which have a tensor besides; all refuse alike. on: the only rank with these options."""

    def run(channel: sw.Channel) -> None:
        mine, room = {KEPT: torch.ones(4)} | source.get(channel.rank, {}), torch.zeros(4)
        before = len(mine)
        more = options if on in (None, channel.rank) else {}
        try:
            sw.reshard(mine, {KEPT: room} | target.get(channel.rank, {}), channel, free_sources=True, **more)
        finally:
            assert len(mine) == before
            assert not room.any()

    raise same_error_everywhere(2, run)


def with_other(source: Any, target: Any, **options: Any) -> None:
    """Rank 1 gives these."""

    def run(channel: sw.Channel) -> None:
        given: tuple[Any, Any] = (source, target) if channel.rank else ({A: torch.ones(4)}, {A: None})
        sw.reshard(given[0], given[1], channel, **(options if channel.rank else {}))

    raise same_error_everywhere(2, run)


def lie(memory: torch.Tensor, source: State, target: State) -> None:
    """In one memory, of which nothing is written."""
    before = memory.clone()
    try:
        given: State = {piece: source.get(piece, torch.full((4,), 7.0)) for piece in (A, B, C)}
        sw.simulate(1, lambda channel: sw.reshard(given, {**target}, channel))
    finally:
        assert torch.equal(memory, before)


M = torch.arange(20.0)
ONES = {A: torch.ones(4)}

REFUSED = Refusals(
    "moving.reshard",
    {
        "nobody holds it": lambda: move({}, {1: {piece_of(): None}}),
        "nobody holds a part": lambda: move({0: {piece_of(run=(0, 3)): torch.zeros(3)}}, {1: {piece_of(): None}}),
        "another dtype": lambda: move({0: {piece_of(): torch.zeros(4)}}, {1: {piece_of(dtype="int32"): None}}),
        "no cast of torch": lambda: move(
            {0: {piece_of(): torch.zeros(4)}}, {1: {piece_of(dtype="float4_e2m1fn_x2"): None}}, cast=True
        ),
        "sources that are none": lambda: move(
            {
                1: {
                    **{piece_of(): torch.zeros(5), "b": torch.zeros(1)},
                    **{piece_of("c"): torch.zeros(4).int(), piece_of("d"): None},
                }
            },
            {},
        ),
        "targets that are none": lambda: move(
            {},
            {
                1: {
                    **{piece_of(): torch.zeros(1).expand(4), piece_of("m"): torch.zeros(4, device="meta")},
                    **{piece_of("s"): torch.zeros(4).to_sparse(), piece_of("x", dtype="y"): None},
                }
            },
        ),
        "few bytes": lambda: move({}, {}, max_bytes=10),
        "a cast on one rank": lambda: move({}, {}, on=1, cast=True),
        "a list as source": lambda: with_other([A], {A: None}),
        "a list as target": lambda: with_other(ONES, [A]),
        "bytes as text": lambda: with_other(ONES, {A: None}, max_bytes="64"),
        "a source that cannot lose entries": lambda: sw.simulate(
            1, lambda channel: sw.reshard(MappingProxyType({}), {}, channel, free_sources=True)
        ),
        # What is read and written of one memory.
        "over a source": lambda: lie(M, {A: M[0:4], B: over(M, 0, 4, 5)}, {C: M[1:5]}),
        "over the end of a source": lambda: lie(M, {A: M[0:4]}, {B: over(M, 3, 4, 3)}),
        "over itself in other strides": lambda: lie(M, {A: over(M, 0, 4, 2)}, {A: over(M, 0, 4, 3)}),
        "over two sources": lambda: lie(M, {A: M[0:4], B: M[2:6]}, {A: M[0:4], B: M[2:6], C: M[3:7]}),
        "two targets in one place": lambda: lie(M, {}, {A: M[0:4], B: M[0:4]}),
        "strided targets that overlap": lambda: lie(M, {}, {A: M[0:8:2], B: M[1:9:2], C: M[4:16:3]}),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_move_is_refused_before_anything_moves(case: str) -> None:
    REFUSED.check(case)


FREE: list[Callable[[torch.Tensor], tuple[State, State]]] = [
    lambda m: ({A: m[0:4], B: m[4:8], C: m[8:12]}, {A: m[0:4], B: m[4:8], C: m[8:12]}),
    lambda m: ({A: over(m, 0, 4, 2)}, {A: over(m, 0, 4, 2), B: over(m, 1, 4, 2)}),
    lambda m: ({A: m[0:4], B: m[2:6]}, {A: m[0:4], B: m[2:6]}),
    lambda m: ({A: over(m, 0, 4, 2), B: m[8:12]}, {C: over(m, 1, 4, 2)}),
    lambda m: ({}, {A: m[0:12:3], B: m[1:13:3], C: m[2:14:3]}),  # columns
    lambda m: ({}, {A: m[8:12], B: m[4:8], C: m[0:4]}),
]


@pytest.mark.parametrize("lie", FREE, ids=lambda _: "")
def test_targets_that_share_no_element_with_what_is_read_are_written(
    lie: Callable[[torch.Tensor], tuple[State, State]],
) -> None:
    source, target = lie(torch.arange(20.0))
    given: State = {piece: source.get(piece, torch.full((4,), 7.0)) for piece in (A, B, C)}
    before = {piece: tensor.tolist() for piece, tensor in given.items()}
    (result,) = sw.simulate(1, lambda channel: sw.reshard(given, {**target}, channel))
    assert all(result[piece].tolist() == before[piece] for piece in target)
    assert {piece: tensor.tolist() for piece, tensor in given.items()} == before


def test_plans_that_differ_are_found_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def planned(*sides: Any, **options: Any) -> ReshardPlan:
        calls.append(0)
        plan = plan_reshard(*sides, **options)
        return plan if len(calls) == 1 else replace(plan, tensors=plan.tensors[::-1])

    monkeypatch.setattr("shardwise.moving.piece_exchange.plan_reshard", planned)
    room = torch.zeros(4)

    def move(channel: sw.Channel) -> None:
        source = {piece_of("a"): torch.ones(4), piece_of("b"): torch.ones(4)}
        sw.reshard(source, {piece_of("a"): room, piece_of("b"): None}, channel)

    with pytest.raises(sw.ShardwiseError, match=r"different plans of a reshard; first difference: rank 0 has tensor"):
        sw.simulate(2, move)
    assert room.tolist() == [0.0] * 4


def test_a_rank_that_fails_on_the_way_stops_the_others_with_its_reason() -> None:
    class Failing(Watched):
        def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
            if self.num_messages > 5 and self.rank == 2:
                raise MemoryError("no room left")
            return super().send(tensor, destination, purpose=purpose)

    seen: list[str] = []

    def move(channel: sw.Channel) -> None:
        source = state_of(of_layers(RUNS, channel.rank), LAYERS)
        try:
            sw.reshard(source, dict.fromkeys(of_layers(COLUMNS, channel.rank)), Failing(channel), max_bytes=4096)
        except sw.ShardwiseError as error:
            seen.append(str(error))
            raise

    with pytest.raises(MemoryError, match="no room left"):
        sw.simulate(4, move)
    assert len(seen) == 3
    assert all("rank 2 stopped: MemoryError in a reshard: no room left" in text for text in seen)
