"""Reduce-scatter and all-gather of 32 MB of bfloat16: our channels against gloo and against plain memory copies.

    python benchmarks/channels.py [NUM_RANKS]        starts its own processes; 2 ranks unless told otherwise

All sides take turns in every round, and each number is the median over the rounds of the ratio to the same round's copy
of 32 MB from memory to memory, so that a busy machine slows both. The sides:

    shared memory, tcp   `processes`, the sum taken in float32 or in bfloat16
    gloo native          `reduce_scatter_tensor` (an all-reduce that rounds at every hop) and `all_gather_into_tensor`
    gloo pairs           isend and irecv between all pairs and a local sum, the best that can be built on gloo

Small calls follow, on their own. Whatever ranks told each other by gloo would cost its smallest call at least.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import Channel, launch, processes

NUM_ELEMENTS = 16 << 20
NUM_ROUNDS = 15
SMALL_CALLS = 100

Side = Callable[[], object]


def scatter_over(channel: Channel, output: torch.Tensor, input: torch.Tensor) -> None:
    channel.reduce_scatter(output, input, purpose="benchmark").wait()


def gather_over(channel: Channel, output: torch.Tensor, input: torch.Tensor) -> None:
    channel.all_gather(output, input, purpose="benchmark").wait()


def sides(channels: dict[str, Channel]) -> dict[str, Side]:
    """What is timed, by name; the first is what the others are compared with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = NUM_ELEMENTS // size
    whole = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16)
    other = torch.zeros_like(whole)
    part = torch.zeros(share, dtype=torch.bfloat16)
    wide = torch.zeros(share)
    arrived = torch.zeros(size, share, dtype=torch.bfloat16)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def between_pairs(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        operations = []
        for step in range(1, size):
            right, left = (rank + step) % size, (rank - step) % size
            operations.append(dist.P2POp(dist.isend, outgoing[right], right))
            operations.append(dist.P2POp(dist.irecv, incoming[left], left))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def pairs_scatter() -> None:
        own = whole.view(size, share)
        between_pairs(own, arrived)
        for number in range(size):
            term = own[rank] if number == rank else arrived[number]
            wide.add_(term) if number else wide.copy_(term)

    def pairs_gather() -> None:
        between_pairs(part.expand(size, share), other.view(size, share))
        other.view(size, share)[rank].copy_(part)

    timed: dict[str, Side] = {"copy of 32 MB": lambda: other.copy_(whole)}
    for name, channel in channels.items():
        timed[f"reduce_scatter, {name}, float32 sum"] = partial(scatter_over, channel, wide, whole)
    for name, channel in channels.items():
        timed[f"reduce_scatter, {name}, bfloat16 sum"] = partial(scatter_over, channel, part, whole)
    timed["reduce_scatter, gloo pairs, float32 sum"] = pairs_scatter
    timed["reduce_scatter, gloo native"] = lambda: scatter(part, whole)
    for name, channel in channels.items():
        timed[f"all_gather, {name}"] = partial(gather_over, channel, other, part)
    timed["all_gather, gloo pairs"] = pairs_gather
    timed["all_gather, gloo native"] = lambda: gather(other, part)
    return timed


def small_calls(channels: dict[str, Channel]) -> dict[str, Side]:
    """What costs a rank its notices to others: the least that words on gloo would cost is a call of gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend: Any = dist.group.WORLD._get_backend(  # type: ignore[union-attr]
        torch.device("cpu")
    )
    words, heard = torch.zeros(64, dtype=torch.uint8), torch.zeros(64 * size, dtype=torch.uint8)
    given, got = torch.zeros(1 << 10), torch.zeros(1 << 10)
    right, left = (rank + 1) % size, (rank - 1) % size

    def pass_on(channel: Channel) -> None:
        channel.send(given, right, purpose="benchmark").wait()
        channel.receive(got, left, purpose="benchmark").wait()

    def pass_on_by_gloo() -> None:
        works = [backend.send([given], right, 0), backend.recv([got], left, 0)]
        for work in works:
            work.wait()

    timed: dict[str, Side] = {}
    for name, channel in channels.items():
        timed[f"exchange of 20 bytes, {name}"] = partial(channel.exchange, b"2" * 20, purpose="d")
        timed[f"message of 4 KiB to the next, {name}"] = partial(pass_on, channel)
    timed["all-gather of 64 bytes, gloo native"] = lambda: backend._allgather_base(heard, words).wait()
    timed["message of 4 KiB to the next, gloo native"] = pass_on_by_gloo
    return timed


def measure() -> None:
    """Time every side on every rank and print the table on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    channels = {"shared memory": processes(), "tcp": processes(shared_memory=False)}
    timed = sides(channels)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for round_number in range(NUM_ROUNDS + 1):
        for name, run in timed.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            if round_number:  # the first warms up
                seconds[name].append(time.perf_counter() - begin)
    copies = seconds["copy of 32 MB"]
    if dist.get_rank() == 0:
        print(f"{'32 MB of bfloat16, ' + str(dist.get_world_size()) + ' ranks':44} {'ms':>8} {'x copy':>8}")
        for name, taken in seconds.items():
            ratio = statistics.median(side / copy for side, copy in zip(taken, copies, strict=True))
            print(f"{name:44} {statistics.median(taken) * 1e3:8.2f} {ratio:8.2f}")
    for name, run in small_calls(channels).items():
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for _ in range(SMALL_CALLS):
            run()
        taken = [(time.perf_counter() - begin), (time.process_time() - begin_cpu)]
        if dist.get_rank() == 0:
            microseconds = [each / SMALL_CALLS * 1e6 for each in taken]
            print(f"{name:44} {microseconds[0]:8.0f} us, {microseconds[1]:.0f} us of processor time")
    for channel in channels.values():
        channel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched() or (len(sys.argv) > 1 and sys.argv[1] == "rank"):
        measure()
    else:
        num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        sys.exit(launch(None, [__file__, "rank"], num_processes=num_ranks))
