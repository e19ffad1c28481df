"""Models in wrappers, with adapters beside their linear maps (as the library peft makes them), under carried plans."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from tests.engine.pipeline.oracle import adamw
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole
from tests.engine.tensor.test_proof import Heads


class Adapted(nn.Module):
    """A frozen map, and a small one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        out: torch.Tensor = self.base_layer(x) + 0.5 * beside
        return out


class Layer(nn.Module):
    """Attention, then two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Heads()
        self.attention.num_heads = 4
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Carrying(nn.Module):
    """A model that carries a plan."""

    tp_plan: Mapping[str, str] = {
        **{"layers.*.attention": "heads", "layers.*.attention.q": "colwise", "layers.*.attention.k": "colwise"},
        **{"layers.*.attention.v": "colwise", "layers.*.attention.out": "rowwise"},
        **{"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Wrapper(nn.Module):
    """Hands on the attributes of what it wraps, its plan among them, under names that do not hold here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out


EVERYWHERE = ("attention.q", "attention.k", "attention.v", "attention.out", "up", "down")


def adapted(names: tuple[str, ...] = EVERYWHERE, *, head: bool = True) -> Wrapper:
    model = Carrying()
    for layer in model.layers:
        for name in names:
            holder, _, attribute = name.rpartition(".")
            module = layer.get_submodule(holder)
            setattr(module, attribute, Adapted(getattr(module, attribute)))
    if head:
        model.head = Adapted(model.head)  # type: ignore[assignment]
    return Wrapper(Wrapper(model))


def run(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out: torch.Tensor = model(x)
    return out.square()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("names", [EVERYWHERE, ("attention.q", "attention.v"), ("attention.out", "down")], ids=len)
def test_the_plan_of_a_wrapped_model_cuts_maps_and_adapters(names: tuple[str, ...], num_ranks: int) -> None:
    def make() -> nn.Module:
        return adapted(names)

    got = compute_cut(make, "auto", num_ranks, run, is_completed=True)
    assert_close(got, compute_whole(make, run))
    assert got.plan is not None
    first = "model.model.layers.0"
    assert ("model.model.layers.0.attention.q.lora_B.default.weight" in got.plan.cuts) == ("attention.q" in names)
    assert (f"{first}.down.lora_A.default.weight" in got.plan.cuts) == ("down" in names)
    assert f"{first}.down.lora_B.default.weight" not in got.plan.cuts


def test_an_adapter_trains_as_in_one_process_and_is_proved() -> None:
    def train(channel: sw.Channel, tp: int) -> list[float]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            adapted().double(),
            sw.Plan(mesh=sw.Mesh(tp=tp), tensor=sw.Tensor(rules="auto" if tp > 1 else None)),
            optimizer=lambda parameters: adamw([each for each in parameters if each.requires_grad]),
            loss=lambda output, batch: (output - batch["y"]).square().mean(),
            channel=channel,
        )
        generator = torch.Generator().manual_seed(1)
        batch = {
            "x": torch.randn(2, 6, 8, generator=generator, dtype=torch.float64),
            "y": torch.randn(2, 6, 5, generator=generator, dtype=torch.float64),
        }
        return [engine.step(batch).loss for _ in range(3)]

    (alone,) = sw.simulate(1, lambda channel: train(channel, 1))
    for losses in sw.simulate(2, lambda channel: train(channel, 2)):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_what_the_rules_of_an_adapter_and_of_its_map_sum_is_summed_once() -> None:
    """As with the carried plan of a model whose embedding has an adapter, and whose head is tied to the map in it."""
    first = "model.model.layers.*"
    rules = {f"{first}.up": "column", f"{first}.down": "row"}
    both = {**rules, f"{first}.up.base_layer": "column", f"{first}.down.base_layer": "row"}
    got = compute_cut(adapted, both, 2, run, is_completed=True)
    assert_close(got, compute_whole(adapted, run))
    other = {**rules, f"{first}.down.base_layer": "row(scatter=1)"}
    with pytest.raises(PlanError, match="by its own rule and by that of its adapter; give one"):
        compute_cut(adapted, other, 2, run, is_completed=True)


class Mixed(Adapted):
    """An adapter that reads all inputs, and mixes all outputs."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.inputs = nn.Parameter(torch.randn(base.in_features, base.in_features))
        self.outputs = nn.Parameter(torch.randn(base.out_features, base.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.inputs) @ self.outputs


def test_an_adapter_that_cannot_be_cut_is_whole_amid_what_is_cut() -> None:
    def make() -> nn.Module:
        model = Carrying()
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.up = Mixed(layer.up)  # type: ignore[assignment]
            layer.attention.out = Mixed(layer.attention.out)  # type: ignore[assignment]
        return Wrapper(model)

    got = compute_cut(make, "auto", 2, run, is_completed=True)
    assert_close(got, compute_whole(make, run))
    assert got.plan is not None
    assert {name.rpartition(".")[2] for name in got.plan.left} == {"up", "out"}
    assert not any(".up." in name or ".out." in name for name in got.plan.cuts)
    assert "model.layers.0.down.weight" in got.plan.cuts


def test_an_adapter_of_parts_of_a_sequence_is_refused() -> None:
    def make(channel: sw.Channel) -> None:
        model = Carrying()
        layer = model.layers[0]
        assert isinstance(layer, Layer)
        layer.down = Mixed(layer.down)  # type: ignore[assignment]
        rules = {"layers.*.up": "column(gather=1)", "layers.*.down": "row(scatter=1)"}
        sw.parallelize(
            model, sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=rules)), optimizer=adamw, channel=channel
        )

    with pytest.raises(PlanError, match=r"layers.0.down' \(Mixed, .*: its adapter needs whole inputs; leave"):
        sw.simulate(2, make)
