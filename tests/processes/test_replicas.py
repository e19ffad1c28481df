"""A host that is killed in the middle of a copy: the program that is started again goes on from the one before.

Hosts are names here, each with a keeper of its own; the one of the lost host is killed with its ranks.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import keeper_store, replicas
from shardwise.comm import Channel
from shardwise.comm.process.own_host import OwnHost
from shardwise.errors import PeerError
from tests.checkpoint.small_states import same
from tests.engine.loops import plan_of, rows
from tests.engine.tower import engine_on
from tests.keepers.kept import Kept
from tests.oracle.program import adamw
from tests.processes.pool import Pool, Transport

HOSTS = "AAB"
IMPATIENT = Transport(timeout_seconds=20.0)


def begun(channel: Channel) -> sw.Engine:
    return engine_on(channel, plan_of(f"dp_shard={channel.size}", compute="bfloat16"), adamw)


def train(engine: sw.Engine, step: int) -> None:
    engine.step(rows(10 * step + engine.channel.rank))


def state_of(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sw.full(engine)}


def uninterrupted(channel: Channel) -> dict[str, torch.Tensor]:
    engine = begun(channel)
    for step in range(3):
        train(engine, step)
    return state_of(engine)


@contextlib.contextmanager
def on_host(name: str) -> Iterator[pytest.MonkeyPatch]:
    """Which host a rank is on, nobody can say but the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_host", lambda: OwnHost(name, "", ()))
        yield patch


def killed(channel: Channel, path: str) -> None:
    """Train with replicas until host A is lost in the copy of step 4: its keeper first, and then its ranks."""
    host = HOSTS[channel.rank]

    class Dying(keeper_store.KeeperWriter):
        def write(self, data: memoryview) -> None:
            super().write(data[: len(data) // 2])
            Kept(path, [host]).kill()
            os.kill(os.getpid(), signal.SIGKILL)

    # What a program does: the error that ends it leaves the context of its replicas, with a copy under way.
    with on_host(host) as patch, contextlib.suppress(PeerError):
        engine = begun(channel)
        with sw.Replicas(path, every=2, channel=channel, keep_seconds=120.0) as copies:
            assert copies.newest() is None
            for step in range(8):
                train(engine, step)
                if step == 4:
                    copies.wait()  # else it could be the copy before that it dies in
                    if host == "A":
                        patch.setattr(keeper_store, "KeeperWriter", Dying)
                copies.save(engine, extra={"step": step})
        pytest.fail("training went on without host A")


def started_again(channel: Channel, path: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The step of the save from which it goes on, and its state."""
    with on_host("B"):
        engine = begun(channel)
        with sw.Replicas(path, every=2, channel=channel) as copies:
            newest = copies.newest()
            assert newest is not None
            return sw.load(newest, engine)["step"], state_of(engine)


def test_a_program_goes_on_from_memory_after_a_host_was_killed_in_a_copy(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "saves")
    pool.run(3, killed, path, transport=IMPATIENT, lost=[0, 1])
    ((step, state),) = pool.run(1, started_again, path, transport=IMPATIENT)
    assert step == 2
    assert same(state, sw.simulate(3, uninterrupted)[0])
    assert not Path(path).exists()
    assert Kept(path, ["B"]).have_ended()
