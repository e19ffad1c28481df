"""Moving state between layouts on simulated ranks: every byte, and how many at a time."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Mesh, Piece
from tests.moving.layouts import Side, State, bits, empty_state, sides, state_of, strided, whole_values
from tests.moving.watched import COLUMNS, LAYERS, RUNS, Watched, of_layers, piece_of
from tests.plan.strategies import proven
from tests.space.layouts import Cut, Layout, Shard

TENSORS = (
    ("w", "float32", (6, 5)),
    ("b", "bfloat16", (7,)),
    ("scale", "float8_e4m3fn", (3, 4)),
    ("mask", "bool", (2, 3, 4)),
    ("phase", "complex64", (5, 2)),
    ("wide", "complex128", (3,)),
    ("step", "int64", ()),
    ("none", "float32", (0, 3)),
)
WHOLES = {name: whole_values(dtype, shape) for name, dtype, shape in TENSORS}


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


def test_sources_go_as_they_leave_and_targets_come_with_their_first_bytes() -> None:
    """Each layer goes from rank 0 to rank 1: neither ever has much more than the model once."""
    alive: dict[int, list[int]] = {0: [], 1: []}
    whole = Layout(Mesh(), {})

    def move(channel: sw.Channel) -> None:
        pieces = of_layers(whole, 0)
        source: State = state_of(pieces, LAYERS) if channel.rank == 0 else {}
        source |= {Piece(name="unwanted", dtype="float32", global_shape=(4,)): torch.zeros(4)}
        held = [weakref.ref(tensor) for tensor in source.values()]
        num_allocated: list[weakref.ref[torch.Tensor]] = []

        def look() -> None:
            alive[channel.rank].append(sum(each() is not None for each in held))

        target: dict[Piece, torch.Tensor | None] = dict.fromkeys(pieces) if channel.rank == 1 else {}
        watched = Watched(channel, look)
        made: list[int] = []
        empty = torch.empty

        def counted(*size: Any, **options: Any) -> torch.Tensor:
            tensor = empty(*size, **options)
            if tensor.shape == (8, 16):
                num_allocated.append(weakref.ref(tensor))
                made.append(watched.num_messages)
            return tensor

        if channel.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", counted)
                result = sw.reshard(source, target, watched, free_sources=True, max_bytes=4096)
        else:
            result = sw.reshard(source, target, watched, free_sources=True, max_bytes=4096)
        assert source == {}
        assert not any(each() is not None for each in held)
        if channel.rank == 1:
            assert all(bits(result[piece]) == bits(LAYERS[piece.name]) for piece in pieces)
            # Two layers a message; a layer's memory is taken when its message was received, with one more under way.
            assert made == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6]

    gc.collect()
    sw.simulate(2, move)
    assert alive[0] == [10, 8, 6, 4, 2, 0]  # before each message leaves its two layers are gone, and the unwanted


def test_what_stays_is_copied_without_a_message() -> None:
    def move(channel: sw.Channel) -> int:
        recorded = sw.Recorded(channel)
        pieces = of_layers(RUNS, channel.rank)
        source = state_of(pieces, LAYERS)
        result = sw.reshard(source, dict.fromkeys(pieces), recorded)
        assert all(bits(result[piece]) == bits(source[piece]) for piece in pieces)
        assert all(result[piece].data_ptr() != source[piece].data_ptr() for piece in pieces if piece.num_elements)
        return recorded.bytes_sent("send")

    assert sw.simulate(4, move) == [0, 0, 0, 0]


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


def test_targets_may_be_parameters_and_views_of_one_buffer() -> None:
    buffer = torch.nn.Parameter(torch.zeros(20))
    pieces = [Piece(name=name, dtype="float32", global_shape=(2, 5)) for name in "ab"]
    with torch.no_grad():
        target = {piece: buffer[at * 10 : at * 10 + 10].view(2, 5) for at, piece in enumerate(pieces)}
    source = {piece: torch.full((2, 5), at + 1.0, requires_grad=True) for at, piece in enumerate(pieces)}
    sw.simulate(1, lambda channel: sw.reshard(source, {**target}, channel))
    assert buffer.tolist() == [1.0] * 10 + [2.0] * 10


def test_conjugates_give_their_values() -> None:
    piece = Piece(name="w", dtype="complex64", global_shape=(2,))
    source = {piece: torch.tensor([1 + 2j, 3 - 1j]).conj()}
    (result,) = sw.simulate(1, lambda channel: sw.reshard(source, {piece: None}, channel))
    assert result[piece].tolist() == [1 - 2j, 3 + 1j]


def test_thousands_of_small_tensors_travel_together() -> None:
    names = [f"layers.{at}" for at in range(2000)]

    def move(channel: sw.Channel) -> int:
        watched = Watched(channel)
        pieces = [piece_of(name) for name in names]
        source = {each: torch.full((4,), float(at)) for at, each in enumerate(pieces)} if channel.rank == 0 else {}
        result = sw.reshard(source, dict.fromkeys(pieces) if channel.rank == 1 else {}, watched)
        assert [tensor[3].item() for tensor in result.values()] == [float(at) for at in range(len(result))]
        return watched.num_messages

    assert sw.simulate(3, move) == [1, 1, 0]
