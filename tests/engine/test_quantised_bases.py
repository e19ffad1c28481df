"""QLoRA as people run it: quantised bases of bitsandbytes and torchao, with adapters, under plans."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import ModelError
from tests.covering import pairwise

WIDTH = 64


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x) + self.b(self.a(x)))
        return out


# The packages are imported where they are used: it takes seconds, in each process that collects tests.
def four_bits(**settings: Any) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    linear: nn.Module = Linear4bit(WIDTH, WIDTH, quant_type="nf4", **settings)
    return linear


def eight_bits() -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    linear: nn.Module = Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    return linear


BASES: dict[str, Callable[[], nn.Module]] = {
    "4 bits": lambda: four_bits(compute_dtype=torch.float32, compress_statistics=True),
    "4 bits in floats": lambda: four_bits(quant_storage=torch.bfloat16, compress_statistics=False),
    "8 bits": eight_bits,
    "torchao": lambda: nn.Linear(WIDTH, WIDTH),
}
PLANS = {
    "one rank": sw.Plan(mesh=sw.Mesh()),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"*.a": "column", "*.b": "row"})),
}


def model_of(base: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(BASES[base]()) for _ in range(2)), nn.Linear(WIDTH, 2)).to("cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".base." not in name)
    if base == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith("base"))
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"input": torch.randn(8, WIDTH, generator=generator), "y": torch.randn(8, 2, generator=generator)}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output, batch["y"])


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2)


def train(engine: sw.Engine[nn.Module], steps: range) -> list[float]:
    mesh = engine.plan.mesh
    own = mesh.data_rank(engine.channel.rank)
    return [
        engine.step({name: each.chunk(mesh.dp_shard)[own] for name, each in batch_of(step).items()}).loss
        for step in steps
    ]


def plain(base: str, steps: int) -> tuple[list[float], Mapping[str, Any]]:
    model = model_of(base)
    optimizer, losses = adamw(list(model.parameters())), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(batch_of(step)["input"]), batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def values(each: Any) -> torch.Tensor:
    found: torch.Tensor = each.dequantize() if type(each).__name__ == "Int8Tensor" else each
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages
        yield


@pytest.mark.parametrize(("base", "before", "after"), pairwise(list(BASES), list(PLANS), list(PLANS)))
def test_adapters_on_a_quantised_base_go_on_in_any_layout(base: str, before: str, after: str, tmp_path: Path) -> None:
    def first(channel: Channel) -> list[float]:
        engine = sw.parallelize(model_of(base), PLANS[before], optimizer=adamw, loss=loss_of, channel=channel)
        losses = train(engine, range(2))
        sw.save(tmp_path / "saved", engine)
        return losses

    def second(channel: Channel) -> tuple[list[float], dict[str, Any]]:
        model = model_of(base, seed=1)  # another base: codes and scales come from the checkpoint
        engine = sw.parallelize(model, PLANS[after], optimizer=adamw, loss=loss_of, channel=channel)
        sw.load(tmp_path / "saved", engine)
        losses = train(engine, range(2, 3))
        engine.evaluate({"input": batch_of(0)["input"], "y": batch_of(0)["y"]})
        losses += train(engine, range(3, 4))
        with engine.whole(rank0_only=True):
            found = model.state_dict() if channel.rank == 0 else {}
            state = {name: values(each).clone() for name, each in found.items()}
        return losses, state

    losses = sw.simulate(PLANS[before].mesh.size, first)[0]
    more, state = sw.simulate(PLANS[after].mesh.size, second)[0]
    expected, plain_state = plain(base, 4)
    if before == after == "one rank":
        assert losses + more == expected
    torch.testing.assert_close(losses + more, expected, rtol=1e-5, atol=0)
    assert state.keys() == plain_state.keys()
    for name, each in plain_state.items():
        if ".base." in name:
            assert torch.equal(state[name].view(torch.uint8), values(each).view(torch.uint8)), name


class Net(nn.Sequential):
    def forward(self, input: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # a model of peft gets both
        out = input
        for each in self:
            out = each(out)
        return out


def by_peft(base: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = Net(BASES[base](), nn.Tanh(), BASES[base](), nn.Linear(WIDTH, 2)).to("cpu")
    if base == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name in ("0", "2"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = base.startswith("4"), base.startswith("8")
    model.tp_plan = {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output"}  # for the unquantised model
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("base", "before", "after"),
    [
        *[("4 bits", "stage 3", "tp"), ("4 bits in floats", "tp", "pp")],
        *[("8 bits", "pp", "one rank"), ("torchao", "one rank", "stage 3")],
    ],
)
def test_adapters_of_peft_are_saved_alone_without_their_quantised_base(
    base: str, before: str, after: str, tmp_path: Path
) -> None:
    """A part of the model is whole then, and a packed weight is there with all that belongs to it, or not at all."""
    from peft import PeftModel

    plans = PLANS | {"tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto"))}
    at = "base_model.model.0.base_layer.weight"

    def first(channel: Channel) -> list[torch.Tensor]:
        model = by_peft(base)
        engine = sw.parallelize(model, plans[before], optimizer=adamw, loss=loss_of, channel=channel)
        train(engine, range(2))
        sw.save_adapters(engine, tmp_path / "adapters")
        with pytest.raises(ModelError, match="packed weights"):
            sw.save_merged(engine, tmp_path / "merged")
        found = []
        with engine.whole(rank0_only=True, optimizer=False, only=at):
            if channel.rank == 0:
                found += [values(model.get_submodule("base_model.model.0.base_layer").weight).clone()]
                model.state_dict()
        with engine.whole(optimizer=False, rank0_only=True):
            if channel.rank == 0:
                if base != "torchao":  # which peft merges with a function of the loader only
                    copy.deepcopy(model).merge_and_unload()
                with torch.no_grad():
                    found += [copy.deepcopy(model).eval()(batch_of(0)["input"])]
        train(engine, range(2, 3))
        return found

    def second(channel: Channel) -> float:
        engine = sw.parallelize(by_peft(base), plans[after], optimizer=adamw, loss=loss_of, channel=channel)
        sw.load_adapters(engine, tmp_path / "adapters")
        return engine.evaluate(batch_of(0)).loss

    weight, output = sw.simulate(plans[before].mesh.size, first)[0]
    plain = by_peft(base)
    codes = values(plain.get_submodule("base_model.model.0.base_layer").weight)
    assert torch.equal(weight.view(torch.uint8), codes.view(torch.uint8))
    read = PeftModel.from_pretrained(plain.unload(), tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = read(batch_of(0)["input"])
    assert torch.equal(output, expected)
    for loss in sw.simulate(plans[after].mesh.size, second):
        assert loss == pytest.approx(loss_of(expected, batch_of(0)).item(), rel=1e-5)
