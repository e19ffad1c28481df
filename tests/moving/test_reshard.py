"""Moving state between layouts on simulated ranks: every byte, how many at a time, and what is refused."""

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
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.plan.reshard import ReshardPlan, plan_reshard
from shardwise.space import Cut, Layout, Mesh, Piece, Shard
from tests.moving.layouts import Side, State, bits, empty_state, sides, state_of, strided, whole_values
from tests.plan.strategies import proven

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


class Watched:
    """A channel that knows how many bytes of messages are under way, and calls `at_send` before each leaves."""

    def __init__(self, channel: sw.Channel, at_send: Callable[[], None] = lambda: None) -> None:
        self._channel = channel
        self._at_send = at_send
        self.under_way = self.most_under_way = self.largest = self.num_messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        self._at_send()
        return self._watch(tensor, self._channel.send(tensor, destination, purpose=purpose))

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        return self._watch(tensor, self._channel.receive(tensor, source, purpose=purpose))

    def _watch(self, tensor: torch.Tensor, work: Work) -> Work:
        self.under_way += tensor.nbytes
        self.num_messages += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.largest = max(self.largest, tensor.nbytes)
        return WatchedWork(self, work, tensor.nbytes)


class WatchedWork:
    def __init__(self, watched: Watched, work: Work, num_bytes: int) -> None:
        self._watched, self._work, self._num_bytes = watched, work, num_bytes

    def wait(self) -> None:
        self._work.wait()
        self._watched.under_way -= self._num_bytes


def of_layers(layout: Layout, rank: int, num_layers: int = 12) -> list[Piece]:
    return [layout.piece(rank, name=f"layers.{at}", dtype="float32", global_shape=(8, 16)) for at in range(num_layers)]


LAYERS = {f"layers.{at}": whole_values("float32", (8, 16)) + at for at in range(12)}

RUNS = Layout(Mesh(dp_shard=4), {"dp_shard": Cut((0, 10, 20, 70, 128))})
COLUMNS = Layout(Mesh(tp=4), {"tp": Shard(1)})


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


def test_a_state_may_be_moved_into_itself_but_not_over_itself() -> None:
    memory = torch.arange(12.0)
    names = ("a", "b", "c")
    source = {
        Piece(name=name, dtype="float32", global_shape=(4,)): memory[at * 4 :][:4] for at, name in enumerate(names)
    }
    (result,) = sw.simulate(1, lambda channel: sw.reshard(source, {**source}, channel))
    assert memory.tolist() == list(range(12))
    assert result == source
    one, two, three = source
    for target in ({one: memory[4:8]}, {two: memory[7:11]}, {one: memory[:4], three: memory[1:5]}):
        with pytest.raises(sw.ShardwiseError, match=r"would be written into memory of [abc]"):
            sw.simulate(1, lambda channel, target=target: sw.reshard(source, target, channel))  # type: ignore[misc]
    assert memory.tolist() == list(range(12))


def over(memory: torch.Tensor, first: int, size: int, step: int) -> torch.Tensor:
    return memory[first : first + size * step : step]


A, B, C = (Piece(name=name, dtype="float32", global_shape=(4,)) for name in "abc")
FREE_OR_NOT: list[tuple[Callable[[torch.Tensor], tuple[State, State]], str | None]] = [
    (lambda m: ({A: m[0:4], B: over(m, 0, 4, 5)}, {C: m[1:5]}), "c.* memory of a"),
    (lambda m: ({A: m[0:12:3], B: m[1:5]}, {C: over(m, 6, 4, 3)}), "c.* memory of a"),
    (lambda m: ({A: m[0:4]}, {B: over(m, 3, 4, 3)}), "b.* memory of a"),
    (lambda m: ({A: m[4:8]}, {B: over(m, 0, 4, 5)}), "b.* memory of a"),
    (lambda m: ({A: over(m, 0, 4, 2)}, {A: over(m, 0, 4, 3)}), "a.* memory of a"),
    (lambda m: ({A: over(m, 0, 4, 2)}, {A: over(m, 0, 4, 2), B: over(m, 1, 4, 2)}), None),
    (lambda m: ({A: m[0:4], B: m[2:6]}, {A: m[0:4]}), None),
    (lambda m: ({A: m[0:4], B: m[2:6]}, {A: m[0:4], B: m[2:6], C: m[3:7]}), "c.* memory of a(.|\\n)*c.* memory of b"),
    (lambda m: ({A: over(m, 0, 4, 2), B: m[8:12]}, {C: over(m, 1, 4, 2)}), None),
]
"""What is read and written of one memory, and what is said of it."""


