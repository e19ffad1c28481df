"""`shardwise ckpt convert` with a rewrite: words, exit codes, what a terminal shows."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from shardwise import checkpoint
from shardwise.cli import main
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.small_states import same

LAYER = "model.layers.0.self_attn"
HEADS = ("--parameter", "num_attention_heads=4", "--parameter", "num_key_value_heads=2")


def state() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    sizes = {"q": 8, "k": 4, "v": 4}
    return {f"{LAYER}.{name}_proj.weight": torch.randn(size, 6, generator=numbers) for name, size in sizes.items()}


def convert(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["ckpt", "convert", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "a", state())
    return tmp_path / "a"


def test_there_and_back_by_name_and_by_record(saved: Path, tmp_path: Path) -> None:
    result = convert(saved, tmp_path / "b", "--rewrite", "llama-qkv", *HEADS, "--certify")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{saved}/save-00000001 (shardwise) -> {tmp_path}/b/save-00000001"
    assert lines[1].startswith("1 tensor, 384 B, verified, in ")
    assert lines[2] == "round trip: all 3 tensors come back to the bit; compared with no original"
    assert result.stderr == ""
    assert list(tensors_of(tmp_path / "b")) == [f"{LAYER}.qkv_proj.weight"]
    assert json.loads((tmp_path / "b/save-00000001/round-trip.json").read_text())["tensors"][0]["verdict"] == "equal"
    for name, words in {"c": ["--rewrite", "llama-qkv", *HEADS], "d": []}.items():
        assert convert(tmp_path / "b", tmp_path / name, "--inverse", *words).exit_code == 0
        assert same(tensors_of(tmp_path / name), state())
    result = convert(tmp_path / "b", tmp_path / "e", "--inverse", "--like", saved, "--certify")  # recorded, compared
    assert result.exit_code == 0, result.output
    assert f"comes back to the bit; all 3 are as in {saved}" in result.stdout
    assert same(tensors_of(tmp_path / "e"), state())


def test_a_dry_run_shows_what_becomes_of_what_and_writes_nothing(saved: Path, tmp_path: Path) -> None:
    for file in (saved / "save-00000001").glob("*.safetensors"):
        file.unlink()  # it reads metadata only
    result = convert(saved, tmp_path / "b", "--rewrite", "llama-qkv", *HEADS, "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"{LAYER}.qkv_proj.weight" in result.stdout
    assert f"{LAYER}.k_proj.weight" in result.stdout
    assert result.stdout.splitlines()[-1] == "nothing was written"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_a_dry_run_is_refused_where_the_real_one_would_be(saved: Path, tmp_path: Path) -> None:
    words = (saved, tmp_path, "--to", "hf", "--rewrite", "llama-qkv", *HEADS)
    results = [convert(*words, *more) for more in ([], ["--dry-run"])]
    assert [each.exit_code for each in results] == [1, 1]
    assert results[0].stderr == results[1].stderr
    assert "is a folder that holds something" in results[0].stderr


def test_findings_are_shown_at_their_place(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.rewrite").write_text("# mine\nmodel.x -> y\nmodel.layers.$L.self_attn.q_proj.weight -> q, k\n")
    for more in ([], ["--dry-run"]):
        result = convert(saved, tmp_path / "b", "--rewrite", tmp_path / "bad.rewrite", *more)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")
        assert "^^^" in result.stderr
    (tmp_path / "bad.rewrite").write_text("model.x -> y\nmodel.z -> y\n")
    result = convert(saved, tmp_path / "b", "--rewrite", tmp_path / "bad.rewrite")
    assert result.exit_code == 1
    assert "line 1, column 1" in result.stderr
    assert "line 2, column 1" in result.stderr


def test_errors_are_one_paragraph(saved: Path, tmp_path: Path) -> None:
    cases: list[tuple[int, list[str | Path], str]] = [
        (
            1,
            ["--rewrite", "lama-qkv"],
            "there is no file lama-qkv, and no rewrite named 'lama-qkv' comes with shardwise",
        ),
        (1, ["--rewrite", "llama-qkv"], "num_attention_heads"),
        (1, ["--inverse"], "does not say which rewrite made it; name the rewrite to undo (--rewrite"),
        (2, ["--set", "a=1"], "name one with --rewrite"),
        (2, ["--parameter", "a=1"], "name one with --rewrite"),
        (2, ["--rewrite", "llama-qkv", "--parameter", "a"], "'a' is not of the form name=value"),
        (2, ["--dry-run"], "name one with --rewrite"),
        (2, ["--rewrite", "llama-qkv", *HEADS, "--like", saved], "give --inverse, --to hf or --certify"),
        (
            2,
            ["--rewrite", "llama-qkv", *HEADS, "--parameter", "num_atention_heads=4"],
            "has no parameter num_atention_heads; its parameters are num_attention_heads, num_key_value_heads; did you "
            "mean num_attention_heads?",
        ),
    ]
    for code, words, text in cases:
        result = convert(saved, tmp_path / "b", *words)
        assert result.exit_code == code, result.output
        assert text in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "b").exists()


def test_it_says_what_was_dropped_and_which_files_go_along(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "hf", "--to", "hf")
    (tmp_path / "hf/config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    (tmp_path / "drop.rewrite").write_text(f"{LAYER}.k_proj.weight -> _\n")
    result = convert(tmp_path / "hf", tmp_path / "b", "--rewrite", tmp_path / "drop.rewrite", "--certify")
    assert f"dropped by the rewrite: {LAYER}.k_proj.weight\nwith config.json\n" in result.stdout
    assert result.stdout.endswith(f"come back to the bit; lossy: {LAYER}.k_proj.weight (dropped)\n")
    result = convert(tmp_path / "hf", tmp_path / "c", "--rewrite", "llama-qkv")  # heads from config.json
    assert result.exit_code == 0, result.output
