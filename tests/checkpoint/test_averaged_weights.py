"""Averaged weights out of a save, in every form that a conversion gives."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.checkpoint import convert, export_hf, preview
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.layouts import odd
from tests.checkpoint.small_states import same
from tests.oracle.batches import word_batch, word_loss

State = dict[str, torch.Tensor]


AVERAGE = "/weight_average"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A save of a run with ties, frozen parts and bfloat16; all that it has, and its averages by parameter."""
    path = tmp_path_factory.mktemp("averaged") / "save"

    def run(channel: sw.Channel) -> State:
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            sharding=sw.Sharding(stage=3, bucket_bytes=300),
            precision=sw.Precision(compute="bfloat16"),
            average=sw.Average(),
        )
        engine = sw.parallelize(
            odd(),
            plan,
            optimizer=lambda all_: torch.optim.AdamW(trained(all_), lr=0.1),
            loss=word_loss,
            channel=channel,
        )
        for seed in range(3):
            engine.step(word_batch(seed, 4))
        sw.save(path, engine)
        return dict(sw.full(engine, optimizer=True))

    whole = sw.simulate(2, run)[0]
    return path, whole, {name.split("/")[1]: each for name, each in whole.items() if name.endswith(AVERAGE)}


def trained(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [each for each in parameters if each.requires_grad]


def model_of(whole: State, averages: State) -> State:
    """The model with averages, ties under their first name; and masters of what is frozen."""
    model = {name: each for name, each in whole.items() if "/" not in name and name != "head.weight"}
    return model | averages | {name: whole[name] for name in FROZEN}


FROZEN = {"optimizer/frozen.weight/master", "optimizer/frozen.bias/master"}


@pytest.mark.parametrize("to", ["pieces", "dcp", "hf"])
def test_a_checkpoint_of_averages_has_them_in_the_place_of_weights(
    to: Literal["pieces", "dcp", "hf"], saved: tuple[Path, State, State], tmp_path: Path
) -> None:
    path, whole, averages = saved
    report = convert(path, tmp_path / "averages", to=to, weights="average", certify=True)
    assert report.certificate is not None
    found, expected = tensors_of(tmp_path / "averages"), model_of(whole, averages)
    if to == "pieces":
        assert same(found, expected)
        return
    assert not any("exp_avg" in name for name in found)
    frozen = {name.split("/")[1]: whole[name] for name in FROZEN} if to == "dcp" else {}
    expected = {name: each for name, each in expected.items() if "/" not in name} | frozen
    assert same(found, {name: each.to(found[name].dtype) for name, each in expected.items()})


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_files_of_averages_have_the_dtypes_of_files_of_weights(
    dtype: str | None, saved: tuple[Path, State, State], tmp_path: Path
) -> None:
    path, _, averages = saved
    export_hf(path, tmp_path / "averages", dtype=dtype, weights="average")
    export_hf(path, tmp_path / "weights", dtype=dtype)
    convert(path, tmp_path / "like", to="hf", like=tmp_path / "weights", weights="average")
    files, current = (load_file(tmp_path / name / "model.safetensors") for name in ("averages", "weights"))
    expected = {name: averages[name].to(each.dtype) if name in averages else each for name, each in current.items()}
    assert same(files, expected)
    assert same(tensors_of(tmp_path / "like"), tensors_of(tmp_path / "averages"))


def test_a_rewrite_takes_averages_along(saved: tuple[Path, State, State], tmp_path: Path) -> None:
    path, _, averages = saved
    rewrite = sw.Rewrite("up.weight^T -> up.kernel")
    export_hf(path, tmp_path / "hf", rewrite, weights="average")
    files = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(files["up.kernel"], averages["up.weight"].T.to(torch.bfloat16))
    assert "up.kernel" in preview(path, to="hf", rewrite=rewrite, weights="average")
    convert(path, tmp_path / "save", rewrite=rewrite)
    assert torch.equal(tensors_of(tmp_path / "save")["optimizer/up.kernel/weight_average"], averages["up.weight"].T)
    convert(tmp_path / "save", tmp_path / "back", rewrite=rewrite.inverse())
    assert same(tensors_of(tmp_path / "back"), tensors_of(path))


def test_padding_of_averages_is_that_of_weights(tmp_path: Path) -> None:
    """Moments of elements that were never trained are 0; their weights and averages are not."""
    state = {key: torch.ones(3, 2) for key in ("w", "optimizer/w/exp_avg", "optimizer/w/weight_average")}
    sw.checkpoint.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b", rewrite=sw.Rewrite("w -> w, pad='[4,-1]', fill=7"))
    got = tensors_of(tmp_path / "b")
    assert got["w"][3].tolist() == got["optimizer/w/weight_average"][3].tolist() == [7, 7]
    assert got["optimizer/w/exp_avg"][3].tolist() == [0, 0]


def test_other_programs_get_no_averages_as_state_of_optimizers_and_means_have_averages_too(
    saved: tuple[Path, State, State], tmp_path: Path
) -> None:
    path, _, averages = saved
    report = convert(path, tmp_path / "dcp", to="dcp")
    assert "optimizer/up.weight/weight_average" in report.left_out
    names = set(tensors_of(tmp_path / "dcp"))
    assert any("up.weight" in name and "exp_avg" in name for name in names)
    assert not any("weight_average" in name for name in names)
    sw.checkpoint.average([path, path], tmp_path / "all", optimizer=True)
    both = tensors_of(tmp_path / "all")
    assert all(torch.equal(both[f"optimizer/{name}{AVERAGE}"], each) for name, each in averages.items())
