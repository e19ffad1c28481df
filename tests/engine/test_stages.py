"""Stages 2 and 3 train to the bits of stage 1, or of one process that adds in their order, whatever a model does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import adamw
from tests.engine.models import loss_of_words, word_batch, word_loss, words, words_with_kept_norm
from tests.engine.oracle import Trained, share_of
from tests.engine.ranks import assert_same_bits
from tests.engine.sharded_nets import BATCHES, WIDTH, net, plan_of
from tests.engine.stages import RoundOrder, assert_at_rest, gathering_of, train_sharded, values_of_all


def assert_stages_agree(make_model: Callable[[], nn.Module], *, ranks: int = 2, **settings: Any) -> Trained:
    """With one microbatch, the same reductions are made in every stage."""

    def trained(stage: int) -> Trained:
        plan = plan_of(stage, ranks=ranks, **settings)
        return train_sharded(make_model, plan, BATCHES, optimizer=adamw, loss=word_loss)

    first = trained(1)
    for stage in (2, 3):
        got = trained(stage)
        assert_same_bits(got, first)
        assert (got.losses, got.grad_norms) == (first.losses, first.grad_norms)
    return first


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("partition", "bucket_bytes", "ranks", "k"),
    [
        ("slice", 600, 2, 3),
        ("whole", 600, 3, 2),
        ("slice", 1, 2, 2),
        ("whole", 1 << 20, 4, 1),
        ("slice", 1 << 20, 2, 2),
    ],
)
def test_sums_are_taken_over_ranks_and_then_over_microbatches(
    stage: int, partition: str, bucket_bytes: int, ranks: int, k: int
) -> None:
    plan = plan_of(stage, ranks=ranks, k=k, partition=partition, bucket_bytes=bucket_bytes)
    got = train_sharded(words, plan, BATCHES, optimizer=adamw, loss=word_loss)
    expected = RoundOrder(
        model=words(), make_optimizer=adamw, loss_of=loss_of_words, num_ranks=ranks, num_microbatches=k, clip=0.3
    ).train(BATCHES)
    assert_same_bits(got, expected)
    assert got.grad_norms == expected.grad_norms


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_replicas_of_owners_add_their_runs_once_per_update(stage: int, k: int) -> None:
    plan = plan_of(stage, mesh=sw.Mesh(dp_replicate=2, dp_shard=2), owners="dp_shard", k=k)
    got = train_sharded(words, plan, BATCHES, optimizer=adamw, loss=word_loss)
    expected = RoundOrder(
        model=words(),
        make_optimizer=adamw,
        loss_of=loss_of_words,
        num_ranks=4,
        ranks_per_sum=2,
        num_microbatches=k,
        clip=0.3,
    ).train(BATCHES)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("accumulate", "reduce", "k"),
    [("float32", "float32", 1), ("float32", "float32", 2), ("bfloat16", "float32", 2), ("float32", "float16", 2)],
)
def test_bfloat16_is_rounded_where_the_plan_says(stage: int, accumulate: str, reduce: str, k: int) -> None:
    precision = sw.Precision(compute="bfloat16", keep=("norm",), accumulate=accumulate, reduce=reduce)
    plan = plan_of(stage, k=k, precision=precision)
    got = train_sharded(words_with_kept_norm, plan, BATCHES, optimizer=adamw, loss=word_loss)
    expected = RoundOrder(
        model=words_with_kept_norm(),
        make_optimizer=adamw,
        loss_of=loss_of_words,
        num_ranks=2,
        num_microbatches=k,
        clip=0.3,
        working=lambda name: torch.float32 if name.startswith("norm") else torch.bfloat16,
        accumulate=getattr(torch, accumulate),
        reduce=getattr(torch, reduce),
    ).train(BATCHES)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_one_data_rank_is_one_process(stage: int, k: int) -> None:
    """With one owner there is nothing to cut: the sums are those of stage 1."""
    trained = [
        train_sharded(words, plan_of(each, ranks=1, k=k), BATCHES, optimizer=adamw, loss=word_loss)
        for each in (1, stage)
    ]
    assert_same_bits(*trained)


KINDS = (
    *("", "tied", "twice", "recurrent", "checkpointed", "checkpoint of several", "frozen", "frozen middle"),
    *("unused output", "no gradient", "in place", "positions", "checkpointed reentrant"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_does_changes_no_bit(kind: str) -> None:
    assert_stages_agree(net(kind))


class Crossing(nn.Module):
    """Uses one value several times in each of several blocks, as cross attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.key(memory)) * self.value(memory) * memory
        out: torch.Tensor = x + self.mix(sum(others) * memory)
        return out


