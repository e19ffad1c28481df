"""What an update casts, calls and sends, as a recorded channel lists it on simulated ranks; and the formulas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import shardwise as sw
from benchmarks.ours import ONCE, engine
from benchmarks.workload import Shape, batches, llama
from shardwise.comm import Channel
from shardwise.plan import Bucket

__all__ = ["Count", "of_sharding"]

SHAPE = Shape(num_sequences=1, num_tokens=2)
BUCKET_BYTES = 4 << 20
"""So small that a unit does not fit into one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """One number of one update on all ranks together."""

    about: str
    what: str
    formula_text: str
    counted: int
    formula: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """On one rank."""

    buckets: tuple[Bucket, ...]
    cast_elements: int
    num_reduced: int
    num_gathered: int
    reduced_bytes: int
    gathered_bytes: int


def of_sharding(num_ranks: int, num_microbatches: int, sharding: sw.Sharding) -> Iterator[Count]:
    """Count one update of the workload's model, in bfloat16 with float32 masters."""
    seen = sw.simulate(num_ranks, lambda channel: _update(channel, num_microbatches, sharding), timeout_seconds=300.0)
    about = f"stage {sharding.stage}{', kept' if sharding.keep_gathered else ''}, {num_ranks} ranks, k = {num_microbatches}"
    k, d, buckets = num_microbatches, num_ranks, seen[0].buckets
    num_elements = sum(slot.num_elements for bucket in buckets for slot in bucket.slots)
    buffers = sum(bucket.num_elements for bucket in buckets)
    times_reduced = k if sharding.stage >= 2 else 1
    reduced_itemsize = 2 if sharding.stage >= 2 or k == 1 else 4
    times_gathered, text = _times_gathered(sharding, k)
    k_text = "k" if sharding.stage >= 2 else "1"
    for what, counted, formula, formula_text in (
        ("elements cast", sum(each.cast_elements for each in seen), num_elements, "N"),
        ("reduce-scatters", sum(each.num_reduced for each in seen), d * times_reduced * len(buckets), f"d * {k_text} * B"),
        ("all-gathers", sum(each.num_gathered for each in seen), d * times_gathered * len(buckets), f"d * {text} * B"),
        (
            "bytes sent to reduce",
            sum(each.reduced_bytes for each in seen),
            (d - 1) * times_reduced * reduced_itemsize * buffers,
            f"(d - 1) * {k_text} * {reduced_itemsize} P",
        ),
        (
            "bytes sent to gather",
            sum(each.gathered_bytes for each in seen),
            (d - 1) * times_gathered * 2 * buffers,
            f"(d - 1) * {text} * 2 P",
        ),
    ):
        yield Count(about=about, what=what, formula_text=formula_text, counted=counted, formula=formula)


def _times_gathered(sharding: sw.Sharding, num_microbatches: int) -> tuple[int, str]:
    """How often each bucket is gathered in an update."""
    if sharding.stage < 3 or sharding.keep_gathered:
        return 1, "1"
    return 2 * num_microbatches, "2k"


def _update(channel: Channel, num_microbatches: int, sharding: sw.Sharding) -> _Seen:
    recorded = sw.Recorded(channel)
    trained = engine(llama(), num_microbatches, precision=ONCE, over=recorded, sharding=sharding)
    first, second = (each.whole for each in batches(SHAPE, num_microbatches, rank=channel.rank, count=2))
    trained.step(first)  # a first update may do more than the later ones
    cast = trained.counters.cast_elements
    recorded.clear()
    trained.step(second)
    return _Seen(
        buckets=trained._buffers.ownership.buckets,
        cast_elements=trained.counters.cast_elements - cast,
        num_reduced=_num_calls(recorded, "reduce_scatter"),
        num_gathered=_num_calls(recorded, "all_gather"),
        reduced_bytes=recorded.bytes_sent("reduce_scatter"),
        gathered_bytes=recorded.bytes_sent("all_gather"),
    )


def _num_calls(recorded: sw.Recorded, operation: str) -> int:
    return sum(call.operation == operation for call in recorded.calls)
