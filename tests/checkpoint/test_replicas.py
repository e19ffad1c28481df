"""Replicas on simulated ranks of two hosts: what they hold, which save a program goes on from, and what is refused.

Keepers are threads here. What killed processes leave behind is in `tests/processes/test_replicas.py`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import replicas
from shardwise.comm import Channel, alone
from shardwise.comm.process.own_host import OwnHost
from shardwise.errors import CheckpointError
from tests.checkpoint.small_states import empty_state, same, save_state, share_of_state, whole_state
from tests.keepers.keeper_threads import KeeperThreads, impatient, threads

__all__ = ["threads"]

HOSTS = ("A", "A", "B")

Run = Callable[..., list[Any]]


@pytest.fixture
def run(threads: KeeperThreads, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Call a function of the channel on simulated ranks of some hosts."""
    here = threading.local()
    # Which host a rank is on, nobody can say but the kernel; hosts with networks are in tests/processes.
    monkeypatch.setattr(replicas, "_host", lambda: OwnHost(here.name, "", ()))

    def on_hosts(function: Callable[[Channel], Any], hosts: tuple[str, ...] = HOSTS) -> list[Any]:
        def rank(channel: Channel) -> Any:
            here.name = hosts[channel.rank]
            return function(channel)

        return list(sw.simulate(len(hosts), rank))

    yield on_hosts
    assert all(threads.end(name) for name in threads.threads)


def share(channel: Channel, seed: int) -> dict[sw.Piece, torch.Tensor]:
    return share_of_state(whole_state(seed), channel.rank, channel.size)


def loaded(copies: sw.Replicas, channel: Channel) -> tuple[int, dict[str, Any]]:
    """The state from which a program goes on, and its extra."""
    newest = copies.newest()
    assert newest is not None
    target = empty_state()
    extra = sw.load(newest, target, channel=channel)
    assert same(target, whole_state(extra["state"]))
    return extra["state"], extra


class LostError(Exception):
    """Ends a program as a lost peer would: its keepers wait for the next start."""


def lost_after(path: Path, *states: int) -> Callable[[Channel], None]:
    """A program that is lost when it has copied these states."""

    def program(channel: Channel) -> None:
        with contextlib.suppress(LostError), sw.Replicas(path, every=1, channel=channel) as copies:
            for seed in states:
                copies.save(share(channel, seed), extra={"state": seed}, step=10 * seed)
            copies.wait()
            raise LostError

    return program


def test_the_first_call_and_each_nth_after_it_make_a_copy(run: Run, tmp_path: Path) -> None:
    def program(channel: Channel) -> list[bool]:
        with sw.Replicas(tmp_path, every=3, channel=channel) as copies:
            assert copies.newest() is None
            return [copies.save(share(channel, 0)) for _ in range(8)]

    assert run(program) == [[True, False, False, True, False, False, True, False]] * 3
    assert list(tmp_path.iterdir()) == []


def test_any_number_of_ranks_on_any_hosts_goes_on_from_the_last_whole_replica(run: Run, tmp_path: Path) -> None:
    def again(channel: Channel) -> None:
        with contextlib.suppress(LostError), sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            assert loaded(copies, channel) == (2, {"state": 2})
            if channel.size < 4:
                raise LostError

    run(lost_after(tmp_path, 1, 2))
    run(again, ("C", "B"))  # host A is lost: its files come from B
    run(again, ("B",))
    run(again, ("A", "B", "C", "C"))


@pytest.mark.parametrize(("saved", "expected"), [(1, 2), (3, 3)])
def test_a_newer_save_of_files_wins(saved: int, expected: int, run: Run, tmp_path: Path) -> None:
    def again(channel: Channel) -> None:
        with sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            assert loaded(copies, channel) == (expected, {"state": expected})
            copies.forget()
            assert copies.newest() == f"{tmp_path}/save-00000001"

    save_state(tmp_path, saved)
    run(lost_after(tmp_path, 2))
    run(again)


def test_a_keeper_holds_two_replicas_of_its_ranks_and_of_those_of_the_host_before(run: Run, tmp_path: Path) -> None:
    elements, hosts = 1 << 18, ("A", "A", "B", "C")

    def program(channel: Channel) -> tuple[int, int, int]:
        offset, shape = (channel.rank * elements,), (len(hosts) * elements,)
        piece = sw.Piece(name="w", dtype="float32", global_shape=shape, offset=offset, shape=(elements,))
        with sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            for _ in range(5):
                copies.save({piece: torch.ones(elements)})
            copies.wait()
            channel.exchange(b"", purpose="all have copied")
            return *copies.held_bytes, copies.counters.waited_bytes

    # A holds the files of its two ranks and that of C, B that of its rank and those of A, C its own and that of B.
    for (held, peak, waited), num_files in zip(run(program, hosts), (3, 3, 3, 2), strict=True):
        formula = 2 * num_files * 4 * elements
        assert formula <= held <= peak < formula + (128 << 10)  # manifests, tables, reports
        assert waited == 5 * 4 * elements


def test_a_second_program_and_wrong_numbers_are_refused(run: Run, tmp_path: Path) -> None:
    def program(channel: Channel) -> None:
        with pytest.raises(CheckpointError, match="every is 0; give a whole number from 1 on"):
            sw.Replicas(tmp_path, every=0, channel=channel)
        with sw.Replicas(tmp_path, every=1, channel=channel):
            if channel.rank == 0:
                said = "another program, which still runs, has its replicas here"
                with impatient(), pytest.raises(CheckpointError, match=said):
                    sw.Replicas(tmp_path, every=1, channel=alone())

    run(program)


def test_its_words_name_the_loss_that_it_survives(run: Run, tmp_path: Path) -> None:
    def program(channel: Channel) -> str:
        with sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            return copies.words

    assert run(program)[0].endswith("in memory of 2 hosts, each rank's on two; they survive the loss of one host")
    assert run(program, ("A", "A"))[0].endswith("they survive the loss of ranks, and not of the host")


def test_stopped_by_hand_it_waits_for_nothing(run: Run, threads: KeeperThreads, tmp_path: Path) -> None:
    def program(channel: Channel) -> None:
        with pytest.raises(KeyboardInterrupt), sw.Replicas(tmp_path, every=1, channel=channel):
            raise KeyboardInterrupt

    run(program)
    assert len(threads.threads) == 2  # and the fixture waits for their ends


def test_hosts_that_were_away_do_not_bring_an_older_replica_back(run: Run, tmp_path: Path) -> None:
    def alone_on_one(channel: Channel) -> None:
        with contextlib.suppress(LostError), sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            assert copies.newest() is None  # two of three hosts are lost at a time
            copies.save(share(channel, 1), extra={"state": 1}, step=10)
            copies.wait()
            raise LostError

    def again(channel: Channel) -> None:
        with sw.Replicas(tmp_path, every=1, channel=channel) as copies:
            assert loaded(copies, channel) == (1, {"state": 1})

    run(lost_after(tmp_path, 2, 3), ("A", "B", "C"))
    run(alone_on_one, ("A",))
    run(again, ("A", "B", "C"))
