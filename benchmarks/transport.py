"""The channel between hosts against gloo alone: 2 hosts of 2 ranks, on links of 1 and 10 Gbit/s and without a limit.

    python -m benchmarks.transport [--write] [--rounds 9] [--links 1000,10000,0]

The hosts are network namespaces (`benchmarks.hosts`), and `tc` shapes what each of them sends. All sides are warm and
take turns in every round; a time is that of the slowest rank. The sides:

    ours            the channel: shared memory within a host, gloo between hosts (up to 512 KiB our connections)
    gloo            everything over gloo, of 1 device and 2 threads (its defaults) and of 2 devices and 4 threads
    gloo between    shared memory within a host, and calls of gloo for what goes to another host

A reduce-scatter over gloo is an all-to-all and a sum in rank order. The operations, in bytes of the tensor named::

    all-gather       the output        every rank gives a quarter of it
    reduce-scatter   the input         every rank gets the sum of a quarter of it
    message          the tensor        from both ranks of a host to those of the other one, which send it back
    broadcast        the value         rank 0's, to all (ours: `exchange`)
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from benchmarks.hosts import INTERFACE, Host, Hosts, hosts, why_not
from benchmarks.markdown import markdown
from shardwise.comm import Channel, processes
from shardwise.comm.channel import sum_in_order

RESULTS = Path(__file__).parent / "results" / "transport.md"
RANKS_PER_HOST = 2
SIZE = 2 * RANKS_PER_HOST
OURS = "ours"
LIMIT = 1.05
"""What the channel adds to gloo (comparisons, rank order, words for what broke) may take so much more."""

CALLS = {4 << 10: 20, 256 << 10: 10, 4 << 20: 3, 64 << 20: 1}
"""Bytes of a tensor, to the calls that are timed together."""
BROADCAST_BYTES = (4 << 10, 256 << 10)

Call = Callable[[], object]


class Side(Protocol):
    """One way to carry tensors."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Every rank's input, in rank order."""

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """This rank's part of the sum."""

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """One tensor to one rank."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """One tensor from one rank."""

    def broadcast(self, value: bytearray) -> None:
        """Rank 0's bytes to all."""


class Ours:
    """A channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        self._channel.all_gather(output, input, purpose="benchmark").wait()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        self._channel.reduce_scatter(output, input, purpose="benchmark").wait()

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """See `Side`."""
        self._channel.send(tensor, destination, purpose="benchmark").wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See `Side`."""
        self._channel.receive(tensor, source, purpose="benchmark").wait()

    def broadcast(self, value: bytearray) -> None:
        """See `Side`."""
        given = bytes(value) if self._channel.rank == 0 else b""
        value[:] = self._channel.exchange(given, purpose="benchmark")[0]


