"""Processes killed while they write to a service of S3: the newest save is whole, and no part is read as a whole."""

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, ObjectStore, convert
from shardwise.checkpoint.saves import list_saves
from shardwise.comm import Channel, alone
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Mode, really_dying
from tests.contracts.s3_service import BUCKET, S3Service, enter
from tests.forks.calls import exit_code_of
from tests.processes.pool import SHARED_MEMORY, Pool

NUM_ELEMENTS = 5 << 19
"""In float32 10 MiB: an upload of two parts."""

EACH = pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])
"""Every operation is the last one of a process; else each so many-th."""


@pytest.fixture(scope="module")
def running() -> Iterator[S3Service]:
    service = S3Service()
    yield service
    service.close()


@pytest.fixture
def service(running: S3Service, monkeypatch: pytest.MonkeyPatch) -> S3Service:
    for name, value in running.variables.items():
        monkeypatch.setenv(name, value)
    running.forget()
    return running


def state(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUM_ELEMENTS,), float(seed)), "b": torch.full((3,), float(seed))}


def _save(_: Connection, variables: dict[str, str], address: str, seed: int, n: int, mode: Mode, later: bool) -> None:
    """A save that is killed at its n-th operation."""
    enter(variables)
    store = really_dying(ObjectStore(address), n, mode=mode)
    if later:
        with AsyncSaver(store, channel=alone(), keep=2) as saver:
            saver.save(state(seed), extra={"seed": seed})
    else:
        sw.save(store, state(seed), extra={"seed": seed}, channel=alone(), keep=2)


def _convert(_: Connection, variables: dict[str, str], source: str, address: str, n: int, mode: Mode, to: str) -> None:
    enter(variables)
    convert(source, really_dying(ObjectStore(address), n, mode=mode), to=to, max_shard_bytes=8 << 20)  # type: ignore[arg-type]


def check(address: str, oldest: int) -> int:
    """The newest save is whole; its seed."""
    found = checkpoint.open(address)
    seed = int(found.extra["seed"])
    assert seed >= oldest
    target = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    sw.load(address, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state(seed).items())
    assert checkpoint.verify(address).good
    return seed


@pytest.mark.parametrize("step", [9, EACH])
@pytest.mark.parametrize("later", [False, True])
def test_sigkill_at_any_operation_of_a_save_leaves_the_old_or_the_new_one(
    later: bool, step: int, service: S3Service
) -> None:
    address = f"s3://{BUCKET}/{'later' if later else 'once'}-{step}"
    sw.save(address, state(1), extra={"seed": 1})
    newest = 1
    codes = []
    for n in range(2, 100, step):
        mode: Mode = ("before", "half", "after")[n // step % 3]
        codes.append(exit_code_of(_save, service.variables, address, n, n, mode, later))
        newest = check(address, newest)
        if codes[-1] == 0:
            break
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 2
    store = ObjectStore(address)
    assert list_saves(store).torn == (), "the save that came through has removed what the others left"
    assert len(list_saves(store).committed) <= 2


@pytest.mark.parametrize("step", [5, EACH])
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_sigkill_at_any_operation_of_a_conversion_leaves_no_checkpoint_or_a_whole_one(
    to: str, step: int, service: S3Service
) -> None:
    source = f"s3://{BUCKET}/source"
    if next(ObjectStore(source).names(), None) is None:
        sw.save(source, state(7))
    codes = []
    for n in range(2, 100, step):
        address = f"s3://{BUCKET}/{to}-{step}/{n}"
        mode: Mode = ("before", "half", "after")[n // step % 3]
        codes.append(exit_code_of(_convert, service.variables, source, address, n, mode, to))
        try:
            found = checkpoint.open(address)
        except CheckpointError:
            assert codes[-1] != 0
            continue
        assert all(torch.equal(found.read(name), tensor) for name, tensor in state(7).items())
        if codes[-1] == 0:
            break
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 2


def save_until_killed(channel: Channel, variables: dict[str, str], address: str, how: Literal["sync", "async"]) -> None:
    """Saves by two ranks; rank 1 is killed while the third is under way."""
    enter(variables)
    saver = AsyncSaver(address, channel=channel, timeout_seconds=30)
    for seed in range(1, 100):
        whole = state(seed)["w"].view(2, -1)
        piece = sw.Piece(
            name="w",
            dtype="float32",
            global_shape=tuple(whole.shape),
            offset=(channel.rank, 0),
            shape=(1, whole.shape[1]),
        )
        mine = {piece: whole[channel.rank : channel.rank + 1]}
        if how == "sync":
            if seed == 3 and channel.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            sw.save(address, mine, extra={"seed": seed}, channel=channel)
        else:
            saver.save(mine, extra={"seed": seed})
            if seed == 3 and channel.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            saver.wait()


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_rank_that_is_killed_leaves_the_save_before(how: str, service: S3Service, pool: Pool) -> None:
    address = f"s3://{BUCKET}/ranks-{how}"
    pool.run(2, _until_killed, service.variables, address, how, transport=SHARED_MEMORY, lost=[1])
    assert checkpoint.open(address).extra["seed"] == 2
    assert checkpoint.verify(address).good
    sw.save(address, state(9), extra={"seed": 9})
    assert list_saves(ObjectStore(address)).torn == ()


def _until_killed(channel: Channel, variables: dict[str, str], address: str, how: Literal["sync", "async"]) -> None:
    with pytest.raises(sw.errors.PeerError):
        save_until_killed(channel, variables, address, how)
