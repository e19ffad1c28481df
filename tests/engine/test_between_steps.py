"""What users do to a model between updates, and the second life of a model under another plan."""

import copy
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel, alone
from tests.engine.models import curve, curve_batch, curve_loss
from tests.engine.oracle import share_of
from tests.engine.ranks import assert_same_bits, train_on_ranks


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(model: nn.Module, *, compute: str | None = None, k: int = 1) -> sw.Engine:
    plan = sw.Plan(precision=sw.Precision(compute=compute), merge=sw.Merge(microbatches=k))
    return sw.parallelize(model, plan, optimizer=sgd, loss=curve_loss, channel=alone())


def test_a_backward_of_the_users_own_keeps_its_gradients_and_does_not_count_in_the_next_update() -> None:
    torch.manual_seed(0)
    disturbed, quiet = engine_of(curve()), engine_of(curve())
    quiet.model.load_state_dict(disturbed.model.state_dict())
    for _ in range(2):
        batch = curve_batch(1, 6)
        curve_loss(disturbed.model(batch["x"]), batch).backward()
        assert all(parameter.grad is not None for parameter in disturbed.model.parameters())
        assert disturbed.step(batch) == quiet.step(batch)
    for ours, theirs in zip(disturbed.model.parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, True, "2"])
def test_a_number_of_microbatches_that_is_none_is_refused_and_the_engine_goes_on(microbatches: Any) -> None:
    engine = engine_of(curve())
    with pytest.raises(sw.ShardwiseError, match="whole number of microbatches, 1 or more, not"):
        engine.step(curve_batch(1, 6), microbatches=microbatches)
    assert engine.step(curve_batch(1, 6)).num_microbatches == 1


@pytest.mark.parametrize("weight", [None, torch.ones(3), "many"])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    engine = sw.parallelize(
        curve(), sw.Plan(), optimizer=sgd, loss=curve_loss, loss_weight=lambda _: weight, channel=alone()
    )
    with pytest.raises(sw.ShardwiseError, match="a weight is one number"):
        engine.step(curve_batch(1, 6))


def test_an_empty_batch_is_refused_in_a_step() -> None:
    with pytest.raises(sw.ShardwiseError, match="the batch has no rows"):
        engine_of(curve()).step(curve_batch(1, 0))


def test_a_parameter_replaced_after_parallelize_is_refused_on_all_ranks() -> None:
    def fn(channel: Channel) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3))
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=sgd, loss=lambda output, _: output.sum(), channel=channel)
        if channel.rank == 1:
            model[0].weight = nn.Parameter(torch.ones(3, 3))
        engine.step({"input": torch.ones(2, 3)})

    with pytest.raises(sw.ShardwiseError, match=r"rank 1: 1 parameters were replaced.*'0\.weight'"):
        sw.simulate(2, fn)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_put_into_the_model_after_parallelize_is_refused(ranks: int, stage: int) -> None:
    def fn(channel: Channel) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), sharding=sw.Sharding(stage=stage))
        engine = sw.parallelize(model, plan, optimizer=sgd, loss=lambda output, _: output.sum(), channel=channel)
        model[1] = nn.Linear(3, 3)
        engine.step({"input": torch.ones(2, 3)})

    with pytest.raises(sw.ShardwiseError, match=r"2 parameters came into the model after parallelize.*'1\.weight'"):
        sw.simulate(ranks, fn)


def test_an_error_of_the_users_own_leaves_a_rank_alone_able_to_go_on() -> None:
    def fails(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        if batch.get("fails"):
            raise ZeroDivisionError
        return curve_loss(output, batch)

    torch.manual_seed(0)
    model = curve()

    def fn(channel: Channel) -> list[sw.StepReport]:
        engine = sw.parallelize(model, sw.Plan(), optimizer=sgd, loss=fails, channel=channel)
        with pytest.raises(ZeroDivisionError):
            engine.step({**curve_batch(1, 6), "fails": True})
        return [engine.step(curve_batch(1, 6)) for _ in range(2)]

    quiet = engine_of(copy.deepcopy(model))
    assert sw.simulate(1, fn)[0] == [quiet.step(curve_batch(1, 6)) for _ in range(2)]


def test_state_shows_values_that_were_loaded_since_the_last_update() -> None:
    engine = engine_of(nn.Sequential(nn.Linear(3, 3)), compute="bfloat16")
    engine.model.load_state_dict({"0.weight": torch.ones(3, 3), "0.bias": torch.full((3,), 2.0)})
    masters = {piece.name: values for piece, values in engine.state().items()}
    assert torch.equal(masters["optimizer/0.weight/master"], torch.ones(3, 3))
    assert torch.equal(masters["optimizer/0.bias/master"], torch.full((3,), 2.0))


def test_a_model_put_under_a_second_plan_trains_under_that_one_alone() -> None:
    torch.manual_seed(0)
    model = curve()
    first = engine_of(model, compute="bfloat16", k=2)
    first.step(curve_batch(1, 6))
    second = engine_of(model, compute="float32")
    fresh = engine_of(curve())
    fresh.model.load_state_dict(model.state_dict())
    for seed in range(2):
        assert second.step(curve_batch(seed, 6)) == fresh.step(curve_batch(seed, 6))
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_batch_norm_trains_in_bfloat16_without_being_named(ranks: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        return nn.functional.mse_loss(output.float(), batch["y"])

    torch.manual_seed(1)
    batches = [{"input": torch.randn(8, 4), "y": torch.randn(8, 2)} for _ in range(3)]

    def trained(keep: tuple[str, ...]) -> Any:
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=ranks), precision=sw.Precision(compute="bfloat16", keep=keep), clip_grad_norm=1.0
        )
        return train_on_ranks(build, plan, batches, optimizer=sgd, loss=loss)

    assert_same_bits(trained(()), trained(("1",)))


