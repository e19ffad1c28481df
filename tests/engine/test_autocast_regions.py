"""Steps in a region of torch.autocast: the numbers of a plain loop with its forwards in the region, and no others."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import AutocastWarning, MismatchError, ModelError
from tests.engine.expected import points, sgd, square_loss
from tests.engine.models import Residual
from tests.engine.oracle import microbatches_of, share_of

Values = dict[str, torch.Tensor]


class Net(Residual):
    """The third layer computes in float32; `backward` under autocast would round its gradients."""

    def added(self, at: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False) if at == 2 else nullcontext():
            return super().added(at, x.float() if at == 2 else x)


class Recomputed(Net):
    """Two layers run again in backward, in the thread of backward: the region is that of their forward there, too."""

    def added(self, at: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            checkpoint(super().added, at, x, use_reentrant=False) if at in (1, 2) else super().added(at, x)
        )
        return out


class Orthogonal(torch.optim.Optimizer):
    """Its step is a product of matrices, which autocast would round; so are all updates that whole matrices need."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    matrix = each.grad.reshape(each.shape[0], -1)
                    each.data.sub_((matrix @ (matrix.T @ matrix)).view(each.shape), alpha=group["lr"])


BATCHES = [points(seed, 8) for seed in range(3)]
BFLOAT16 = torch.autocast("cpu", torch.bfloat16)


def plain(
    num_microbatches: int, region: Any, *, optimizer: Any = sgd, device: str = "cpu", kind: type[nn.Module] = Net
) -> Values:
    """What the loop leaves behind that torch's pages recommend."""
    model = kind().to(device)
    optimizer = optimizer(list(model.parameters()))
    for given in BATCHES:
        batch = {name: each.to(device) for name, each in given.items()}
        optimizer.zero_grad()
        for part in microbatches_of(batch, 1, num_microbatches)[0]:
            with region:
                loss = square_loss(model(part["x"]), part)
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_microbatches
        optimizer.step()
    return {name: each.detach().cpu() for name, each in model.named_parameters()}


def on_ranks(
    plan: sw.Plan,
    train: Callable[[sw.Engine, list[Any]], Any],
    *,
    optimizer: Any = sgd,
    device: str = "cpu",
    kind: type[nn.Module] = Net,
) -> Any:
    """What `train` gives on rank 0 for an engine and this rank's share of the batches."""

    def run(channel: sw.Channel) -> Any:
        engine = sw.parallelize(kind(), plan, optimizer=optimizer, loss=square_loss, channel=channel)
        at, count = plan.mesh.coordinates(channel.rank)["dp_shard"], plan.mesh.dp_shard
        return train(engine, [share_of(batch, at, count) for batch in BATCHES])

    return sw.simulate(plan.mesh.size, run, device=device)[0]


def plan_of(stage: int = 1, k: int = 1, schedule: str = "1f1b", partition: Any = "slice", **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage, partition=partition),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(schedule=schedule),
    )


def around_each(region: Any) -> Callable[[sw.Engine, list[Any]], Values]:
    def train(engine: sw.Engine, batches: list[Any]) -> Values:
        for batch in batches:
            with region:
                engine.step(batch)
        return dict(sw.full(engine))

    return train


LAYOUTS = {
    "one rank": plan_of(1, 4),
    **{f"stage {stage}": plan_of(stage, dp_shard=2) for stage in range(4)},
    "stage 3 twice": plan_of(3, 2, dp_shard=2),
    "pipeline": plan_of(1, 4, pp=2),
    "interleaved": plan_of(1, 2, "interleaved", pp=2),
    "pipeline and stage 3": plan_of(3, 2, pp=2, dp_shard=2),
}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((name, torch.bfloat16) for name in LAYOUTS), ("stage 3 twice", torch.float16), ("pipeline", torch.float16)],
)
def test_a_step_in_a_region_is_a_forward_in_it_and_all_else_outside(layout: str, dtype: torch.dtype) -> None:
    assert_as_a_plain_loop(layout, torch.autocast("cpu", dtype))


