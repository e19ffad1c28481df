"""What is refused of a move on simulated ranks, and how a rank that fails stops the others."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import Work
from shardwise.plan.reshard import ReshardPlan, plan_reshard
from shardwise.space import Piece
from tests.moving.layouts import State, state_of
from tests.moving.watched import COLUMNS, LAYERS, RUNS, Watched, of_layers, piece_of


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


REFUSALS: list[tuple[str, dict[int, Any], dict[int, Any], dict[str, Any], str]] = [
    ("nobody", {0: {}}, {1: {piece_of(): None}}, {}, "w: rank 1 wants it, and no rank holds a tensor of this name"),
    (
        "part",
        {0: {piece_of(run=(0, 3)): torch.zeros(3)}},
        {1: {piece_of(): None}},
        {},
        r"w: rank 1 wants \[0:4\] of it, but no rank holds 1 of its 4 elements, the first at index \(3,\)",
    ),
    (
        "dtype",
        {0: {piece_of(): torch.zeros(4)}},
        {1: {piece_of(dtype="int32"): None}},
        {},
        "held as float32, but rank 1 wants it as int32; want float32, or say cast=True",
    ),
    (
        "cast",
        {0: {piece_of(): torch.zeros(4)}},
        {1: {piece_of(dtype="float4_e2m1fn_x2"): None}},
        {"cast": True},
        "torch cannot cast float32 to float4_e2m1fn_x2",
    ),
    (
        "tensors",
        {
            1: {
                piece_of(): torch.zeros(5),
                "b": torch.zeros(1),
                piece_of("c"): torch.zeros(4).int(),
                piece_of("d"): None,
            }
        },
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
                piece_of(): torch.zeros(1).expand(4),
                piece_of("m"): torch.zeros(4, device="meta"),
                piece_of("s"): torch.zeros(4).to_sparse(),
                piece_of("x", dtype="y"): None,
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
    kept = piece_of("kept")

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
        sw.ShardwiseError, match=r"rank 1 reshards with .*'cast': True, .*\}, but rank 0 with .*make the same"
    ):
        sw.simulate(2, move)


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
    alone, late = piece_of("alone", (999,)), piece_of("late", (5,))

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
