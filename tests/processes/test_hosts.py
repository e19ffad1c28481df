"""Ranks on hosts of their own: what is said when a cable is pulled or a host is lost, and what goes on all the same.

Hosts are network namespaces on a switch. Ranks find each other through the variables of the launchers.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from benchmarks.hosts import Host, Hosts, hosts, why_not
from shardwise.comm import Channel, processes
from shardwise.errors import PeerError
from tests.engine.loops import plan_of
from tests.engine.tower import engine_on
from tests.forks.calls import Call
from tests.oracle.program import adamw

PATIENCE_SECONDS = 100.0
"""For what must come; far above what it takes."""

LIMIT_SECONDS = 4.0
"""Of a channel without progress."""

Environment = Callable[[int, int, int, Sequence[Host]], dict[str, str]]
"""What a launcher sets, from the rank, the size, the number of ranks of a host, and the hosts."""


def by_torchrun(rank: int, size: int, per_host: int, among: Sequence[Host]) -> dict[str, str]:
    """MASTER_ADDR is the address of the first host."""
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_host, "MASTER_PORT": 29500}
    return {**{name: str(value) for name, value in found.items()}, "MASTER_ADDR": among[0].address}


def by_srun(rank: int, size: int, per_host: int, among: Sequence[Host]) -> dict[str, str]:
    """The list of hosts, and no address of rank 0."""
    found = {"SLURM_JOB_ID": 71, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_host}
    names = ",".join(host.name for host in among)
    return {
        **{name: str(value) for name, value in found.items()},
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": names,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A process on one of the hosts, as the test sees it."""

    process: Call
    connection: Connection

    def says(self) -> Any:
        """The next thing that it has to say, which may be an error; an EOFError where it has ended without one."""
        assert self.connection.poll(PATIENCE_SECONDS), "a rank says nothing"
        try:
            return self.connection.recv()
        except EOFError as error:
            return error

    def goes_on(self) -> None:
        """Let it out of `pause`."""
        self.connection.send("go on")


def all_say(ranks: Sequence[Rank]) -> list[Any]:
    """The next thing that each has to say; where some fail, all errors are shown: one is the cause of the others."""
    said = [rank.says() for rank in ranks]
    errors = {at: each for at, each in enumerate(said) if isinstance(each, BaseException)}
    assert not errors, errors
    return said


def pause(connection: Connection) -> None:
    """In a rank: wait until the test has done what it has to do meanwhile."""
    connection.send("paused")
    assert connection.poll(PATIENCE_SECONDS), "the test has ended"
    connection.recv()


def live(end: Connection, host: Host, environment: dict[str, str], limit: float, function: Callable[..., Any]) -> None:
    """The life of a rank; what `function(channel, connection)` returns is the last thing that it says."""
    host.enter()
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        channel = processes(timeout_seconds=limit)
        end.send(function(channel, end))
        channel.close()
    except BaseException as error:
        end.send(error)
        raise


