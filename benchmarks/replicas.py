"""Copies in memory of hosts: how long a step waits for one, how long it takes, and how long a restore takes.

Ranks of two hosts copy their state; host A is lost with its keeper, and the program is started again on C and B:

    python -m benchmarks.replicas            2 ranks, 256 MiB each; writes benchmarks/results/replicas.md
    python -m benchmarks.replicas 4 16       so many ranks and MiB; prints only

Hosts are names on one machine: bytes between them go through TCP on the loopback interface. The machine is shared, so
the table has the processor time of the ranks too.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import shardwise as sw
from shardwise.checkpoint import replicas
from shardwise.comm import Channel, default_channel
from shardwise.comm.process.own_host import OwnHost
from shardwise.errors import ShardwiseError
from shardwise.launchers.local import launch

RESULT = Path(__file__).parent / "results" / "replicas.md"
COPIES = 5
LIMIT_SECONDS = 5.0
"""Of a restore of 256 MiB per rank."""


class _LostError(Exception):
    pass


def _state(channel: Channel, num_mib: int, value: float) -> dict[sw.Piece, torch.Tensor]:
    """Several tensors, as a model has them."""
    state = {}
    for number in range(8):
        elements = num_mib << 15
        piece = sw.Piece(
            name=f"w{number}",
            dtype="float32",
            global_shape=(channel.size * elements,),
            offset=(channel.rank * elements,),
            shape=(elements,),
        )
        state[piece] = torch.full((elements,), value + number + channel.rank)
    return state


def copy(channel: Channel, path: str, num_mib: int) -> dict[str, float]:
    """Some copies, and then the loss of the first host."""
    measured: dict[str, float] = {}
    waits, copies_take = [], []
    try:
        with sw.Replicas(path, every=1, channel=channel) as copies:
            for number in range(COPIES):
                state = _state(channel, num_mib, float(number))
                channel.exchange(b"", purpose="begin together")
                began, cpu = time.perf_counter(), time.process_time()
                copies.save(state, step=number)
                waits.append(time.perf_counter() - began)
                copies._saver.wait()
                copies_take.append(time.perf_counter() - began)
                measured["processor seconds of a copy"] = time.process_time() - cpu
            source = torch.ones(num_mib << 20, dtype=torch.uint8)
            target = torch.zeros(num_mib << 20, dtype=torch.uint8)
            began = time.perf_counter()
            target.copy_(source)
            measured["one copy of memory"] = time.perf_counter() - began
            measured["keeper, MiB"] = copies.held_bytes[1] / (1 << 20)
            channel.exchange(b"", purpose="all have copied")
            if _host_of(channel.rank, channel.size, "A") == "A":
                os.kill(copies._owned.held()["process"], signal.SIGKILL)
            raise _LostError
    except (_LostError, ConnectionError, ShardwiseError):
        pass
    return measured | {"a step waits": statistics.median(waits[1:]), "a copy takes": statistics.median(copies_take[1:])}


def restore(channel: Channel, path: str, num_mib: int) -> dict[str, float]:
    """The program is started again."""
    target = _state(channel, num_mib, -1.0)
    channel.exchange(b"", purpose="begin together")
    began, cpu = time.perf_counter(), time.process_time()
    with sw.Replicas(path, every=1, channel=channel) as copies:
        newest = copies.newest()
        assert newest is not None
        sw.load(newest, target, channel=channel)
        measured = {
            "a restore takes": time.perf_counter() - began,
            "processor seconds of a restore": time.process_time() - cpu,
        }
        expected = _state(channel, num_mib, float(COPIES - 1))
        assert all(torch.equal(target[piece], expected[piece]) for piece in expected)
    return measured


def _host_of(rank: int, size: int, first: str) -> str:
    return first if rank < size // 2 else "B"


def _rank(path: str, num_mib: int, first: str) -> None:
    channel = default_channel()
    host = _host_of(channel.rank, channel.size, first)
    replicas._host = lambda: OwnHost(host, "", ())
    measured = (copy if first == "A" else restore)(channel, path, num_mib)
    lines = [f"{name}\t{value}\n" for name, value in measured.items()]
    Path(f"{path}.{first}.{channel.rank}").write_text("".join(lines))
    channel.close()


def main(size: int = 2, num_mib: int = 256) -> str:
    """The table of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/saves"
        for first in ("A", "C"):
            code = launch("benchmarks.replicas", ["rank", path, str(num_mib), first], num_processes=size)
            assert code == 0, f"the ranks ended with exit code {code}"
        texts = [(Path(folder) / f"saves.{first}.{rank}").read_text() for first in ("A", "C") for rank in range(size)]
    slowest: dict[str, float] = {}
    for line in "".join(texts).splitlines():
        name, value = line.split("\t")
        slowest[name] = max(slowest.get(name, 0.0), float(value))
    rows = [f"| {name} | {value:.2f} |" for name, value in slowest.items()]
    return "\n".join(
        [
            "# Copies in memory of hosts",
            "",
            f"{size} ranks on 2 hosts, {num_mib} MiB each; then a host is lost, and another one takes its place.",
            "Seconds of the slowest rank, but for the memory of a keeper. Both hosts are one machine of two cores,",
            "which other programs used too.",
            "",
            "| what | |",
            "|---|---|",
            *rows,
            "",
            f"A restore opens the replicas, and loads and verifies all bytes. It may take {LIMIT_SECONDS:g} s.",
            "",
            "Written by `python -m benchmarks.replicas`.",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1:]:
        print(main(*map(int, sys.argv[1:])))
    else:
        RESULT.write_text(main())
        print(RESULT.read_text())
