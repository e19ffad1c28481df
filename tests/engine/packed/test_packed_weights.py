"""Adapters on packed bases, of packages and without: frozen weights in fewer bits stay as they are, in any layout."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import Channel, alone
from shardwise.errors import ModelError
from tests.engine.packed_models import Float8Linear, StatefulLinear
from tests.engine.refusals import raise_of_all, same_error_everywhere
from tests.engine.tower import on_ranks, train
from tests.oracle.one_process import train_in_one_process
from tests.refusals import Refusals

WIDTH = 64
STEPS = 4


# The packages are imported where they are used: it takes seconds, in each process that collects tests.
def four_bits(**settings: Any) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    linear: nn.Module = Linear4bit(WIDTH, WIDTH, quant_type="nf4", **settings)
    return linear


def eight_bits() -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    linear: nn.Module = Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    return linear


def of_codes(kind: Callable[[torch.Tensor], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind(torch.randn(WIDTH, WIDTH) / 8)


BASES: dict[str, Callable[[], nn.Module]] = {
    "4 bits": lambda: four_bits(compute_dtype=torch.float32, compress_statistics=True),
    "4 bits in floats": lambda: four_bits(quant_storage=torch.bfloat16, compress_statistics=False),
    "8 bits": eight_bits,
    "torchao": lambda: nn.Linear(WIDTH, WIDTH),
    "packs anew in evaluations": of_codes(StatefulLinear),
    "float8 and buffers": of_codes(Float8Linear),
}
DATA, STAGE3 = sw.Mesh(dp_shard=2), sw.Sharding(stage=3)
RULES = sw.Tensor(rules={"*.a": "column", "*.b": "row"})
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "stage 0": {"mesh": sw.Mesh(dp_replicate=2), "sharding": sw.Sharding(stage=0)},
    "stage 1": {"mesh": DATA, "sharding": sw.Sharding(partition="whole")},
    "stage 2": {"mesh": DATA, "sharding": sw.Sharding(stage=2)},
    "stage 3": {"mesh": DATA, "sharding": STAGE3},
    "pp": {"mesh": sw.Mesh(pp=2)},
    "tp": {"mesh": sw.Mesh(tp=2), "tensor": RULES},
    "pp and stage 3": {"mesh": sw.Mesh(pp=2, dp_shard=2), "sharding": STAGE3},
    "tp and stage 3": {"mesh": sw.Mesh(tp=2, dp_shard=2), "sharding": STAGE3, "tensor": RULES},
}


def plan_of(layout: str, compute: str | None = None) -> sw.Plan:
    return sw.Plan(**LAYOUTS[layout], precision=sw.Precision(compute=compute))


class Adapted(nn.Module):
    """A frozen map with an adapter; the batch's rows stay apart."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x)
        out: torch.Tensor = x + torch.tanh(base + self.b(self.a(x.to(self.a.weight.dtype))).to(base.dtype))
        return out


def model_of(base: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(BASES[base]()) for _ in range(2)), nn.Linear(WIDTH, 2)).to("cpu")
    model.register_parameter("steps", nn.Parameter(torch.arange(3), requires_grad=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".base." not in name and name != "steps")
    quantised(model, base, "base")
    return model


def quantised(model: nn.Module, base: str, *names: str) -> None:
    if base == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith(names))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"input": torch.randn(8, WIDTH, generator=generator), "y": torch.randn(8, 2, generator=generator)}


