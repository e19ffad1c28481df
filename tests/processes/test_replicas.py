"""Whole hosts that are killed: the program that is started again goes on from memory, with the same bits.

Hosts are names here, each with a keeper of its own; the one of a lost host is killed with its ranks.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import keeper_store, replicas
from shardwise.comm import Channel
from shardwise.comm.own_host import OwnHost
from shardwise.errors import PeerError
from tests.checkpoint.small_states import same
from tests.engine.loops import plan_of, rows
from tests.engine.tower import engine_on
from tests.keepers.kept import Kept
from tests.oracle.program import adamw
from tests.processes.pool import Pool, Transport

STEPS = 8
IMPATIENT = Transport(timeout_seconds=20.0)

Trained = tuple[int, dict[str, torch.Tensor]]
"""The step from which a program began, and the state with which it ended."""


def engine_of(channel: Channel) -> sw.Engine:
    return engine_on(channel, plan_of(f"dp_shard={channel.size}", compute="bfloat16"), adamw)


def train(engine: sw.Engine, step: int, rank: int) -> None:
    engine.step(rows(10 * step + rank))


def state_of(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sw.full(engine)}


def uninterrupted(channel: Channel, steps: int) -> dict[str, torch.Tensor]:
    engine = engine_of(channel)
    for step in range(steps):
        train(engine, step, channel.rank)
    return state_of(engine)


@contextlib.contextmanager
def on_host(name: str) -> Iterator[pytest.MonkeyPatch]:
    """Which host a rank is on, nobody can say but the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_host", lambda: OwnHost(name, "", ()))
        yield patch


def killed(channel: Channel, path: str, hosts: Sequence[str], when: str) -> None:
    """Train with replicas until the ranks of host A are killed, and its keeper first.

    "copy": in the middle of the copy of step 4. Else: in step 5, when that copy is whole.
    """
    is_victim = hosts[channel.rank] == "A"

    def kill() -> None:
        kept.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying(keeper_store.KeeperWriter):
        def write(self, data: memoryview) -> None:
            super().write(data[: len(data) // 2])
            kill()

    # What a program does: the error that ends it leaves the context of its replicas, with a copy under way or not.
    with on_host(hosts[channel.rank]) as patch, contextlib.suppress(PeerError):
        engine = engine_of(channel)
        with sw.Replicas(path, every=2, channel=channel, keep_seconds=120.0) as copies:
            kept = Kept(path, [hosts[channel.rank]])
            assert copies.newest() is None
            for step in range(STEPS):
                train(engine, step, channel.rank)
                if "copy" in when and step == 4:
                    copies.wait()  # else it could be the copy before that it dies in
                    if is_victim:
                        patch.setattr(keeper_store, "KeeperWriter", Dying)
                copies.save(engine, extra={"step": step})
                if "copy" not in when and step == 4:
                    copies.wait()
                    if is_victim:
                        kill()
        pytest.fail("training went on without the victims")


def started_again(channel: Channel, path: str, hosts: Sequence[str], steps: int) -> Trained:
    with on_host(hosts[channel.rank]):
        engine = engine_of(channel)
        with sw.Replicas(path, every=2, channel=channel) as copies:
            newest = copies.newest()
            assert newest is not None
            begin = sw.load(newest, engine)["step"] + 1
            for step in range(begin, steps):
                train(engine, step, channel.rank)
                copies.save(engine, extra={"step": step})
            return begin, state_of(engine)


@pytest.mark.parametrize(
    ("when", "again", "begin"),
    [
        ("host", "CCB", 5),  # rank 0's host, which has the manifest, is lost and replaced
        ("host in a copy", "B", 3),  # the copy of step 4 is torn, that of step 2 is whole; no other host comes
    ],
)
def test_a_program_goes_on_from_memory_after_a_host_was_killed(
    when: str, again: str, begin: int, pool: Pool, tmp_path: Path
) -> None:
    path = str(tmp_path / "saves")
    kept = Kept(path, ["A", "B", "C"])
    pool.run(3, killed, path, list("AAB"), when, transport=IMPATIENT, lost=[0, 1])
    steps = STEPS if len(again) == 3 else begin
    results = pool.run(len(again), started_again, path, list(again), steps, transport=IMPATIENT)
    expected = sw.simulate(3, lambda channel: uninterrupted(channel, steps))[0]
    for began, state in results:
        assert began == begin
        assert same(state, expected)
    assert not Path(path).exists()
    assert Kept(path, again).have_ended()
    kept.kill()  # that of a host which did not come back would wait for it
