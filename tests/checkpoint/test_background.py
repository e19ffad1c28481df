"""Saves in the background: what they hold, how they fail, whom they wait for, and what they leave of memory."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore
from shardwise.checkpoint.saves import list_saves
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import WRITING, Counting, Gate, Hooked, Operation, raising
from tests.checkpoint.small_states import contents, loaded, rubbish, same, share_of_state, whole_state
from tests.forks.programs import started

FULL, FULL_DATA = raising(errno.ENOSPC, *WRITING), raising(errno.ENOSPC, "begin")


def share(seed: int, channel: Channel) -> dict[sw.Piece, torch.Tensor]:
    return share_of_state(whole_state(seed), channel.rank, channel.size)


def own(channel: Channel) -> dict[sw.Piece, torch.Tensor]:
    """A tensor that no other rank has, so that each rank has a file."""
    return {sw.Piece(name=f"w{channel.rank}", dtype="float32", global_shape=(2,)): torch.ones(2)}


def savers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardwise-save"]


@pytest.mark.parametrize(("size", "layout"), [(1, "whole"), (3, "pieces")])
def test_the_save_holds_the_values_at_its_call_whatever_becomes_of_the_state(
    size: int, layout: Literal["pieces", "whole"], tmp_path: Path
) -> None:
    gate = Gate("begin", "create")
    store = Hooked(LocalStore(tmp_path), gate)

    def run(channel: Channel) -> None:
        state = share(1, channel)
        with AsyncSaver(store, layout=layout, channel=channel) as saver:
            channel.exchange(b"", purpose="all have looked at the storage")
            gate.close()
            saver.save(state, extra={"step": 4})
            for tensor in state.values():
                tensor.zero_()
            assert not list(tmp_path.rglob("*.safetensors"))
            channel.exchange(b"", purpose="all have changed their states")
            gate.open()
            report = saver.wait()
            assert report is not None
            assert (report.step, report.num_tensors, report.location) == (4, 5, str(tmp_path / "save-00000001"))
            assert saver.wait() is None

    sw.simulate(size, run)
    assert same(loaded(tmp_path)[0], whole_state(1))
    assert checkpoint.verify(tmp_path).good
    assert rubbish(tmp_path) == []
    assert savers() == []


@pytest.mark.parametrize(("call", "bad"), [("save", {1, 2}), ("wait", {0}), ("close", {1})])
def test_a_failure_is_told_once_to_all_at_the_next_call_by_those_who_met_it_and_the_one_after_saves(
    call: str, bad: set[int], tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    before = contents(tmp_path)
    is_full = False

    def when_full(operation: Operation) -> None:
        if is_full:
            FULL(operation)

    def run(channel: Channel) -> str:
        nonlocal is_full
        store = Hooked(LocalStore(tmp_path), when_full) if channel.rank in bad else LocalStore(tmp_path)
        saver = AsyncSaver(store, channel=channel)
        channel.exchange(b"", purpose="all have looked at the storage")
        is_full = True
        saver.save(own(channel))
        with pytest.raises(CheckpointError) as caught:
            {"save": lambda: saver.save(own(channel)), "wait": saver.wait, "close": saver.close}[call]()
        saver.close()  # says nothing any more
        channel.exchange(b"", purpose="all have seen the error")
        assert contents(tmp_path) == before
        is_full = False
        channel.exchange(b"", purpose="the disk has room again")
        saver.save(share(2, channel))
        saver.close()
        return str(caught.value)

    told = sw.simulate(3, run)
    assert set(told) == {told[0]}
    assert [line.split(":")[0] for line in told[0].splitlines()] == [f"rank {rank}" for rank in sorted(bad)]
    said = "cannot be written: No space left on device"
    assert told[0].count(said) == told[0].count("nothing was committed") == len(bad)
    assert same(loaded(tmp_path)[0], whole_state(2))
    assert rubbish(tmp_path) == []
    assert savers() == []


def test_what_ranks_write_after_rank_0_has_given_up_is_removed_and_they_have_nothing_to_tell(tmp_path: Path) -> None:
    late = Gate("write")
    late.close()

    def run(channel: Channel) -> str:
        saver = AsyncSaver(Hooked(LocalStore(tmp_path), late if channel.rank else FULL_DATA), channel=channel)
        saver.save(own(channel))
        channel.exchange(b"", purpose="all have begun")
        while channel.rank == 0 and len(savers()) > 2:
            os.sched_yield()
        channel.exchange(b"", purpose="rank 0 has given up and cleaned up")
        late.open()
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
        return str(caught.value)

    told = sw.simulate(3, run)
    assert set(told) == {told[0]}
    assert [line.split(":")[0] for line in told[0].splitlines()] == ["rank 0"]
    assert contents(tmp_path) == {}


def test_saves_follow_each_other_one_at_a_time_of_states_that_grow(tmp_path: Path) -> None:
    store = Counting(LocalStore(tmp_path))
    sizes = (3, 1000, 10)
    with AsyncSaver(store) as saver:
        for size in sizes:
            saver.save({"w": torch.arange(size)}, step=size)
            assert len(savers()) <= 1
        assert (saver.counters.waited_bytes, saver.counters.queued_bytes) == (8 * sum(sizes), 0)
    begun = 0
    for operation in store.operations:
        begun += operation.kind == "begin" and operation.name.endswith(".safetensors")
        begun -= operation.kind == "create"
        assert begun in (0, 1)
    for size in sizes:
        assert torch.equal(checkpoint.open(tmp_path, step=size).read("w"), torch.arange(size))


def test_training_that_fails_leaves_a_save_that_was_written(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        with AsyncSaver(tmp_path, channel=channel) as saver:
            saver.save(share(1, channel))
            while not [*tmp_path.rglob("*-rank00001.report.json"), *tmp_path.rglob("manifest.json")]:
                channel.exchange(b"", purpose="rank 1 is still writing")
                os.sched_yield()
            raise FloatingPointError("the loss is not finite")

    with pytest.raises(FloatingPointError):
        sw.simulate(2, run)
    assert same(loaded(tmp_path)[0], whole_state(1))
    assert savers() == []


PROGRAMS = {
    "that ends after the call": """
