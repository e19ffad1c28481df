"""Adapters on packed bases: frozen weights in fewer bits stay as they are, wherever their parts are."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import Channel, alone
from shardwise.errors import ModelError, PlanError
from tests.covering import pairwise
from tests.engine.packed_models import WIDTH, Codes, packed_net, shell
from tests.engine.refusals import same_error_everywhere

STEPS = 3
RULES = {"blocks.*.a": "column", "blocks.*.b": "row"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "stage 0": {"mesh": sw.Mesh(dp_replicate=2), "sharding": sw.Sharding(stage=0)},
    "stage 1": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=1, partition="whole")},
    "stage 2": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=2)},
    "stage 3": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=3)},
    "pp": {"mesh": sw.Mesh(pp=2)},
    "pp and stage 3": {"mesh": sw.Mesh(pp=2, dp_shard=2), "sharding": sw.Sharding(stage=3)},
    "tp and stage 3": {
        "mesh": sw.Mesh(tp=2, dp_shard=2),
        "sharding": sw.Sharding(stage=3),
        "tensor": sw.Tensor(rules=RULES),
    },
}


def plan_of(layout: str, *, compute: str | None = None, k: int = 1) -> sw.Plan:
    settings = {"mesh": sw.Mesh(), **LAYOUTS[layout]}
    return sw.Plan(precision=sw.Precision(compute=compute), merge=sw.Merge(microbatches=k), **settings)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, WIDTH, generator=generator), "y": torch.randn(8, 4, generator=generator)}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output.float(), batch["y"])


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2)


def engine_of(plan: sw.Plan, channel: Channel, *, seed: int = 0) -> sw.Engine[nn.Module]:
    return sw.parallelize(packed_net(seed), plan, optimizer=adamw, loss=loss_of, channel=channel)


def train(engine: sw.Engine[nn.Module], steps: range) -> list[float]:
    mesh, losses = engine.plan.mesh, []
    for step in steps:
        share = {
            name: each.chunk(mesh.dp_replicate * mesh.dp_shard)[mesh.data_rank(engine.channel.rank)]
            for name, each in batch_of(step).items()
        }
        losses.append(engine.step(share).loss)
    return losses


def plain(steps: int = STEPS) -> tuple[list[float], nn.Module]:
    model = packed_net()
    optimizer, losses = adamw(list(model.parameters())), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(batch_of(step)["x"]), batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def contents(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a state dict, those inside of others by their names."""
    found: dict[str, torch.Tensor] = {}
    for name, each in state.items():
        found |= {f"{name}.codes": each.codes, f"{name}.scale": each.scale} if isinstance(each, Codes) else {name: each}
    # Codes that are stored as floats may be NaN there.
    bits = {
        name: each.view(torch.int16) if "base.weight" in name and each.dtype == torch.bfloat16 else each
        for name, each in found.items()
    }
    return {name: each.clone() for name, each in bits.items()}


def is_trained(name: str) -> bool:
    return name.endswith(("a.weight", "b.weight")) or name.startswith("head.")


@pytest.mark.parametrize(("layout", "compute", "k"), pairwise(list(LAYOUTS), [None, "bfloat16"], [1, 2]))
def test_a_packed_base_trains_as_in_one_process(layout: str, compute: str | None, k: int) -> None:
    plan = plan_of(layout, compute=compute, k=k)

    def run(channel: Channel) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = engine_of(plan, channel)
        losses = train(engine, range(STEPS))
        with engine.whole(rank0_only=True):
            state = contents(engine.model.state_dict()) if channel.rank == 0 else {}
        return losses, state

    expected, model = plain()
    losses, state = sw.simulate(plan.mesh.size, run)[0]
    if layout == "one rank" and compute is None and k == 1:
        assert losses == expected
    torch.testing.assert_close(losses, expected, rtol=1e-6 if compute is None else 2e-2, atol=0)
    for name, each in contents(model.state_dict()).items():
        if name == "blocks.1.base.bias":  # the module itself has brought it to bfloat16
            torch.testing.assert_close(state[name], each.float(), rtol=1e-2, atol=0)
        elif not is_trained(name):
            assert state[name].dtype == each.dtype, name
            assert torch.equal(state[name].view(torch.uint8), each.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one rank", "stage 3"),
        ("stage 3", "pp"),
        ("pp", "stage 2"),
        ("pp and stage 3", "tp and stage 3"),
        ("tp and stage 3", "one rank"),
    ],
)
def test_a_checkpoint_of_a_packed_base_goes_on_in_any_layout(before: str, after: str, tmp_path: Path) -> None:
    def first(channel: Channel) -> list[float]:
        engine = engine_of(plan_of(before), channel)
        losses = train(engine, range(2))
        sw.save(tmp_path / "saved", engine)
        return losses

    def second(channel: Channel) -> list[float]:
        # Another base: all its codes and scales come from the checkpoint.
        engine = engine_of(plan_of(after), channel, seed=1)
        sw.load(tmp_path / "saved", engine)
        return train(engine, range(2, 4))

    losses = sw.simulate(plan_of(before).mesh.size, first)[0] + sw.simulate(plan_of(after).mesh.size, second)[0]
    torch.testing.assert_close(losses, plain(4)[0], rtol=1e-6, atol=0)