def loss_of(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return F.mse_loss(output.float(), batch["y"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2)


def engine_of(base: str, plan: str | sw.Plan, channel: Channel, seed: int = 0) -> sw.Engine:
    asked = plan_of(plan) if isinstance(plan, str) else plan
    return sw.parallelize(model_of(base, seed), asked, optimizer=adamw, loss=loss_of, channel=channel)


def plain(base: str, steps: int = STEPS) -> tuple[list[float], Mapping[str, Any]]:
    model = model_of(base)
    batches = [batch_of(step) for step in range(steps)]
    trained = train_in_one_process(model, adamw(model.parameters()), batches, loss=loss_of)
    return trained.losses, model.state_dict()


def run_on(engine: sw.Engine, steps: range) -> list[float]:
    return train(engine, map(batch_of, steps))


def values(each: Any) -> torch.Tensor:
    found: torch.Tensor = each.dequantize() if type(each).__name__ == "Int8Tensor" else each
    return found


def bits(each: Any) -> torch.Tensor:
    return values(each).contiguous().view(torch.uint8)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages
        yield


def moves() -> Iterator[Any]:
    """Each base under each layout, before and after; a third of them quickly."""
    for number, base in enumerate(BASES):
        for at, before in enumerate(LAYOUTS):
            after = list(LAYOUTS)[(at + number + 1) % len(LAYOUTS)]
            yield pytest.param(base, before, after, marks=[] if (at + number) % 3 == 0 else pytest.mark.stress)


@pytest.mark.parametrize(("base", "before", "after"), list(moves()))
def test_adapters_on_a_packed_base_go_on_in_any_layout(base: str, before: str, after: str, tmp_path: Path) -> None:
    """By a checkpoint, or by a relayout where there are as many ranks; evaluations lie between."""

    def first(channel: Channel) -> list[float]:
        engine = engine_of(base, before, channel)
        losses = run_on(engine, range(2))
        sw.save(tmp_path / "saved", engine)
        if plan_of(before).mesh.size == plan_of(after).mesh.size:
            losses += run_on(sw.relayout(engine, plan_of(after)), range(2, STEPS))
        return losses

    def second(channel: Channel) -> tuple[list[float], dict[str, Any]]:
        engine = engine_of(base, after, channel, seed=1)  # another base: codes and scales come from the checkpoint
        sw.load(tmp_path / "saved", engine)
        losses = run_on(engine, range(2, 3))
        engine.evaluate(batch_of(0))
        losses += run_on(engine, range(3, STEPS))
        return losses, {name: values(each).clone() for name, each in sw.full_state_dict(engine).items()}

    expected, plain_state = plain(base)
    losses = on_ranks(plan_of(before), first)[0]
    more, state = on_ranks(plan_of(after), second)[0]
    for found in (losses, losses[:2] + more):
        near = 0 if before == "one rank" == after and base != "packs anew in evaluations" else 1e-5
        assert found == pytest.approx(expected[: len(found)], rel=near)
    assert state.keys() == plain_state.keys()
    for name, each in plain_state.items():
        if ".base." in name and not name.endswith(".bias"):
            assert torch.equal(bits(state[name]), bits(each)), name


@pytest.mark.parametrize(
    ("base", "layout", "where"),
    [
        *[("8 bits", "stage 2", "bfloat16"), ("8 bits", "stage 3", "device"), ("torchao", "pp", "device")],
        *[("torchao", "stage 0", "autocast"), ("packs anew in evaluations", "stage 3", "autocast")],
        *[("float8 and buffers", "tp and stage 3", "bfloat16"), ("float8 and buffers", "stage 1", "device")],
    ],
)
def test_a_packed_base_trains_in_bfloat16_under_autocast_and_on_devices(
    base: str, layout: str, where: str, fake: str
) -> None:
    plan = plan_of(layout, "bfloat16" if where == "bfloat16" else None)

    def run(channel: Channel) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
            return run_on(engine_of(base, plan, channel), range(STEPS))

    losses = on_ranks(plan, run, **({"device": fake} if where == "device" else {}))[0]
    assert losses == pytest.approx(plain(base)[0], rel=1e-3 if where == "device" else 3e-2)


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
    quantised(model, base, "0", "2")
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

    plans = {name: plan_of(name) for name in LAYOUTS} | {
        "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto"))
    }
    at = "base_model.model.0.base_layer.weight"

    def first(channel: Channel) -> list[torch.Tensor]:
        model = by_peft(base)
        engine = sw.parallelize(model, plans[before], optimizer=adamw, loss=loss_of, channel=channel)
        run_on(engine, range(2))
        sw.save_adapters(engine, tmp_path / "adapters")
        with pytest.raises(ModelError, match="packed weights"):
            sw.save_merged(engine, tmp_path / "merged")
        found = []
        with engine.whole(rank0_only=True, optimizer=False, only=at):
            if channel.rank == 0:
                found += [values(model.get_submodule("base_model.model.0.base_layer").weight).clone()]
        with engine.whole(optimizer=False, rank0_only=True):
            if channel.rank == 0:
                if base != "torchao":  # which peft merges with a function of the loader only
                    copy.deepcopy(model).merge_and_unload()
                with torch.no_grad():
                    found += [copy.deepcopy(model).eval()(batch_of(0)["input"])]
        run_on(engine, range(2, 3))
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