import sys, threading, torch
from shardwise.checkpoint import AsyncSaver, LocalStore

class Late(LocalStore):
    "Writes when the program has ended."
    def write(self, name, *, num_bytes):
        threading.main_thread().join()
        return super().write(name, num_bytes=num_bytes)

saver = AsyncSaver(Late(sys.argv[1]))
saver.save({"w": torch.arange(1000)}, extra={"step": 7})
""",
    "whose disk is full": """
import resource, signal, sys, torch, shardwise as sw
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
saver = sw.checkpoint.AsyncSaver(sys.argv[1])
saver.save({"w": torch.arange(1000)})
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_its_save_in_the_end_or_is_told_why_not(program: str, tmp_path: Path) -> None:
    with started(["-c", PROGRAMS[program], str(tmp_path)]) as running:
        _, err = running.communicate(timeout=100)
        assert running.wait(timeout=0) == 0
    if "full" in program:
        assert "shardwise: a save in the background was not made: " in err
        assert "File too large" in err
        return
    assert err == ""
    target = {"w": torch.zeros(1000, dtype=torch.int64)}
    assert sw.load(tmp_path, target) == {"step": 7}
    assert torch.equal(target["w"], torch.arange(1000))
    assert checkpoint.verify(tmp_path).good


@pytest.mark.parametrize("breaks", [False, True])
def test_check_waits_for_no_disk_and_says_how_a_save_ended(breaks: bool, tmp_path: Path) -> None:
    gate = Gate("begin")

    def run(channel: Channel) -> None:
        def fail(operation: Operation) -> None:
            gate(operation)
            if breaks and channel.rank == 1 and operation.kind == "begin":
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        saver = AsyncSaver(Hooked(LocalStore(tmp_path), fail), channel=channel)
        channel.exchange(b"", purpose="all have looked at the storage")
        gate.close()
        assert saver.check() is None  # none is under way
        saver.save(share(1, channel), step=3)
        assert saver.check() is None
        assert not saver.has_failed
        channel.exchange(b"", purpose="all have looked")
        gate.open()
        if breaks:
            while channel.rank == 1 and not saver.has_failed:  # rank 0 hears of it sooner or later
                os.sched_yield()
            channel.exchange(b"", purpose="rank 1 has ended")
            with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
                saver.check()
        else:
            while (report := saver.check()) is None:
                os.sched_yield()
            assert report.step == 3
        saver.close()

    sw.simulate(2, run)
    assert list_saves(LocalStore(tmp_path)).committed == (() if breaks else (1,))


def test_a_rank_that_still_writes_is_waited_for_however_long(tmp_path: Path) -> None:
    """The clock of `timeout_seconds` begins when the other ranks have ended, not when rank 0 has."""
    gate, looks = Gate("begin"), list[float]()

    def look(operation: Operation) -> None:
        if operation.kind == "names":
            looks.append(time.monotonic())

    def run(channel: Channel) -> None:
        store = Hooked(LocalStore(tmp_path), gate if channel.rank else look)
        with AsyncSaver(store, channel=channel, timeout_seconds=0.05) as saver:
            channel.exchange(b"", purpose="all have looked at the storage")
            gate.close()
            saver.save(share(1, channel))
            begun = len(looks)
            while channel.rank == 0 and len(looks) < begun + 12:  # its thread looks for the report, with pauses
                os.sched_yield()
            channel.exchange(b"", purpose="rank 0 would have given up long ago")
            gate.open()

    sw.simulate(2, run)
    assert looks[11] - looks[10] > 4 * 0.02, "pauses grow: on an object store each look is a request"
    assert same(loaded(tmp_path)[0], whole_state(1))


def test_storage_that_is_lost_later_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    is_lost = False

    class Unmounted(LocalStore):
        def names(self, folder: str = "") -> Any:
            return iter([]) if is_lost else super().names(folder)

    def run(channel: Channel) -> None:
        nonlocal is_lost
        saver = AsyncSaver(tmp_path if channel.rank else Unmounted(tmp_path), channel=channel, timeout_seconds=0.2)
        saver.save(share(1, channel))
        is_lost = True
        saver.close()

    with pytest.raises(CheckpointError, match=r"0\.2 s have passed, and .*-rank00001\.report\.json is not there"):
        sw.simulate(2, run)