def test_a_converted_save_goes_on_and_files_of_another_dtype_keep_the_packed_bits(tmp_path: Path) -> None:
    def first(channel: Channel) -> list[float]:
        engine = engine_of(plan_of("stage 3"), channel)
        losses = train(engine, range(2))
        sw.save(tmp_path / "saved", engine)
        return losses

    def second(channel: Channel) -> list[float]:
        engine = engine_of(plan_of("pp"), channel, seed=1)
        sw.load(tmp_path / "converted", engine)
        return train(engine, range(2, 4))

    losses = sw.simulate(2, first)[0]
    sw.checkpoint.convert(tmp_path / "saved", tmp_path / "converted", to="pieces")
    torch.testing.assert_close(losses + sw.simulate(2, second)[0], plain(4)[0], rtol=1e-6, atol=0)
    sw.checkpoint.export_hf(tmp_path / "saved", tmp_path / "kept")
    sw.checkpoint.export_hf(tmp_path / "saved", tmp_path / "files", dtype="float16")
    kept, cast = (load_file(tmp_path / each / "model.safetensors") for each in ("kept", "files"))
    assert kept.keys() == cast.keys()
    for name, each in kept.items():
        if ".base.weight" in name:
            assert cast[name].dtype == each.dtype, name
            assert torch.equal(cast[name].view(torch.uint8), each.view(torch.uint8)), name
        elif ".base." not in name:
            assert cast[name].dtype == (torch.float16 if each.is_floating_point() else each.dtype), name


def test_a_conversion_casts_what_was_trained_next_to_bytes_and_names_what_it_leaves(tmp_path: Path) -> None:
    """A table of bytes may be no code of a packed weight: nothing is left in silence."""

    class Coloured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(6))
            self.register_buffer("palette", torch.arange(6, dtype=torch.uint8))
            self.register_buffer("mean", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            palette, mean = self.get_buffer("palette"), self.get_buffer("mean")
            return x * self.scale + palette + mean

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return output.square().mean()

    engine = sw.parallelize(Coloured(), sw.Plan(), optimizer=torch.optim.AdamW, loss=loss)
    engine.step({"x": torch.ones(2, 6)})
    sw.save(tmp_path / "saved", engine)
    report = sw.checkpoint.export_hf(tmp_path / "saved", tmp_path / "files", dtype="bfloat16")
    assert (report.cast, report.uncast) == (("scale",), ("mean",))
    found = load_file(tmp_path / "files" / "model.safetensors")
    assert {name: each.dtype for name, each in found.items()} == {
        "scale": torch.bfloat16,
        "palette": torch.uint8,
        "mean": torch.float32,
    }
    again = sw.checkpoint.convert(
        tmp_path / "saved",
        tmp_path / "all",
        to="hf",
        dtype="bfloat16",
        rewrite=sw.Rewrite(["mean -> mean, dtype='bfloat16'"]),
    )
    assert again.uncast == ()
    assert load_file(tmp_path / "all" / "model.safetensors")["mean"].dtype == torch.bfloat16


@pytest.mark.parametrize(("before", "after"), [("stage 3", "pp"), ("pp", "stage 3"), ("stage 2", "stage 3")])
def test_a_packed_base_is_laid_out_anew(before: str, after: str) -> None:
    def run(channel: Channel) -> list[float]:
        engine = engine_of(plan_of(before), channel)
        losses = train(engine, range(2))
        # A refusal on the way leaves all as it was.
        with pytest.raises(PlanError, match="matches none"):
            sw.relayout(engine, sw.Plan(mesh=engine.plan.mesh, precision=sw.Precision(keep=("nothing",))))
        losses += train(engine, range(2, 3))
        return losses + train(sw.relayout(engine, plan_of(after)), range(3, 5))

    for losses in sw.simulate(2, run):
        torch.testing.assert_close(losses, plain(5)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["one rank", "stage 2", "stage 3", "pp"])
def test_codes_that_an_evaluation_packs_anew_are_put_back(layout: str, tmp_path: Path) -> None:
    def run(channel: Channel) -> list[float]:
        engine = engine_of(plan_of(layout), channel)
        losses = []
        for step in range(STEPS):
            losses += train(engine, range(step, step + 1))
            engine.evaluate(batch_of(step))
            sw.save(tmp_path / str(step), engine)
        return losses

    losses = sw.simulate(plan_of(layout).mesh.size, run)[0]
    torch.testing.assert_close(losses, plain()[0], rtol=1e-6, atol=0)
    found = sw.checkpoint.open(tmp_path / "2").read("blocks.1.base.weight")
    assert torch.equal(found.view(torch.int16), contents(packed_net().state_dict())["blocks.1.base.weight"])


def test_frozen_codes_have_no_masters_gradients_or_state(tmp_path: Path) -> None:
    def run(channel: Channel) -> tuple[Any, set[str], int]:
        engine = engine_of(plan_of("stage 2", compute="bfloat16"), channel)
        train(engine, range(1))
        named = {piece.name for piece in [*engine.state(), *engine.gradients()] if piece.name.startswith("optimizer/")}
        sizes = engine.footprint()
        return sizes, named, engine.traffic().reduce_bytes

    model = packed_net()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for name, each in contents(model.state_dict()).items() if not is_trained(name))
    buffers = sum(each.nbytes for each in model.buffers())
    for sizes, named, sent in sw.simulate(2, run):
        assert all(is_trained(name.split("/")[1]) for name in named)
        # Scales that are attributes are in no state dict: 16 rows of a block, and of another.
        assert sizes.frozen_bytes == frozen - buffers + 2 * WIDTH * 4
        assert sizes.working_bytes <= 2 * (trained + 16 * 16)
        assert sent <= 2 * (trained + 16 * 16)


