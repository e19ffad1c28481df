"""`shardwise ckpt convert` and `shardwise ckpt diff`: words, exit codes, one paragraph of error."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

from shardwise import checkpoint
from shardwise.cli import main
from tests.cli.processes import on_a_terminal

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


def test_convert_says_what_it_made(saved: Path, tmp_path: Path) -> None:
    result = ckpt("convert", saved, tmp_path / "b", "--step", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{saved}/save-00000001 (shardwise) -> {tmp_path}/b/save-00000001"
    assert lines[1] == "tied tensors written once: tied = w"
    assert lines[2].startswith("3 tensors, 104 B, verified, in 0.")
    assert result.stderr == ""
    assert ckpt("diff", saved, tmp_path / "b", "--step-a", "1").exit_code == 0


def test_convert_to_hugging_face_files_says_what_it_left_out(saved: Path, tmp_path: Path) -> None:
    result = ckpt("convert", saved, tmp_path / "hf", "--to", "hf")
    assert result.exit_code == 0
    assert "2 tensors of optimizers left out, of them 1 master\n" in result.stdout
    assert list(safetensors.torch.load_file(tmp_path / "hf/model.safetensors")) == ["w"]
    result = ckpt("convert", tmp_path / "hf", tmp_path / "back", "--to", "pieces")
    assert "1 tensor, 48 B, unverified (only saves of shardwise are compared as they are read), in " in result.stdout


def test_errors_are_one_paragraph(saved: Path, tmp_path: Path) -> None:
    ckpt("convert", saved, tmp_path / "hf", "--to", "hf")
    cases: list[tuple[int, list[str | Path], str]] = [
        (1, ["convert", saved, tmp_path / "hf", "--to", "hf"], "is a folder that holds something"),
        (1, ["convert", tmp_path / "none", tmp_path / "x"], "holds no checkpoint: it does not exist"),
        (1, ["convert", saved, tmp_path / "x", "--step", "9"], "has no save of step 9; it has saves of these steps: 1"),
        (2, ["convert", saved, tmp_path / "x", "--to", "gguf"], "'gguf' is not one of 'pieces', 'whole', 'hf'"),
        (2, ["diff", saved, tmp_path / "none"], "holds no checkpoint: it does not exist"),
        (2, ["diff", saved, saved, "--step-b", "9"], "has no save of step 9"),
        (2, ["diff", saved], "Missing argument 'B'"),
    ]
    for code, words, text in cases:
        result = ckpt(*words)
        assert result.exit_code == code
        assert text in result.stderr
        assert "Traceback" not in result.output
        assert result.stdout == ""
    assert "Traceback" in ckpt("diff", saved, tmp_path / "none", "--debug").stderr


def test_diff_ends_with_0_where_all_is_the_same_and_1_where_not(saved: Path, tmp_path: Path) -> None:
    same = ckpt("diff", saved, saved)
    assert same.exit_code == 0
    assert same.stdout.splitlines()[-1] == (
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


def test_diff_prints_json_alone(saved: Path) -> None:
    result = ckpt("diff", saved, saved, "--step-b", "1", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [(row["name"], row["finding"], row["num_different"]) for row in found["tensors"]] == [
        ("optimizer/w/exp_avg", "values", 2)
    ]
    assert json.loads(ckpt("diff", saved, saved, "--json").stdout)["equal"] is True


@pytest.mark.processes
def test_a_terminal_gets_a_bar_and_then_the_result(saved: Path, tmp_path: Path) -> None:
    code, _, text = on_a_terminal("ckpt", "convert", str(saved), str(tmp_path / "b"), output_too=True)
    assert code == 0
    assert "converting" in text
    assert "104/104 bytes" in text
    assert "3 tensors, 104 B, verified, in 0." in text.splitlines()[-1]
    code, _, text = on_a_terminal("ckpt", "diff", str(saved), str(tmp_path / "b"), "--step-a", "1", output_too=True)
    assert code == 1
    assert "comparing" in text
    assert "2 of 3 tensors are equal" in text.splitlines()[-1]
