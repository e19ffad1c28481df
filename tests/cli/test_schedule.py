"""`shardwise schedule`: what a schedule looks like, and whether it can be run."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from click.testing import CliRunner, Result

from shardwise.cli import main

FEEDBACK = "0>1,1>2,2>0,0>1,1>2,2>3"


def schedule(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["schedule", *map(str, arguments)])


def test_a_named_schedule_is_drawn() -> None:
    result = schedule("1f1b", "--ranks", 2, "--microbatches", 3, "--orders")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "1f1b: 2 stages, 2 ranks, 3 microbatches\n"
        "rank 0  0------1------..............0=============2------1=============.......2=============\n"
        "rank 1  .......0------0=============1------1=============2------2=============..............\n"
        "3- forward, 3= backward of microbatch 3; . idle; 12 ms, bubble 25.0%\n"
        "\n"
        "1f1b: 2 stages, 2 ranks, 3 microbatches\n"
        "rank 0: F0.0 F1.0 B0.0 F2.0 B1.0 B2.0\n"
        "rank 1: F0.1 B0.1 F1.1 B1.1 F2.1 B2.1\n"
    )


def test_times_are_given_for_all_stages_or_for_each() -> None:
    sizes = ("1f1b", "--ranks", 2, "--microbatches", 1)
    times = ("--forward-ms", "1,2.5", "--backward-ms", "4", "--transfer-ms", 0.25)
    assert "12 ms, bubble" in schedule(*sizes, *times).stdout


def test_interleaved_has_two_chunks_unless_told_otherwise() -> None:
    sizes = ("interleaved", "--ranks", 2, "--microbatches", 2)
    assert schedule(*sizes).stdout.startswith("interleaved: 4 stages, 2 ranks, ")
    assert schedule(*sizes, "--chunks", 3).stdout.startswith("interleaved: 6 stages, 2 ranks, ")


def test_a_schedule_written_in_a_file_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("own: 1 stage, 1 rank, 2 microbatches\nrank 0: F0.0 B0.0 F1.0 B1.0\n")
    result = schedule(file)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "own: 1 stage, 1 rank, 2 microbatches")


def test_a_named_schedule_that_would_deadlock_is_changed_and_a_written_one_refused(tmp_path: Path) -> None:
    sizes = ("--ranks", 4, "--microbatches", 6)
    changed = schedule("1f1b", *sizes, "--transfers", FEEDBACK)
    assert changed.exit_code == 0
    heading, why, *_ = changed.stdout.splitlines()
    assert heading == "1f1b, stages 0 to 2 in step: 4 stages, 4 ranks, 6 microbatches"
    assert why.startswith("not 1f1b itself: deadlock: rank 0 in F2.0 (microbatch 2, stage 0) waits for the value of")

    file = tmp_path / "own.txt"
    file.write_text(schedule("1f1b", *sizes, "--orders").stdout.partition("\n\n")[2])
    assert schedule(file).exit_code == 0
    refused = schedule(file, "--transfers", FEEDBACK)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "schedule '1f1b as written': deadlock: rank 0 in F2.0" in refused.stderr


def test_the_picture_is_written_by_its_suffix(tmp_path: Path) -> None:
    sizes = ("fthenb", "--ranks", 2, "--microbatches", 2)
    assert schedule(*sizes, "--picture", tmp_path / "a.png").stdout.endswith(f"drawn in {tmp_path / 'a.png'}\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    schedule(*sizes, "--picture", tmp_path / "a.svg")
    assert ElementTree.fromstring((tmp_path / "a.svg").read_text()).tag.endswith("svg")
