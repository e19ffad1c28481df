"""Tied models load what writers saved under each name of a tensor, if all copies are equal to the bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.errors import ShardwiseError
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.stored_values import save_dcp
from tests.covering import covering

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    """Three names of one parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(31, 10)
        self.out = nn.Linear(10, 31, bias=False)
        self.out.weight = self.embed.weight
        self.third = nn.Linear(10, 31)
        self.third.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.embed(x)) + self.out(self.embed(x))
        return out


def apart(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in Tied(seed).state_dict().items()}


def put(folder: Path, kind: str, state: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint by a writer that does not look for ties."""
    folder = folder / kind
    if kind == "dcp":
        save_dcp(folder, state)
    elif kind == "safetensors":
        folder.mkdir()
        safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    elif kind == "ours":
        sw.save(folder, dict(state))
    elif kind == "ours by three":

        def run(channel: Channel) -> None:
            rows = [min(31, 11 * rank) for rank in range(4)][channel.rank : channel.rank + 2]
            pieces = {
                sw.Piece(name=name, dtype="float32", global_shape=tuple(tensor.shape),
                         offset=(rows[0], *[0] * (tensor.ndim - 1)), shape=(rows[1] - rows[0], *tensor.shape[1:])):
                tensor[rows[0] : rows[1]]
                for name, tensor in state.items()
            }  # fmt: skip
            sw.save(folder, pieces, channel=channel)

        sw.simulate(3, run)
    return folder


KINDS = ["dcp", "safetensors", "ours", "ours by three"]


def load(path: Path, size: int, **options: object) -> tuple[list[Tied], list[str]]:
    models = [Tied(9) for _ in range(size)]
    errors: list[str] = []

    def run(channel: Channel) -> None:
        model = models[channel.rank]
        state = TorchState(model) if channel.size == 3 else model.state_dict()
        try:
            sw.load(path, state, channel=channel, **options)  # type: ignore[arg-type]
        except ShardwiseError as error:
            errors.append(str(error))

    sw.simulate(size, run)
    assert len(errors) in (0, size)
    return models, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_copies_that_are_equal_load_into_one_parameter(kind: str, size: int, tmp_path: Path) -> None:
    path = put(tmp_path, kind, apart())
    with small_limits(512):  # several windows, which ranks share
        models, errors = load(path, size)
    assert not errors
    for model in models:
        assert all(torch.equal(tensor, apart()[name]) for name, tensor in model.state_dict().items())


PLACES = [(0, 0), (17, 3), (30, 9)]


@pytest.mark.parametrize(("kind", "size", "at"), covering(KINDS, (1, 2, 3), PLACES, strength=2))
def test_one_element_that_differs_refuses_on_all_ranks_and_both_ways_out_work(
    kind: str, size: int, at: tuple[int, int], tmp_path: Path
) -> None:
    state = apart()
    state["out.weight"][0, 0] = state["embed.weight"][0, 0] = state["third.weight"][0, 0] = 0.0
    state["out.weight"][at] = -0.0 if at == (0, 0) else 7.0  # -0.0 differs by its bits alone
    path = put(tmp_path, kind, state)
    with small_limits(512):
        models, errors = load(path, size)
    untouched = Tied(9).state_dict()
    assert len(errors) == size
    assert len(set(errors)) == 1
    assert "out.weight: unexpected. The target ties it to embed.weight, but in the checkpoint the two have" in errors[0]
    assert 'strict=False, or drop it with a rewrite, sw.Rewrite("out.weight -> _")' in errors[0]
    assert "third" not in errors[0]
    assert all(torch.equal(each, untouched[name]) for model in models for name, each in model.state_dict().items())
    for options in ({"strict": False}, {"rewrite": sw.Rewrite("out.weight -> _")}):
        models, errors = load(path, size, **options)
        assert not errors
        assert all(torch.equal(model.embed.weight, state["embed.weight"]) for model in models)


@pytest.mark.parametrize("cut", [torch.zeros(31, 9), torch.zeros(31, 10, dtype=torch.float64)])
def test_copies_of_other_shapes_or_dtypes_are_refused(cut: torch.Tensor, tmp_path: Path) -> None:
    path = put(tmp_path, "safetensors", {**apart(), "out.weight": cut})
    _, [error] = load(path, 1)
    assert "out.weight: unexpected" in error
    assert "the two are of different shapes or dtypes. Ignore it with strict=False" in error


@pytest.mark.parametrize("equal", [True, False])
def test_copies_are_compared_as_a_rewrite_makes_them(equal: bool, tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in apart().items()}
    state["model.out.weight"] = state["model.out.weight"].T.contiguous()
    if not equal:
        state["model.out.weight"][9, 30] += 1
    path = put(tmp_path, "dcp", state)
    others = [f"model.{name} -> {name}" for name in apart() if name != "out.weight"]
    rewrite = sw.Rewrite("\n".join(["model.out.weight^T -> out.weight", *others]))
    models, errors = load(path, 2, rewrite=rewrite)
    assert bool(errors) == (not equal)
    if equal:
        assert all(torch.equal(model.embed.weight, apart()["embed.weight"]) for model in models)
    else:
        assert "the two have different values" in errors[0]


def test_a_checkpoint_with_copies_goes_through_convert_and_import(tmp_path: Path) -> None:
    path = put(tmp_path, "safetensors", apart())
    checkpoint.convert(path, tmp_path / "converted")
    checkpoint.import_hf(path, tmp_path / "imported")
    checkpoint.convert(tmp_path / "imported", tmp_path / "hf", to="hf")
    for name in ("converted", "imported", "hf"):
        [model], errors = load(tmp_path / name, 1)
        assert not errors
        assert torch.equal(model.embed.weight, apart()["embed.weight"])


def test_copies_with_equal_checksums_are_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, "ours", apart())
    target = Tied(9).state_dict()
    report = sw.load(path, target).report
    assert report.read_bytes == 31 * 10 * 4 + 31 * 4
