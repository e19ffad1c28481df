"""Checkpoints of models with other wrappers around their modules: the names differ by the wrappers only."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise.checkpoint import TorchState, export_hf
from shardwise.errors import CheckpointError
from tests.oracle.batches import points, share_of, square_loss
from tests.oracle.program import adamw

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(torch.tanh(self.inner(x)))
        return out


class WrappedBlocks(nn.Module):
    """The last block has the matrix of the first."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        blocks[2].inner.weight = blocks[0].inner.weight
        self.blocks = nn.Sequential(*map(wrap, blocks))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(x))
        return out


def plain(module: nn.Module) -> nn.Module:
    return module


def recomputed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


class Kept(nn.Module):
    """A wrapper whose child has the name that torch's compiler gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._orig_mod(x)
        return out


def run(
    wrap: Wrap, *, stage: int = 1, ranks: int = 1, load: Path | None = None, save: Path | None = None, steps: range
) -> list[float]:
    """Losses of an engine; batch statistics are of one data rank, so every rank has the whole batch."""

    def train(channel: sw.Channel) -> list[float]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=ranks), sharding=sw.Sharding(stage=stage))
        engine = sw.parallelize(WrappedBlocks(wrap), plan, optimizer=adamw, loss=square_loss, channel=channel)
        if load is not None:
            sw.load(str(load), engine, channel=channel)
        losses = [engine.step(share_of(points(step, 8), 0, 1)).loss for step in steps]
        if save is not None:
            sw.save(str(save), engine, channel=channel)
        return losses

    return sw.simulate(ranks, train)[0]


@pytest.mark.parametrize(("one", "other"), [(plain, recomputed), (recomputed, plain), (Kept, recomputed)])
def test_a_run_goes_on_with_other_wrappers(tmp_path: Path, one: Wrap, other: Wrap) -> None:
    """Parameters, masters, optimizer state, buffers and ties."""
    expected = run(one, steps=range(4))
    run(one, steps=range(2), save=tmp_path)
    assert run(other, steps=range(2, 4), load=tmp_path) == expected[2:]


# torch's compiler looks at the gradient of values that are no leaves, and is warned by torch about it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_run_goes_on_with_compiled_blocks_under_another_layout(tmp_path: Path) -> None:
    expected = run(plain, steps=range(4))
    run(compiled, steps=range(2), save=tmp_path)
    assert run(plain, steps=range(2, 4), load=tmp_path, stage=3, ranks=2) == pytest.approx(expected[2:], rel=1e-6)
    run(plain, steps=range(2), save=tmp_path)
    assert run(compiled, steps=range(2, 4), load=tmp_path) == expected[2:]


@pytest.mark.parametrize("wrap", [plain, recomputed])
def test_plain_torch_takes_the_save_of_a_wrapped_model_and_gives_one_back(tmp_path: Path, wrap: Wrap) -> None:
    expected = run(Kept, steps=range(2), save=tmp_path / "engine")
    model = WrappedBlocks(wrap)
    optimizer = adamw(list(model.parameters()))
    sw.load(str(tmp_path / "engine"), TorchState(model, optimizer))
    optimizer.zero_grad()
    batch = points(2, 8)
    square_loss(model(batch["x"]), batch).backward()
    optimizer.step()
    sw.save(str(tmp_path / "torch"), TorchState(model, optimizer))
    expected = run(plain, steps=range(4))
    assert run(Kept, steps=range(3, 4), load=tmp_path / "torch") == expected[3:]


def test_two_stored_tensors_of_one_name_do_not_silently_become_one(tmp_path: Path) -> None:
    sw.save(str(tmp_path), {"a.w": torch.zeros(2), "a._orig_mod.w": torch.ones(2)})
    model = nn.ModuleDict({"a": nn.Module()})
    model["a"].w = nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"a\._orig_mod\.w"):
        sw.load(str(tmp_path), TorchState(model))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_files_for_other_programs_have_the_names_of_the_plain_model(tmp_path: Path, dtype: str | None) -> None:
    run(Kept, steps=range(1), save=tmp_path / "save")
    report = export_hf(str(tmp_path / "save"), str(tmp_path / "hf"), dtype=dtype)
    assert report.certificate is not None
    model = WrappedBlocks(plain)
    kept = WrappedBlocks(Kept)
    sw.load(str(tmp_path / "save"), TorchState(kept))
    files = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(files) | set(report.aliases) == set(model.state_dict())
    for (name, _), values in zip(model.named_parameters(), kept.parameters(), strict=True):
        assert torch.equal(files[name], values.detach().to(files[name].dtype))
    # A rewrite says names itself, and a save keeps them.
    named = sw.Rewrite(["'head.weight' -> 'top.weight'"])
    export_hf(str(tmp_path / "save"), str(tmp_path / "named"), named)
    assert "blocks.0._orig_mod.inner.bias" in load_file(tmp_path / "named" / "model.safetensors")


def test_names_of_a_mapping_are_its_own_and_two_of_one_plain_name_stay(tmp_path: Path) -> None:
    given = {"a._orig_mod.w": torch.zeros(2), "b._orig_mod.w": torch.ones(2), "b.w": torch.ones(1)}
    assert set(dict(sw.full(given))) == set(given)
    sw.save(str(tmp_path / "save"), given)
    export_hf(str(tmp_path / "save"), str(tmp_path / "hf"))
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"a.w", "b._orig_mod.w", "b.w"}
