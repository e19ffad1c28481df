"""What the control plane costs: exchanges of small values, and what the start of many ranks asks of the store.

    python -m benchmarks.control [--ranks 4096] [--starts 1024] [--write]

Exchanges: one rank of a large world is real, on hosts of 8. Its neighbours in the tree are stubs in another process,
which give what is below them, or all values, over sockets. The time is the processor time of the real rank.

Steps: the same for what `Engine.step` does around its two exchanges. It packs what this rank says, reads what all ranks
have said, and decides. Seconds and losses are drawn, and differ on all ranks.

Starts: each rank is a thread with its own connection to one store of torch.distributed on 127.0.0.1. It takes part in
what `connect` does at the store, and opens no socket to another rank. The time is from the first request of any rank to
the last one, with all threads on one interpreter. Rank 0 alone reads the tables that it makes: each rank of a world
does so on its own processor.
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.markdown import Row, markdown
from shardwise.comm.agreement import agreed
from shardwise.comm.channel import Channel, Signature, alone
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.connections import HostRecord, compared_records, packed_record
from shardwise.comm.process.joined_values import JoinedValues, joined
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.messages import fits_in_frame
from shardwise.comm.process.rendezvous import Rendezvous
from shardwise.comm.process.tree import place_in_tree, relay_neighbours
from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.forward.passes import Joint
from shardwise.engine.step.channels import EngineChannels, RankGroups
from shardwise.engine.step.exchange import (
    NUM_PARTS_OF_OPENING,
    StepFacts,
    StepFlags,
    batch_compared,
    exchange_step,
    merge_weights,
    parts_of_opening,
)
from shardwise.engine.step.figures import Divisors, FigureMaking, RankFigures
from shardwise.engine.step.loss_entries import LossEntries
from shardwise.engine.step.reports import RankTimes
from shardwise.engine.telemetry import packed
from shardwise.plan import Merge, Plan
from shardwise.space import Mesh

RESULTS = Path(__file__).parent / "results" / "control.md"
PATIENCE_SECONDS = 120.0
RANKS_OF_A_HOST = 8
WARM_UPS = 3
TURNS = 150
OPENING, CLOSING = "weights of a step", "losses and norms"
MICROBATCHES = 4
PARAMETERS = 288
"""Of a model of 24 blocks."""


def num_below(rank: int, members: Sequence[int], kernels: Sequence[int]) -> int:
    """How many ranks give their values through this one, with its own."""
    return 1 + sum(num_below(child, members, kernels) for child in place_in_tree(rank, members, kernels).children)


Values = Callable[[int], Sequence[bytes]]
"""The parts that a rank gives in an exchange."""


def milliseconds(
    size: int, rank: int, exchanges: Mapping[str, Values], act: Callable[[ProcessChannel], None]
) -> tuple[float, float, int]:
    """Least and median processor time of `act` on one rank, and the number of its sockets, with those of its relay.

    exchanges: what all ranks give in each of the exchanges of `act`, by its purpose.
    """
    kernels = [each // RANKS_OF_A_HOST for each in range(size)]
    members = tuple(range(size))
    place = place_in_tree(rank, members, kernels)
    stubs: list[Stub] = []
    ours: dict[int, socket.socket] = {}
    for peer in place.neighbours:
        ours[peer], theirs = socket.socketpair()
        # Ranks are in the order of the tree here.
        begin, count = (0, size) if peer == place.parent else (peer, num_below(peer, members, kernels))
        below = range(begin, begin + count)
        runs = {
            purpose: as_tree([JoinedValues.of_one(parts(each), 0, each) for each in below])
            for purpose, parts in exchanges.items()
        }
        stubs.append(Stub(rank=peer, connection=theirs, runs=runs, is_parent=peer == place.parent))
    # Another process, as in a world: on threads of this one, stubs would take turns with the rank that is measured.
    playing = multiprocessing.get_context("fork").Process(target=play, args=(stubs, rank, kernels, [*ours.values()]))
    playing.start()
    for stub in stubs:
        stub.connection.close()
    links = {peer: PeerLink(end, rank=peer, local=kernels[peer] == kernels[rank]) for peer, end in ours.items()}
    board = Switchboard(rank, links, timeout_seconds=PATIENCE_SECONDS, kernels=kernels)
    channel = ProcessChannel(board, members, owns_board=True)
    gc.collect()
    gc.freeze()  # what stubs give is in no rank, whose collector would not walk through it
    taken = []
    for _ in range(WARM_UPS + TURNS):
        began = time.thread_time()
        act(channel)
        taken.append(time.thread_time() - began)
    board.close()  # neighbours wait until this rank has read their goodbyes
    playing.join(PATIENCE_SECONDS)
    assert playing.exitcode == 0, "a neighbour has failed"
    return (
        min(taken[WARM_UPS:]) * 1e3,
        statistics.median(taken[WARM_UPS:]) * 1e3,
        len(links) + len(relay_neighbours(rank, kernels)),
    )


def as_tree(runs: Sequence[JoinedValues]) -> bytearray:
    """Joined as ranks join them: few at a time."""
    half, last = len(runs) // 2, runs[-1].last
    if half:
        halves = (as_tree(runs[:half]), as_tree(runs[half:]))
        runs = [JoinedValues.parsed(each, len(runs), len(runs[0].parts)) for each in halves]
    return joined(runs, last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stub:
    """A neighbour of the real rank."""

    rank: int
    connection: socket.socket
    runs: Mapping[str, bytearray]
    """What it gives in each exchange, by its purpose."""
    is_parent: bool

    def play(self, peer: int, kernels: Sequence[int]) -> None:
        """Its side of all turns with the real rank `peer`."""
        link = PeerLink(self.connection, rank=peer, local=kernels[self.rank] == kernels[peer])
        board = Switchboard(self.rank, {peer: link}, timeout_seconds=PATIENCE_SECONDS, kernels=kernels)
        exchange = ProcessChannel(board, tuple(range(len(kernels))))._values
        with board.lock:
            for _ in range(WARM_UPS + TURNS):
                for purpose, run in self.runs.items():
                    signature = Signature(operation="exchange", purpose=purpose)
                    if self.is_parent:
                        exchange.trade(signature, bytearray(), (), [peer])
                        exchange.trade(signature, run, [peer], ())
                    else:
                        exchange.trade(signature, run, [peer], [peer])
        board.close()  # once all is written: the last values may still wait for room in the socket


def play(stubs: Sequence[Stub], peer: int, kernels: Sequence[int], others: Sequence[socket.socket]) -> None:
    """All neighbours of the real rank `peer`; others: its ends of their connections."""
    for end in others:
        end.close()
    threads = [threading.Thread(target=stub.play, args=(peer, kernels)) for stub in stubs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def milliseconds_of_exchanges(size: int, rank: int, num_bytes: int) -> tuple[float, float, int]:
    """Of two exchanges of one value each, which differs on all ranks."""

    def value(rank: int) -> bytes:
        return rank.to_bytes(num_bytes, "little")

    def exchange(channel: ProcessChannel) -> None:
        for purpose in (OPENING, CLOSING):
            assert len(channel.exchange(value(rank), purpose=purpose)) == size

    return milliseconds(size, rank, dict.fromkeys((OPENING, CLOSING), lambda each: [value(each)]), exchange)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKind:
    """What ranks say of their steps."""

    name: str
    pp: int = 1
    tp: int = 1
    counts_tokens: bool = False


KINDS = [
    StepKind(name="data ranks, stages 0 to 3"),
    StepKind(name="weighted by tokens", counts_tokens=True),
    StepKind(name="pp = 4", pp=4),
    StepKind(name="tp = 2, by tokens", tp=2, counts_tokens=True),
]


class StepSaid:
    """What each rank of a mesh says in a step."""

    def __init__(self, kind: StepKind, size: int) -> None:
        self._kind, self._size = kind, size
        plan = Plan(
            mesh=Mesh(pp=kind.pp, dp_shard=size // kind.pp // kind.tp, tp=kind.tp),
            merge=Merge(microbatches=MICROBATCHES),
        )
        self.ranks = RankGroups.of(plan)

    def opening(self, rank: int) -> dict[str, Any]:
        """For `parts_of_opening`."""
        chance = random.Random(self.ranks.data_ranks[rank])
        weights = [float(chance.randrange(1, 4096)) if self._kind.counts_tokens else 8.0 for _ in range(MICROBATCHES)]
        lines = [f"'input' [32, 2048] int64 with digest {chance.getrandbits(64):016x}"]
        batch = batch_compared(lines, is_whole=True) if self._kind.pp * self._kind.tp > 1 else b""
        return {"weights": weights, "batch": batch, "facts": StepFacts(autocast="no autocast")}

    def closing(self, rank: int) -> dict[str, Any]:
        """For `exchange_step`."""
        chance = random.Random(rank)
        stage, per_stage = self.ranks.stages[rank], PARAMETERS // self._kind.pp
        return {
            # Ranks along tp have one loss.
            "figures": [bytes(8), b"", struct.pack("<dd", 1 / (3 + self.ranks.data_ranks[rank]), chance.random())],
            "times": self._times(rank, chance),
            "mine": StepFlags(
                touched=[at // per_stage == stage for at in range(PARAMETERS)],
                changed_buffers=[],
                written=[False] * PARAMETERS,
            ),
        }

    def _times(self, rank: int, chance: random.Random) -> list[bytes]:
        waited = {chance.randrange(self._size): chance.random() for _ in range(8)}
        amount = 1 << 30 if rank % 64 else 1 << 29
        times = RankTimes(
            rank=rank,
            compute_s=chance.random(),
            waiting_s=sum(waited.values()),
            waited_for=waited,
            outside_s=chance.random(),
            sent_bytes=amount,
            received_bytes=amount,
            peak_bytes=chance.getrandbits(36),
            late_steps=0,
        )
        return packed(times, num_ranks=self._size)


class Listening:
    """A channel that keeps what `exchange_step` gives it."""

    def exchange_parts(self, parts: Sequence[bytes], *, purpose: str) -> list[RankValues]:
        """Of this rank alone."""
        self.parts = parts
        return [RankValues.of([part]) for part in parts]


def milliseconds_of_a_step(said: StepSaid, size: int, rank: int) -> tuple[float, float, int]:
    """Of all that a step does around its two exchanges, and the bytes that a rank gives in both."""
    opens, closes = said.opening(rank), said.closing(rank)
    data_rank, losses = said.ranks.data_ranks[rank], [MicrobatchLoss(torch.zeros(()), {})] * MICROBATCHES
    one, some = alone(), cast("Channel", SimpleNamespace(size=2))
    channels = EngineChannels(
        world=one, pipeline=one, everyone=some, owners=some, replicas=one, tensor=one, ranks=said.ranks
    )
    figures = FigureMaking(channels, (torch.float32,) * PARAMETERS)

    def step(channel: Channel) -> None:
        with agreed(channel, purpose=OPENING, num_parts=NUM_PARTS_OF_OPENING) as agreement:
            agreement.parts = parts_of_opening(**opens)
        weighting, _, _ = merge_weights(channel, agreement.of_parts, [], same_count=True, ranks=said.ranks)
        assert weighting.joint == [Joint.ALL] * MICROBATCHES
        assert len(weighting.factors(data_rank)) == MICROBATCHES
        closing = exchange_step(channel, **closes)
        # What a rank says of its gradients is in `closes`; here they are not.
        own = RankFigures(
            losses=LossEntries(losses, weighting, data_rank),
            weights=None,
            digests={},
            parts=[],
            divisors=Divisors(weighting.num_microbatches, None),
            runs=[],
            norms=None,
            used={},
        )
        made = figures.made(own, closing.figures)
        assert made.is_finite
        assert not closing.flags.stop

    def closing_parts(rank: int) -> Sequence[bytes]:
        listening = Listening()
        exchange_step(listening, **said.closing(rank))  # type: ignore[arg-type]
        return listening.parts

    exchanges: dict[str, Values] = {
        OPENING: lambda each: [b"+", *parts_of_opening(**said.opening(each))],
        CLOSING: lru_cache(maxsize=None)(closing_parts),
    }
    least, median, _ = milliseconds(size, rank, exchanges, step)
    return least, median, sum(len(part) for parts in exchanges.values() for part in parts(rank))


def gather(meeting: Rendezvous, key: str, value: str) -> list[str]:
    """What `Rendezvous.gather` asks of the store. Only rank 0 reads what is in the table.

    All ranks read it at the same time in a world; here one interpreter would do it for all, one after the other.
    """
    if meeting.rank == 0:
        return meeting.gather(key, value)
    meeting.publish(key, value)
    meeting._read(f"{key}/all", key, 0)
    return []


def start(meeting: Rendezvous) -> None:
    """The rounds of `connections.connect`."""
    if meeting.rank == 0:
        meeting.publish("token", "t" * 32)
    meeting.read("token", 0)
    host = meeting.rank // RANKS_OF_A_HOST
    address = f"10.0.{host >> 8}.{host & 255}"
    kernel = f"{host:036} net:[4026531840]"
    record = HostRecord(kernel=kernel, name=f"node-{host}", way=address, store=[], has_secret=False)
    records = compared_records(gather(meeting, "host", packed_record(record)) or [packed_record(record)], 0)
    assert len(records) == (1 if meeting.rank else meeting.size)
    gather(meeting, "verdict", "")
    gather(meeting, "address", json.dumps([[address], 40_000 + meeting.rank]))
    meeting.publish("connected", "")
    if meeting.rank == 0:
        meeting.read_all("connected")


def seconds_of_a_start(size: int) -> float:
    """From the first request of any rank to the last one. Once per process: the store of torch keeps threads."""
    patience = timedelta(seconds=PATIENCE_SECONDS)
    server = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, None, False, patience, wait_for_workers=False) for _ in range(size)]
    ready = threading.Barrier(size + 1)

    def live(rank: int) -> None:
        meeting = Rendezvous(
            rank=rank,
            size=size,
            device=torch.device("cpu"),
            store=PrefixStore("channel", clients[rank]),
            store_host="127.0.0.1",
            patience_seconds=PATIENCE_SECONDS,
        )
        ready.wait()
        start(meeting)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def growing(largest: int) -> list[int]:
    """Sizes of worlds up to the largest."""
    return [size for size in (16, 64, 256, 1024, 4096) if size < largest] + [largest]


def main() -> None:
    """Time worlds of growing size, and print or write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--starts", type=int, default=1024)
    parser.add_argument("--one-start", type=int, help="time a start of so many ranks, and print the seconds alone")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.one_start is not None:
        print(seconds_of_a_start(given.one_start), flush=True)
        os._exit(0)  # the clients of the store take long to end
    torch.set_num_threads(1)  # as a rank has few cores
    rows: list[Row] = []
    for size in growing(given.ranks):
        # The root of all, the first of the host in the middle, and a rank without any below it.
        for rank in (0, size // 2, size - 1):
            for num_bytes in (20, 200):
                if not fits_in_frame(size * num_bytes, local=False):
                    continue  # gloo would carry it, which stubs have not
                least, median, num_sockets = milliseconds_of_exchanges(size, rank, num_bytes)
                rows.append((*map(str, (size, rank, num_bytes, num_sockets)), f"{least:.2f}", f"{median:.2f}"))
    header = ("ranks", "rank", "bytes of a value", "sockets", "2 exchanges, least ms", "median ms")
    exchanges = markdown(header, rows)
    rows = []
    for size in growing(given.ranks):
        for kind in KINDS:
            said = StepSaid(kind, size)
            for rank in (0, size // 2, size - 1):
                least, median, num_bytes = milliseconds_of_a_step(said, size, rank)
                rows.append((kind.name, *map(str, (size, rank, num_bytes)), f"{least:.2f}", f"{median:.2f}"))
    steps = markdown(("steps", "ranks", "rank", "bytes of a rank", "exchanges of a step, least ms", "median ms"), rows)
    rows = []
    for size in growing(given.starts):
        command = [sys.executable, "-m", "benchmarks.control", "--one-start", str(size)]
        # The store looks up the name of each client, and waits for a server of names that does not answer.
        environment = os.environ | {"RES_OPTIONS": "timeout:1 attempts:1"}
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=600,
            env=environment,
        )
        seconds = float(done.stdout)
        rows.append((str(size), f"{seconds:.2f}"))
    tables = f"{exchanges}\n\n{steps}\n\n{markdown(('ranks', 'store time of a start, s'), rows)}"
    print(tables)
    if given.write:
        intro = (
            f"Made by `python -m benchmarks.control` on {date.today()}, torch {torch.__version__}, on two cores that\n"
            f"other programs shared (load average {os.getloadavg()[1]:.0f}), which makes all times longer. Asked:\n"
            "2 ms for 2 exchanges at 4,096 ranks, 10 s of store time at 1,024 ranks.\n\n"
            "An exchange is the processor time of one real rank, with stubs for its neighbours in the tree. Its\n"
            "sockets are those to these neighbours, and those to the neighbours of its relay, which a channel makes\n"
            "when it starts and which are silent while all is well.\n\n"
            "Values that together do not fit into a frame are left out: gloo carries them, and stubs have none.\n\n"
            f"The exchanges of a step are those of k = {MICROBATCHES} microbatches of a model of "
            f"{PARAMETERS} parameters,\n"
            "with all that `Engine.step` does around them: to pack, to read what all ranks say, and to decide.\n\n"
            "The store serves stub ranks, each a thread with its own connection, that make the requests of a start.\n"
            "Rank 0 alone takes the tables of all ranks apart."
        )
        RESULTS.write_text(f"# Control plane\n\n{intro}\n\n{tables}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
