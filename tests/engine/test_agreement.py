"""Ranks compare before they act: what differs between them is named, in the same words on every rank."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.agreement import agree, compare, digest_of_values
from shardwise.errors import BatchError, MismatchError, ModelError, OptimizerError, PlanError, ShardwiseError
from tests.engine.expected import adamw, points, seeded, square_loss

PLAN = sw.Plan(mesh=sw.Mesh(dp_shard=3))


def two_layers(width: int = 5) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)))()


def same_error_everywhere(world_size: int, fn: Callable[[sw.Channel], object]) -> ShardwiseError:
    """The error that `fn` raises on every rank; the ranks can talk afterwards."""
    errors: list[ShardwiseError] = []

    def run(channel: sw.Channel) -> None:
        with pytest.raises(ShardwiseError) as caught:
            fn(channel)
        errors.append(caught.value)
        channel.exchange(b"", purpose="still there")

    sw.simulate(world_size, run)
    assert len(errors) == world_size
    assert len({(type(error), str(error)) for error in errors}) == 1
    return errors[0]


def refusal(
    *,
    models: Mapping[int, Callable[[], nn.Module]] = {},
    plans: Mapping[int, sw.Plan] = {},
    optimizers: Mapping[int, Any] = {},
    plan: sw.Plan = PLAN,
) -> ShardwiseError:
    """The error of `parallelize` on three ranks, some of which are given something else."""

    def run(channel: sw.Channel) -> None:
        sw.parallelize(
            models.get(channel.rank, two_layers)(),
            plans.get(channel.rank, plan),
            optimizer=optimizers.get(channel.rank, adamw),
            loss=square_loss,
            channel=channel,
        )

    return same_error_everywhere(3, run)


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
    model[1].register_parameter("bias", nn.Parameter(torch.zeros(1)))
    model[1].register_parameter("again", model[1].bias)
    return model


def frozen() -> nn.Module:
    model = two_layers()
    model[1].bias.requires_grad_(False)
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
    assert str(error).startswith(
        "rank 1 and rank 0 were given different plans; first difference: rank 0 has mesh.pp = 1, "
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
    assert (
        "rank 1 and rank 0 were given different models or optimizers; first difference: rank 0 has optimizer AdamW"
        in (str(error))
    )


def test_names_to_keep_that_mean_nothing_are_refused_with_the_nearest_name() -> None:
    error = refusal(plan=replace(PLAN, precision=sw.Precision(keep=("*norm*", "0.weihgt", "1"))))
    assert isinstance(error, PlanError)
    first, second = str(error).splitlines()[1:]
    assert first.startswith("  - precision.keep: '*norm*' matches none of the 4 parameters; the nearest parameter is ")
    assert second.endswith("'0.weihgt' matches none of the 4 parameters; the nearest parameter is '0.weight'")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 1)


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call lazy modules experimental
        return nn.Sequential(nn.LazyLinear(1))


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = two_layers()
    model.register_buffer("graph", buffer)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (on_meta, "parameter 'weight' is on the meta device and has no values; load or initialise the model before"),
        (lazy, "parameter '0.weight' has no shape before the first forward; run the model once on a sample before"),
        (
            lambda: with_buffer(torch.eye(3).to_sparse()),
            "buffer 'graph' has layout torch.sparse_coo; shardwise runs dense",
        ),
        (lambda: with_buffer(torch.ones(2, device="meta")), "buffer 'graph' is on the meta device and has no values"),
    ],
)
def test_a_model_without_values_is_refused_by_name(make: Callable[[], nn.Module], message: str) -> None:
    error = refusal(models=dict.fromkeys(range(3), make), optimizers=dict.fromkeys(range(3), sgd_of_any))
    assert isinstance(error, ModelError)
    assert str(error).startswith(message)
    alone = refusal(models={1: make})
    assert isinstance(alone, ModelError)
    assert str(alone).startswith(f"rank 1: {message}")


def sgd_of_any(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_of_a_dtype_that_no_plan_holds_is_refused() -> None:
    def make() -> nn.Module:
        model = two_layers()
        model.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.uint16), requires_grad=False))
        return model

    error = refusal(models=dict.fromkeys(range(3), make))
    assert isinstance(error, PlanError)
    assert "parameter 'table' has dtype uint16, which no plan can hold" in str(error)


def drops_one(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters[1:], lr=0.1)


def drops_many(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def adds_one(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1)


def copies(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(each.detach().clone()) for each in parameters], lr=0.1)


def over_two_optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters[:2])]


def raises(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise KeyError("no such group")


def needs_a_closure(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (drops_one, "1 of the model's trainable parameters are in no group: '0.weight'; give them to the optimizer"),
        (
            drops_many,
            "4 of the model's trainable parameters are in no group: '0.weight', '0.bias', '1.weight' and 1 more",
        ),
        (drops_many, "1 of its parameters are not the model's"),
        (
            adds_one,
            "(SGD) does not fit the model: 1 of its parameters are not the model's; build it over the parameters",
        ),
        (copies, "4 of its parameters are not the model's"),
        (
            over_two_optimizers,
            "(SGD and Adam) does not fit the model: these are in several groups: '0.weight', '0.bias'",
        ),
        (raises, "the optimizer function raised KeyError: 'no such group'"),
        (needs_a_closure, "LBFGS.step needs a closure that computes the loss again"),
        (
            lambda parameters: None,
            "optimizer: NoneType is not a torch.optim.Optimizer, a sequence of them, or a function",
        ),
        ("AdamW", "optimizer: str is not a torch.optim.Optimizer"),
        (None, "optimizer: NoneType is not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_on_all_ranks(optimizer: Any, message: str) -> None:
    everywhere = refusal(optimizers=dict.fromkeys(range(3), optimizer))
    assert isinstance(everywhere, OptimizerError)
    assert message in str(everywhere)
    alone = refusal(optimizers={1: optimizer})
    assert str(alone) == f"rank 1: {everywhere}"
    assert type(alone) is type(everywhere)


def test_different_refusals_are_all_told() -> None:
    error = refusal(optimizers={0: drops_one, 2: raises})
    assert [line[:40] for line in str(error).splitlines()] == [
        "rank 0: the optimizer (SGD) does not fit",
        "rank 2: the optimizer function raised Ke",
    ]


def test_a_refused_model_is_as_it_was() -> None:
    def run(channel: sw.Channel) -> None:
        model = two_layers()
        before = [(id(each), each.data_ptr(), each._version) for each in model.parameters()]
        with pytest.raises(OptimizerError):
            sw.parallelize(model, PLAN, optimizer=drops_one, loss=square_loss, channel=channel)
        assert [(id(each), each.data_ptr(), each._version) for each in model.parameters()] == before
        engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 2))

    sw.simulate(3, run)


def test_values_are_given_in_rank_order_when_nobody_refuses() -> None:
    def run(channel: sw.Channel) -> list[bytes]:
        return agree(channel, None, purpose="names", value=b"-" + bytes([channel.rank]))

    assert sw.simulate(3, run) == [[b"-\x00", b"-\x01", b"-\x02"]] * 3


def test_a_verdict_keeps_the_kind_of_the_first_refusal_and_its_words() -> None:
    def run(channel: sw.Channel) -> None:
        mine = {1: BatchError("no \u00e9 rows\nat all"), 2: ModelError("no model")}
        agree(channel, mine.get(channel.rank), purpose="verdict")

    error = same_error_everywhere(3, run)
    assert isinstance(error, BatchError)
    assert str(error) == "rank 1: no \u00e9 rows\nat all\nrank 2: no model"


def test_the_rank_that_refused_shows_its_own_error_as_the_cause() -> None:
    def run(channel: sw.Channel) -> BaseException | None:
        mine = ModelError("mine") if channel.rank == 1 else None
        with pytest.raises(ModelError) as caught:
            agree(channel, mine, purpose="verdict")
        return caught.value.__cause__

    causes = sw.simulate(2, run)
    assert causes[0] is None
    assert str(causes[1]) == "mine"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [["a"], ["a", "b"], ["a"]],
            "rank 1 and rank 0 were given different words; first difference: rank 0 has nothing",
        ),
        (
            [["a", "b"], [], ["a"]],
            "ranks 1, 2 and rank 0 were given different words; first difference: rank 0 has a, rank 1",
        ),
        (
            [["a", "b"], ["a", "c"], ["x", "b"]],
            "ranks 1, 2 and rank 0 were given different words; first difference: rank 0",
        ),
        ([["a\nb"], ["a", "b"], ["a\nb"]], "rank 1 and rank 0 were given different words"),
    ],
)
def test_lines_that_differ_are_named(lines: list[list[str]], message: str) -> None:
    error = same_error_everywhere(
        3, lambda channel: compare(channel, lines[channel.rank], subject="words", hint="Agree.")
    )
    assert isinstance(error, MismatchError)
    assert str(error).startswith(message)
    assert str(error).endswith(". Agree.")


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