class Translation(nn.Module):
    """`kind`: whether blocks are computed again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.encoder(self.embedding(words)))
        x = self.embedding(words.flip(1))
        passed = [x]
        for block in self.blocks:
            if self.kind == "plain":
                x = block(x, memory, *passed)
            else:
                x = checkpoint(block, x, memory, *passed, use_reentrant=self.kind == "reentrant")
            passed = [*passed, x * memory]
        out: torch.Tensor = self.head(x + sum(passed))
        return out


@pytest.mark.parametrize(
    ("kind", "pp"), [("plain", 1), ("checkpointed", 1), ("reentrant", 1), ("plain", 2), ("checkpointed", 2)]
)
def test_a_value_that_several_units_use_several_times_gets_its_gradients_in_one_order(kind: str, pp: int) -> None:
    def run(channel: sw.Channel, stage: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Translation(kind)
        plan = sw.Plan(
            mesh=sw.Mesh(pp=pp, dp_shard=2),
            sharding=sw.Sharding(stage=stage, bucket_bytes=600),
            pipeline=sw.Pipeline(stages={"embedding": 0, "encoder": 0, "blocks.*": 1, "head": 1} if pp > 1 else None),
        )
        engine = sw.parallelize(
            model, plan, optimizer=lambda each: torch.optim.SGD(each, lr=1.0), loss=word_loss, channel=channel
        )
        for batch in BATCHES:
            engine.step(share_of(batch, plan.mesh.coordinates(channel.rank)["dp_shard"], 2))
        return dict(sw.full(engine, channel=channel))

    expected = sw.simulate(2 * pp, lambda channel: run(channel, 1))[0]
    for stage in (2, 3):
        got = sw.simulate(2 * pp, partial(run, stage=stage))[0]
        for name, value in expected.items():
            assert torch.equal(got[name], value), (stage, name)


@pytest.mark.parametrize(("ranks", "partition"), [(3, "slice"), (5, "whole")])
def test_ranks_that_own_nothing_take_part(ranks: int, partition: str) -> None:
    """Of some units: a norm of 6 elements, a scale."""
    assert_stages_agree(net("tied"), ranks=ranks, partition=partition)


@pytest.mark.parametrize("units", [("blocks.*",), ("blocks.*.attention", "blocks.*"), ("blocks.0", "blocks.1.up")])
def test_units_of_any_cut_change_no_bit(units: tuple[str, ...]) -> None:
    first = train_sharded(net("tied"), plan_of(1), BATCHES, optimizer=adamw, loss=word_loss)
    plan = plan_of(3, units=units)
    assert_same_bits(train_sharded(net("tied"), plan, BATCHES, optimizer=adamw, loss=word_loss), first)


def test_any_dtypes_share_a_unit() -> None:
    precision = sw.Precision(compute="bfloat16", keep=("*norm*", "*.up"))
    assert_stages_agree(net("frozen"), precision=precision)


@pytest.mark.parametrize("kind", ["tied", "checkpointed"])
def test_evaluations_and_predictions_between_steps_change_nothing(kind: str) -> None:
    def between(engine: sw.Engine, model: nn.Module, channel: sw.Channel) -> None:
        # Other numbers of rows on the ranks, and none on the last one.
        rows = [5, 0][channel.rank]
        engine.evaluate({name: value[:rows] for name, value in BATCHES[0].items()})
        engine.predict({"words": BATCHES[0]["words"][:2]}, lambda inputs: model(inputs["words"]))
        assert_at_rest(engine) if engine.plan.sharding.stage == 3 else None

    trained = [
        train_sharded(net(kind), plan_of(stage, k=2), BATCHES, optimizer=adamw, loss=word_loss, after=after)
        for stage, after in ((2, lambda *_: None), (2, between), (3, between))
    ]
    for other in trained[1:]:
        assert_same_bits(other, trained[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_microbatches_that_only_some_ranks_compute(stage: int) -> None:
    """Weights are counts of words to predict; rank 0 has none in its first microbatch, rank 1 none in its last."""

    def loss_weight(batch: Mapping[str, Any]) -> float:
        return float((batch["targets"] != -100).sum())

    batches = [{name: value.clone() for name, value in batch.items()} for batch in BATCHES]
    for batch in batches:
        batch["targets"][:4] = -100
        batch["targets"][20:] = -100
    plan = plan_of(stage, k=3)
    got = train_sharded(words, plan, batches, optimizer=adamw, loss=word_loss, loss_weight=loss_weight)
    expected = RoundOrder(
        model=words(),
        make_optimizer=adamw,
        loss_of=loss_of_words,
        num_ranks=2,
        num_microbatches=3,
        clip=0.3,
        loss_weight=loss_weight,
    ).train(batches)
    assert_same_bits(got, expected)


class Alternating(nn.Module):
    """Uses one of two layers, by the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.one = nn.Linear(4, 11)
        self.other = nn.Linear(4, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        head = self.one if words[0, 0] % 2 else self.other
        out: torch.Tensor = head(self.embedding(words))
        return out


@pytest.mark.parametrize("k", [1, 2])
def test_parameters_that_come_back_into_use_are_reduced_late_but_whole(k: int) -> None:
    """Buckets do not wait for what no rank used in the update before; stage 3 wants one order of modules on all."""
    batches = [{name: value.clone() for name, value in word_batch(seed, 8).items()} for seed in range(6)]
    for number, batch in enumerate(batches):
        batch["words"][:, 0] = number % 2 + 2

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Alternating()

    expected = RoundOrder(
        model=make(), make_optimizer=adamw, loss_of=loss_of_words, num_ranks=2, num_microbatches=k, clip=0.3
    ).train(batches)
    for stage in (2, 3):
        plan = plan_of(stage, k=k, bucket_bytes=1 << 20)
        got = train_sharded(make, plan, batches, optimizer=adamw, loss=word_loss)
        for name, value in got.parameters.items():
            # A late sum is added per rank first; otherwise the same two terms, and one rounding of each more.
            torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=2**-22 if k > 1 else 0)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_gradients_of_what_no_rank_used_before_come_after_their_bucket_has_left(k: int, by_rank: bool) -> None:
    """Where transfers go on alone. `by_rank`: in each update some rank uses each."""
    batches = [{name: value.clone() for name, value in word_batch(seed, 8).items()} for seed in range(3)]
    for number, batch in enumerate(batches):
        batch["words"][:, 0] = number % 2 + 2
        if by_rank:
            batch["words"][4:6, 0], batch["words"][6:, 0] = 3, 2  # with k = 2 it uses both

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Alternating()

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = make()
        engine = sw.parallelize(
            model, plan_of(2, k=k, bucket_bytes=1), optimizer=adamw, loss=word_loss, channel=GoesOnAlone(channel)
        )
        for batch in batches:
            engine.step(share_of(batch, channel.rank, channel.size))
        return values_of_all(model, engine, channel)

    expected = RoundOrder(
        model=make(), make_optimizer=adamw, loss_of=loss_of_words, num_ranks=2, num_microbatches=k, clip=0.3
    ).train(batches)
    for values in sw.simulate(2, run):
        for name, value in values.items():
            # A late sum is added per rank first, as above.
            torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=2**-22 if k > 1 else 0)


