"""`shardwise plan`: which layout fits, and which one to take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import shardwise as sw
from shardwise.cli import main

SIZES = ("--parameters", "7B", "--layers", 32, "--hidden", 4096, "--heads", 32)


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_what_to_take_is_a_plan(tmp_path: Path) -> None:
    result = plan(*SIZES, "--ranks", 8, "--memory", "80GB")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "7 billion parameters in 32 blocks of width 4096, 32000 words; AdamW, bfloat16"
    (taken,) = [line for line in lines if line.startswith("take ")]
    assert taken == "take dp_shard=8, stage 2, k=4. It is the simplest within a tenth of the fastest."
    (marked,) = [line for line in lines if line.startswith("> ")]
    assert "dp_shard=8, stage 2, k=4" in marked
    toml = "\n".join(line for line in lines if "." in line.partition(" = ")[0] and " = " in line)
    assert sw.Plan.parse(toml) == sw.Plan(
        mesh=sw.Mesh(dp_shard=8),
        sharding=sw.Sharding(stage=2),
        merge=sw.Merge(microbatches=4),
        precision=sw.Precision(compute="bfloat16"),
    )
    assert "  dp_shard=8, stage 1, k=4: 73 GB" in lines


def test_a_folder_of_a_model_says_its_sizes(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    config |= {"num_attention_heads": 32, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = plan(tmp_path, "--ranks", 8, "--memory", "80GB")
    assert result.exit_code == 0
    assert result.stdout.startswith("6.74 billion parameters in 32 blocks of width 4096, 32000 words")
    assert plan(tmp_path, "--parameters", "8B", "--ranks", 8, "--memory", "80GB").stdout.startswith("8 billion")
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": config}))
    result = plan(tmp_path, "--layers", 16, "--vocabulary", 100, "--ranks", 1, "--memory", "80GB")
    assert result.stdout.splitlines()[0].endswith("in 16 blocks of width 4096, 100 words; AdamW, bfloat16")
    assert result.stdout.splitlines()[1].startswith("1 rank with 80 GB")


def test_where_nothing_fits_the_smallest_are_shown() -> None:
    result = plan(*SIZES, "--ranks", 2, "--memory", "16GiB")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "too large for nine tenths of 17 GB:" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("no layout fits: take more ranks, fewer tokens")


def test_all_layouts_are_shown_where_they_are_asked_for() -> None:
    few, many = (plan(*SIZES, "--ranks", 8, "--memory", "80GB", *more).stdout for more in ((), ("--all",)))
    assert "--all shows them" in few
    assert "more" not in many
    assert len(many.splitlines()) > len(few.splitlines()) + 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--parameters", "7B"),
            "the model is not known: give --layers, --hidden, or a folder with a config.json",
        ),
        (("nowhere",), "nowhere cannot be read: No such file or directory"),
        (
            ("--parameters", "7", "--layers", 32, "--hidden", 4096),
            "parameters: 7 in all leave -8192000 for each of 32 layers, besides 262144000 of the embedding and the "
            "head; is one of the numbers wrong?",
        ),
        (("--parameters", "1e999"), "'1e999' is not a number of at least 1, such as 7e9, 7B or 80GB"),
        (("--parameters", "many"), "'many' is not a number of at least 1, such as 7e9, 7B or 80GB"),
    ],
)
def test_what_is_missing_or_wrong_is_said(arguments: tuple[object, ...], message: str) -> None:
    result = plan(*arguments, "--ranks", 8, "--memory", "80GB")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom shardwise.cli import main\n"
        f"try: main({['plan', *map(str, SIZES), '--ranks', '8', '--memory', '80GB']!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
