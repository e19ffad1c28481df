"""The launcher: rank 0 has the terminal, failures are attributed, and nobody is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from shardwise.launchers.local import PEER_FAILED, launch
from tests.forks.programs import started

RANK = "import os, signal, sys\nrank = int(os.environ['RANK'])\n"


def run(code: str, *arguments: str, num_processes: int = 2, grace_seconds: float = 20.0) -> int:
    return launch(None, ["-c", RANK + code, *arguments], num_processes=num_processes, grace_seconds=grace_seconds)


def is_alive(pid: int) -> bool:
    """Whether it runs: one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_learn_their_places_and_only_rank_0_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert run(f"print(*(os.environ[name] for name in {names}), *sys.argv[1:])", "--lr", "1") == 0
    assert capfd.readouterr() == ("0 0 2 2 127.0.0.1 --lr 1\n", "")


def test_ranks_are_given_one_secret_unless_the_user_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARDWISE_SECRET", "SHARDWISE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    code = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(os.environ.get('SHARDWISE_SECRET', ''))"
    assert run(code) == 0
    first, second = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert first == second
    assert len(first) >= 16
    monkeypatch.setenv("SHARDWISE_SECRET_FILE", "of the user")
    assert run(code) == 0
    assert (tmp_path / "1").read_text() == ""


def test_the_rank_that_fails_first_gives_the_exit_code_and_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
if rank == 1:
    print("before")
    sys.exit("the data folder is empty")
signal.pause()
"""
    assert run(code, grace_seconds=0.2) == 1
    expected = "rank 1 failed with exit code 1\n[rank 1] before\n[rank 1] the data folder is empty\n"
    assert capfd.readouterr() == ("", expected)


def test_wrong_usage_that_all_ranks_find_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("print('no such option', file=sys.stderr)\nsys.exit(2)", num_processes=3) == 2
    assert capfd.readouterr() == ("", "no such option\n")


def test_a_rank_that_only_lost_its_peer_is_not_blamed(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # Rank 1 leaves only when rank 0 has gone: the end of rank 0 closes the gate.
    code = f"""
if rank == 0:
    held = open({str(gate)!r}, "w")
    os._exit({PEER_FAILED})
open({str(gate)!r}).read()
sys.exit("the kettle boils over")
"""
    assert run(code) == 1
    assert capfd.readouterr().err == "rank 1 failed with exit code 1\n[rank 1] the kettle boils over\n"


def test_a_run_with_a_killed_rank_has_failed_and_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    code = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()"
    assert run(code, grace_seconds=0.01) == 1
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL\n"


def test_others_have_time_to_report_themselves(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = f"""
if rank == 1:
    held = open({str(gate)!r}, "w")
    sys.exit(1)
open({str(gate)!r}).read()
print("rank 1 is gone")
"""
    assert run(code) == 1
    assert capfd.readouterr().out == "rank 1 is gone\n"


@pytest.mark.parametrize("stubborn", [False, True])
def test_ranks_that_do_not_end_are_terminated_and_then_killed(
    stubborn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("shardwise.launchers.local"), "SECONDS_TO_TERMINATE", 0.5)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = f"""
if rank == 1:
    if {stubborn}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open({str(gate)!r}, "w").write(str(os.getpid()))
    signal.pause()
open({str(tmp_path / "pid")!r}, "w").write(open({str(gate)!r}).read())
sys.exit(5)
"""
    assert run(code, grace_seconds=0.1) == 5
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_reaches_every_rank_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = f"""
count = 0
def interrupted(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, interrupted)
if rank == 0:
    open({str(gate)!r}).read()
    os.kill(os.getppid(), signal.SIGINT)
else:
    open({str(gate)!r}, "w").close()
while not count:
    signal.sigtimedwait([], 0.05)
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(count))
"""
    assert run(code) == 130
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1", "1"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_a_launcher_that_is_ended(number: signal.Signals, code: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    rank = RANK + f"open({str(gate)!r}, 'w').write(f'{{os.getpid()}} ')\nsignal.pause()"
    program = f"""
import sys
from shardwise.launchers.local import launch
sys.exit(launch(None, ["-c", {rank!r}], num_processes=2))
"""
    with started(["-c", program]) as launcher:
        pids: list[int] = []
        with gate.open() as written:
            while len(pids) < 2:
                pids += map(int, written.read().split())
        launcher.send_signal(number)
        assert launcher.wait(timeout=60) == code
        deadline = time.monotonic() + 60
        while any(map(is_alive, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_signal_that_comes_twice_at_once_leaves_ranks_their_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("shardwise.launchers.local")
    monkeypatch.setattr(module, "SECONDS_TO_TERMINATE", 0.01)
    monkeypatch.setattr(module, "ONE_REQUEST_SECONDS", 60.0)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = f"""
def save(number, frame):
    time.sleep(1.0)
    open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
if rank == 0:
    open({str(gate)!r}).read()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getppid(), signal.SIGTERM)
    while signal.SIGTERM not in signal.sigpending():  # two that come before the first is handled arrive as one
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
else:
    open({str(gate)!r}, "w").close()
while True:
    time.sleep(0.05)  # a pause would miss a signal that comes before it
"""
    assert run("import time" + code) == 128 + signal.SIGTERM
    assert {"0", "1"} <= {each.name for each in tmp_path.iterdir()}