class Gloo:
    """A process group of gloo, with more than one device for its threads to listen at."""

    def __init__(self, store: Store, rank: int, *, num_devices: int) -> None:
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=300)
        options._devices = [group.create_device(interface=INTERFACE) for _ in range(num_devices)]
        options._threads = 2 * num_devices
        self._group = group(store, rank, SIZE, options)
        self._arrived: dict[int, torch.Tensor] = {}

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        self._group._allgather_base(output, input).wait()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        arrived = self.memory_for(input)
        self._group.alltoall_base(arrived, input, [], []).wait()
        sum_in_order(output, arrived.chunk(SIZE))

    def memory_for(self, input: torch.Tensor) -> torch.Tensor:
        """Where the parts of all ranks arrive before they are added; kept, as an engine would."""
        if len(input) not in self._arrived:
            self._arrived[len(input)] = torch.empty_like(input)
        return self._arrived[len(input)]

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """See `Side`."""
        self._group.send([tensor], destination, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See `Side`."""
        self._group.recv([tensor], source, 0).wait()

    def broadcast(self, value: bytearray) -> None:
        """See `Side`."""
        self._group.broadcast([torch.frombuffer(value, dtype=torch.uint8)]).wait()

    def begin(self, pairs: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> list[dist.Work]:
        """With each rank, the tensor for it and the place for its own."""
        works = [self._group.recv([place], rank, 0) for rank, _, place in pairs]
        return works + [self._group.send([tensor], rank, 0) for rank, tensor, _ in pairs]


class GlooBetween:
    """Shared memory within the host, and gloo for the pairs of ranks of two hosts."""

    def __init__(self, gloo: Gloo, channel: Channel) -> None:
        self._gloo = gloo
        self._rank = channel.rank
        first = channel.rank // RANKS_PER_HOST * RANKS_PER_HOST
        self._near = range(first, first + RANKS_PER_HOST)
        self._far = [rank for rank in range(SIZE) if rank not in self._near]
        self._within = channel.over(self._near)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        parts = output.chunk(SIZE)
        works = self._gloo.begin([(rank, input, parts[rank]) for rank in self._far])
        near = output[self._near[0] * len(input) : (self._near[-1] + 1) * len(input)]
        self._within.all_gather(near, input, purpose="benchmark").wait()
        for work in works:
            work.wait()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """See `Side`."""
        parts = input.chunk(SIZE)
        terms = list(self._gloo.memory_for(input).chunk(SIZE))
        terms[self._rank] = parts[self._rank]
        works = self._gloo.begin([(rank, parts[rank], terms[rank]) for rank in self._far])
        others = [rank for rank in self._near if rank != self._rank]
        for rank in others:
            self._within.send(parts[rank], rank - self._near[0], purpose="benchmark").wait()
        for rank in others:
            self._within.receive(terms[rank], rank - self._near[0], purpose="benchmark").wait()
        for work in works:
            work.wait()
        sum_in_order(output, terms)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """See `Side`."""
        self._gloo.send(tensor, destination)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See `Side`."""
        self._gloo.receive(tensor, source)

    def broadcast(self, value: bytearray) -> None:
        """See `Side`."""
        self._gloo.broadcast(value)


def calls(side: Side, rank: int) -> dict[tuple[str, int], Call]:
    """What is timed of a side, by operation and bytes; each has been called once, with the right result."""
    found: dict[tuple[str, int], Call] = {}
    for num_bytes in CALLS:
        elements = num_bytes // 4
        whole, part = torch.full((elements,), rank + 1.0), torch.empty(elements // SIZE)
        side.reduce_scatter(part, whole)
        assert torch.equal(part, torch.full_like(part, float(sum(range(1, SIZE + 1)))))
        found["reduce-scatter", num_bytes] = partial(side.reduce_scatter, part, whole)

        own, output = torch.full((elements // SIZE,), rank + 1.0), torch.empty(elements)
        side.all_gather(output, own)
        assert output.chunk(SIZE)[-1][-1] == SIZE
        found["all-gather", num_bytes] = partial(side.all_gather, output, own)

        message = torch.full((elements,), float(rank % RANKS_PER_HOST))
        found["message", num_bytes] = partial(there_and_back, side, message, rank)
        found["message", num_bytes]()
        assert message[-1] == rank % RANKS_PER_HOST
    for num_bytes in BROADCAST_BYTES:
        value = bytearray([rank + 1]) * num_bytes
        side.broadcast(value)
        assert value == bytearray([1]) * num_bytes
        found["broadcast", num_bytes] = partial(side.broadcast, value)
    return found


def there_and_back(side: Side, tensor: torch.Tensor, rank: int) -> None:
    """Between the two ranks that have the same number on their hosts."""
    peer = (rank + RANKS_PER_HOST) % SIZE
    if rank < peer:
        side.send(tensor, peer)
        side.receive(tensor, peer)
    else:
        side.receive(tensor, peer)
        side.send(tensor, peer)


def measure_rank(num_rounds: int) -> None:
    """Time every side, in a process that is one rank; rank 0 prints what all have found."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    channel = processes(timeout_seconds=120.0)
    sides: dict[str, Side] = {OURS: Ours(channel)}
    for num_devices in (1, 2):
        gloo = Gloo(PrefixStore(f"gloo {num_devices}", store), rank, num_devices=num_devices)
        sides["gloo" if num_devices == 1 else f"gloo, {num_devices} devices"] = gloo
        if num_devices == 1:
            sides["gloo between"] = GlooBetween(gloo, channel)
    timed = {name: calls(side, rank) for name, side in sides.items()}
    seconds: dict[str, list[tuple[float, float]]] = {}
    names = list(timed)
    for number in range(num_rounds):
        # Each side comes first now and then: what one leaves behind slows the next one.
        turns = names[number % len(names) :] + names[: number % len(names)]
        for operation, num_bytes in timed[OURS]:
            for name in turns:
                channel.exchange(b"", purpose="all are here")
                begun, begun_processor = time.perf_counter(), time.process_time()
                for _ in range(CALLS[num_bytes]):
                    timed[name][operation, num_bytes]()
                taken = (time.perf_counter() - begun, time.process_time() - begun_processor)
                each = (taken[0] / CALLS[num_bytes], taken[1] / CALLS[num_bytes])
                seconds.setdefault(json.dumps([operation, num_bytes, name]), []).append(each)
    everybody = channel.exchange(json.dumps(seconds).encode(), purpose="times")
    if rank == 0:
        print(json.dumps([json.loads(each) for each in everybody]))
    channel.close()
    # Without taking gloo down: it would wait for ranks that have left.
    sys.stdout.flush()
    os._exit(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One operation on tensors of one size over one link: milliseconds per side and round."""

    megabits: int
    operation: str
    num_bytes: int
    elapsed: Mapping[str, Sequence[float]]
    """Of the slowest rank."""
    processor: Mapping[str, Sequence[float]]
    """Of all ranks together."""

    def ratio(self, side: str) -> float:
        """How many times as long as ours it takes: the median over the rounds."""
        pairs = zip(self.elapsed[side], self.elapsed[OURS], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def cost(self) -> float:
        """How many times as long ours takes as the quickest side on gloo."""
        return 1 / self.ratio(self.best)

    @property
    def best(self) -> str:
        """The quickest of the sides on gloo."""
        return min((side for side in self.elapsed if side != OURS), key=self.ratio)


def measure(megabits: int, num_rounds: int) -> list[Cell]:
    """Every cell of one link; 0 megabits: without a limit."""
    with hosts(2) as made:
        made.shape(megabits or None)
        of_ranks = json.loads(_run_ranks(made, num_rounds))
    cells: dict[tuple[str, int], Cell] = {}
    for key in of_ranks[0]:
        operation, num_bytes, side = json.loads(key)
        empty = Cell(megabits=megabits, operation=operation, num_bytes=num_bytes, elapsed={}, processor={})
        cell = cells.setdefault((operation, num_bytes), empty)
        rounds = list(zip(*(each[key] for each in of_ranks), strict=True))
        cell.elapsed[side] = [max(elapsed for elapsed, _ in ranks) * 1e3 for ranks in rounds]  # type: ignore[index]
        cell.processor[side] = [sum(used for _, used in ranks) * 1e3 for ranks in rounds]  # type: ignore[index]
    return list(cells.values())


def _run_ranks(made: Hosts, num_rounds: int) -> str:
    """All ranks to their end; what rank 0 has printed."""
    ranks = [_started(made, made[number // RANKS_PER_HOST], number, num_rounds) for number in range(SIZE)]
    try:
        printed, _ = ranks[0].communicate(timeout=1500)
        if codes := [code for code in (rank.wait(timeout=60) for rank in ranks) if code]:
            raise RuntimeError(f"ranks ended with {codes}")
    finally:
        for rank in ranks:
            rank.kill()
    return printed


def _started(made: Hosts, host: Host, rank: int, num_rounds: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "benchmarks.transport", "--rank", "--rounds", str(num_rounds)]
    announced = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank % RANKS_PER_HOST)}
    environment = {**os.environ, **announced, "MASTER_ADDR": made[0].address, "MASTER_PORT": "29500"}
    environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(host.command(*words), env=environment, stdout=subprocess.PIPE, text=True)


def link_of(megabits: int) -> str:
    """In words."""
    return f"{megabits / 1000:g} Gbit/s" if megabits else "no limit"


def size_of(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def table(cells: Sequence[Cell]) -> str:
    """One row per operation, size and link."""
    sides = list(cells[0].elapsed)
    rows = []
    for cell in cells:
        times = [f"{statistics.median(cell.elapsed[side]):.2f}" for side in sides]
        used = [f"{statistics.median(cell.processor[side]):.2f}" for side in (OURS, cell.best)]
        words = (link_of(cell.megabits), cell.operation, size_of(cell.num_bytes))
        rows.append((*words, *times, cell.best, f"{cell.cost:.2f}", *used))
    header = ("link", "operation", "size", *(f"{side}, ms" for side in sides))
    return markdown((*header, "best on gloo", "ours / best", "ours, processor ms", "best, processor ms"), rows)


def summary(cells: Sequence[Cell]) -> str:
    """How many cells of each link and operation are within the limit, and the middle of the ratios."""
    rows = []
    for megabits in dict.fromkeys(cell.megabits for cell in cells):
        for operation in dict.fromkeys(cell.operation for cell in cells):
            ratios = [cell.cost for cell in cells if (cell.megabits, cell.operation) == (megabits, operation)]
            within = sum(ratio <= LIMIT for ratio in ratios)
            middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
            words = (link_of(megabits), operation, f"{within} of {len(ratios)}")
            rows.append((*words, f"{middle:.2f}", f"{least:.2f}", f"{most:.2f}"))
    return markdown(("link", "operation", f"sizes within {LIMIT}", "median ours / best", "least", "most"), rows)


def verdict(cells: Sequence[Cell]) -> str:
    """In how many cells of links with a limit the channel is quick enough."""
    limited = [cell for cell in cells if cell.megabits]
    within = sum(cell.cost <= LIMIT for cell in limited)
    counted = f"{within} of {len(limited)} cells"
    return f"On links with a limit, ours takes at most {LIMIT} times as long as the best side on gloo in {counted}."


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description="The channel against gloo.")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all sides in turns (default 9)")
    parser.add_argument("--links", default="1000,10000,0", help="Mbit/s, comma-separated; 0 is no limit")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/transport.md")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure_rank(arguments.rounds)
    if refused := why_not():
        sys.exit(refused)
    cells = [cell for link in arguments.links.split(",") for cell in measure(int(link), arguments.rounds)]
    text = f"{verdict(cells)}\n\n{summary(cells)}\n\n{table(cells)}"
    print(text)
    if arguments.write:
        RESULTS.write_text(f"{_head()}\n\n{text}\n", encoding="utf-8")


def _head() -> str:
    command = shlex.join(["python", "-m", "benchmarks.transport", *sys.argv[1:]])
    return f"""# Transport between hosts

Made by `{command}` on {date.today().isoformat()}:
torch {torch.__version__}, Python {platform.python_version()}. Two hosts of two ranks, as network namespaces of one
machine of two cores, which other programs shared. `tc` shaped what each host sends. Milliseconds are medians over the
rounds, of the slowest rank; processor milliseconds are those of all four ranks. `best` is the quickest side on gloo.
A message goes there and back, for both pairs of ranks at once."""


if __name__ == "__main__":
    main()
