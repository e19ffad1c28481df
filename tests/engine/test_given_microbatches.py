"""A list of microbatches of any shapes trains as a plain loop that accumulates over them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import BatchError, MismatchError, ShardwiseError
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.hybrid_models import data_rank, decoder, num_data_ranks, plan_of
from tests.engine.models import NUM_WORDS

Words = dict[str, torch.Tensor]


def words(seed: int, rows: int, length: int) -> Words:
    """Rows of words, and the word that follows each."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(NUM_WORDS, (rows, length + 1), generator=generator)
    return {"words": drawn[:, :-1], "labels": drawn[:, 1:]}


def word_loss(output: torch.Tensor, batch: Words) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    return loss


def count_words(batch: Words) -> int:
    return batch["labels"].numel()


SHAPES = [(3, 5), (1, 7), (2, 2), (4, 3), (2, 6), (1, 1)]
"""Of the microbatches of a step: rows and length."""


def given(step: int, rank: int, num_ranks: int) -> list[Words]:
    """The microbatches of a data rank, all of one number and none of one shape."""
    count = len(SHAPES) // num_ranks
    shapes = SHAPES[step:] + SHAPES[:step]
    return [words(100 * step + at, *shapes[at]) for at in range(rank * count, (rank + 1) * count)]


def accumulated(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    *,
    weigh: Callable[[Any], float],
    loss: Callable[[Any, Any], torch.Tensor] = word_loss,
    call: Callable[[nn.Module, Any], Any] = lambda model, part: model(part["words"]),
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The loop that everybody writes: losses, norms and parameters."""
    optimizer = adamw([each for each in model.parameters() if each.requires_grad])
    losses, norms = [], []
    for parts in steps:
        optimizer.zero_grad()
        weights = [weigh(part) for part in parts]
        total = math.fsum(weights)
        mean, values = total / len(parts), []
        for part, weight in zip(parts, weights, strict=True):
            if weight:
                value = loss(call(model, part), part)
                (value if len(set(weights)) == 1 else value * (weight / mean)).backward()
                values.append(weight * value.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        losses.append(math.fsum(values) / total)
    return losses, norms, {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("mesh", "stage", "by_words"),
    [
        *[("dp_shard=1", 0, True), ("dp_shard=1", 1, False), ("dp_shard=2", 0, False), ("dp_shard=2", 1, True)],
        *[("dp_shard=3", 2, True), ("dp_shard=2", 3, False), ("dp_shard=2,tp=2", 1, False), ("tp=2", 3, True)],
    ],
)
def test_microbatches_of_any_shapes_train_as_in_a_plain_loop(mesh: str, stage: int, by_words: bool) -> None:
    assert_trains_as_a_plain_loop(sw.Mesh.parse(mesh), stage, "1f1b", by_words)


@pytest.mark.parametrize(
    ("schedule", "stage", "num_ranks"),
    [("1f1b", 1, 2), ("1f1b", 3, 2), ("fthenb", 0, 1), ("fthenb", 2, 2), ("interleaved", 1, 1), ("interleaved", 3, 2)],
)
def test_microbatches_of_any_shapes_train_on_stages_as_in_a_plain_loop(
    schedule: str, stage: int, num_ranks: int
) -> None:
    assert_trains_as_a_plain_loop(sw.Mesh(pp=2, dp_shard=num_ranks), stage, schedule, by_words=True)


def assert_trains_as_a_plain_loop(mesh: sw.Mesh, stage: int, schedule: str, by_words: bool) -> None:
    plan, num_ranks, num_steps = plan_of(mesh, stage=stage, k=2, schedule=schedule), num_data_ranks(mesh), 3

    def run(channel: sw.Channel) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
        engine = sw.parallelize(
            decoder(),
            plan,
            optimizer=adamw,
            loss=word_loss,
            loss_weight=count_words if by_words else None,
            channel=channel,
        )
        rank = data_rank(mesh, channel.rank)
        reports = [engine.step(given(step, rank, num_ranks)) for step in range(num_steps)]
        assert [report.num_microbatches for report in reports] == [len(SHAPES) // num_ranks] * num_steps
        held_out = engine.evaluate(given(0, rank, num_ranks)).loss
        return (
            [report.loss for report in reports],
            [report.grad_norm for report in reports],
            {name: tensor.clone() for name, tensor in sw.full(engine)},
            held_out,
        )

    model = decoder()
    steps = [[part for rank in range(num_ranks) for part in given(step, rank, num_ranks)] for step in range(num_steps)]
    weigh = count_words if by_words else lambda batch: len(batch["words"])
    losses, norms, parameters = accumulated(model, steps, weigh=weigh)
    weights = [weigh(part) for part in steps[0]]
    with torch.no_grad():
        values = [word_loss(model(part["words"]), part).item() for part in steps[0]]
    held_out = math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)
    exactly = mesh.size == 1
    for found in sw.simulate(mesh.size, run):
        assert found[0] == (losses if exactly else pytest.approx(losses, rel=1e-10))
        assert found[1] == (norms if exactly else pytest.approx(norms, rel=1e-10))
        assert found[3] == pytest.approx(held_out, rel=1e-10)
        for name, value in found[2].items():
            if exactly:
                assert torch.equal(value, parameters[name]), name
            else:
                torch.testing.assert_close(value, parameters[name], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [(1, 3), (2, 0)])
def test_each_data_rank_may_have_another_number_of_microbatches(stage: int, counts: tuple[int, int]) -> None:
    parts = [[points(10 * rank + at, 2 + at) for at in range(count)] for rank, count in enumerate(counts)]

    def run(channel: sw.Channel) -> tuple[list[float], float, torch.Tensor, int]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage), clip_grad_norm=0.2)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        reports = [engine.step(parts[channel.rank]) for _ in range(3)]
        weight = dict(sw.full(engine))["0.weight"]
        return [each.loss for each in reports], reports[-1].grad_norm, weight, reports[-1].num_microbatches

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))()
    losses, norms, parameters = accumulated(
        model,
        [[*parts[0], *parts[1]]] * 3,
        weigh=lambda part: len(part["x"]),
        loss=square_loss,
        call=lambda model, part: model(part["x"]),
    )
    for rank, found in enumerate(sw.simulate(2, run)):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms[-1], rel=1e-5)
        torch.testing.assert_close(found[2], parameters["0.weight"])
        assert found[3] == counts[rank]


@pytest.mark.parametrize(
    ("mesh", "stage", "schedule", "counts"),
    [
        ("pp=2,dp_shard=2", 3, "1f1b", [(2, 4), (0, 1), (2, 2)]),
        ("pp=2,dp_shard=2", 3, "interleaved", [(4, 2), (2, 0)]),
        pytest.param("pp=2,dp_shard=2,dp_replicate=2", 2, "interleaved", [(2, 0, 2, 4)], marks=pytest.mark.stress),
        pytest.param("pp=2,dp_shard=2,tp=2", 3, "1f1b", [(1, 2)], marks=pytest.mark.stress),
    ],
)
def test_data_ranks_of_stages_may_have_other_numbers_and_shapes_of_microbatches(
    mesh: str, stage: int, schedule: str, counts: Sequence[Sequence[int]]
) -> None:
    sizes = sw.Mesh.parse(mesh)
    steps = [
        [[words(100 * step + 10 * rank + at, 1 + (at + rank) % 3, 2 + (step + at + rank) % 5) for at in range(count)]
         for rank, count in enumerate(each)]
        for step, each in enumerate(counts)
    ]  # fmt: skip

    def run(channel: sw.Channel) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
        plan = plan_of(sizes, stage=stage, k=2, schedule=schedule)
        engine = sw.parallelize(
            decoder(), plan, optimizer=adamw, loss=word_loss, loss_weight=count_words, channel=channel
        )
        rank = data_rank(sizes, channel.rank)
        reports = [engine.step(each[rank]) for each in steps]
        found = {name: tensor.clone() for name, tensor in sw.full(engine)}
        return [report.loss for report in reports], [report.grad_norm for report in reports], found

    together = [[part for parts in each for part in parts] for each in steps]
    losses, norms, parameters = accumulated(decoder(), together, weigh=count_words)
    for found in sw.simulate(sizes.size, run):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(norms, rel=1e-10)
        for name, value in found[2].items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-7, atol=1e-7)


def test_a_list_of_the_same_rows_gives_the_bits_of_one_batch() -> None:
    def run(channel: sw.Channel, listed: bool) -> tuple[list[float], torch.Tensor]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=3))
        model = seeded(lambda: nn.Linear(4, 1))()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        losses = []
        for step in range(3):
            batch: Any = points(2 * step + channel.rank, 7)
            if listed:
                batch = [dict(zip(batch, cut, strict=True)) for cut in _cut(batch, [3, 2, 2])]
            losses.append(engine.step(batch).loss)
        return losses, model.weight.detach().clone()

    for one, other in zip(
        sw.simulate(2, lambda channel: run(channel, True)),
        sw.simulate(2, lambda channel: run(channel, False)),
        strict=True,
    ):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


def _cut(batch: Words, sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(value.split(sizes) for value in batch.values()), strict=True))


@pytest.mark.parametrize(
    ("batch", "settings", "kind", "message"),
    [
        ([], {}, BatchError, "no microbatch on any rank has a weight above 0"),
        ([points(0, 0)] * 2, {}, BatchError, "no microbatch on any rank has a weight above 0"),
        ([points(0, 2)] * 2, {"microbatches": 3}, BatchError, "a list of 2 microbatches was given, and microbatches=3"),
        ([{"x": torch.ones(2, 4), "y": torch.ones(3, 1)}], {}, BatchError, "give microbatches of any shapes as a list"),
    ],
)
def test_a_list_that_cannot_be_computed_is_refused_on_all_ranks(
    batch: list[Any], settings: dict[str, Any], kind: type[ShardwiseError], message: str
) -> None:
    def run(channel: sw.Channel) -> str:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(
            seeded(lambda: nn.Linear(4, 1))(), plan, optimizer=adamw, loss=square_loss, channel=channel
        )
        with pytest.raises(kind) as caught:
            engine.step(batch, **settings)
        assert not engine.step([points(0, 2), points(1, 3)]).skipped
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert message in first


def test_ranks_that_share_a_batch_are_given_the_same_list() -> None:
    def run(channel: sw.Channel) -> str:
        engine = sw.parallelize(decoder(), plan_of(sw.Mesh(tp=2)), optimizer=adamw, loss=word_loss, channel=channel)
        with pytest.raises(MismatchError) as caught:
            engine.step([words(0, 2, 3), words(1 + channel.rank, 2, 4)])
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert "Rank 0 has '1.words' [2, 4] int64 with digest" in first


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_lists_train_on_a_device_as_on_the_host(fake: str, num_ranks: int) -> None:
    def run(channel: sw.Channel, device_weights: bool) -> list[float]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), clip_grad_norm=0.2)
        engine = sw.parallelize(
            seeded(lambda: nn.Linear(4, 1))().to(channel.device),
            plan,
            optimizer=adamw,
            loss=square_loss,
            loss_weight=(lambda batch: batch["x"].new_tensor(len(batch["x"]))) if device_weights else None,
            channel=channel,
        )
        found = []
        for step in range(3):
            batch = [points(step, 2), points(10 + step, 3)][: 2 - channel.rank]
            if device_weights:
                batch = [{name: value.to(channel.device) for name, value in part.items()} for part in batch]
            report = engine.step(batch)
            found += [report.loss, report.grad_norm, report.weight]
        return found

    wanted = sw.simulate(num_ranks, lambda channel: run(channel, False))[0]
    for weights in (False, True):
        for found in sw.simulate(num_ranks, partial(run, device_weights=weights), device=fake):
            assert found == pytest.approx(wanted, rel=1e-5)
