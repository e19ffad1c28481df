"""What an update casts, calls and sends, as a recorded channel lists it on simulated ranks; and the formulas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import shardwise as sw
from benchmarks.hybrid.tensor import HEADS, tensor_plan
from benchmarks.ours import ONCE, engine, plan_of
from benchmarks.workload import Shape, batches, llama
from shardwise.comm import Channel
from shardwise.plan import Bucket

__all__ = ["Count", "of_sharding", "of_tensor"]

SHAPE = Shape(num_sequences=1, num_tokens=2)
BUCKET_BYTES = 1 << 20
"""So small that a layer does not fit into one."""
FIRST, LAST = "model.embed_tokens.weight", "lm_head.weight"
"""The units that a forward begins and ends with have one parameter each."""


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


def of_sharding(
    num_ranks: int, num_microbatches: int, sharding: sw.Sharding, *, num_layers: int = 8
) -> Iterator[Count]:
    """Count one update of the workload's model, in bfloat16 with float32 masters."""
    plan = plan_of(num_ranks, num_microbatches, precision=ONCE, sharding=sharding)
    seen = sw.simulate(
        num_ranks,
        lambda channel: _update(channel, channel.rank, llama(num_layers=num_layers), plan),
        timeout_seconds=300.0,
    )
    kept = ", kept" if sharding.keep_gathered else ""
    about = f"stage {sharding.stage}{kept}, {num_ranks} ranks, k = {num_microbatches}"
    k, d, buckets = num_microbatches, num_ranks, seen[0].buckets
    num_elements = sum(slot.num_elements for bucket in buckets for slot in bucket.slots)
    buffers = sum(bucket.num_elements for bucket in buckets)
    each_time = sharding.stage >= 2
    reduced, wide = (k if each_time else 1), (2 if each_time or k == 1 else 4)
    gathers, text = _gathered(buckets, sharding, k)
    k_text = "k" if each_time else "1"
    yield from _counts(
        about,
        seen,
        [
            ("elements cast", "cast_elements", "N", num_elements),
            ("reduce-scatters", "num_reduced", f"d * {k_text} * B", d * reduced * len(buckets)),
            ("all-gathers", "num_gathered", f"d * ({text.format('B')})", d * len(gathers)),
            (
                "bytes sent to reduce",
                "reduced_bytes",
                f"(d - 1) * {k_text} * {wide} P",
                (d - 1) * reduced * wide * buffers,
            ),
            (
                "bytes sent to gather",
                "gathered_bytes",
                f"(d - 1) * 2 * ({text.format('P')})",
                (d - 1) * 2 * sum(bucket.num_elements for bucket in gathers),
            ),
        ],
    )


def of_tensor(num_ranks: int, num_microbatches: int, *, num_layers: int = 8) -> Iterator[Count]:
    """Count one update of the same model cut along tp: of each layer two sums forward and two backward, one of the
    embedding forward, one of the head backward, and the logits.
    """

    def run(channel: Channel) -> _Seen:
        model = llama(num_heads=HEADS, num_layers=num_layers)
        return _update(channel, 0, model, tensor_plan(num_ranks, num_microbatches))

    config: Any = llama(num_heads=HEADS, num_layers=num_layers).config
    seen = sw.simulate(num_ranks, run, timeout_seconds=300.0)
    about = f"tensor parallelism, {num_ranks} ranks, k = {num_microbatches}"
    k, t, num_sums = num_microbatches, num_ranks, 4 * config.num_hidden_layers + 2
    num_tokens = SHAPE.num_sequences * SHAPE.num_tokens
    sums_bytes = (t - 1) * k * num_sums * num_tokens * config.hidden_size * 2
    logits_bytes = (t - 1) * k * num_tokens * config.vocab_size * 2
    sums, sent = "k * (4 L + 2)", "(t - 1) * k * (4 L + 2) * 2 TH"
    yield from _counts(
        about,
        seen,
        [
            ("reduce-scatters", "num_reduced", f"t * {sums}", t * k * num_sums),
            ("all-gathers", "num_gathered", f"t * {sums} + t * k", t * k * (num_sums + 1)),
            ("bytes sent to reduce", "reduced_bytes", sent, sums_bytes),
            ("bytes sent to gather", "gathered_bytes", f"{sent} + (t - 1) * k * 2 TV", sums_bytes + logits_bytes),
        ],
    )


def _counts(about: str, seen: Sequence[_Seen], asked: Sequence[tuple[str, str, str, int]]) -> Iterator[Count]:
    for what, name, formula_text, formula in asked:
        counted = sum(getattr(each, name) for each in seen)
        yield Count(about=about, what=what, formula_text=formula_text, counted=counted, formula=formula)


def _gathered(buckets: Sequence[Bucket], sharding: sw.Sharding, num_microbatches: int) -> tuple[list[Bucket], str]:
    """The gathers of an update, and their formula.

    Stage 3 gathers for each forward and each backward, but what the one needed last is there when the other begins:
    the head after a forward, the embedding after a backward.
    """
    if sharding.stage < 3 or sharding.keep_gathered:
        return list(buckets), "{0}"
    k = num_microbatches
    not_first, not_last = (
        [bucket for bucket in buckets if name not in {slot.name for slot in bucket.slots}] for name in (FIRST, LAST)
    )
    return [*buckets, *k * not_last, *(k - 1) * not_first], "{0} + k ({0} - {0}last) + (k - 1) ({0} - {0}first)"


def _update(channel: Channel, data_rank: int, model: nn.Module, plan: sw.Plan) -> _Seen:
    recorded = sw.Recorded(channel)
    trained = engine(model, plan, over=recorded)
    first, second = (each.whole for each in batches(SHAPE, plan.merge.microbatches, rank=data_rank, count=2))
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
