"""Ranks compare before they act: what differs between them is named, in the same words on every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.comm.agreement import agreed, compare, digest_of_values
from shardwise.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    MismatchError,
    ModelError,
    PeerError,
    PlanError,
    RewriteError,
    ShardwiseError,
)
from tests.engine.refusals import PLAN, refusal, same_error_everywhere, two_layers


def test_other_shapes_are_named_with_the_ranks_and_the_first_difference() -> None:
    error = refusal(models={1: lambda: two_layers(6), 2: lambda: two_layers(6)})
    assert isinstance(error, MismatchError)
    assert str(error) == (
        "ranks 1, 2 and rank 0 were given different models or optimizers; first difference: "
        "rank 0 has parameter '0.weight' [5, 4] float32 trainable, "
        "rank 1 has parameter '0.weight' [6, 4] float32 trainable. Build the same model and optimizer on every rank."
    )


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


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (
            lambda: two_layers().bfloat16(),
            "'0.weight' [5, 4] float32 trainable",
            "'0.weight' [5, 4] bfloat16 trainable",
        ),
        (frozen, "'1.bias' [1] float32 trainable", "'1.bias' [1] float32 frozen"),
        (one_more, "rank 0 has optimizer AdamW", "parameter '2.weight' [1, 1] float32 trainable"),
        (one_buffer_more, "rank 0 has optimizer AdamW", "buffer 'scale' [2] float32"),
        (tied, "'1.bias' [1] float32 trainable", "'1.bias' [1] float32 trainable also ['1.again']"),
    ],
)
def test_other_models_are_named_with_the_rank_and_the_first_difference(
    make: Callable[[], nn.Module], first: str, second: str
) -> None:
    error = refusal(models={2: make})
    assert isinstance(error, MismatchError)
    assert str(error).startswith("rank 2 and rank 0 were given different models or optimizers; first difference: ")
    told, other = str(error).split("rank 2 has ")
    assert first in told
    assert second in other


def other_value(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = two_layers()
        with torch.no_grad():
            flat = model.get_parameter(name).view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
        return model

    return make


def test_values_that_differ_by_one_bit_are_named() -> None:
    error = refusal(models={2: other_value("1.weight")})
    assert isinstance(error, MismatchError)
    assert "rank 2 and rank 0 were given different values; first difference: rank 0 has '1.weight' with" in str(error)
    assert "Build the model from the same seed on every rank (torch.manual_seed)" in str(error)


def test_the_first_of_several_differences_is_named() -> None:
    error = refusal(models={1: other_value("1.bias"), 2: other_value("0.bias")})
    assert "ranks 1, 2 and rank 0 were given different values; first difference: rank 0 has '0.bias'" in str(error)


def test_other_plans_are_named_with_the_setting() -> None:
    error = refusal(plans={1: replace(PLAN, clip_grad_norm=1.0), 2: PLAN})
    assert isinstance(error, MismatchError)
    assert "rank 1 and rank 0 were given different plans; first difference: rank 0 has mesh.pp = 1, rank 1" in str(
        error
    )
    error = refusal(plans={0: replace(PLAN, merge=sw.Merge(microbatches=2))})
    assert "first difference: rank 0 has merge.microbatches = 2, rank 1 has merge.microbatches = 1" in str(error)


def test_a_mesh_that_does_not_multiply_to_the_world_is_refused_with_both_numbers() -> None:
    error = refusal(plan=sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2)))
    assert isinstance(error, PlanError)
    assert "mesh dp_replicate=2,dp_shard=2 asks for 4 ranks, but the world has 3; start 4 processes" in str(error)


def test_a_mesh_that_is_wrong_on_one_rank_is_refused_on_all() -> None:
    error = refusal(plans={1: sw.Plan(mesh=sw.Mesh(dp_shard=2))})
    assert isinstance(error, PlanError)
    assert str(error).startswith("rank 1: mesh dp_shard=2 asks for 2 ranks, but the world has 3; start 2 processes")


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-2, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(
            [{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1e-2, weight_decay=0.1
        ),
        lambda parameters: torch.optim.AdamW(list(reversed(parameters)), lr=1e-2, weight_decay=0.1),
    ],
)
def test_other_settings_of_the_optimizer_are_named(optimizer: Any) -> None:
    error = refusal(optimizers={1: optimizer})
    assert isinstance(error, MismatchError)
    assert "rank 1 and rank 0 were given different models" in str(error)
    assert "first difference: rank 0 has optimizer AdamW {" in str(error)


def test_values_are_given_in_rank_order_when_nobody_refuses() -> None:
    def run(channel: sw.Channel) -> Sequence[bytes]:
        with agreed(channel, purpose="names") as agreement:
            agreement.value = b"-" + bytes([channel.rank])
        return agreement.values

    assert sw.simulate(3, run) == [[b"-\x00", b"-\x01", b"-\x02"]] * 3


def refused(errors: Mapping[int, ShardwiseError], num_ranks: int = 3) -> ShardwiseError:
    """What all ranks raise when some have these errors."""

    def run(channel: sw.Channel) -> None:
        with agreed(channel, purpose="verdict"):
            if channel.rank in errors:
                raise errors[channel.rank]

    error = same_error_everywhere(num_ranks, run)
    assert isinstance(error, ShardwiseError)
    return error


def test_a_verdict_keeps_the_kind_of_the_first_refusal_and_its_words() -> None:
    error = refused({1: BatchError("no \u00e9 rows\nat all"), 2: ModelError("no model")})
    assert type(error) is BatchError
    assert str(error) == "rank 1: no \u00e9 rows\nat all\nrank 2: no model"


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


def test_the_error_of_the_only_rank_that_decides_does_not_name_it() -> None:
    def run(channel: sw.Channel) -> None:
        with agreed(channel, purpose="verdict", only=0):
            if channel.rank == 0:
                raise PlanError("one", "two")

    error = same_error_everywhere(2, run)
    assert isinstance(error, PlanError)
    assert str(error) == str(PlanError("one", "two"))
    assert error.problems == ("one", "two")


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


@pytest.mark.parametrize(
    ("lines", "ranks", "first"),
    [
        ([["a"], ["a", "b"], ["a"]], "rank 1", "rank 0 has nothing there, rank 1 has b"),
        ([["a", "b"], [], ["a"]], "ranks 1, 2", "rank 0 has a, rank 1 has nothing there"),
        ([["a", "b"], ["a", "c"], ["x", "b"]], "ranks 1, 2", "rank 0 has a, rank 2 has x"),
        ([["a\nb"], ["a", "b"], ["a\nb"]], "rank 1", "rank 0 has a\nb, rank 1 has a"),
    ],
)
def test_lines_that_differ_are_named(lines: list[list[str]], ranks: str, first: str) -> None:
    error = same_error_everywhere(
        3, lambda channel: compare(channel, lines[channel.rank], subject="words", hint="Agree.")
    )
    assert isinstance(error, MismatchError)
    assert str(error) == f"{ranks} and rank 0 were given different words; first difference: {first}. Agree."


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
