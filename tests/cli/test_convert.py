"""`shardwise ckpt convert` and `shardwise ckpt diff`: words, exit codes, one paragraph of error."""

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import shardwise as sw
from shardwise import checkpoint
from shardwise.cli import main
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.small_states import same
from tests.cli.processes import in_this_process, on_a_terminal
from tests.train.row_kinds import run_of
from tests.train.runs import finished

LAYER = "model.layers.0.self_attn"
HEADS = ("--parameter", "num_attention_heads=4", "--parameter", "num_key_value_heads=2")
QKV = ("--rewrite", "llama-qkv")
STATE = {"w": torch.arange(12.0).view(3, 4), "optimizer/w/master": torch.ones(12), "optimizer/w/exp_avg": torch.ones(2)}


def ckpt(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {**STATE, "tied": STATE["w"]}
    checkpoint.save(tmp_path / "a", state, step=1)
    checkpoint.save(tmp_path / "a", {**state, "optimizer/w/exp_avg": torch.zeros(2)}, step=2)
    return tmp_path / "a"


def projections() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    sizes = {"q": 8, "k": 4, "v": 4}
    return {f"{LAYER}.{name}_proj.weight": torch.randn(size, 6, generator=numbers) for name, size in sizes.items()}


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "layer", projections())
    return tmp_path / "layer"