@pytest.mark.parametrize(("lie", "text"), FREE_OR_NOT, ids=lambda _: "")
def test_only_targets_that_share_elements_with_what_is_read_are_refused(
    lie: Callable[[torch.Tensor], tuple[State, State]], text: str | None
) -> None:
    memory = torch.arange(20.0)
    source, target = lie(memory)
    given: State = {piece: source.get(piece, torch.full((4,), 7.0)) for piece in (A, B, C)}
    before = {piece: tensor.tolist() for piece, tensor in given.items()}
    if text is None:
        (result,) = sw.simulate(1, lambda channel: sw.reshard(given, {**target}, channel))
        assert all(result[piece].tolist() == before[piece] for piece in target)
        assert {piece: tensor.tolist() for piece, tensor in given.items()} == before
    else:
        with pytest.raises(sw.ShardwiseError, match=text):
            sw.simulate(1, lambda channel: sw.reshard(given, {**target}, channel))
        assert memory.tolist() == list(range(20))


def piece(name: str = "w", shape: tuple[int, ...] = (4,), dtype: str = "float32", **place: Any) -> Piece:
    return Piece(name=name, dtype=dtype, global_shape=shape, **place)


REFUSALS: list[tuple[str, dict[int, Any], dict[int, Any], dict[str, Any], str]] = [
    ("nobody", {0: {}}, {1: {piece(): None}}, {}, "w: rank 1 wants it, and no rank holds a tensor of this name"),
    (
        "part",
        {0: {piece(run=(0, 3)): torch.zeros(3)}},
        {1: {piece(): None}},
        {},
        r"w: rank 1 wants \[0:4\] of it, and 1 of its 4 elements are held by no rank, the first at index \(3,\)",
    ),
    (
        "dtype",
        {0: {piece(): torch.zeros(4)}},
        {1: {piece(dtype="int32"): None}},
        {},
        "held as float32, but rank 1 wants it as int32; want float32, or say cast=True",
    ),
    (
        "cast",
        {0: {piece(): torch.zeros(4)}},
        {1: {piece(dtype="float4_e2m1fn_x2"): None}},
        {"cast": True},
        "torch cannot cast float32 to float4_e2m1fn_x2",
    ),
    (
        "tensors",
        {1: {piece(): torch.zeros(5), "b": torch.zeros(1), piece("c"): torch.zeros(4).int(), piece("d"): None}},
        {},
        {},
        r"rank 1: 4 problems:(.|\n)*w\[0:4\] has 4 elements, but its tensor has shape \[5\](.|\n)*named by a Piece"
        r"(.|\n)*but its tensor of int32(.|\n)*a NoneType",
    ),
    (
        "targets",
        {},
        {
            1: {
                piece(): torch.zeros(1).expand(4),
                piece("m"): torch.zeros(4, device="meta"),
                piece("s"): torch.zeros(4).to_sparse(),
                piece("x", dtype="y"): None,
            }
        },
        {},
        r"rank 1: 4 problems:(.|\n)*share memory \(expanded\)(.|\n)*on meta(.|\n)*sparse(.|\n)*'y', which is no dtype",
    ),
    ("bytes", {}, {}, {"max_bytes": 10}, "max_bytes is 10; messages need at least 64 bytes"),
]


