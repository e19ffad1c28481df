"""What a peer answers in an exchange may be anything: all ranks raise one error of shardwise that names it."""

import collections
import json
import random
import struct
from collections.abc import Callable, Sequence

import pytest
import torch

import shardwise as sw
from shardwise import errors
from shardwise.comm.agreement import agreed, compare, exchange_parts, understood
from shardwise.comm.process.joined_values import JoinedValues, joined
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import DIM_0, MicrobatchLoss
from shardwise.engine.metrics import EvaluationMetrics
from shardwise.engine.step.channels import RankGroups
from shardwise.engine.step.exchange import (
    NUM_PARTS_OF_OPENING,
    StepFacts,
    StepFlags,
    Weighting,
    batch_compared,
    exchange_step,
    merge_weights,
    parts_of_opening,
)
from shardwise.engine.step.loss_entries import exchange_evaluation, parts_of_evaluation, rows_in
from shardwise.engine.step.reports import RankTimes
from shardwise.engine.telemetry import packed, rank_times
from shardwise.errors import PeerError, ShardwiseError
from shardwise.moving.nested_exchange import packed as nested
from shardwise.moving.piece_exchange import Gathering, pack_pieces, unpack_alike
from shardwise.space import Piece
from tests.comm.hostile import mutated


class Answering:
    """The channel of rank 0 of two, whose peer gives one of these answers after the other."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        return [value, self._answers.pop(0) if self._answers else b""]

    def abort(self, reason: str) -> None:
        raise AssertionError(f"nothing here is a fault of this rank: {reason}")


def packed_parts(parts: Sequence[bytes]) -> bytes:
    """As `exchange_parts` sends them over a channel that knows no parts."""
    return struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)


FACTS = StepFacts(written=["w"])
OPENING = parts_of_opening([1.0, 2.0], FACTS, batch=batch_compared(["x: float32"], is_whole=True))
PIECES = [Piece(name="a", dtype="float32", global_shape=(4, 2), offset=(0, 0), shape=(2, 2))]
TIMES = RankTimes(
    rank=0,
    compute_s=1.0,
    waiting_s=0.5,
    waited_for={1: 0.5},
    outside_s=0.0,
    sent_bytes=1,
    received_bytes=2,
    peak_bytes=3,
    late_steps=0,
)
REFUSALS = [
    [kind, "no room", ["no room"], ["look at the disk"]] for kind in ("CheckpointError", "PlanError", "BatchError")
]


def of_agreement(answer: bytes) -> None:
    with agreed(Answering(answer), purpose="a verdict"):  # type: ignore[arg-type]
        pass


def of_comparison(answer: bytes) -> None:
    compare(Answering(bytes(16), answer), ["a", "b"], subject="models", hint="")  # type: ignore[arg-type]


def of_weights(answer: bytes) -> None:
    channel = Answering(answer)
    parts = exchange_parts(channel, OPENING, purpose="weights")  # type: ignore[arg-type]
    assert list(map(len, parts)) == [2] * NUM_PARTS_OF_OPENING
    ranks = RankGroups.of(sw.Plan(mesh=sw.Mesh(dp_shard=2)))
    merge_weights(channel, parts, ["x: float32"], same_count=False, ranks=ranks)  # type: ignore[arg-type]


def of_a_step(answer: bytes) -> None:
    answered = exchange_step(
        Answering(answer),  # type: ignore[arg-type]
        StepFlags(touched=[True, False], changed_buffers=[False], written=[True]),
        figures=[bytes(16), b""],
        times=[bytes(8), b""],
    )
    assert (len(answered.flags.touched), [len(each) for each in answered.figures]) == (2, [2, 2])
    rows_in(answered.figures[0], [[[]], [[]]], [1, 1], purpose="losses")


def of_times(answer: bytes) -> None:
    amounts, seconds = packed(TIMES, num_ranks=2)
    rank_times([RankValues.of([amounts, answer]), RankValues.of([seconds] * 2)])
    rank_times([RankValues.of([amounts] * 2), RankValues.of([seconds, answer])])


class Counting:
    """A metric with states as torchmetrics has them."""

    def __init__(self) -> None:
        self._reductions = {"total": torch.sum, "seen": None}
        self.reset()

    def reset(self) -> None:
        self.total, self.seen, self._update_count = torch.zeros(2), list[torch.Tensor](), 0

    def update(self, values: torch.Tensor) -> None:
        self.total, self.seen, self._update_count = self.total + 1, [*self.seen, values], 1

    def compute(self) -> torch.Tensor:
        return self.total.sum()


def counted() -> EvaluationMetrics:
    """A function and a metric with states, which have seen three rows."""
    metrics = EvaluationMetrics(
        {"mean": lambda output, batch: output.mean(), "count": (Counting(), lambda output, batch: output)},
        rows=DIM_0,
        device=torch.device("cpu"),
        speaks=True,
    )
    metrics.begin()
    metrics.see(torch.ones(3), {"x": torch.ones(3)})
    return metrics


def of_an_evaluation(answer: bytes) -> None:
    weighting, metrics = Weighting.of([[1.0], [1.0]]), counted()
    exchange_evaluation(
        parts_of_evaluation([MicrobatchLoss(torch.ones(()), {"aux": 1.0})], weighting, 0, metrics),
        channel=Answering(answer),  # type: ignore[arg-type]
        weighting=weighting,
        ranks=RankGroups.of(sw.Plan(mesh=sw.Mesh(dp_shard=2))),
        observer=metrics,
    )


def of_pieces(answer: bytes) -> None:
    unpack_alike([pack_pieces(PIECES), answer], pack_pieces(PIECES), PIECES)


def of_texts(answer: bytes) -> None:
    Gathering("texts").gather(Answering(b"+" + bytes(16), answer), [b"mine"])  # type: ignore[arg-type]


def of_joined_values(answer: bytes) -> None:
    def parse(content: bytes) -> list[bytes]:
        both = joined([JoinedValues.parsed(bytearray(content), 1, 2), of_two(b"mine")], 0)
        found = JoinedValues.parsed(both, 2, 2)
        return [b"".join(each) for each in zip(*found.parts, strict=True)]

    own = bytes(joined([of_two(b"own")], 0))
    assert [len(each) for each in understood([own, answer], parse, purpose="")] == [2, 2]


def of_two(value: bytes) -> JoinedValues:
    """A value of two parts."""
    return JoinedValues.of_one([value, bytes(8)], 1, 0)


PARSERS = {
    of_agreement: [b"+", *(b"-" + json.dumps(each).encode() for each in REFUSALS)],
    of_comparison: [b'["a", "c"]'],
    of_joined_values: [
        bytes(joined(each, 0)) for each in ([of_two(b"theirs")], [of_two(b"")], [of_two(b"a"), of_two(b"a")])
    ],
    of_weights: [packed_parts(OPENING)],
    of_a_step: [packed_parts([b"\1", bytes(16), b"", bytes(8), b""])],
    of_times: packed(TIMES, num_ranks=2),
    of_an_evaluation: [packed_parts([bytes(8), b'[["aux"]]', bytes(8), *counted().packed()])],
    of_pieces: [pack_pieces(PIECES)],
    of_texts: [b'["a text"]'],
}


def hostile(num_rounds: int) -> None:
    found = collections.Counter[Callable[[bytes], None]]()
    for number, (read, good) in enumerate(PARSERS.items()):
        chance = random.Random(number)
        for at in range(num_rounds):
            answer = chance.randbytes(9) if at % 8 == 0 else mutated(chance.choice(good), chance)
            try:
                read(answer)
            except PeerError as error:
                found[read] += error.rank == 1
            except ShardwiseError:  # it could be read, and says what ranks may say
                pass
    assert all(found[read] > num_rounds // 20 for read in PARSERS), found


@pytest.mark.parametrize("num_rounds", [150, pytest.param(10_000, marks=pytest.mark.stress)])
def test_random_and_mutated_answers_end_in_errors_of_shardwise(num_rounds: int) -> None:
    hostile(num_rounds)


@pytest.mark.parametrize("total", [[torch.ones(2)], 5, "x", None])
def test_a_state_of_a_metric_that_is_of_another_kind_is_refused(total: object) -> None:
    given = nested([[3.0, 1.0], [[1, {"total": total, "seen": []}]]], "states")
    with pytest.raises(PeerError, match="rank 1 gave"):
        counted().results(RankValues.of([counted().packed()[1], given]), [0, 1])


@pytest.mark.parametrize(
    "refusal",
    [
        ["in_words", "text", [], []],  # an attribute of the module that is no error
        ["__builtins__", "text", [], []],
        ["UnderflowWarning", "text", [], []],
        ["CheckpointError", 5, [], []],
        ["CheckpointError", "text", "letters", []],
        ["CheckpointError", "text", [], [[]]],
        ["CheckpointError"],
        7,
    ],
)
def test_only_errors_of_shardwise_are_made_of_what_a_peer_says(refusal: object) -> None:
    with pytest.raises(
        PeerError, match=r"rank 1 gave \d+ bytes that cannot be read in exchange for 'a verdict'"
    ) as caught:
        of_agreement(b"-" + json.dumps(refusal).encode())
    assert caught.value.rank == 1


def test_every_error_that_a_rank_refuses_with_arrives_as_what_it_is() -> None:
    kinds: Sequence[type[ShardwiseError]] = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ShardwiseError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        with pytest.raises(kind, match="rank 1: no room") as caught:
            of_agreement(b"-" + json.dumps([kind.__name__, "no room", [], []]).encode())
        assert type(caught.value) is kind