def test_convert_says_what_it_made_and_what_it_left_out(saved: Path, tmp_path: Path) -> None:
    result = ckpt("convert", saved, tmp_path / "b", "--step", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"{saved}/save-00000001 (shardwise) -> {tmp_path}/b/save-00000001"
    assert lines[1] == "tied tensors written once: tied = w"
    assert lines[2].startswith("3 tensors, 104 B, verified, in 0.")
    assert ckpt("diff", saved, tmp_path / "b", "--step-a", "1").exit_code == 0
    result = ckpt("convert", saved, tmp_path / "hf", "--to", "hf")
    assert result.exit_code == 0
    assert "2 tensors of optimizers left out, of them 1 master\n" in result.stdout
    assert list(safetensors.torch.load_file(tmp_path / "hf/model.safetensors")) == ["w"]
    result = ckpt("convert", tmp_path / "hf", tmp_path / "back", "--to", "pieces")
    assert "1 tensor, 48 B, unverified (only saves of shardwise are compared as they are read), in " in result.stdout


def test_diff_ends_with_0_where_all_is_the_same_and_1_where_not(saved: Path) -> None:
    same_ones = ckpt("diff", saved, saved)
    assert same_ones.exit_code == 0
    assert same_ones.stdout.splitlines()[-1] == (
        "3 of 3 tensors are equal (104 B; 3 of them by their checksums, unread); extra is equal"
    )
    result = ckpt("diff", saved, saved, "--step-a", "1")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[3:5] == [
        "tensor               differs in  A    B    elements  max |A-B|  first at",
        "optimizer/w/exp_avg  values      1.0  0.0  2 of 2    1          [0]",
    ]
    assert ckpt("diff", saved, saved, "--step-a", "1", "--model-only").exit_code == 0
    assert "0 the same, 1 different, 2 trouble" in ckpt("diff", "--help").stdout
    found = json.loads(ckpt("diff", saved, saved, "--step-b", "1", "--json").stdout)
    assert [(row["name"], row["finding"], row["num_different"]) for row in found["tensors"]] == [
        ("optimizer/w/exp_avg", "values", 2)
    ]
    assert json.loads(ckpt("diff", saved, saved, "--json").stdout)["equal"] is True
    # The exit code of success is that of a command that ends, also for a program that calls it.
    assert main(["ckpt", "diff", str(saved), str(saved)], standalone_mode=False) is None


def test_a_diff_that_is_stopped_early_does_not_say_that_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(MetaPathFinder):
        """Ctrl-C comes while the command loads what compares."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "shardwise.checkpoint":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "shardwise.checkpoint")
    monkeypatch.delattr(sw, "checkpoint", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Stopping(), *sys.meta_path])
    result = ckpt("diff", "a", "b")
    assert (result.exit_code, result.stderr) == (130, "stopped by Ctrl-C\n")


def test_a_rewrite_goes_there_and_back_by_name_and_by_record(layer: Path, tmp_path: Path) -> None:
    result = ckpt("convert", layer, tmp_path / "b", *QKV, *HEADS, "--certify")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{layer}/save-00000001 (shardwise) -> {tmp_path}/b/save-00000001"
    assert lines[1].startswith("1 tensor, 384 B, verified, in ")
    assert lines[2] == "round trip: all 3 tensors come back to the bit; compared with no original"
    assert list(tensors_of(tmp_path / "b")) == [f"{LAYER}.qkv_proj.weight"]
    assert json.loads((tmp_path / "b/save-00000001/round-trip.json").read_text())["tensors"][0]["verdict"] == "equal"
    for name, words in {"c": [*QKV, *HEADS], "d": []}.items():
        assert ckpt("convert", tmp_path / "b", tmp_path / name, "--inverse", *words).exit_code == 0
        assert same(tensors_of(tmp_path / name), projections())
    result = ckpt("convert", tmp_path / "b", tmp_path / "e", "--inverse", "--like", layer, "--certify")
    assert f"comes back to the bit; all 3 are as in {layer}" in result.stdout
    assert same(tensors_of(tmp_path / "e"), projections())


def test_a_dry_run_shows_what_becomes_of_what_and_writes_nothing(layer: Path, tmp_path: Path) -> None:
    for file in (layer / "save-00000001").glob("*.safetensors"):
        file.unlink()  # it reads metadata only
    result = ckpt("convert", layer, tmp_path / "b", *QKV, *HEADS, "--dry-run")
    assert result.exit_code == 0, result.output
    assert all(f"{LAYER}.{name}_proj.weight" in result.stdout for name in ("qkv", "k"))
    assert result.stdout.splitlines()[-1] == "nothing was written"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["layer"]


def test_it_says_what_was_dropped_and_which_files_go_along(layer: Path, tmp_path: Path) -> None:
    ckpt("convert", layer, tmp_path / "hf", "--to", "hf")
    (tmp_path / "hf/config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    (tmp_path / "drop.rewrite").write_text(f"{LAYER}.k_proj.weight -> _\n")
    result = ckpt("convert", tmp_path / "hf", tmp_path / "b", "--rewrite", tmp_path / "drop.rewrite", "--certify")
    assert f"dropped by the rewrite: {LAYER}.k_proj.weight\nwith config.json\n" in result.stdout
    assert result.stdout.endswith(f"come back to the bit; lossy: {LAYER}.k_proj.weight (dropped)\n")
    assert ckpt("convert", tmp_path / "hf", tmp_path / "c", *QKV).exit_code == 0, "heads are those of config.json"


@pytest.mark.processes
def test_a_terminal_gets_a_bar_and_then_the_result(saved: Path, tmp_path: Path) -> None:
    code, _, text = on_a_terminal("ckpt", "convert", str(saved), str(tmp_path / "b"), output_too=True)
    assert code == 0
    assert "converting" in text
    assert "104/104 bytes" in text
    assert "3 tensors, 104 B, verified, in 0." in text.splitlines()[-1]


# From training to files that transformers loads, by commands alone ---------------------------------------------------


def shardwise(*words: str | Path) -> str:
    result = in_this_process(*map(str, words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saves of a run, which trained a Llama on words in bfloat16."""
    folder = tmp_path_factory.mktemp("run")
    finished(run_of(folder, "words", "precision.compute=bfloat16", "checkpoint.every=2", "train.steps=2"))
    return folder / "out" / "checkpoints"


def from_pretrained(path: Path) -> Any:
    from transformers import AutoModelForCausalLM  # here: the import takes seconds, also where no test is run

    return AutoModelForCausalLM.from_pretrained(path)


def test_what_was_trained_is_loaded_by_transformers_with_its_tokenizer(saves: Path, tmp_path: Path) -> None:
    catalogue = checkpoint.open(saves)
    masters = {name: catalogue.read(f"optimizer/{name}/master") for name in catalogue.tensors if "/" not in name}
    told = shardwise("ckpt", "convert", saves, tmp_path / "direct", "--to", "hf", "--dtype", "float32", "--certify")
    assert f"{len(masters)} tensors out of masters, in the place of working copies\n" in told
    assert "config.json, generation_config.json\n" in told
    assert "without config.json" not in told
    shardwise("ckpt", "convert", saves, tmp_path / "fused", *QKV)  # heads from the save
    told = shardwise("ckpt", "convert", tmp_path / "fused", tmp_path / "files", "--inverse", "--to", "hf", "--certify")
    assert "tensors come back to the bit" in told
    for folder, dtype in (("direct", torch.float32), ("files", torch.bfloat16)):
        model = from_pretrained(tmp_path / folder)
        assert model.dtype == dtype
        assert all(torch.equal(tensor, masters[name].to(dtype)) for name, tensor in model.state_dict().items())
        assert (tmp_path / folder / "tokenizer.json").exists()


def test_a_save_without_a_configuration_says_so_and_takes_one(saves: Path, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tensors_of(saves).items() if "/" not in name}
    checkpoint.save(tmp_path / "plain", state)
    told = shardwise("ckpt", "convert", tmp_path / "plain", tmp_path / "without", "--to", "hf", "--certify")
    assert "without config.json, which SRC does not have and from_pretrained needs: give it with --config" in told
    shardwise("ckpt", "convert", saves, tmp_path / "hf", "--to", "hf")
    for config in (tmp_path / "hf", tmp_path / "hf/config.json"):
        out = tmp_path / f"out {config.suffix}"
        told = shardwise("ckpt", "convert", tmp_path / "plain", out, "--to", "hf", "--config", config)
        assert "without config.json" not in told
        model = from_pretrained(out)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    fused = (*QKV, "--config", tmp_path / "hf")  # also for the numbers of heads
    shardwise("ckpt", "convert", tmp_path / "plain", tmp_path / "fused", *fused)
    kept = checkpoint.open(tmp_path / "fused").extra["huggingface"]
    assert kept["config.json"] == json.loads((tmp_path / "hf/config.json").read_text())
