"""Weights of trainers in the tensors of receivers, on simulated ranks: every bit, byte that travels, and error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.checkpoint import StreamReport
from shardwise.comm import Work
from shardwise.comm.local_tensors import dtype_name
from shardwise.errors import MismatchError, PlanError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Mesh, Piece
from shardwise.testing.accelerator import behind
from tests.checkpoint.small_limits import small_limits
from tests.engine.refusals import same_error_everywhere
from tests.moving.layouts import TENSORS, WHOLES, Side, bits, empty_state, sides, state_of, strided
from tests.plan.strategies import proven
from tests.refusals import Refusals
from tests.space.layouts import Layout, Shard

Target = dict[Piece, torch.Tensor]


def two_sides(num_ranks: int) -> st.SearchStrategy[tuple[Side, Side]]:
    tensors = st.lists(st.sampled_from(TENSORS[:-1]), min_size=1, max_size=4, unique=True)
    return tensors.flatmap(lambda chosen: st.tuples(sides(num_ranks, chosen), sides(num_ranks, chosen)))


def needed_bytes(held: Side, wanted: Side) -> int:
    """Element by element."""
    num_bytes = 0
    for mine, theirs in zip(held, wanted, strict=True):
        have, want = (
            {(piece.name, element) for piece in pieces for element in elements_of(piece)} for pieces in (mine, theirs)
        )
        dtypes = {name: dtype for name, dtype, _ in TENSORS}
        num_bytes += sum(itemsize_bytes(dtypes[name]) for name, _ in want - have)
    return num_bytes


def elements_of(piece: Piece) -> list[int]:
    whole = torch.arange(torch.Size(piece.global_shape).numel()).view(piece.global_shape)
    part = whole[piece.box.slices()].reshape(-1)
    found: list[int] = part[slice(*piece.elements)].tolist()
    return found


@proven
@given(st.integers(1, 4).flatmap(two_sides), st.sampled_from([64, 1000, 1 << 20]), st.booleans(), st.booleans())
def test_any_layout_becomes_any_other_bit_for_bit_and_all_bytes_are_counted(
    both: tuple[Side, Side], max_bytes: int, is_strided: bool, delta: bool
) -> None:
    held, wanted = both

    def move(channel: sw.Channel) -> tuple[StreamReport, int]:
        source, target = state_of(held[channel.rank], WHOLES), empty_state(wanted[channel.rank])
        if is_strided:
            source, target = ({piece: strided(each) for piece, each in side.items()} for side in (source, target))
        recorded = sw.Recorded(channel)
        report = sw.stream(source, target, channel=recorded, delta=delta)
        for piece, expected in state_of(wanted[channel.rank], WHOLES).items():
            assert bits(target[piece]) == bits(expected)
        assert {call.operation for call in recorded.calls} <= {"exchange", "send", "receive"}
        return report, recorded.bytes_sent("send")

    with small_limits(max_bytes, block_bytes=16):
        reports, sent = zip(*sw.simulate(len(held), move), strict=True)
    assert all(each == reports[0] for each in reports)
    assert reports[0].sent_bytes == sum(sent)
    assert reports[0].needed_bytes == needed_bytes(held, wanted)


def served(num_bytes: int = 1 << 20, dtype: str = "float32") -> list[Piece]:
    """A matrix, cut by columns over two receivers, ranks 2 and 3."""
    rows = num_bytes // 64 // itemsize_bytes(dtype)
    layout = Layout(Mesh(tp=2), {"tp": Shard(1)})
    return [layout.piece(rank, name="w", dtype=dtype, global_shape=(rows, 64)) for rank in range(2)]


def trained(num_bytes: int = 1 << 20) -> list[Piece]:
    """The same matrix, cut by rows over ranks 0 and 1."""
    layout = Layout(Mesh(tp=2), {"tp": Shard(0)})
    return [layout.piece(rank, name="w", dtype="float32", global_shape=(num_bytes // 256, 64)) for rank in range(2)]


def random_values(piece: Piece) -> torch.Tensor:
    return torch.randn(piece.global_shape, generator=torch.Generator().manual_seed(0))[piece.box.slices()].clone()


def on_four(channel: sw.Channel, of_trainer: Callable[[Any], Any], of_receiver: Callable[[Any], Any]) -> Any:
    """Ranks 0 and 1 train, 2 and 3 receive."""
    if channel.rank < 2:
        return of_trainer({trained()[channel.rank]: random_values(trained()[channel.rank])})
    piece = served()[channel.rank - 2]
    return of_receiver({piece: torch.zeros(piece.shape)})


# Only what has changed


def test_with_delta_only_changed_blocks_travel_and_targets_need_no_memory_of_the_last_time() -> None:
    """Blocks of 4 streams are of 64 KiB each: rows 0 to 2047 go from rank 0, the others from rank 1, half to each."""
    first, second = 5, 3000  # rows: one of rank 0, one of rank 1

    def move(channel: sw.Channel) -> list[StreamReport]:
        source, target = on_four(channel, lambda held: (held, None), lambda wanted: (None, wanted))
        piece, tensor = next(iter((source or target).items()))
        reports = []

        def again(last: StreamReport | None = None) -> None:
            reports.append(sw.stream(source, target, channel=channel, delta=True, last=last))
            for piece, tensor in (target or {}).items():
                assert torch.equal(tensor, whole[piece.box.slices()])

        whole = random_values(Piece(name="w", dtype="float32", global_shape=(4096, 64)))
        again()  # everything
        again(reports[-1])  # nothing
        for row, number in ((first, 7.0), (second, 8.0)):  # an element of each trainer, both of rank 2's columns
            whole[row, 3] = number
            if piece.box.offset[0] <= row < piece.box.stop[0] and channel.rank < 2:
                tensor[row - piece.offset[0], 3] = number
        again(reports[-1])
        if channel.rank == 3:
            tensor[first] = (
                0.0  # a receiver that has spoilt its weights gets them again, though trainers have not moved
            )
        again()
        return reports

    with small_limits(block_bytes=1 << 16):
        everything, nothing, two, one = sw.simulate(4, move)[0]
    assert (everything.num_blocks, everything.skipped_blocks) == (16, 0)
    assert (nothing.skipped_blocks, nothing.skipped_bytes) == (16, 1 << 20)
    assert nothing.sent_bytes == 2 * 16 * 8  # checksums, there and back
    assert (two.skipped_blocks, two.skipped_bytes) == (14, 14 << 16)
    assert two.sent_bytes == nothing.sent_bytes + (2 << 16)
    assert (one.skipped_blocks, one.sent_bytes) == (15, nothing.sent_bytes + (1 << 16))
    assert everything.digest == nothing.digest != two.digest == one.digest


# Devices, dtypes and names


def test_weights_go_from_device_to_device_whose_streams_run_behind(fake: str) -> None:
    whole = random_values(Piece(name="w", dtype="float32", global_shape=(4096, 64)))

    def move(channel: sw.Channel) -> None:
        source, target = on_four(channel, lambda held: (held, None), lambda wanted: (None, wanted))
        source, target = (
            side and {piece: tensor.to(channel.device).add_(1) for piece, tensor in side.items()}
            for side in (source, target)
        )
        sw.stream(source, target, channel=channel)
        for piece, tensor in (target or {}).items():
            assert torch.equal(tensor.cpu(), whole[piece.box.slices()] + 1)

    with behind(1):
        sw.simulate(4, move, device=fake)


@pytest.mark.parametrize("name", ["w", "v"])
@pytest.mark.parametrize("wide", [False, True])
def test_payloads_of_nans_that_casts_change_are_no_difference(wide: bool, name: str) -> None:
    """Whether the target is of another dtype, or a rewrite casts."""
    values = torch.arange(0x7F80, 0x7F80 + 200, dtype=torch.int16).view(torch.bfloat16)
    values, other = (values, torch.float32) if wide else (values.float(), torch.bfloat16)
    rewrite = sw.Rewrite(f"w -> v, dtype='{dtype_name(other)}'") if name == "v" else None
    target = {name: torch.zeros(200, dtype=other)}

    def move(channel: sw.Channel) -> StreamReport:
        if channel.rank:
            return sw.stream(None, target, channel=channel)
        return sw.stream({"w": values}, None, channel=channel, rewrite=rewrite)

    sw.simulate(2, move)
    assert bits(target[name]) == bits(values.to(other))


def test_receivers_may_want_a_part_under_any_name_of_a_tied_tensor() -> None:
    tied = torch.randn(8, 4)

    def move(channel: sw.Channel) -> StreamReport:
        whole = {"embed": tied, "head": tied, "norm": torch.ones(4)}
        pieces = (
            [
                Piece(name=name, dtype="float32", global_shape=(8, 4), offset=(2, 0), shape=(3, 4))
                for name in (("head",), ("embed", "head"))[channel.rank - 1]
            ]
            if channel.rank
            else []
        )
        target = {piece: torch.zeros(3, 4) for piece in pieces}
        report = sw.stream(whole if channel.rank == 0 else None, target, channel=channel)
        assert all(torch.equal(tensor, tied[2:5]) for tensor in target.values())
        return report

    report = sw.simulate(3, move)[0]
    assert report.unwanted == ("norm",)
    assert report.needed_bytes == 3 * 48


# The second call


def test_a_rank_may_forget_the_last_call_or_want_another_part_in_the_next() -> None:
    def move(channel: sw.Channel) -> None:
        source, target = on_four(channel, lambda held: (held, None), lambda wanted: (None, wanted))
        last: StreamReport | None = None
        before = None
        for call in range(5):
            if call == 1 and channel.rank == 3:
                last = None
            if call == 2 and source is None:  # one of them wants half of it
                (piece,) = target
                target = {piece: target[piece]} if channel.rank == 2 else {piece.within(0, 64): torch.zeros(64)}
            if call == 4:
                last = before if channel.rank == 1 else last
            before = last
            last = sw.stream(source, target, channel=channel, last=last)
            for piece, tensor in (target or {}).items():
                whole = random_values(Piece(name="w", dtype="float32", global_shape=piece.global_shape))
                expected = whole[piece.box.slices()].reshape(-1)[slice(*piece.elements)]
                assert torch.equal(tensor.reshape(-1), expected)
                tensor.zero_()

    sw.simulate(4, move)


# What cannot be


def stream(
    arguments: Callable[[sw.Channel], dict[str, Any]] = lambda channel: {}, *, target: Any = None, **of_rank_2: Any
) -> None:
    """Rank 0 has `w`, and ranks 1 and 2 want it; rank 2 gives something else. Targets stay, and the channel is used."""

    def move(channel: sw.Channel) -> None:
        room = {"w": torch.zeros(4, 2)}
        given: dict[str, Any] = {"source": None, "target": room} if channel.rank else {"source": HELD, "target": None}
        given |= arguments(channel)
        if channel.rank == 2:
            given |= of_rank_2 | ({"target": target} if target is not None else {})
        try:
            sw.stream(given.pop("source"), given.pop("target"), channel=channel, **given)
        finally:
            assert not room["w"].any()

    raise same_error_everywhere(3, move)


HELD = {"w": torch.ones(4, 2)}
NONE: Any = []

REFUSED = Refusals(
    "checkpoint.streams",
    {
        "names that nobody has": lambda: stream(
            lambda channel: {"target": {f"x{channel.rank}": torch.zeros(2)}} if channel.rank else {}
        ),
        "another shape": lambda: stream(target={"w": torch.zeros(4, 3)}),
        "no tensor": lambda: stream(target={"w": None}),
        "a list": lambda: stream(target=[torch.zeros(4, 2)]),
        "no target": lambda: stream(target=nn.Linear(2, 2)),
        "an expanded target": lambda: stream(target={"w": torch.zeros(1).expand(4, 2)}),
        "delta on one rank": lambda: stream(delta=True),
        "delta a number": lambda: stream(delta=1),
        "last a number": lambda: stream(last=1),
        "no rewrite": lambda: stream(rewrite="w -> v"),
        "another rewrite": lambda: stream(rewrite=sw.Rewrite("w -> v")),
        "a rewrite that does not fit": lambda: stream(
            lambda channel: {} if channel.rank else {"rewrite": sw.Rewrite("nothing -> v")}
        ),
        "nobody wants anything": lambda: stream(lambda channel: {"target": None}),
        "no channel": lambda: sw.stream({}, {}, channel=NONE),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_cannot_do_is_the_error_of_all(case: str) -> None:
    REFUSED.check(case)


def test_a_rewrite_does_not_write_over_what_it_still_reads() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    swap = sw.Rewrite("a -> t; b -> a; t -> b")
    with pytest.raises(PlanError, match=r"would be written into memory of .*, which is read; clone\(\) one"):
        sw.simulate(1, lambda channel: sw.stream(tensors, tensors, channel=channel, rewrite=swap))
    target = {name: tensor.clone() for name, tensor in tensors.items()}
    sw.simulate(1, lambda channel: sw.stream(tensors, target, channel=channel, rewrite=swap))
    assert [each.tolist() for each in target.values()] == [[1, 1], [0, 0]]


class Damaging:
    """A channel of a rank whose link changes a bit of each of its messages of elements."""

    def __init__(self, channel: sw.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        if "digests" not in purpose:
            tensor = tensor.clone()
            tensor[-1] ^= 1
        return self._channel.send(tensor, destination, purpose=purpose)


@pytest.mark.parametrize("delta", [False, True])
def test_a_bit_that_was_lost_on_the_way_is_an_error_on_all_ranks(delta: bool) -> None:
    texts = []

    def move(channel: sw.Channel) -> None:
        source, target = on_four(channel, lambda held: (held, None), lambda wanted: (None, wanted))
        used = Damaging(channel) if channel.rank == 1 else channel
        with pytest.raises(MismatchError) as error:
            sw.stream(source, target, channel=used, delta=delta)
        texts.append(str(error.value))

    sw.simulate(4, move)
    assert texts == texts[:1] * 4
    assert texts[0].startswith(
        "rank 2: the target does not hold what rank 1 gave: 1 of 1 blocks differ, the first in w. A memory or a link is"
    )
    assert "rank 3: the target does not hold what rank 1 gave" in texts[0]
