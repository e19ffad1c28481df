"""`shardwise top`: one table, lines in a file, an end with the runs."""

from pathlib import Path

from click.testing import CliRunner

from shardwise.cli import main
from tests.runs.run_folders import step, times, written


def run_of(folder: Path, *, ended: bool) -> Path:
    mark = written(folder, step(1, times(0, 0.1, {1: 0.3}), times(1, 0.4, {})))
    if ended:
        mark.end(None)
    return folder


def test_once_prints_a_table_of_each_run_and_ends(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "one", ended=False), run_of(tmp_path / "two", ended=True)]
    done = CliRunner().invoke(main, ["top", *map(str, runs), "--once"])
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.output.splitlines()
    assert lines[0] == "one  step 1/20  loss 2.0000  12.3 k tokens/s  running"
    assert lines[5:7] == ["", "two  step 1/20  loss 2.0000  12.3 k tokens/s  finished"]
    assert [text.split() for text in lines if " slow " in text] == [
        ["1", "slow", "400", "ms", "0", "s", "-", "1", "ms", "1.2", "kB", "2.4", "MB", "612.0", "MB"]
    ] * 2


def test_a_file_gets_one_line_of_a_run_that_has_ended(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["top", str(run_of(tmp_path / "two", ended=True))])
    assert done.exit_code == 0
    assert done.output == "two  step 1/20  loss 2.0000  12.3 k tokens/s  finished  slowest: rank 1\n"


def test_a_run_that_counts_rows_says_so(tmp_path: Path) -> None:
    written(tmp_path / "one", step(1, times(0, 0.1, {})), rows="rows")
    done = CliRunner().invoke(main, ["top", str(tmp_path / "one"), "--once"])
    assert "  12.3 k rows/s  " in done.output
