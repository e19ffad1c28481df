"""The way back after training: a save knows through which rewrite its values came, whatever was trained between."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import TorchState
from shardwise.cli import main

TEXT = """
    layers.$L.experts.*.w -> layers.$L.experts, stack=0
    layers.$L.gate, layers.$L.up -> layers.$L.gate_up, axis=0
    layers.$L.down^T -> layers.$L.down
"""
LAYOUTS = {
    "one": (sw.Plan(), 1),
    "stage 3": (
        sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3), precision=sw.Precision(compute="bfloat16")),
        3,
    ),
    "pp": (sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)), 2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(3, 4, 4))
        self.gate_up = nn.Parameter(torch.zeros(8, 4))
        self.down = nn.Parameter(torch.zeros(8, 4))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + torch.einsum("bi,eij->bj", states, self.experts)
        out: torch.Tensor = torch.tanh(states @ self.gate_up.T) @ self.down
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return (output.float() - 1).square().mean()


def hub(folder: Path) -> Path:
    """Files with other names and shapes than the model's: unequal parts, experts apart, a transposed matrix."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for at in range(2):
        tensors |= {f"layers.{at}.experts.{number}.w": torch.randn(4, 4) for number in range(3)}
        tensors |= {f"layers.{at}.gate": torch.randn(5, 4), f"layers.{at}.up": torch.randn(3, 4)}
        tensors[f"layers.{at}.down"] = torch.randn(4, 8)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def parted(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By hand: the model's tensors as the hub has them."""
    tensors: dict[str, torch.Tensor] = {}
    for at in range(2):
        tensors |= {f"layers.{at}.experts.{number}.w": whole[f"layers.{at}.experts"][number] for number in range(3)}
        gate_up = whole[f"layers.{at}.gate_up"]
        tensors |= {f"layers.{at}.gate": gate_up[:5], f"layers.{at}.up": gate_up[5:]}
        tensors[f"layers.{at}.down"] = whole[f"layers.{at}.down"].T
    return tensors


def convert(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["ckpt", "convert", *map(str, words)])
    assert "Traceback" not in result.output
    return result


def same(folder: Path, whole: Mapping[str, torch.Tensor]) -> bool:
    found, expected = load_file(folder / "model.safetensors"), parted(whole)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def trained(path: Path, layout: str, load: Callable[[sw.Engine, sw.Channel], object]) -> dict[str, torch.Tensor]:
    """Load into an engine, train, save; the weights then."""
    plan, ranks = LAYOUTS[layout]

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = sw.parallelize(Net(), plan, optimizer=sgd, loss=loss, channel=channel)
        load(engine, channel)
        before = dict(sw.full(engine, channel=channel))
        engine.step({"states": torch.randn(4, 4, generator=torch.Generator().manual_seed(channel.rank * (ranks == 3)))})
        sw.save(path, engine, step=1, channel=channel)
        after = dict(sw.full(engine, channel=channel))
        assert not any(torch.equal(before[name], tensor) for name, tensor in after.items())
        return after

    return sw.simulate(ranks, run)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trained_save_leads_back_by_itself(tmp_path: Path, layout: str) -> None:
    source = hub(tmp_path / "hub")
    (tmp_path / "mine.rewrite").write_text(TEXT)
    assert convert(source, tmp_path / "fused", "--rewrite", tmp_path / "mine.rewrite").exit_code == 0
    rewrite = sw.Rewrite.file(tmp_path / "mine.rewrite")
    ways: dict[str, Callable[[sw.Engine, sw.Channel], object]] = {
        "of a converted save": lambda engine, channel: sw.load(tmp_path / "fused", engine, channel=channel),
        "through the rewrite": lambda engine, channel: sw.load(source, engine, rewrite=rewrite, channel=channel),
        "of a trained save": lambda engine, channel: sw.load(tmp_path / "of a converted save", engine, channel=channel),
    }
    for name, load in ways.items():
        whole = trained(tmp_path / name, layout, load)
        result = convert(tmp_path / name, tmp_path / f"{name} out", "--inverse", "--to", "hf", "--certify")
        assert result.exit_code == 0, result.output
        assert "come back to the bit" in result.stdout
        assert same(tmp_path / f"{name} out", whole)


def test_a_relayout_and_a_plain_program_remember_it_too(tmp_path: Path) -> None:
    source, rewrite = hub(tmp_path / "hub"), sw.Rewrite(TEXT)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(Net(), LAYOUTS["pp"][0], optimizer=sgd, loss=loss, channel=channel)
        sw.load(source, engine, rewrite=rewrite, channel=channel)
        engine = sw.relayout(engine, sw.Plan(mesh=sw.Mesh(dp_shard=2)))
        engine.step({"states": torch.ones(2, 4)})
        sw.save(tmp_path / "moved", engine, channel=channel)

    sw.simulate(2, run)
    model = Net()
    state = TorchState(model, sgd(list(model.parameters())))
    sw.load(source, state, rewrite=rewrite)
    sw.save(tmp_path / "plain", state)
    for name in ("moved", "plain"):
        assert sw.checkpoint.recorded_rewrite(tmp_path / name) == rewrite
        assert convert(tmp_path / name, tmp_path / f"{name} out", "--inverse", "--to", "hf").exit_code == 0
    assert same(tmp_path / "plain out", model.state_dict())


def test_values_that_came_through_no_rewrite_forget_the_one_before(tmp_path: Path) -> None:
    source, rewrite = hub(tmp_path / "hub"), sw.Rewrite(TEXT)
    engine = sw.parallelize(Net(), sw.Plan(), optimizer=sgd, loss=loss)
    sw.save(tmp_path / "fresh", engine)
    sw.load(source, engine, rewrite=rewrite)
    sw.load(tmp_path / "fresh", engine)
    sw.save(tmp_path / "again", engine)
    result = convert(tmp_path / "again", tmp_path / "out", "--inverse")
    assert result.exit_code == 1
    assert "does not say which rewrite made it; name the rewrite to undo (--rewrite NAME --inverse)" in result.stderr


def test_a_save_that_remembers_nothing_goes_back_like_an_original(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")
    (tmp_path / "mine.rewrite").write_text(TEXT)
    whole = dict(sw.full(load_file(source / "model.safetensors"), sw.Rewrite(TEXT)))
    sw.save(tmp_path / "forgot", whole)
    words = ("--to", "hf", "--rewrite", tmp_path / "mine.rewrite", "--inverse", "--like", source)
    result = convert(tmp_path / "forgot", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    assert same(tmp_path / "out", whole)
    result = convert(tmp_path / "forgot", tmp_path / "compared", *words, "--certify")
    assert f"are as in {source}" in result.output
    assert "; not: " not in result.output
    assert convert(tmp_path / "forgot", tmp_path / "x", "--to", "hf", "--like", source).exit_code == 1


def test_a_lossy_way_back_wants_a_word(tmp_path: Path) -> None:
    (tmp_path / "narrow.rewrite").write_text("a -> b, dtype='bfloat16'\n")
    sw.save(tmp_path / "a", {"a": torch.ones(3)})
    assert convert(tmp_path / "a", tmp_path / "b", "--rewrite", tmp_path / "narrow.rewrite").exit_code == 0
    result = convert(tmp_path / "b", tmp_path / "c", "--inverse")
    assert result.exit_code == 1
    assert "(--lossy)" in result.stderr
    assert convert(tmp_path / "b", tmp_path / "c", "--inverse", "--lossy").exit_code == 0
    assert sw.checkpoint.open(tmp_path / "c").read("a").dtype == torch.float32
