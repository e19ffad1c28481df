"""What trainers wrote with torch.save: training that goes on as in their programs, names of state, several files."""

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.foreign_files.small_program import batch, loss_of, make_model
from tests.checkpoint.small_states import same_tensor
from tests.contracts.format_cases import check_tensors
from tests.refusals import Refusals

FILES = Path(__file__).parents[1] / "foreign_files"


def loaded(name: str) -> Any:
    """What torch gives for a file here, which a script of this folder wrote."""
    return torch.load(FILES / name, weights_only=False)


def test_safetensors_keep_no_order_so_state_keeps_its_numbers() -> None:
    folder = FILES / "accelerate_safetensors"
    state = loaded("accelerate_safetensors/optimizer.bin")["state"]
    numbered = {f"optimizer/{number}/{key}": each for number, held in state.items() for key, each in held.items()}
    check_tensors(folder, load_file(folder / "model.safetensors") | numbered, has_more=True)
    [note] = checkpoint.open(folder).contents.notes
    assert "safetensors files do not keep the order of the model" in note
    weights = make_model().state_dict()
    sw.load(folder, weights, channel=alone())  # weights alone leave the state where it is
    assert torch.equal(weights["0.weight"], checkpoint.open(folder).read("0.weight"))


def test_names_that_a_file_says_go_before_numbers(tmp_path: Path) -> None:
    model = make_model()
    # In another order than that of the model, which no shapes could tell.
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    optimizer = torch.optim.AdamW(named[::-1])
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    for name, parameter in model.named_parameters():
        assert same_tensor(catalogue.read(f"optimizer/{name}/exp_avg"), optimizer.state[parameter]["exp_avg"])


def test_running_means_have_no_number_of_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(12.0).view(4, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    for name, parameter in model.named_parameters():
        assert same_tensor(catalogue.read(f"optimizer/{name}/exp_avg"), optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("why", ["several ways", "do not fit", "neither a tensor nor a number"])
def test_what_is_not_proven_keeps_its_number(tmp_path: Path, why: str) -> None:
    state: dict[str, torch.Tensor] = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2)}
    shapes = {"several ways": [3, 2], "do not fit": [2, 3], "neither a tensor nor a number": [3, 3, 2]}[why]
    step: Any = b"1" if why == "neither a tensor nor a number" else torch.tensor(1.0)
    entries = {number: {"step": step, "exp_avg": torch.full((size,), number)} for number, size in enumerate(shapes)}
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": list(entries)}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    assert catalogue.read("optimizer/1/exp_avg").tolist() == [1] * shapes[1]
    [note] = catalogue.contents.notes
    assert why in note
    with pytest.raises(CheckpointError, match="optimizer/1/exp_avg: unexpected"):
        sw.load(tmp_path / "x.pt", {**state, "optimizer/a/exp_avg": torch.zeros(3)}, channel=alone())


def test_scales_next_to_words_of_codes_keep_their_dtype(tmp_path: Path) -> None:
    model = {
        "up.qweight": torch.ones(4, 2, dtype=torch.int32),
        "up.scales": torch.full((1, 2), 1 / 3),
        "norm.weight": torch.ones(2),
        "window.index": torch.zeros(3, 3, dtype=torch.int64),
        "window.table": torch.ones(3, 2),
    }
    save_file(model, tmp_path / "model.safetensors")
    report = checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "out", to="hf", dtype="bfloat16")
    assert report.uncast == ("up.scales",)
    written = checkpoint.open(tmp_path / "out")
    assert torch.equal(written.read("up.scales"), model["up.scales"])
    assert written.read("window.table").dtype == torch.bfloat16


def test_whole_numbers_that_no_tensor_holds_are_named_in_the_state_of_an_optimizer(tmp_path: Path) -> None:
    state = {0: {"exp_avg": torch.ones(2, 2), "seed": 2**70, "step": -(2**63) + 1}}
    optimizer = {"state": state, "param_groups": [{"lr": 1.0, "params": [0]}]}
    torch.save({"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer}, tmp_path / "odd.pt")
    contents = checkpoint.open(tmp_path / "odd.pt").contents
    assert "its seed of parameter 0 is neither a tensor nor a number of 64 bits" in contents.left_state
    assert contents.tensors["optimizer/0/step"].dtype == "int64"


@pytest.mark.parametrize(("num_ranks", "got"), [(1, [0]), (2, [0, 1]), (2, [0]), (2, [1])])
def test_a_part_of_a_model_of_meta_says_that_it_is_one(tmp_path: Path, num_ranks: int, got: list[int]) -> None:
    for rank in got:
        state = {"layers.0.attention.wo.weight": torch.ones(4, 4 // num_ranks), "norm.weight": torch.ones(4)}
        torch.save(state, tmp_path / f"consolidated.0{rank}.pth")
    for rank in got:
        notes = checkpoint.open(tmp_path / f"consolidated.0{rank}.pth").contents.notes
        assert any("has the part of one rank of each tensor" in note for note in notes) == (num_ranks > 1)
    with pytest.raises(CheckpointError, match=r"convert_llama_weights_to_hf\.py of transformers, or name the file"):
        checkpoint.open(tmp_path)


def quantised(folder: Path) -> object:
    data = (FILES / "small.gguf").read_bytes()
    at = data.index(b"float16") + len("float16") + 4 + 16
    (folder / "q.gguf").write_bytes(data[:at] + struct.pack("<I", 12) + data[at + 4 :])
    return checkpoint.open(folder / "q.gguf")


def two_optimizers(folder: Path) -> object:
    for name in ("pytorch_model.bin", "optimizer.bin"):
        shutil.copy(FILES / "accelerate_bin" / name, folder / name)
    shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    assert "0.weight" in checkpoint.open(folder / "pytorch_model.bin").tensors
    return checkpoint.open(folder)


REFUSED = Refusals(
    "checkpoint.torch_folders",
    {"two optimizers next to a model": two_optimizers, "a quantised model of llama.cpp": quantised},
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_one_model_is_refused(case: str) -> None:
    REFUSED.check(case)
