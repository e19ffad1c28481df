"""Saves in the background: what they hold, when they fail, and what they leave of memory and threads."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, PeerError
from tests.checkpoint.faulty import Counting, Operation, T, Watched
from tests.checkpoint.small_states import contents, loaded, rubbish, same, share_of_state, whole_state
from tests.forks.programs import started

SECONDS = 30


class Gated(Watched):
    """Nothing is written while the gate is closed. It is open when the saver is made, which looks at the storage."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind in ("begin", "create"):
            assert self.gate.wait(SECONDS)
        return act()


class Broken(Watched):
    """While it is broken nothing can be written."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_broken = False

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if self.is_broken and operation.kind in ("begin", "create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return act()


def savers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardwise-save"]


@pytest.mark.parametrize("layout", ["pieces", "whole"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_save_holds_the_values_at_its_call_whatever_becomes_of_the_state(
    size: int, layout: Literal["pieces", "whole"], tmp_path: Path
) -> None:
    stores = [Gated(LocalStore(tmp_path)) for _ in range(size)]

    def run(channel: Channel) -> None:
        state = share_of_state(whole_state(1), channel.rank, size)
        with AsyncSaver(stores[channel.rank], layout=layout, channel=channel) as saver:
            stores[channel.rank].gate.clear()
            saver.save(state, extra={"step": 4})
            for tensor in state.values():
                tensor.zero_()
            assert not list(tmp_path.rglob("*.safetensors"))
            channel.exchange(b"", purpose="all have changed their states")
            stores[channel.rank].gate.set()
            report = saver.wait()
            assert report is not None
            assert (report.step, report.num_tensors, report.location) == (4, 5, str(tmp_path / "save-00000001"))
            assert saver.wait() is None

    sw.simulate(size, run)
    assert same(loaded(tmp_path)[0], whole_state(1))
    assert checkpoint.verify(tmp_path).good
    assert rubbish(tmp_path) == []
    assert savers() == []


def test_what_is_written_in_the_background_is_what_is_written_at_once(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        state = share_of_state(whole_state(1), channel.rank, 2)
        sw.save(tmp_path / "sync", state, channel=channel)
        with AsyncSaver(tmp_path / "async", channel=channel) as saver:
            saver.save(state)

    sw.simulate(2, run)
    one, other = (
        [data for name, data in sorted(contents(tmp_path / how).items(), key=lambda each: each[0][-12:])]
        for how in ("sync", "async")
    )
    data_files = [at for at, data in enumerate(one) if b"__metadata__" in data[:64]]
    assert len(data_files) == 2
    assert [one[at] for at in data_files] == [other[at] for at in data_files]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failure_surfaces_at_the_next_call_on_all_ranks_and_the_one_after_saves(
    call: str, victim: int, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    before = contents(tmp_path)
    broken = Broken(LocalStore(tmp_path))

    def run(channel: Channel) -> str:
        saver = AsyncSaver(broken if channel.rank == victim else tmp_path, channel=channel)
        broken.is_broken = True
        state = share_of_state(whole_state(2), channel.rank, 2)
        saver.save(state)
        with pytest.raises(CheckpointError) as caught:
            {"save": lambda: saver.save(state), "wait": saver.wait, "close": saver.close}[call]()
        channel.exchange(b"", purpose="all have seen the error")
        assert contents(tmp_path) == before
        broken.is_broken = False
        channel.exchange(b"", purpose="the disk has room again")
        saver.save(state)
        saver.close()
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert f"rank {victim}: {tmp_path}/save-00000002/" in first
    assert "cannot be written: No space left on device" in first
    assert "nothing was committed" in first
    assert same(loaded(tmp_path)[0], whole_state(2))
    assert rubbish(tmp_path) == []
    assert savers() == []


def test_what_a_rank_wrote_after_another_had_given_up_is_removed(tmp_path: Path) -> None:
    broken, late = Broken(LocalStore(tmp_path)), Gated(LocalStore(tmp_path))

    def run(channel: Channel) -> None:
        saver = AsyncSaver(late if channel.rank else broken, channel=channel)
        broken.is_broken = True
        late.gate.clear()
        saver.save(share_of_state(whole_state(1), channel.rank, 2))
        while channel.rank == 0 and len(savers()) > 1:
            os.sched_yield()
        channel.exchange(b"", purpose="rank 0 has given up and cleaned up")
        late.gate.set()
        with pytest.raises(CheckpointError, match="No space left on device"):
            saver.wait()

    sw.simulate(2, run)
    assert contents(tmp_path) == {}


def test_a_save_that_cannot_be_begun_says_so_at_once_and_the_next_works(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        with AsyncSaver(tmp_path, channel=channel) as saver:
            good = {"w": torch.ones(1)}
            bad: Any = {"w": 1.5}
            with pytest.raises(CheckpointError, match="rank 1: 'w' is a float, not a tensor"):
                saver.save(bad if channel.rank else good)
            saver.save(good)

    sw.simulate(2, run)
    assert [file.name for file in tmp_path.iterdir()] == ["save-00000001"]


def test_what_is_no_rewrite_is_refused_when_the_saver_is_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rewrite is a str; give sw\.Rewrite\(text\)"):
        AsyncSaver(tmp_path, rewrite="a -> c")  # type: ignore[arg-type]


def test_one_snapshot_is_used_by_all_saves_and_given_back(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    with AsyncSaver(tmp_path) as saver:
        places = set()
        for step in range(4):
            state["w"] += 1
            saver.save(state, step=step)
            places.add(saver._snapshot._blocks[0].data_ptr())
        assert len(places) == 1
        assert saver._snapshot.num_bytes == 4000
        assert (saver.counters.waited_bytes, saver.counters.queued_bytes) == (4 * 4000, 0)
    assert saver._snapshot.num_bytes == 0
    for step in range(4):
        assert torch.equal(checkpoint.open(tmp_path, step=step).read("w"), torch.arange(1000.0) + step + 1)


def test_one_save_is_under_way_at_a_time(tmp_path: Path) -> None:
    store = Counting(LocalStore(tmp_path))
    with AsyncSaver(store) as saver:
        for _ in range(3):
            saver.save(whole_state(1))
            assert len(savers()) <= 1
    begun = 0
    for operation in store.operations:
        begun += operation.kind == "begin" and operation.name.endswith(".safetensors")
        begun -= operation.kind == "create"
        assert begun in (0, 1)
    assert store.num_operations["create"] == 3


def test_training_that_fails_leaves_a_save_that_was_written(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        with AsyncSaver(tmp_path, channel=channel) as saver:
            saver.save(share_of_state(whole_state(1), channel.rank, 2))
            while not [*tmp_path.rglob("*-rank00001.report.json"), *tmp_path.rglob("manifest.json")]:
                channel.exchange(b"", purpose="rank 1 is still writing")
                os.sched_yield()
            raise FloatingPointError("the loss is not finite")

    with pytest.raises(FloatingPointError):
        sw.simulate(2, run)
    assert same(loaded(tmp_path)[0], whole_state(1))
    assert savers() == []


def test_a_lost_peer_is_an_error_and_nobody_waits_for_its_report(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    gated = Gated(LocalStore(tmp_path))
    errors = []

    def run(channel: Channel) -> None:
        saver = AsyncSaver(gated if channel.rank else tmp_path, channel=channel)
        gated.gate.clear()
        saver.save(share_of_state(whole_state(2), channel.rank, 2))
        if channel.rank:
            raise SystemExit("lost")
        with pytest.raises(PeerError) as caught:
            saver.wait()
        errors.append(str(caught.value))
        assert len(savers()) == 1  # the lost one's, which has not written a byte

    with pytest.raises(SystemExit):
        sw.simulate(2, run)
    assert len(errors) == 1
    gated.gate.set()
    for thread in savers():
        thread.join()
    assert same(loaded(tmp_path)[0], whole_state(1))
    checkpoint.save(tmp_path, whole_state(3))
    assert rubbish(tmp_path) == []


PROGRAM = """
import sys, threading, torch
from shardwise.checkpoint import AsyncSaver, LocalStore

class Late(LocalStore):
    "Writes when the program has ended."
    def write(self, name, *, num_bytes):
        threading.main_thread().join()
        return super().write(name, num_bytes=num_bytes)

saver = AsyncSaver(Late(sys.argv[1]))
saver.save({"w": torch.arange(5)}, extra={"step": 7})
"""


def test_a_program_that_ends_after_the_call_leaves_a_committed_save(tmp_path: Path) -> None:
    with started(["-c", PROGRAM, str(tmp_path)]) as program:
        _, err = program.communicate(timeout=100)
        assert (program.wait(timeout=0), err) == (0, "")
    target = {"w": torch.zeros(5, dtype=torch.int64)}
    assert sw.load(tmp_path, target) == {"step": 7}
    assert torch.equal(target["w"], torch.arange(5))
    assert checkpoint.verify(tmp_path).good


def test_a_state_may_grow_between_saves(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path) as saver:
        for num_elements in (3, 1000, 10):
            saver.save({"w": torch.arange(num_elements)}, step=num_elements)
    for num_elements in (3, 1000, 10):
        assert torch.equal(checkpoint.open(tmp_path, step=num_elements).read("w"), torch.arange(num_elements))
