"""Steps in a region of torch.autocast: the numbers of a plain loop with its forwards in the region, and no others."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import alone
from tests.engine.loops import begun, in_one_process, on_ranks, plan_of, share
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import points, square_loss
from tests.oracle.program import sgd
from tests.oracle.words import Residual
from tests.refusals import Refusals


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
LAYOUTS = {
    "one rank": plan_of(k=4),
    **{f"stage {stage}": plan_of("dp_shard=2", stage) for stage in range(4)},
    "stage 3 twice": plan_of("dp_shard=2", 3, 2),
    "pipeline": plan_of("pp=2", k=4),
    "interleaved": plan_of("pp=2", k=2, schedule="interleaved"),
    "pipeline and stage 3": plan_of("pp=2,dp_shard=2", 3, 2),
    "whole": plan_of("dp_shard=2", sharding={"partition": "whole"}),
}
CASES = [
    *((name, Recomputed, at % 2 == 0, torch.bfloat16, sgd) for at, name in enumerate(LAYOUTS)),
    *((name, Net, name == "stage 3", torch.float16, sgd) for name in ("stage 3", "pipeline")),
    *((name, Net, False, torch.bfloat16, Orthogonal) for name in ("one rank", "whole")),
]


@pytest.mark.parametrize(("layout", "kind", "on_device", "dtype", "optimizer"), CASES)
def test_a_step_in_a_region_is_a_forward_in_it_and_all_else_outside(
    fake: str, layout: str, kind: type[nn.Module], on_device: bool, dtype: torch.dtype, optimizer: Any
) -> None:
    plan, device = LAYOUTS[layout], fake if on_device else "cpu"
    settings: Any = {"loss": square_loss, "optimizer": optimizer, "device": device}
    region, parts = torch.autocast(device, dtype), plan.mesh.dp_shard * plan.merge.microbatches
    expected = in_one_process(kind, BATCHES, parts=parts, region=region, **settings)
    without = in_one_process(kind, BATCHES, parts=parts, **settings)
    assert not any(torch.equal(without.parameters[name], value) for name, value in expected.parameters.items())
    got = on_ranks(kind, plan, BATCHES, region=region, **settings)
    # Data ranks add in another order than one process where each has several microbatches.
    is_exact = min(plan.mesh.dp_shard, plan.merge.microbatches) == 1
    for name, value in expected.parameters.items():
        torch.testing.assert_close(
            got.parameters[name], value, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6
        )


def test_the_caller_gets_its_region_back_and_casts_new_weights_in_it() -> None:
    engine = begun(alone(), Net, loss=square_loss, optimizer=sgd)
    model, x = engine.model, BATCHES[0]["x"]
    with torch.autocast("cpu", torch.float16, cache_enabled=False), BFLOAT16:
        before = model(x)
        engine.step(BATCHES[0])
        after = model(x)
        assert torch.equal(engine.predict({"x": x}), after)
        with torch.autocast("cpu", enabled=False):
            engine.step(BATCHES[1])
            assert model(x).dtype == torch.float32
        assert after.dtype == torch.bfloat16
        assert torch.autocast_increment_nesting() == 3
        assert torch.autocast_decrement_nesting() == 2
    assert not torch.equal(before, after)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    with BFLOAT16, pytest.raises(KeyError):
        engine.step({"x": x})


def in_different_regions() -> None:
    def run(channel: sw.Channel) -> None:
        engine = begun(channel, Net, plan_of("dp_shard=2"), loss=square_loss, optimizer=sgd)
        with BFLOAT16 if channel.rank else nullcontext():
            engine.step(share(engine, BATCHES[0]))

    raise same_error_everywhere(2, run)


REFUSED = Refusals("engine.autocast_regions", {"different regions on ranks": in_different_regions})


@pytest.mark.parametrize("case", REFUSED)
def test_different_regions_on_ranks_are_refused(case: str) -> None:
    REFUSED.check(case)