def test_files_of_another_dtype_keep_the_packed_bits(tmp_path: Path) -> None:
    def save(channel: Channel) -> None:
        engine = engine_of("packs anew in evaluations", "stage 3", channel)
        run_on(engine, range(2))
        sw.save(tmp_path / "saved", engine)

    sw.simulate(2, save)
    sw.checkpoint.export_hf(tmp_path / "saved", tmp_path / "kept")
    sw.checkpoint.export_hf(tmp_path / "saved", tmp_path / "files", dtype="float16")
    kept, cast = (load_file(tmp_path / each / "model.safetensors") for each in ("kept", "files"))
    assert kept.keys() == cast.keys()
    for name, each in kept.items():
        if ".base.weight" in name:
            assert cast[name].dtype == each.dtype, name
            assert torch.equal(bits(cast[name]), bits(each)), name
        elif ".base." not in name:
            assert cast[name].dtype == (torch.float16 if each.is_floating_point() else each.dtype), name


def is_trained(name: str) -> bool:
    return name.endswith(("a.weight", "b.weight")) or name.startswith("2.")


@pytest.mark.parametrize("base", ["4 bits in floats", "torchao", "float8 and buffers"])
def test_frozen_codes_have_no_masters_gradients_or_state_and_stage_3_cuts_them(base: str) -> None:
    def run(channel: Channel) -> tuple[Any, Any]:
        engine = engine_of(base, plan_of("stage 2", "bfloat16"), channel)
        run_on(engine, range(1))
        named = {piece.name for piece in [*engine.state(), *engine.gradients()] if piece.name.startswith("optimizer/")}
        assert all(is_trained(name.split("/")[1]) for name in named if "bias" not in name)
        trained = sum(each.numel() for name, each in engine.model.named_parameters() if each.requires_grad)
        assert engine.traffic().reduce_bytes <= 2 * (trained + 16 * 16)
        return engine.footprint(), engine_of(base, "stage 3", channel).footprint()

    one = engine_of(base, "one rank", alone()).footprint()
    for whole, cut in sw.simulate(2, run):
        assert whole.frozen_bytes > WIDTH * WIDTH
        assert cut.frozen_bytes + cut.working_bytes < 0.75 * (one.frozen_bytes + one.working_bytes)


# Refusals -----------------------------------------------------------------------------------------------------------


def cut(rules: dict[str, str]) -> Callable[[], None]:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=rules))
    return lambda: raise_of_all(2, lambda channel: engine_of("8 bits", plan, channel))


def other_codes(channel: Channel) -> None:
    model: Any = model_of("packs anew in evaluations")
    if channel.rank == 1:
        model[1].base.weight.state.inner["scale"].mul_(2)
    sw.parallelize(model, plan_of("stage 2"), optimizer=adamw, loss=loss_of, channel=channel)


def without_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.empty(4, 4, dtype=torch.uint8, device="meta"), requires_grad=False)
    sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=loss_of)


def trained_codes() -> None:
    model: Any = model_of("torchao")
    model[0].base.weight.requires_grad_()
    sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=loss_of)


REFUSED = Refusals(
    "engine.packed_tensors",
    {
        "columns of codes": cut({"*.base": "column"}),
        "rows of one weight": cut({"1.base.weight": "row"}),
        "a vocabulary": cut({"1.base": "vocab"}),
        "no values": without_values,
        "codes that require a gradient": trained_codes,
    },
)


def test_other_codes_on_one_rank_are_refused() -> None:
    assert "rank 0 has '1.base.weight.state.inner.scale' with digest" in str(same_error_everywhere(2, other_codes))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_with_codes_is_refused(case: str) -> None:
    REFUSED.check(case)
