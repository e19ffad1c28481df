"""Buffers of the model: after every update all ranks hold what data rank 0's forward left in them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.oracle import share_of

PURPOSE = "buffers of the model"


class Normed(nn.Module):
    """A batch norm: running statistics and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.norm(self.first(x)))
        return y.float()


class Writing(nn.Module):
    """A model whose forward runs `write` on it; its buffers are of several dtypes, one under two names."""

    def __init__(self, write: Callable[["Writing", torch.Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("any_negative", torch.tensor([False, False]))
        self.register_buffer("exact", torch.zeros(3, 0, dtype=torch.float64))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("last", torch.zeros(4), persistent=False)
        self.register_buffer("unset", None)
        self.also_mean = nn.Module()
        self.also_mean.register_buffer("mean", self.get_buffer("mean"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, x)
        y: torch.Tensor = self.linear(x)
        return y


def write_nothing(model: Writing, x: torch.Tensor) -> None:
    """Leave all buffers alone."""


def write_in_place(model: Writing, x: torch.Tensor) -> None:
    model.get_buffer("mean").mul_(0.9).add_(x.mean(0))
    model.get_buffer("seen").add_(len(x))
    model.get_buffer("any_negative")[1] |= bool((x < 0).any())
    model.get_buffer("turn").add_(x.sum() * 1j)
    model.get_buffer("last").copy_(x[-1])


def replace(model: Writing, x: torch.Tensor) -> None:
    model.mean = model.get_buffer("mean") * 0.9 + x.mean(0)
    model.seen = model.get_buffer("seen") + len(x)
    model.last = x[-1].clone()


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def assert_rank_zero_holds(
    make: Callable[[], nn.Module], *, num_ranks: int, k: int, steps: int = 3, precision: sw.Precision | None = None
) -> None:
    """Step, and compare all ranks' buffers with those of a copy that saw data rank 0's microbatches alone."""
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=num_ranks), merge=sw.Merge(microbatches=k), precision=precision or sw.Precision()
    )

    def run(channel: sw.Channel) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        model = make()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        found = []
        for seed in range(steps):
            alone = copy.deepcopy(model)
            share = share_of(points(seed, 4 * k * num_ranks), channel.rank, num_ranks)
            for at in range(k):
                alone(share_of(share, at, k)["x"])
            engine.step(share)
            found.append((buffers_of(alone), buffers_of(model)))
        return found

    for of_rank in (results := sw.simulate(num_ranks, run)):
        for (expected, _), (_, got) in zip(results[0], of_rank, strict=True):
            assert_equal(got, expected)
    if num_ranks > 1:  # or else there would be nothing to give
        assert any(not torch.equal(results[0][0][0][name], value) for name, value in results[1][0][0].items())


RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])
MERGES = pytest.mark.parametrize("k", [1, 2, 3])


@RANKS
@MERGES
def test_running_statistics_are_those_of_data_rank_zero(num_ranks: int, k: int) -> None:
    assert_rank_zero_holds(seeded(Normed), num_ranks=num_ranks, k=k)


def test_running_statistics_stay_float32_where_the_norm_is_kept() -> None:
    precision = sw.Precision(compute="bfloat16", keep=("norm",))
    assert_rank_zero_holds(seeded(Normed), num_ranks=2, k=2, precision=precision)


@RANKS
@MERGES
@pytest.mark.parametrize("write", [write_in_place, replace])
def test_buffers_of_any_dtype_written_or_replaced_follow_data_rank_zero(
    write: Callable[[Writing, torch.Tensor], None], num_ranks: int, k: int
) -> None:
    assert_rank_zero_holds(seeded(lambda: Writing(write)), num_ranks=num_ranks, k=k)


def test_a_count_of_batches_counts_the_microbatches_of_one_rank() -> None:
    def run(channel: sw.Channel) -> int:
        model = seeded(Normed)()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=3))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 12))
        engine.step(points(channel.rank, 12), microbatches=2)
        return int(model.get_buffer("norm.num_batches_tracked"))

    assert sw.simulate(2, run) == [5, 5]


def test_the_replicas_of_all_data_axes_follow_rank_zero() -> None:
    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = seeded(lambda: Writing(write_in_place))()
        plan = sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2), sharding=sw.Sharding(owners="dp_shard"))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 4))
        return buffers_of(model)

    first, *others = sw.simulate(4, run)
    assert torch.equal(first["mean"], points(0, 4)["x"].mean(0))
    for other in others:
        assert_equal(other, first)


def calls_for_buffers(write: Callable[[Writing, torch.Tensor], None], *, evaluate: bool = False) -> list[int]:
    """Bytes that rank 0 sent for buffers, per call, in two steps or evaluations on two ranks."""

    def run(channel: sw.Channel) -> list[int]:
        recorded = sw.Recorded(channel)
        model = seeded(lambda: Writing(write))()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=recorded)
        for seed in range(2):
            (engine.evaluate if evaluate else engine.step)(points(seed + channel.rank, 4))
        return [call.bytes_sent for call in recorded.calls if call.purpose == PURPOSE]

    return sw.simulate(2, run)[0]


def test_nothing_is_sent_for_buffers_when_none_has_changed() -> None:
    assert calls_for_buffers(write_nothing) == []


def test_only_buffers_that_changed_are_sent_in_one_call_per_update() -> None:
    assert calls_for_buffers(write_in_place) == [4 * 4 + 8 + 2 + 2 * 8 + 4 * 4] * 2
    assert calls_for_buffers(replace) == [4 * 4 + 8 + 4 * 4] * 2


def write_on_negative_sums(model: Writing, x: torch.Tensor) -> None:
    if x.sum() < 0:
        model.get_buffer("last").copy_(x[0])


@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0)])
def test_a_buffer_that_one_rank_only_has_written_is_that_of_rank_zero_everywhere(signs: tuple[float, float]) -> None:
    def run(channel: sw.Channel) -> torch.Tensor:
        model = seeded(lambda: Writing(write_on_negative_sums))()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        batch = points(0, 4)
        batch["x"] = batch["x"].abs() * signs[channel.rank]
        engine.step(batch)
        return model.get_buffer("last").clone()

    first, second = sw.simulate(2, run)
    assert torch.equal(first, second)
    assert bool(first.any()) == (signs[0] < 0)


def test_buffers_that_are_not_kept_in_state_dicts_are_not_in_the_state() -> None:
    def run(channel: sw.Channel) -> set[str]:
        model = seeded(lambda: Writing(write_in_place))()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(partition="whole"))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        return {piece.name for piece in engine.state() if not piece.name.startswith("linear")}

    of_state_dict = {"mean", "seen", "any_negative", "exact", "turn"}
    assert sw.simulate(2, run) == [of_state_dict, of_state_dict]


class Growing(nn.Module):
    """A buffer that comes and goes."""

    cache: torch.Tensor | None
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = None if self.cache is not None else x[0].detach().clone()
        self.late = x[:1].detach().clone()
        y: torch.Tensor = self.linear(x)
        return y


def test_a_buffer_that_comes_and_goes_does_not_stop_the_training() -> None:
    def run(channel: sw.Channel) -> list[torch.Tensor | None]:
        model = seeded(Growing)()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        caches = []
        for seed in range(3):
            engine.step(points(2 * seed + channel.rank, 2))
            caches.append(model.cache)
        return caches

    first, second = sw.simulate(2, run)
    assert [cache is None for cache in first] == [True, False, True]
    for one, other in zip(first, second, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))
