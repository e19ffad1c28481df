"""Ranks compare before they act: what differs between them is named, in the same words on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.comm.agreement import agreed, compare, understood
from shardwise.comm.digests import digest_of_values
from shardwise.comm.rank_values import RankValues
from shardwise.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelError,
    PeerError,
    PlanError,
    RewriteError,
    ShardwiseError,
)
from tests.engine.refusals import PLAN, refusal, same_error_everywhere, two_layers
from tests.refusals import Refusals


def refuse(**other: Any) -> None:
    """`parallelize` on three ranks, some of which are given something else: all raise the same."""
    raise refusal(**other)


def one_more() -> nn.Module:
    return two_layers().append(nn.Linear(1, 1))


def one_buffer_more() -> nn.Module:
    model = two_layers()
    model.register_buffer("scale", torch.ones(2))
    return model


def tied() -> nn.Module:
    model = two_layers()
    model[1].register_parameter("again", model.get_parameter("1.bias"))
    return model


def frozen() -> nn.Module:
    model = two_layers()
    model.get_parameter("1.bias").requires_grad_(False)
    return model


def other_value(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = two_layers()
        with torch.no_grad():
            flat = model.get_parameter(name).view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
        return model

    return make


def adamw(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1} | settings)


def compare_lines(*of_ranks: Sequence[str]) -> None:
    raise same_error_everywhere(
        3, lambda channel: compare(channel, of_ranks[channel.rank], subject="words", hint="Agree.")
    )


def refused(errors: Mapping[int, ShardwiseError], only: int | None = None) -> ShardwiseError:
    """What all of three ranks raise when some have these errors."""

    def run(channel: sw.Channel) -> None:
        with agreed(channel, purpose="verdict", only=only):
            if channel.rank in errors:
                raise errors[channel.rank]

    error = same_error_everywhere(3, run)
    assert isinstance(error, ShardwiseError)
    return error


def raise_refused(errors: Mapping[int, ShardwiseError]) -> None:
    raise refused(errors)


REFUSED = Refusals(
    "comm.agreement",
    {
        "other shapes": lambda: refuse(models={1: lambda: two_layers(6), 2: lambda: two_layers(6)}),
        "another dtype": lambda: refuse(models={2: lambda: two_layers().bfloat16()}),
        "a frozen parameter": lambda: refuse(models={2: frozen}),
        "a layer more": lambda: refuse(models={2: one_more}),
        "a buffer more": lambda: refuse(models={2: one_buffer_more}),
        "a tie": lambda: refuse(models={2: tied}),
        "one bit of a value": lambda: refuse(models={2: other_value("1.weight")}),
        "two values": lambda: refuse(models={1: other_value("1.bias"), 2: other_value("0.bias")}),
        "plans of all ranks": lambda: refuse(plans={1: replace(PLAN, clip_grad_norm=1.0), 2: PLAN}),
        "the plan of rank 0": lambda: refuse(plans={0: replace(PLAN, merge=sw.Merge(microbatches=2))}),
        "a mesh of more ranks": lambda: refuse(plan=sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2))),
        "a mesh on one rank": lambda: refuse(plans={1: sw.Plan(mesh=sw.Mesh(dp_shard=2))}),
        "another rate": lambda: refuse(optimizers={1: adamw(lr=2e-2)}),
        "another setting": lambda: refuse(optimizers={1: adamw(amsgrad=True)}),
        "another optimizer": lambda: refuse(
            optimizers={1: lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)}
        ),
        "groups": lambda: refuse(optimizers={1: lambda each: adamw()([{"params": each[:1]}, {"params": each[1:]}])}),
        "parameters in another order": lambda: refuse(optimizers={1: lambda each: adamw()(list(reversed(each)))}),
        "a line more": lambda: compare_lines(["a"], ["a", "b"], ["a"]),
        "lines fewer": lambda: compare_lines(["a", "b"], [], ["a"]),
        "the first of two lines": lambda: compare_lines(["a", "b"], ["a", "c"], ["x", "b"]),
        "two refuse": lambda: raise_refused({1: BatchError("no \u00e9 rows\nat all"), 2: ModelError("no model")}),
        "a line of two": lambda: compare_lines(["a\nb"], ["a", "b"], ["a\nb"]),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_is_named_with_the_ranks_and_the_first_difference(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PlanError("one", "two"),
        lambda: ConfigError("only one"),
        lambda: CheckpointError(*(f"problem {at}" for at in range(50)), about="the save"),
        lambda: RewriteError("line 1\n  a -> b\n  ^", "line 2", about="rules.txt"),
    ],
)
def test_all_problems_and_notes_travel(make: Callable[[], Any]) -> None:
    def noted() -> Any:
        error = make()
        error.add_note("a note")
        return error

    error = refused({rank: noted() for rank in range(3)})
    assert type(error) is type(make())
    assert str(error) == str(make())
    assert error.problems == make().problems  # type: ignore[attr-defined]
    assert error.__notes__ == ["a note"]


def test_problems_and_notes_name_the_rank_where_not_all_refuse() -> None:
    refusing = PlanError("one", "two")
    refusing.add_note("a note")
    error = refused({1: refusing, 2: ModelError("no model")})
    assert isinstance(error, PlanError)
    assert str(error) == f"rank 1: {PlanError('one', 'two')}\nrank 2: no model"
    assert error.problems == ("rank 1: one", "rank 1: two", "rank 2: no model")
    assert error.__notes__ == ["rank 1: a note"]
    # That of the only rank which decides does not name it.
    error = refused({0: PlanError("one", "two")}, only=0)
    assert (str(error), error.problems) == (str(PlanError("one", "two")), ("one", "two"))  # type: ignore[attr-defined]


def test_a_kind_that_no_user_knows_becomes_the_kind_that_it_is() -> None:
    class NarrowError(CheckpointError):
        pass

    assert type(refused({0: NarrowError("narrow")})) is CheckpointError


def test_other_errors_are_not_told() -> None:
    class OwnError(Exception):
        pass

    recorded = sw.Recorded(alone())
    with pytest.raises(OwnError), agreed(recorded, purpose="verdict"):
        raise OwnError
    assert recorded.calls == []


def test_other_errors_stop_the_peers_of_a_rank_that_says_what_it_does() -> None:
    def run(channel: sw.Channel) -> str:
        with pytest.raises((ZeroDivisionError, PeerError)) as caught, agreed(channel, purpose="v", doing="a division"):
            _ = 1 // channel.rank
        return str(caught.value)

    assert "rank 0 stopped: ZeroDivisionError in a division: " in sw.simulate(2, run)[1]


def test_the_rank_that_refused_shows_its_own_error_as_the_cause() -> None:
    def run(channel: sw.Channel) -> BaseException | None:
        def refuse() -> None:
            with agreed(channel, purpose="verdict"):
                if channel.rank == 1:
                    raise ModelError("mine")

        with pytest.raises(ModelError) as caught:
            refuse()
        return caught.value.__cause__

    causes = sw.simulate(2, run)
    assert causes[0] is None
    assert str(causes[1]) == "mine"


def test_equal_lines_cost_one_digest() -> None:
    def run(channel: sw.Channel) -> int:
        recorded = sw.Recorded(channel)
        compare(recorded, ["a line"] * 10_000, subject="lines", hint="")
        return recorded.bytes_sent()

    assert sw.simulate(2, run) == [16, 16]


def test_a_digest_tells_values_apart_and_not_strides() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert digest_of_values(matrix) == digest_of_values(matrix.t().contiguous().t())
    assert digest_of_values(matrix) != digest_of_values(matrix.t())
    digests = [
        digest_of_values(each)
        for each in (
            matrix,
            -matrix,
            matrix.bfloat16(),
            matrix.to(torch.complex64),
            matrix > 3,
            torch.tensor(1.0),
            torch.ones(0),
            torch.tensor(float("nan")),
        )
    ]
    assert len(set(digests)) == len(digests)


def test_a_digest_is_of_conjugate_and_negative_values_where_torch_has_not_computed_them_yet() -> None:
    values = torch.complex(torch.arange(6.0), torch.arange(1.0, 7.0)).view(2, 3)
    for each in (values.conj(), values.mT.conj(), values.conj().imag):
        assert digest_of_values(each) == digest_of_values(each.resolve_conj().resolve_neg().clone())
    assert digest_of_values(values.conj()) != digest_of_values(values)


@pytest.mark.parametrize("refuses", [None, 1])
def test_parts_travel_with_a_consent_and_not_with_a_refusal(refuses: int | None) -> None:
    def run(channel: sw.Channel) -> list[list[bytes]] | str:
        try:
            with agreed(channel, purpose="parts", num_parts=2) as agreement:
                if channel.rank == refuses:
                    raise BatchError("no rows")
                agreement.value = b"value"
                agreement.parts = [b"alike", bytes([channel.rank])]
        except BatchError as error:
            return str(error)
        assert agreement.values == [b"value"] * 3
        assert agreement.of_parts[0].runs == [(b"alike", 3)]
        return [[*part] for part in agreement.of_parts]

    expected = [[b"alike"] * 3, [b"\0", b"\1", b"\2"]] if refuses is None else "rank 1: no rows"
    assert sw.simulate(3, run) == [expected] * 3


def test_a_rank_whose_bytes_mean_nothing_is_named_also_behind_ranks_that_gave_the_same() -> None:
    with pytest.raises(PeerError) as caught:
        understood(RankValues.of([b"1", b"1", b"1", b"x"]), int, purpose="numbers")
    assert caught.value.rank == 3
