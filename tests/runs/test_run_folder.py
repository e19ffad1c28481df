"""A run seen from outside: its folder, its state, its table."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.runs.rank_table import heading, line, table
from shardwise.runs.run_folder import view
from shardwise.runs.stop_signals import Stopped
from tests.runs.run_folders import step, times, written
from tests.train.runs import finished, small_run


def test_a_table_has_the_means_of_ranks_and_names_the_slow_one(tmp_path: Path) -> None:
    slow = [step(n, times(0, 0.05, {1: 0.25 + n / 10}), times(1, 0.35 + n / 10, {0: 0.002})) for n in (1, 2, 3)]
    written(tmp_path / "demo", *slow)
    seen = view(tmp_path / "demo")
    assert heading(seen) == "demo  step 3/20  loss 0.6667  12.3 k tokens/s  eta 00:34  running"
    assert table(seen) == [
        "rank        compute   waits      for  outside    sent  received      peak",
        "   0          50 ms  450 ms  1: 100%     1 ms  1.2 kB    2.4 MB  612.0 MB",
        "   1  slow   550 ms    2 ms  0: 100%     1 ms  1.2 kB    2.4 MB  612.0 MB",
        "means of the last 3 updates; slowest: rank 1",
    ]
    assert line(seen).endswith("running  slowest: rank 1")
    assert table(seen, most_rows=1)[1].startswith("   1 ")
    assert table(seen, most_rows=1)[2] == "and 1 ranks that were busy for less time"


def test_of_many_ranks_a_line_has_the_busiest_and_means_are_of_a_rank_where_it_is_shown(tmp_path: Path) -> None:
    every = [[times(rank, 9.0 if rank == late else 1.0 + rank % 5, {}) for rank in range(100)] for late in (90, 95)]
    written(tmp_path / "many", *(step(n, *ranks) for n, ranks in enumerate(every, 1)))
    seen = view(tmp_path / "many")
    for late, line_of_run in zip((90, 95), seen.lines, strict=True):
        shown = [each["rank"] for each in line_of_run["ranks"]]
        assert (len(shown), shown) == (64, sorted(shown))
        assert {late, *(rank for rank in range(100) if rank % 5 == 4)} <= set(shown)
        assert line_of_run["slowest"][0] == late
    rows = {text.split()[0]: text.split() for text in table(seen)[1:-1]}
    # Each of the two is idle enough to be left out of the other line.
    assert (rows["95"][1] == "slow", *rows["95"][2:4]) == (True, "9", "s")
    assert "90" not in rows


def test_times_that_no_clock_gave_are_null_and_shown_as_unknown(tmp_path: Path) -> None:
    unknown = dataclasses.replace(times(0, float("nan"), {}), waiting_s=float("nan"))
    written(tmp_path / "run", step(1, unknown))
    seen = view(tmp_path / "run")
    assert seen.lines[0]["ranks"][0]["compute_s"] is None
    assert table(seen)[1].split()[:4] == ["0", "?", "?", "-"]


def test_how_a_run_ended_is_seen(tmp_path: Path) -> None:
    one = step(1, times(0, 0.1, {}))
    for name, error, expected in [
        ("done", None, "finished"),
        ("stopped", Stopped(15, "after step 3"), "stopped by SIGTERM after step 3"),
        ("broken", RuntimeError("no more memory\nand more"), "failed: RuntimeError: no more memory"),
    ]:
        mark = written(tmp_path / name, one)
        assert view(tmp_path / name).state == "running"
        mark.end(error)
        assert (view(tmp_path / name).state, view(tmp_path / name).ended) == (expected, expected)


def test_a_run_whose_process_is_gone_is_dead_and_one_without_news_is_silent(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    written(tmp_path / "run", step(1, times(0, 0.1, {})), step(2, times(0, 0.1, {})))
    path = tmp_path / "run" / "run.json"
    mark = json.loads(path.read_text())
    path.write_text(json.dumps(mark | {"pid": int(gone.stdout)}))
    assert view(tmp_path / "run").state == f"dead: process {int(gone.stdout)} of rank 0 is gone"
    # Of another host nothing is known but the time of the last line.
    path.write_text(json.dumps(mark | {"host": "elsewhere", "pid": int(gone.stdout)}))
    written_s = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime
    assert view(tmp_path / "run", now_s=written_s + 79).state == "running"
    assert view(tmp_path / "run", now_s=written_s + 90).state == "silent for 90 s"
    assert view(tmp_path / "run").ended is None
    # One that logs seldom has its own pace, which the first line tells.
    for name, lines, age_s, expected in (
        ("seldom", [step(50, times(0, 0.1, {}))], 1050, "running"),
        ("not any more", [step(50, times(0, 0.1, {}))], 1070, "silent for 1070 s"),
        ("not yet", [], 400, "no update yet for 400 s"),
    ):
        written(tmp_path / name, *lines)
        written_s = (tmp_path / name / "metrics.jsonl").stat().st_mtime
        assert view(tmp_path / name, now_s=written_s + age_s).state == expected


def test_a_folder_that_is_torn_empty_or_old_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    mark = written(tmp_path / "run")
    assert (view(tmp_path / "run").state, table(view(tmp_path / "run"))) == ("no update yet", ["no times of ranks yet"])
    mark.end(None)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": null, "elapsed_s": 1.0}\n{"step": 2, "lo')
    (tmp_path / "run" / "run.json").unlink()
    assert [each["step"] for each in view(tmp_path / "run").lines] == [1]
    assert table(view(tmp_path / "run")) == ["these metrics have no times of ranks"]
    assert heading(view(tmp_path / "run")) == "run  step 1  running"
    path.unlink()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read .*runs/demo"):
        view(tmp_path / "run")


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    written(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    with path.open("w") as file:
        for number in range(1, 40_001):
            file.write(json.dumps({"step": number, "loss": 1.0, "elapsed_s": float(number)}) + "\n")
    assert os.path.getsize(path) > 1 << 20
    assert [each["step"] for each in view(path.parent).lines] == list(range(39_991, 40_001))


def test_a_run_leaves_the_times_of_its_ranks_and_its_end(tmp_path: Path) -> None:
    done = finished(small_run(tmp_path, num_processes=2))
    assert [[each["rank"] for each in found["ranks"]] for found in done.metrics] == [[0, 1]] * 6
    assert all(each["compute_s"] > 0 for found in done.metrics for each in found["ranks"])
    seen = view(tmp_path / "out")
    assert (seen.ended, seen.mark["steps"], seen.mark["ranks"]) == ("finished", 6, 2)
    assert heading(seen).startswith("out  step 6/6  loss ")
