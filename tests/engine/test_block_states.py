"""Optimizers whose state is packed in blocks: whole parameters get one process's numbers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from tests.engine.packed_models import Codes

_BLOCK = 64


class BlockMomentum(torch.optim.Optimizer):
    """Momentum in int8 with a scale per block, of parameters that are not small; as tensors, or in one around them."""

    def __init__(self, params: Any, lr: float = 1e-2, *, in_one: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.in_one = in_one

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if parameter.numel() < 1024:
                    state["momentum"] = state.get("momentum", 0) * 0.9 + parameter.grad
                    parameter.sub_(group["lr"] * state["momentum"])
                    continue
                blocks = parameter.grad.reshape(-1, _BLOCK)
                if state:
                    held = vars(state["momentum"]) if self.in_one else state
                    blocks = blocks + 0.9 * held["codes"].reshape(-1, _BLOCK) * held["scale"]
                scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
                codes = (blocks / scale).round().to(torch.int8).view(parameter.shape)
                packed = {"codes": codes, "scale": scale}
                state.update({"momentum": Codes(codes, scale, torch.float32)} if self.in_one else packed)
                parameter.sub_(group["lr"] * (codes.reshape(-1, _BLOCK) * scale).view(parameter.shape))


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OWN: dict[str, Make] = {
    "tensors": BlockMomentum,
    "a tensor around them": lambda parameters: BlockMomentum(parameters, in_one=True),
}


# The packages are imported where they are used: it takes seconds, in each process that collects tests.
def of_bitsandbytes(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-2)
    return made


def of_transformers(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers import Adafactor

    made: torch.optim.Optimizer = Adafactor(  # type: ignore[no-untyped-call]
        parameters, lr=1e-2, scale_parameter=False, relative_step=False
    )
    return made


def of_torchao(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, kind)(parameters, lr=1e-2)
    return made


PACKAGES: dict[str, Make] = {
    "bitsandbytes": of_bitsandbytes,
    "transformers": of_transformers,
    # It compiles its update for each shape, which takes seconds.
    "torchao": partial(of_torchao, "AdamW8bit"),
    "torchao 4 bits": partial(of_torchao, "AdamW4bit"),
}
ALL = OWN | PACKAGES
PLANS = {
    "one rank": sw.Plan(mesh=sw.Mesh()),
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=1, partition="whole")),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3, partition="whole")),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "slices": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=1)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64), nn.Linear(64, 2))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=generator), torch.randn(8, 2, generator=generator)


def loss_of(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def engine_of(name: str, plan: sw.Plan, channel: Channel) -> sw.Engine[nn.Module]:
    return sw.parallelize(model(), plan, optimizer=ALL[name], loss=loss_of, channel=channel)


def train(engine: sw.Engine[nn.Module], steps: range) -> list[float]:
    mesh = engine.plan.mesh
    ranks, own = mesh.dp_replicate * mesh.dp_shard, mesh.data_rank(engine.channel.rank)
    return [engine.step(tuple(each.chunk(ranks)[own] for each in batch_of(step))).loss for step in steps]


def plain(name: str, steps: int) -> list[float]:
    module = model()
    optimizer, losses = ALL[name](list(module.parameters())), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(batch_of(step)[0]), batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Of the compiler that torchao's updates run through.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("tensors", "one rank", "stage 3"),
        ("tensors", "stage 1", "one rank"),
        ("a tensor around them", "stage 1", "pp"),
        ("a tensor around them", "pp", "one rank"),
        ("a tensor around them", "one rank", "stage 0"),
        ("bitsandbytes", "one rank", "stage 1"),
        ("bitsandbytes", "stage 3", "pp"),
        ("transformers", "stage 0", "stage 1"),
        ("transformers", "stage 1", "one rank"),
        pytest.param("torchao", "stage 1", "one rank", marks=pytest.mark.stress),
        pytest.param("torchao 4 bits", "pp", "stage 3", marks=pytest.mark.stress),
    ],
)
def test_a_state_in_blocks_goes_on_in_another_layout(name: str, before: str, after: str, tmp_path: Path) -> None:
    def first(channel: Channel) -> list[float]:
        engine = engine_of(name, PLANS[before], channel)
        losses = train(engine, range(2))
        sw.save(tmp_path / "saved", engine)
        return losses

    def second(channel: Channel) -> tuple[list[float], set[str]]:
        engine = engine_of(name, PLANS[after], channel)
        sw.load(tmp_path / "saved", engine)
        losses = train(engine, range(2, 3))
        with engine.whole(optimizer=True):
            kinds = {type(each).__name__ for state in engine.optimizer.state.values() for each in state.values()}
        return losses + train(engine, range(3, 4)), kinds

    # Ranks wait for each other while one of them compiles an update.
    losses = sw.simulate(PLANS[before].mesh.size, first, timeout_seconds=600)[0]
    more, kinds = sw.simulate(PLANS[after].mesh.size, second, timeout_seconds=600)[0]
    torch.testing.assert_close(losses + more, plain(name, 4), rtol=1e-6, atol=0)
    assert ("Codes" in kinds) == (name == "a tensor around them")


@pytest.mark.parametrize("name", ["tensors", "a tensor around them", "bitsandbytes"])
@pytest.mark.parametrize("layout", ["slices", "tp"])
def test_no_block_is_cut(name: str, layout: str) -> None:
    plan = PLANS[layout]
    losses = sw.simulate(2, lambda channel: train(engine_of(name, plan, channel), range(4)))[0]
    torch.testing.assert_close(losses, plain(name, 4), rtol=1e-6, atol=0)


def test_a_relayout_takes_a_state_in_blocks_along() -> None:
    def run(channel: Channel) -> list[float]:
        engine = engine_of("a tensor around them", PLANS["stage 1"], channel)
        losses = train(engine, range(2))
        return losses + train(sw.relayout(engine, PLANS["pp"]), range(2, 4))

    torch.testing.assert_close(sw.simulate(2, run)[0], plain("a tensor around them", 4), rtol=1e-6, atol=0)
