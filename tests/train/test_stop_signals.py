"""A run that is asked to stop: every rank leaves after the same update, which is saved, and it goes on bit for bit."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from rich.console import Console

from shardwise import checkpoint
from shardwise.comm import Channel, alone, simulate
from shardwise.runs import stop_signals
from shardwise.runs.stop_signals import Stopped, StopSignals
from shardwise.train.rank import run
from tests.train.runs import finished, laid_out, small_run, without_times


class Asked(StopSignals):
    """A signal comes to this rank in the update `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def has_come(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.number = int(signal.SIGTERM)
        return super().has_come()


def stopped(folder: Path, *words: str, at: int, rank: int = 0, resume: str | None = None) -> list[str]:
    """Run until a signal comes to `rank` in update `at` (counted from where the run begins); what each rank says."""
    config = laid_out(folder, *words)

    def body(channel: Channel) -> str:
        signals = Asked(at if channel.rank == rank else 0)
        with pytest.raises(Stopped) as caught:
            run(config, channel, Console(file=io.StringIO()), resume=resume, signals=signals)
        assert (caught.value.exit_code, caught.value.is_agreed) == (143, True)
        return str(caught.value)

    return simulate(config.plan.mesh.size, body)


LAYOUTS = {
    "stage 3": ["mesh.dp_shard=2", "sharding.stage=3"],
    "pp": ["mesh.pp=2", "checkpoint.background=false"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_to_any_one_rank_ends_all_after_the_same_update_and_the_run_goes_on_bit_for_bit(
    layout: str, tmp_path: Path
) -> None:
    words = [*LAYOUTS[layout], "checkpoint.every=4", "train.microbatch=2"]
    (tmp_path / "whole").mkdir()
    whole = finished(laid_out(tmp_path / "whole", *words))
    size = laid_out(tmp_path, *words).plan.mesh.size
    said = stopped(tmp_path, *words, at=3, rank=size - 1)  # between two saves
    saves = tmp_path / "out" / "checkpoints"
    assert (
        said
        == [f"stopped by SIGTERM after step 3 of 6, which is saved in {saves}; --resume auto goes on from there"] * size
    )
    assert checkpoint.open(saves).step == 3
    stopped(tmp_path, *words, at=1, rank=0, resume="auto")  # with an evaluation and a save of its own
    assert [checkpoint.open(folder).step for folder in sorted(saves.iterdir())] == [3, 4]
    resumed = finished(laid_out(tmp_path, *words), resume="auto")
    assert without_times(resumed.metrics) == without_times(whole.metrics)


def test_without_checkpoints_nothing_is_saved_and_it_says_so(tmp_path: Path) -> None:
    (said,) = stopped(tmp_path, at=2)
    assert said == "stopped by SIGTERM after step 2 of 6; nothing was saved, because checkpoint.every is not set"
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_run_that_saves_in_memory_alone_goes_on_from_there(tmp_path: Path) -> None:
    words = ["checkpoint.replicas=2"]
    whole = finished(small_run(tmp_path, *words, f"train.output={tmp_path / 'whole'}"))
    stopped(tmp_path, *words, at=5)
    resumed = finished(laid_out(tmp_path, *words), resume="auto")
    assert "goes on from step 4, out of " in resumed.printed
    assert without_times(resumed.metrics) == without_times(whole.metrics)


def test_a_signal_before_the_first_update_ends_the_run_without_one(tmp_path: Path) -> None:
    signals = StopSignals()
    signals.number = int(signal.SIGUSR1)
    with pytest.raises(Stopped, match=r"stopped by SIGUSR1 before the first update") as caught:
        run(small_run(tmp_path, "checkpoint.every=2"), alone(), Console(file=io.StringIO()), signals=signals)
    assert caught.value.exit_code == 138
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_a_signal_in_the_last_update_ends_a_run_that_is_complete(tmp_path: Path) -> None:
    (said,) = stopped(tmp_path, "checkpoint.every=4", at=6)
    assert said.startswith("stopped by SIGTERM after step 6 of 6, which is saved in ")
    assert "nothing is left to do" in finished(small_run(tmp_path, "checkpoint.every=4"), resume="auto").printed


@pytest.fixture
def default_signals() -> Iterator[None]:
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in stop_signals.STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
def test_signals_are_noted_while_a_run_trains_and_end_it_else() -> None:
    with StopSignals() as signals, pytest.raises(Stopped, match=r"^stopped by SIGTERM$") as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not caught.value.is_agreed
    with StopSignals() as signals, signals.noted(alone()) as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop()
        assert signals.of_all(alone()) == signal.SIGUSR1
        signals.number = 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
def test_a_signal_that_comes_after_the_last_agreement_is_not_lost() -> None:
    with StopSignals() as signals, pytest.raises(Stopped), signals.noted(alone()):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("default_signals")
def test_a_forked_child_dies_of_the_signal_and_handlers_of_others_stay() -> None:
    def theirs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("nobody sends it")

    signal.signal(signal.SIGUSR1, theirs)
    with StopSignals() as signals, signals.noted(alone()):
        assert signal.getsignal(signal.SIGUSR1) is theirs
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("seconds", "code"), [(-1.0, 128 + signal.SIGTERM), (60.0, 0)])
def test_a_second_request_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch, seconds: float, code: int) -> None:
    """Signals that come soon after the first are the same request: a launcher passes them on."""
    monkeypatch.setattr(stop_signals, "ONE_REQUEST_SECONDS", seconds)
    child = os.fork()
    if not child:
        with StopSignals() as signals, signals.noted(alone()):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