@contextmanager
def ranks_on(
    made: Hosts, per_host: int, function: Callable[..., Any], by: Environment, *, limit: float = LIMIT_SECONDS
) -> Iterator[list[Rank]]:
    """So many ranks on each host, which run `function`."""
    size = per_host * len(made.hosts)
    ranks: list[Rank] = []
    try:
        for rank in range(size):
            environment = by(rank, size, per_host, made.hosts)
            process = Call(live, made[rank // per_host], environment, limit, function)
            ranks.append(Rank(process=process, connection=process.connection))
        yield ranks
    finally:
        for each in ranks:
            each.process.end(patience_seconds=0.0)


_why_not = cache(why_not)


@contextmanager
def allowed(count: int) -> Iterator[Hosts]:
    """So many hosts; skips, with one line for all tests, where the system does not allow them."""
    if refused := _why_not():
        pytest.skip(refused)
    with hosts(count) as made:
        yield made


def add_up(channel: Channel, num_elements: int = 1 << 18) -> torch.Tensor:
    """An all-reduce, whose sum is exact, of parts that gloo carries between hosts."""
    own = torch.full((num_elements * channel.size,), channel.rank + 1.0)
    part, whole = torch.empty(num_elements), torch.empty(num_elements * channel.size)
    channel.reduce_scatter(part, own, purpose="gradients").wait()
    channel.all_gather(whole, part, purpose="weights").wait()
    return whole


def add_up_for_ever(channel: Channel) -> None:
    """Until one raises."""
    while True:
        add_up(channel)


def until_the_end(channel: Channel, connection: Connection) -> tuple[str, int | None]:
    """Calls for ever; what the error says, and whom it names."""
    add_up(channel)
    pause(connection)
    with pytest.raises(PeerError) as caught:
        add_up_for_ever(channel)
    return str(caught.value), caught.value.rank


def listens(channel: Channel, connection: Connection) -> set[str]:
    """The addresses of this host, as the kernel writes them, at which anything listens while gloo carries tensors."""
    add_up(channel)
    tables = [Path("/proc/self/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    found = {line.split()[1].partition(":")[0] for table in tables for line in table if line.split()[3] == "0A"}
    channel.exchange(b"", purpose="all have looked")
    return found


def test_nothing_listens_on_other_interfaces_than_the_one_between_the_hosts() -> None:
    with allowed(2) as made, ranks_on(made, 1, listens, by_torchrun) as ranks:
        for said, host in zip(all_say(ranks), made.hosts, strict=True):
            assert said == {f"{int.from_bytes(socket.inet_aton(host.address), sys.byteorder):08X}"}


def test_a_pulled_cable_is_told_on_both_sides_with_a_rank_of_the_other_one() -> None:
    with allowed(2) as made, ranks_on(made, 2, until_the_end, by_srun) as ranks:
        assert set(all_say(ranks)) == {"paused"}
        made.cut(1)
        for rank in ranks:
            rank.goes_on()
        told = all_say(ranks)
    for here, (text, culprit) in enumerate(told):
        others = (2, 3) if here < 2 else (0, 1)
        assert culprit in others, text
        assert re.match(rf"rank {culprit}\b.* made no progress for {LIMIT_SECONDS:g} s", text)
        assert re.search(rf", while rank {here}\b.* was in ", text)


SLOW_MEGABITS = 16
BYTES_TOO_MANY = 10 << 20
"""More than the slow link carries within the limit, in chunks that take a tenth of it."""


def slowly(channel: Channel, connection: Connection) -> tuple[bool, float]:
    """A message of 10 MiB; whether it came whole, and how long it took."""
    pause(connection)
    sent = torch.arange(BYTES_TOO_MANY // 4, dtype=torch.int32)
    begun = time.monotonic()
    if channel.rank == 0:
        channel.send(sent, 1, purpose="activations").wait()
        arrived = channel.exchange(b"", purpose="whether all came")[1] == b"whole"
    else:
        received = torch.empty_like(sent)
        channel.receive(received, 0, purpose="activations").wait()
        arrived = torch.equal(received, sent)
        channel.exchange(b"whole" if arrived else b"", purpose="whether all came")
    return arrived, time.monotonic() - begun


def test_a_message_may_take_longer_than_the_limit_on_a_slow_link() -> None:
    with allowed(2) as made, ranks_on(made, 1, slowly, by_srun) as ranks:
        assert set(all_say(ranks)) == {"paused"}
        made.shape(SLOW_MEGABITS)
        for rank in ranks:
            rank.goes_on()
        for arrived, taken in all_say(ranks):
            assert arrived
            assert taken > LIMIT_SECONDS


Trained = tuple[list[float], dict[str, Any]]
STEPS_BEFORE, STEPS_AFTER = 2, 3


def train(channel: Channel, meanwhile: Callable[[], None] = lambda: None) -> Trained:
    """Losses of some updates under stage 3, and the parameters behind them."""
    engine = engine_on(channel, plan_of(f"dp_shard={channel.size}", 3), adamw)
    losses = []
    for step in range(STEPS_BEFORE + STEPS_AFTER):
        if step == STEPS_BEFORE:
            meanwhile()
        rows = torch.arange(16.0).view(4, 4) + step + channel.rank
        losses.append(engine.step({"input": rows.sin()}).loss)
    return losses, {name: value.tolist() for name, value in sw.full(engine)}


def train_across(channel: Channel, connection: Connection) -> Trained:
    """Train, and pause in the middle."""
    return train(channel, lambda: pause(connection))


def test_a_cable_that_is_plugged_in_again_in_time_changes_nothing() -> None:
    with allowed(2) as made, ranks_on(made, 2, train_across, by_torchrun, limit=PATIENCE_SECONDS) as ranks:
        assert set(all_say(ranks)) == {"paused"}
        made.cut(0)
        for rank in ranks:
            rank.goes_on()
        # No update ends while the link is cut.
        assert not ranks[0].connection.poll(1.0)
        assert not any(rank.connection.poll() for rank in ranks)
        made.restore(0)
        trained = all_say(ranks)
    assert trained == sw.simulate(4, train)