@pytest.mark.parametrize("kind", ["tied", "twice", "recurrent"])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_next_unit_is_gathered_ahead_where_transfers_go_on_alone(kind: str, keeps: bool) -> None:
    most = []

    def run(channel: sw.Channel, stage: int, **more: Any) -> dict[str, torch.Tensor]:
        model = net(kind)()
        plan = plan_of(stage, k=2, **more)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=GoesOnAlone(channel))
        if stage == 3 and not keeps:
            gathering = gathering_of(engine)
            fill = gathering._fill

            def counted(unit: Any) -> None:
                fill(unit)
                # The model's own parameters are there all the while.
                most.append(sum(each.plan.name != "" for each in gathering._resident))

            gathering._fill = counted  # type: ignore[method-assign]
        for batch in BATCHES:
            engine.step(share_of(batch, channel.rank, channel.size))
        return values_of_all(model, engine, channel)

    first = sw.simulate(2, lambda channel: run(channel, 2))
    ahead = sw.simulate(2, lambda channel: run(channel, 3, keep_gathered=keeps))
    for ours, theirs in zip(ahead, first, strict=True):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
    # The one that is used and the next; a tied head has its bias beside the weight of the embedding.
    assert keeps or max(most) == (3 if kind == "tied" else 2)


def test_saving_gathers_nothing_and_any_stage_loads_what_another_saved(tmp_path: Any) -> None:
    precision = sw.Precision(compute="bfloat16", keep=("*norm*",))
    batches = [share_of(batch, 0, 1) for batch in BATCHES]

    def run(channel: sw.Channel, source: int, target: int) -> None:
        path = tmp_path / f"{source}-{target}"
        recorded = sw.Recorded(channel)
        shares = [share_of(batch, channel.rank, channel.size) for batch in batches]
        model = net("frozen middle")()
        engine = sw.parallelize(
            model, plan_of(source, precision=precision), optimizer=adamw, loss=word_loss, channel=recorded
        )
        engine.step(shares[0])
        recorded.clear()
        engine.state()
        assert not recorded.calls
        sw.save(path, engine, channel=recorded)
        assert not [call for call in recorded.calls if call.operation in ("all_gather", "reduce_scatter")]
        other_model = net("frozen middle")()
        other = sw.parallelize(
            other_model, plan_of(target, precision=precision), optimizer=adamw, loss=word_loss, channel=channel
        )
        sw.load(path, other, channel=channel)
        for share in shares[1:]:
            assert engine.step(share) == other.step(share)
        ours, theirs = values_of_all(model, engine, channel), values_of_all(other_model, other, channel)
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name

    for source, target in ((1, 3), (3, 2), (2, 3), (3, 1)):
        sw.simulate(2, partial(run, source=source, target=target))


def test_compiled_blocks_are_gathered_around_the_whole_compiled_call() -> None:
    def compiled() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11))
        model[1].compile(backend="eager")
        return model

    trained = []
    for stage in (1, 3):
        torch.compiler.reset()
        trained.append(train_sharded(compiled, plan_of(stage), BATCHES, optimizer=adamw, loss=word_loss))
    assert_same_bits(*trained)
