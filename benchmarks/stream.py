"""Weights from trainers to receivers: `sw.stream` against gathering and broadcasting them, in turns within one run.

    python -m benchmarks.stream [--write] [--rounds 7] [--mib 4,256]

All ranks are processes of this machine. The sides are warm, take turns in every round, and end with the same bits in
the tensors of the receivers; a time is that of the slowest rank. The sides:

    stream                 `sw.stream` with the layouts of the last call: messages, and digests of both ends
    stream, all the same   the same with `delta`, when nothing has changed
    gather and broadcast   what trainers do by hand: the ranks that hold a tensor gather it whole, one of them sends it
                           to every receiver, and that takes its part; on the same channel (shared memory)
    the same over gloo     the same with all_gather and broadcast of torch.distributed

`first call` is a stream that plans, after one of a single element. Bytes are those of all messages that elements
travel in.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.markdown import Row, markdown
from shardwise.comm import Channel
from shardwise.launchers.local import launch
from shardwise.space import Piece, even_cuts

RESULT = Path(__file__).parent / "results" / "stream.md"

LIMIT = 1.05
"""Bytes sent over bytes needed, at most."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a Llama in bfloat16, and along which dim tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int


def model(num_mib: int) -> list[Tensor]:
    """About as large: eight layers, and a vocabulary of 8 times the width."""
    width = next(each for each in range(32, 1 << 14, 32) if (8 * 12 + 16) * each * each >= num_mib << 19)
    found = [Tensor("embed", (8 * width, width), 0, 0), Tensor("head", (8 * width, width), 0, 7)]
    for layer in range(8):
        found += [Tensor(f"{layer}.{name}", (width, width), 0, layer) for name in ("q", "k", "v")]
        found += [Tensor(f"{layer}.o", (width, width), 1, layer), Tensor(f"{layer}.norm", (width,), None, layer)]
        found += [Tensor(f"{layer}.{name}", (width * 8 // 3 // 8 * 8, width), 0, layer) for name in ("gate", "up")]
        found.append(Tensor(f"{layer}.down", (width, width * 8 // 3 // 8 * 8), 1, layer))
    return found


@dataclass(frozen=True)
class Layout:
    """How so many ranks hold the model: stages, each cut along tp; or runs, as stage 3 cuts over data ranks."""

    name: str
    pp: int = 1
    tp: int = 1
    runs: int = 0

    @property
    def num_ranks(self) -> int:
        return self.runs or self.pp * self.tp

    def holders(self, tensor: Tensor) -> range:
        """The ranks that have something of a tensor."""
        if self.runs:
            return range(self.runs)
        stage = tensor.layer * self.pp // 8
        return range(stage * self.tp, (stage + 1) * self.tp)

    def piece(self, tensor: Tensor, rank: int) -> Piece:
        """What one of the holders has."""
        whole = Piece(name=tensor.name, dtype="bfloat16", global_shape=tensor.shape)
        if self.runs:
            return whole.within(*even_cuts(whole.num_elements, self.runs)[rank])
        if tensor.dim is None:
            return whole
        start, stop = even_cuts(tensor.shape[tensor.dim], self.tp)[rank % self.tp]
        offset = [start if at == tensor.dim else 0 for at in range(len(tensor.shape))]
        shape = [stop - start if at == tensor.dim else size for at, size in enumerate(tensor.shape)]
        return Piece(name=tensor.name, dtype="bfloat16", global_shape=tensor.shape, offset=offset, shape=shape)


CELLS = (
    (Layout("tp 2", tp=2), Layout("tp 2", tp=2)),
    (Layout("pp 2 x tp 2", pp=2, tp=2), Layout("tp 1")),
    (Layout("pp 2 x tp 2", pp=2, tp=2), Layout("tp 4", tp=4)),
    (Layout("stage 3 over 4", runs=4), Layout("tp 2", tp=2)),
)

FIRST, STREAM, SAME = "first call", "stream", "stream, all the same"
BY_HAND, GLOO = "gather and broadcast", "the same over gloo"


class Ours:
    """`sw.stream`."""

    def __init__(self, channel: Channel, source: dict[Piece, torch.Tensor], target: dict[Piece, torch.Tensor]) -> None:
        self._channel, self._source, self._target = channel, source, target
        self.report: sw.checkpoint.StreamReport | None = None

    def move(self, *, delta: bool = False) -> None:
        self.report = sw.stream(self._source, self._target, channel=self._channel, delta=delta, last=self.report)


class ByHand:
    """One tensor after the other, whole on the ranks that hold it and on every receiver."""

    def __init__(self, channel: Channel, cell: tuple[Layout, Layout], tensors: Sequence[Tensor]) -> None:
        self.channel, (self.trainers, self.receivers), self.tensors = channel, cell, tensors
        self.groups: dict[tuple[int, ...], tuple[Channel | None, dist.ProcessGroup, dist.ProcessGroup]] = {}
        takers = range(self.trainers.num_ranks, channel.size)
        for ranks in dict.fromkeys(tuple(self.trainers.holders(each)) for each in tensors):
            own = channel.over(ranks) if channel.rank in ranks else None
            self.groups[ranks] = own, dist.new_group(list(ranks)), dist.new_group([ranks[0], *takers])

    def move(self, source: dict[Piece, torch.Tensor], target: dict[Piece, torch.Tensor], *, gloo: bool) -> None:
        for tensor in self.tensors:
            holders = tuple(self.trainers.holders(tensor))
            whole = torch.empty(tensor.shape, dtype=torch.bfloat16)
            if self.channel.rank in holders:
                self._gather(tensor, holders, source, whole, gloo=gloo)
            if self.channel.rank == holders[0] or target:
                self._spread(tensor, holders, whole, gloo=gloo)
            for piece in self.pieces_of(tensor) if target else ():
                target[piece].copy_(whole[piece.box.slices()])

    def pieces_of(self, tensor: Tensor) -> Iterator[Piece]:
        yield self.receivers.piece(tensor, self.channel.rank - self.trainers.num_ranks)

    def _gather(
        self,
        tensor: Tensor,
        holders: Sequence[int],
        source: dict[Piece, torch.Tensor],
        whole: torch.Tensor,
        *,
        gloo: bool,
    ) -> None:
        own = source[self.trainers.piece(tensor, self.channel.rank)]
        if own.numel() == whole.numel():
            whole.copy_(own.view(whole.shape))
            return
        parts = [self.trainers.piece(tensor, rank) for rank in holders]
        counts = [piece.num_elements for piece in parts]
        gathered = torch.empty(sum(counts), dtype=torch.bfloat16)
        group, process_group, _ = self.groups[tuple(holders)]
        if gloo:
            dist.all_gather(list(gathered.split(counts)), own.reshape(-1), group=process_group)
        else:
            assert group is not None
            group.all_gather(gathered, own.reshape(-1), counts=counts, purpose="gather").wait()
        for piece, part in zip(parts, gathered.split(counts), strict=True):
            if piece.run is not None:
                whole.view(-1)[slice(*piece.run)] = part
            else:
                whole[piece.box.slices()] = part.view(piece.shape)

    def _spread(self, tensor: Tensor, holders: Sequence[int], whole: torch.Tensor, *, gloo: bool) -> None:
        if gloo:
            dist.broadcast(whole, src=holders[0], group=self.groups[tuple(holders)][2])
        elif self.channel.rank == holders[0]:
            takers = range(self.trainers.num_ranks, self.channel.size)
            for work in [self.channel.send(whole, taker, purpose="spread") for taker in takers]:
                work.wait()
        else:
            self.channel.receive(whole, holders[0], purpose="spread").wait()


def measured(channel: Channel, work: Callable[[], None]) -> float:
    """Seconds of the slowest rank."""
    channel.exchange(b"", purpose="begin together")
    began = time.perf_counter()
    work()
    seconds = repr(time.perf_counter() - began).encode()
    return max(float(each) for each in channel.exchange(seconds, purpose="seconds"))


def run(channel: Channel, cell: tuple[Layout, Layout], num_mib: int, rounds: int) -> dict[str, object]:
    """Both sides, on one rank."""
    trainers, receivers = cell
    tensors, source, target = model(num_mib), {}, {}
    generator = torch.Generator().manual_seed(0)
    for each in tensors:
        whole = torch.randn(each.shape, generator=generator, dtype=torch.bfloat16)
        if channel.rank in trainers.holders(each):
            piece = trainers.piece(each, channel.rank)
            part = whole[piece.box.slices()]
            source[piece] = (part if piece.run is None else part.reshape(-1)[slice(*piece.run)]).clone()
        elif channel.rank >= trainers.num_ranks:
            piece = receivers.piece(each, channel.rank - trainers.num_ranks)
            target[piece] = torch.zeros(piece.shape, dtype=torch.bfloat16)
    small = Piece(name="warm", dtype="bfloat16", global_shape=(1,))
    values = {small: torch.ones(1, dtype=torch.bfloat16)}
    Ours(channel, values if channel.rank == 0 else {}, values if channel.rank else {}).move()
    ours, by_hand = Ours(channel, source, target), ByHand(channel, cell, tensors)
    seconds: dict[str, list[float]] = {
        FIRST: [measured(channel, ours.move)],
        STREAM: [],
        SAME: [],
        BY_HAND: [],
        GLOO: [],
    }
    assert ours.report is not None
    sent, needed = ours.report.sent_bytes, ours.report.needed_bytes
    streamed = {piece: tensor.clone() for piece, tensor in target.items()}
    recorded = sw.Recorded(channel)
    ByHand(recorded, cell, tensors).move(source, target, gloo=False)
    told = channel.exchange(str(recorded.bytes_sent()).encode(), purpose="bytes by hand")
    works = {
        STREAM: ours.move,
        SAME: lambda: ours.move(delta=True),
        BY_HAND: lambda: by_hand.move(source, target, gloo=False),
        GLOO: lambda: by_hand.move(source, target, gloo=True),
    }
    for turn in range(rounds + 1):
        names = list(works)[turn % len(works) :] + list(works)[: turn % len(works)]
        for name in names:
            for tensor in target.values() if name != SAME else ():
                tensor.zero_()
            took = measured(channel, works[name])
            seconds[name] += [took] if turn else []
            assert all(torch.equal(target[piece], tensor) for piece, tensor in streamed.items()), name
            if name == STREAM and turn:
                assert ours.report.sent_bytes == sent
    return {"sent": sent, "needed": needed, "by hand": sum(map(int, told)), "seconds": seconds}


def _rank(folder: str, cell: int, num_mib: int, rounds: int) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    channel = sw.processes(device=torch.device("cpu"), timeout_seconds=300)
    result = run(channel, CELLS[cell], num_mib, rounds)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    channel.close()
    dist.destroy_process_group()


HEADER: Row = (
    *("trainers", "receivers", "MiB", "sent / needed", "by hand / needed", "stream, ms", "first call, ms"),
    *("all the same, ms", "by hand, ms", "over gloo, ms", "stream / by hand", "stream / over gloo"),
)


def row(cell: tuple[Layout, Layout], num_mib: int, result: dict[str, object]) -> Row:
    """Medians, and the medians of ratios within a round."""
    seconds = result["seconds"]
    assert isinstance(seconds, dict)
    sent, needed, by_hand = (float(str(result[key])) for key in ("sent", "needed", "by hand"))
    assert sent / needed <= LIMIT, f"{sent} bytes were sent for {needed}"

    def ratio(other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(seconds[STREAM], seconds[other], strict=True)):.2f}"

    times = [f"{statistics.median(seconds[name]) * 1e3:.1f}" for name in (STREAM, FIRST, SAME, BY_HAND, GLOO)]
    shown = cell[0].name, cell[1].name, str(num_mib), f"{sent / needed:.4f}", f"{by_hand / needed:.2f}"
    return (*shown, *times, ratio(BY_HAND), ratio(GLOO))


def table(sizes: Sequence[int], rounds: int, cells: Sequence[int] = range(len(CELLS))) -> str:
    """The table of one run, and its worst cell."""
    rows = []
    for num_mib in sizes:
        for at in cells:
            with tempfile.TemporaryDirectory() as folder:
                arguments = ["--rank", folder, str(at), str(num_mib), str(rounds)]
                size = sum(each.num_ranks for each in CELLS[at])
                code = launch("benchmarks.stream", arguments, num_processes=size)
                assert code == 0, f"the ranks ended with exit code {code}"
                rows.append(row(CELLS[at], num_mib, json.loads((Path(folder) / "result").read_text())))
    worst = max(rows, key=lambda each: float(each[-2]))
    last = f"The worst cell, against the same channel: {worst[0]} to {worst[1]}, {worst[2]} MiB: {worst[-2]}."
    return f"{markdown(HEADER, rows)}\n\n{last}"


def main() -> None:
    """Measure, print, and write if asked."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--mib", default="4,256")
    asked.add_argument("--write", action="store_true")
    arguments = asked.parse_args()
    if arguments.rank:
        folder, *numbers = arguments.rank
        _rank(folder, *map(int, numbers))
        return
    found = table([int(each) for each in arguments.mib.split(",")], arguments.rounds)
    print(found)
    if arguments.write:
        made = f"{date.today().isoformat()}: {os.cpu_count()} cores, Python {platform.python_version()}"
        text = [
            "# Weights to receivers",
            "",
            f"Made by `python -m benchmarks.stream --write` on {made}, torch",
            f"{torch.__version__}. Ratios are medians over {arguments.rounds} rounds of (ours / its) within a round,",
            "times medians of the slowest rank. A stream compares also the digests of what it has moved, which the",
            "others do not. All processes are on this machine, and share its cores with other programs.",
            "",
            found,
            "",
        ]
        RESULT.write_text("\n".join(text))


if __name__ == "__main__":
    main()