def test_reductions_of_mixed_precision_started_early_are_all_waited_for() -> None:
    """A narrower bucket among others waits for all before it, not only for its neighbour."""

    def fn(channel: Channel) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            sharding=sw.Sharding(bucket_bytes=600),
            merge=sw.Merge(microbatches=2),
            precision=sw.Precision(compute="bfloat16", reduce="bfloat16", keep=("2", "3")),
        )
        engine = sw.parallelize(
            model, plan, optimizer=sgd, loss=lambda output, _: output.float().square().mean(), channel=Eager(channel)
        )
        batch = {"input": torch.randn(8, 16)}
        reports = [engine.step(share_of(batch, channel.rank, 2)) for _ in range(3)]
        assert engine.counters.early_reductions > 0
        return [report.loss for report in reports]

    class Eager(sw.Recorded):
        """A channel of which the engine believes that it progresses alone."""

        progresses_alone = True

        def over(self, ranks: Sequence[int]) -> sw.Recorded:
            channel = super().over(ranks)
            return channel if channel.size == 1 else self

    first, second = sw.simulate(2, fn)
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.parametrize("nested", [[torch.ones(3), torch.ones(3)], {"deep": (1, torch.ones(3))}, (torch.ones(3),)])
def test_rows_of_another_number_inside_an_entry_are_refused(nested: Any) -> None:
    with pytest.raises(sw.ShardwiseError, match=r"all tensors of a batch have the same number of rows.*more"):
        engine_of(curve()).step({**curve_batch(1, 6), "more": nested})


def test_entries_that_hold_no_tensors_go_to_every_microbatch() -> None:
    seen: list[Any] = []

    class Listens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, input: torch.Tensor, names: list[str]) -> Any:
            seen.append(names)
            return self.inner(input)

    plan = sw.Plan(merge=sw.Merge(microbatches=2))
    engine = sw.parallelize(Listens(), plan, optimizer=sgd, loss=lambda output, _: output.sum(), channel=alone())
    engine.step({"input": torch.ones(4, 3), "names": ["a", "b"]})
    assert seen == [["a", "b"], ["a", "b"]]


def test_a_compiled_model_gets_the_entries_that_its_own_forward_names() -> None:
    torch.manual_seed(0)
    plain, inner = curve(), curve()
    inner.load_state_dict(plain.state_dict())
    compiled = torch.compile(inner, backend="eager")
    assert isinstance(compiled, nn.Module)
    batch = {**curve_batch(1, 6), "not_for_the_model": torch.ones(6)}
    assert engine_of(compiled, k=2).step(batch) == engine_of(plain, k=2).step(batch)


@pytest.mark.parametrize("mesh", [sw.Mesh(), sw.Mesh(pp=2)], ids=["one rank", "pp"])
def test_an_engine_that_is_let_go_gives_its_memory_back_at_once(mesh: sw.Mesh) -> None:
    """Without the collector: its buffers may fill a device, and the next engine needs the room."""

    def run(channel: sw.Channel) -> tuple[bool, bool]:
        plan = sw.Plan(mesh=mesh, average=sw.Average(decay=0.9))
        engine = sw.parallelize(
            curve(), plan, optimizer=sgd, loss=lambda output, batch: output.square().mean(), channel=channel
        )
        engine.step({"input": torch.ones(4, 3)})
        engine.evaluate({"input": torch.ones(4, 3)})
        with engine.averaged():
            pass
        held = weakref.ref(engine), weakref.ref(engine._buffers)
        del engine
        return held[0]() is None, held[1]() is None

    gc.disable()
    try:
        sw.simulate(mesh.size, run)  # torch makes some cycles once, in the first trial of an optimizer
        assert sw.simulate(mesh.size, run) == [(True, True)] * mesh.size
    finally:
        gc.enable()


class Pooled(nn.Linear):
    """Gives what the loss does not read as well, as a pooler does."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = super().forward(input)
        return x, torch.tanh(x)


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pooled(3, 3) for _ in range(3))

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = input
        for block in self.blocks:
            x, unread = block(x)
        return x, unread


@pytest.mark.parametrize("budget", [None, 10_000_000])
def test_steps_leave_no_graph_of_outputs_that_the_loss_does_not_read(budget: int | None) -> None:
    """No collector sees what a node of autograd holds: its own output would hold it for ever."""

    def run(channel: sw.Channel) -> list[int]:
        activations = sw.Activations() if budget is None else sw.Activations(budget_bytes=budget)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3), activations=activations)
        engine = sw.parallelize(
            Unread(), plan, optimizer=sgd, loss=lambda output, batch: output[0].square().mean(), channel=channel
        )
        alive = []
        for _ in range(4):
            engine.step({"input": torch.ones(4, 3)})
            channel.exchange(b"", purpose="one counts for all")
            if channel.rank == 0:
                gc.collect()
                alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            channel.exchange(b"", purpose="it has counted")
        return alive

    counts, _ = sw.simulate(2, run)
    assert counts[1] == counts[2] == counts[3], counts