@pytest.mark.parametrize(
    ("layout", "kind", "dtype"),
    [
        *((name, Net, torch.bfloat16) for name in LAYOUTS),
        *((name, Recomputed, torch.bfloat16) for name in ("one rank", "stage 3", "pipeline", "pipeline and stage 3")),
        ("stage 3 twice", Net, torch.float16),
        ("pipeline", Recomputed, torch.float16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_step_in_a_region_of_a_device_is_that_of_a_plain_loop_there(
    layout: str, kind: type[nn.Module], dtype: torch.dtype, fake: str
) -> None:
    assert_as_a_plain_loop(layout, torch.autocast(fake, dtype), device=fake, kind=kind)


def assert_as_a_plain_loop(layout: str, region: Any, *, device: str = "cpu", kind: type[nn.Module] = Net) -> None:
    plan = LAYOUTS[layout]
    expected = plain(plan.mesh.dp_shard * plan.merge.microbatches, region, device=device, kind=kind)
    # That the region casts at all.
    without = plain(plan.mesh.dp_shard * plan.merge.microbatches, nullcontext(), device=device, kind=kind)
    assert not any(torch.equal(without[name], value) for name, value in expected.items())
    got = on_ranks(plan, around_each(region), device=device, kind=kind)
    for name, value in expected.items():
        # Data ranks add in another order than one process where each has several microbatches.
        if plan.mesh.dp_shard > 1 and plan.merge.microbatches > 1:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(got[name], value)


@pytest.mark.parametrize("layout", ["one rank", "stage 3 twice", "interleaved"])
def test_a_region_around_all_steps_is_named_and_trains_as_one_around_each(layout: str) -> None:
    """torch keeps casts of weights in it, and an update does not renew them."""

    def train(engine: sw.Engine, batches: list[Any]) -> tuple[Values, float, torch.Tensor]:
        with BFLOAT16:
            engine.evaluate(batches[0])
            engine.step(batches[0])
            engine.evaluate(batches[0])
            if engine.channel.rank == 0:
                with pytest.warns(AutocastWarning, match="dtype=torch.bfloat16. has been open since the last step"):
                    engine.step(batches[1])
            else:
                engine.step(batches[1])
            engine.step(batches[2])  # and warns no more
            return dict(sw.full(engine)), *looked_at(engine, batches[0])

    def train_apart(engine: sw.Engine, batches: list[Any]) -> tuple[Values, float, torch.Tensor]:
        values = around_each(BFLOAT16)(engine, batches)
        with BFLOAT16:
            return values, *looked_at(engine, batches[0])

    (got, loss, output), (expected, *looked) = (on_ranks(LAYOUTS[layout], each) for each in (train, train_apart))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert loss == looked[0]
    assert torch.equal(output, looked[1])


def looked_at(engine: sw.Engine, batch: Any) -> tuple[float, torch.Tensor]:
    """Of an evaluation and a prediction."""
    output = engine.predict(batch, lambda given: engine.model(given["x"]))
    assert output.dtype == torch.bfloat16
    return engine.evaluate(batch).loss, output


def test_the_caller_gets_its_region_back_and_casts_new_weights_in_it() -> None:
    def train(engine: sw.Engine, batches: list[Any]) -> None:
        model, x = engine.model, batches[0]["x"]
        with torch.autocast("cpu", torch.float16, cache_enabled=False), BFLOAT16:
            before = model(x)
            engine.step(batches[0])
            after = model(x)
            with torch.autocast("cpu", enabled=False):
                engine.step(batches[1])
                assert model(x).dtype == torch.float32
            assert after.dtype == torch.bfloat16
            assert torch.autocast_increment_nesting() == 3
            assert torch.autocast_decrement_nesting() == 2
        assert not torch.equal(before, after)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        with BFLOAT16, pytest.raises(KeyError):
            engine.step({"x": x})

    on_ranks(plan_of(), train)


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_optimizers_run_outside_of_the_region(dp_shard: int) -> None:
    expected = plain(dp_shard, BFLOAT16, optimizer=Orthogonal)
    got = on_ranks(plan_of(partition="whole", dp_shard=dp_shard), around_each(BFLOAT16), optimizer=Orthogonal)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


class Leaky(Net):
    """Enters a region in its forward, or in a hook of its backward, and does not leave it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            torch.autocast(x.device.type, torch.float16).__enter__()
        x = super().forward(x)
        if self.where == "backward":
            x.register_hook(enter)
        return x


def enter(_: object) -> None:
    torch.autocast("cpu", torch.float16).__enter__()


@pytest.mark.parametrize("region", [nullcontext(), BFLOAT16])
@pytest.mark.parametrize(
    ("where", "named"),
    [("forward", "the forward, or the loss.* ended in .*torch.float16"), ("backward", "a hook of a backward")],
)
def test_a_region_that_is_not_left_is_refused_in_its_step(where: str, named: str, region: Any) -> None:
    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(Leaky(where), plan_of(), optimizer=sgd, loss=square_loss, channel=channel)
        with region:
            here = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
            with pytest.raises(ModelError, match=named):
                engine.step(BATCHES[0])
            assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")) == here
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()

    sw.simulate(1, run)


def test_a_region_of_a_device_that_is_not_left_is_refused_in_its_step(fake: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(Leaky("forward"), plan_of(), optimizer=sgd, loss=square_loss, channel=channel)
        with torch.autocast(fake, torch.bfloat16):
            with pytest.raises(
                ModelError, match=r'began in torch.autocast\("fake", dtype=torch.bfloat16\) and ended in'
            ):
                engine.step(BATCHES[0])
            assert (torch.get_autocast_dtype(fake), torch.is_autocast_enabled(fake)) == (torch.bfloat16, True)
        assert not torch.is_autocast_enabled(fake)

    sw.simulate(1, run, device=fake)


def test_ranks_in_different_regions_are_refused() -> None:
    def run(channel: sw.Channel) -> str:
        plan = plan_of(dp_shard=2)
        engine = sw.parallelize(Net(), plan, optimizer=sgd, loss=square_loss, channel=channel)
        with BFLOAT16 if channel.rank else nullcontext(), pytest.raises(MismatchError) as refused:
            engine.step(share_of(BATCHES[0], channel.rank, 2))
        return str(refused.value)

    assert set(sw.simulate(2, run)) == {
        "ranks would compute in different dtypes: rank 0 calls under no torch.autocast, rank 1 under "
        'torch.autocast("cpu", dtype=torch.bfloat16). Call under the same torch.autocast on all ranks'
    }