def test_stage_3_cuts_codes_and_scales() -> None:
    def run(channel: Channel) -> tuple[int, int]:
        sizes = engine_of(plan_of("stage 3"), channel).footprint()
        return sizes.frozen_bytes, sizes.working_bytes

    alone_bytes = engine_of(plan_of("one rank"), alone()).footprint()
    for frozen, working in sw.simulate(2, run):
        assert frozen == 0
        assert working < 0.75 * (alone_bytes.frozen_bytes + alone_bytes.working_bytes)


def test_only_the_stage_of_a_packed_weight_holds_it() -> None:
    def run(channel: Channel) -> list[bool]:
        engine = engine_of(plan_of("pp"), channel)
        blocks: Any = engine.model.blocks
        first, second, third = (blocks[at].base for at in range(3))
        return [
            first.weight.is_meta,
            first.weight.codes.is_meta,
            second.weight.state.inner["scale"].is_meta,
            third.weight.is_meta,
            third.weight.CB.is_meta,
            third.weight.SCB.is_meta,
        ]

    first, second = sw.simulate(2, run)
    assert all(one != other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "rules", [{"blocks.*.base": "column"}, {"blocks.1.base.weight": "row"}, {"blocks.2.base": "vocab"}], ids=str
)
def test_a_packed_weight_is_not_cut_along_tp(rules: dict[str, str]) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=rules))
    error = same_error_everywhere(2, lambda channel: engine_of(plan, channel))
    assert "packed weight, whose codes and scales are not cut; leave it out" in str(error)


def test_other_codes_on_one_rank_are_refused() -> None:
    def build(channel: Channel) -> object:
        model: Any = packed_net()
        if channel.rank == 1:
            model.blocks[1].base.weight.state.inner["scale"].mul_(2)
        return sw.parallelize(model, plan_of("stage 2"), optimizer=adamw, loss=loss_of, channel=channel)

    error = same_error_everywhere(2, build)
    assert "blocks.1.base.weight.state.inner.scale" in str(error)


def test_packed_weights_without_values_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.empty(4, 4, dtype=torch.uint8, device="meta"), requires_grad=False)
    with pytest.raises(ModelError, match=r"'0.weight'.* have no initial values.*Quantise"):
        sw.parallelize(model, sw.Plan(mesh=sw.Mesh()), optimizer=adamw, loss=loss_of, channel=alone())


def test_a_tensor_around_others_that_requires_a_gradient_is_refused() -> None:
    model = shell(torch.randn(4, 4))
    model.weight.requires_grad_()
    with pytest.raises(ModelError, match="plain tensors: freeze it"):
        sw.parallelize(model, sw.Plan(mesh=sw.Mesh()), optimizer=adamw, loss=loss_of, channel=alone())


@pytest.mark.parametrize("layout", ["stage 1", "stage 3", "pp"])
def test_packed_weights_train_on_devices(fake: str, layout: str) -> None:
    plan = plan_of(layout)
    losses = sw.simulate(plan.mesh.size, lambda channel: train(engine_of(plan, channel), range(STEPS)), device=fake)[0]
    torch.testing.assert_close(losses, plain()[0], rtol=1e-5, atol=0)


def test_a_packed_base_under_autocast() -> None:
    def run(channel: Channel) -> list[float]:
        engine = engine_of(plan_of("stage 3"), channel)
        losses = []
        for step in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                losses += train(engine, range(step, step + 1))
        return losses

    model = packed_net()
    optimizer, expected = adamw(list(model.parameters())), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(batch_of(step)["x"]), batch_of(step))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = sw.simulate(2, run)[0]
    assert math.isfinite(sum(losses))
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)