@pytest.mark.parametrize(("source", "target", "options", "text"), [row[1:] for row in REFUSALS], ids=lambda _: "")
def test_every_rank_refuses_alike_before_anything_moves(
    source: dict[int, Any], target: dict[int, Any], options: dict[str, Any], text: str
) -> None:
    kept = piece("kept")

    def move(channel: sw.Channel) -> str:
        mine = {kept: torch.ones(4)} | source.get(channel.rank, {})
        room = torch.zeros(4)
        with pytest.raises(sw.ShardwiseError, match=text) as error:
            sw.reshard(mine, {kept: room} | target.get(channel.rank, {}), channel, free_sources=True, **options)
        assert len(mine) == 1 + len(source.get(channel.rank, {}))
        assert room.tolist() == [0.0] * 4
        return str(error.value)

    assert len(set(sw.simulate(2, move))) == 1


def test_ranks_that_ask_for_different_things_are_named() -> None:
    def move(channel: sw.Channel) -> None:
        sw.reshard({}, {}, channel, cast=channel.rank == 1)

    with pytest.raises(
        sw.ShardwiseError, match=r"rank 1 reshards with .*'cast': True\}, but rank 0 with .*make the same"
    ):
        sw.simulate(2, move)


def test_plans_that_differ_are_found_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def planned(*sides: Any, **options: Any) -> ReshardPlan:
        calls.append(0)
        plan = plan_reshard(*sides, **options)
        return plan if len(calls) == 1 else replace(plan, tensors=plan.tensors[::-1])

    monkeypatch.setattr("shardwise.moving.consent.plan_reshard", planned)
    room = torch.zeros(4)

    def move(channel: sw.Channel) -> None:
        source = {piece("a"): torch.ones(4), piece("b"): torch.ones(4)}
        sw.reshard(source, {piece("a"): room, piece("b"): None}, channel)

    with pytest.raises(sw.ShardwiseError, match=r"different plans of a reshard; first difference: rank 0 has tensor"):
        sw.simulate(2, move)
    assert room.tolist() == [0.0] * 4


def test_only_a_source_that_can_lose_entries_is_freed() -> None:
    def move(channel: sw.Channel) -> None:
        sw.reshard(MappingProxyType({}), {}, channel, free_sources=True)

    with pytest.raises(sw.ShardwiseError, match="takes entries out of the source, but it is a mappingproxy"):
        sw.simulate(1, move)


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


def test_a_rank_without_memory_for_its_target_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ranks have agreed: rank 1 wants the tensor, and waits in vain for room; rank 0 waits for rank 2."""
    empty = torch.empty

    def too_small(*size: Any, **options: Any) -> torch.Tensor:
        if size == ((999,),):
            raise MemoryError("no room left")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", too_small)
    seen: list[str] = []
    alone, late = piece("alone", (999,)), piece("late", (5,))

    def move(channel: sw.Channel) -> None:
        source = {0: {alone: torch.ones(999)}, 1: {late: torch.ones(5)}}.get(channel.rank, {})
        target: dict[Piece, torch.Tensor | None] = {0: {late: None}, 1: {alone: None}}.get(channel.rank, {})  # type: ignore[assignment]
        try:
            sw.reshard(source, target, channel)
            channel.exchange(b"", purpose="going on")
        except sw.ShardwiseError as error:
            seen.append(str(error))
            raise

    with pytest.raises(MemoryError, match="no room left"):
        sw.simulate(3, move)
    assert len(seen) == 2
    assert all("rank 1 stopped: MemoryError in a reshard: no room left" in text for text in seen)


def test_thousands_of_small_tensors_travel_together() -> None:
    names = [f"layers.{at}" for at in range(2000)]

    def move(channel: sw.Channel) -> int:
        watched = Watched(channel)
        pieces = [piece(name) for name in names]
        source = {each: torch.full((4,), float(at)) for at, each in enumerate(pieces)} if channel.rank == 0 else {}
        result = sw.reshard(source, dict.fromkeys(pieces) if channel.rank == 1 else {}, watched)
        assert [tensor[3].item() for tensor in result.values()] == [float(at) for at in range(len(result))]
        return watched.num_messages

    assert sw.simulate(3, move) == [1, 1, 0]
