"""Ranks and whole hosts that are killed: the program that is started again goes on from memory, with the same bits.

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
from tests.keepers.kept import Kept
from tests.processes.pool import Pool, Transport

STEPS = 8
IMPATIENT = Transport(timeout_seconds=20.0)

Trained = tuple[int, dict[str, torch.Tensor]]
"""The step from which a program began, and the state with which it ended."""


def engine_of(channel: Channel) -> sw.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return sw.parallelize(
        model,
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), precision=sw.Precision(compute="bfloat16")),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=lambda output, batch: (output.float() - batch["y"]).square().mean(),
        channel=channel,
    )


def train(engine: sw.Engine, step: int, rank: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    engine.step({"input": x, "y": x.sum(1, keepdim=True)})


def state_of(engine: sw.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sw.full(engine)}


def uninterrupted(size: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    def run(channel: Channel) -> dict[str, torch.Tensor]:
        engine = engine_of(channel)
        for step in range(steps):
            train(engine, step, channel.rank)
        return state_of(engine)

    state: dict[str, torch.Tensor] = sw.simulate(size, run)[0]
    return state


@contextlib.contextmanager
def on_host(name: str) -> Iterator[pytest.MonkeyPatch]:
    """Which host a rank is on, nobody can say but the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_host", lambda: OwnHost(name, "", ()))
        yield patch


def killed(channel: Channel, path: str, hosts: Sequence[str], victims: Sequence[int], when: str) -> None:
    """Train with replicas until the victims are killed; with "host" their keeper goes first.

    "copy": in the middle of the copy of step 4. Else: in step 5, when that copy is whole.
    """
    is_victim = channel.rank in victims

    def kill() -> None:
        if "host" in when:
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
    ("victims", "when", "again", "begin"),
    [
        ([1], "rank", "AAB", 5),  # the copy of step 4 was whole
        ([0, 1], "host", "CCB", 5),  # rank 0's host, which has the manifest, is lost and replaced
        ([0, 1], "host in a copy", "B", 3),  # the copy of step 4 is torn, that of step 2 is whole; no other host comes
    ],
)
def test_a_program_goes_on_from_memory_after_ranks_or_a_host_were_killed(
    victims: list[int], when: str, again: str, begin: int, pool: Pool, tmp_path: Path
) -> None:
    path = str(tmp_path / "saves")
    kept = Kept(path, ["A", "B", "C"])
    arguments = (path, list("AAB"), victims, when)
    pool.run(3, killed, *arguments, transport=IMPATIENT, lost=victims)
    steps = STEPS if len(again) == 3 else begin
    results = pool.run(len(again), started_again, path, list(again), steps, transport=IMPATIENT)
    expected = uninterrupted(3, steps)
    for began, state in results:
        assert began == begin
        assert same(state, expected)
    assert not Path(path).exists()
    assert Kept(path, again).have_ended()
    kept.kill()  # that of a host which did not come back would wait for it
