"""Bytes: the arena of gradients, byte by byte; footprint and traffic against the count of every element."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Arena, Bucket, OwnedLayout, Ownership, Precision, footprint, plan_arena, traffic
from shardwise.plan.dtypes import itemsize_bytes, promote
from shardwise.plan.memory import gradient_dtype, wire_dtype
from shardwise.plan.specs import Sums
from tests.plan.strategies import ownerships, precisions, proven

planned = precisions.flatmap(lambda precision: st.tuples(st.just(precision), ownerships(precision)))
microbatches = st.integers(1, 3)


def trained(ownership: Ownership) -> list[Bucket]:
    return [bucket for bucket in ownership.buckets if bucket.trainable]


def bytes_of_gradients(arena: Arena, ownership: Ownership) -> list[range]:
    return [
        range(
            region.gradient_start_bytes,
            region.gradient_start_bytes + bucket.num_elements * itemsize_bytes(region.gradient_dtype),
        )
        for region, bucket in zip(arena.regions, trained(ownership), strict=True)
    ]


def bytes_of_results(arena: Arena, ownership: Ownership, owner: int) -> list[range]:
    return [
        range(
            region.reduced_start_bytes,
            region.reduced_start_bytes + bucket.counts[owner] * itemsize_bytes(bucket.master),
        )
        for region, bucket in zip(arena.regions, trained(ownership), strict=True)
    ]


@proven
@given(planned, microbatches)
def test_no_result_is_written_over_a_gradient_to_be_reduced_and_gradients_in_the_masters_dtype_take_no_more(
    given_plan: tuple[Precision, Ownership], num_microbatches: int
) -> None:
    precision, ownership = given_plan
    for owner in range(ownership.num_owners):
        arena = plan_arena(ownership, owner, precision, num_microbatches=num_microbatches)
        gradients = bytes_of_gradients(arena, ownership)
        results = bytes_of_results(arena, ownership, owner)
        memory: dict[int, str] = {}
        for at, region in enumerate(gradients):  # backward fills every gradient ...
            assert not memory.keys() & set(region)
            memory |= dict.fromkeys(region, f"gradient {at}")
        for at, region in enumerate(results):  # ... and the buckets are reduced in turn
            assert all(memory[byte] == f"gradient {at}" for byte in gradients[at])
            if arena.regions[at].gradient_dtype != trained(ownership)[at].master:
                assert not set(region) & set(gradients[at])  # a reduction with a cast cannot be in place
            memory |= dict.fromkeys(region, f"result {at}")
        for at, region in enumerate(results):
            assert all(memory[byte] == f"result {at}" for byte in region)
        assert all(0 <= byte < arena.num_bytes for byte in memory)
        in_place = [
            each.gradient_dtype == of.master for each, of in zip(arena.regions, trained(ownership), strict=True)
        ]
        for is_in_place, place, bucket in zip(in_place, arena.regions, trained(ownership), strict=True):
            assert place.gradient_start_bytes % 32 == place.reduced_start_bytes % 32 == 0
            own_start = bucket.part(owner).start * itemsize_bytes(bucket.master)
            assert not is_in_place or place.reduced_start_bytes == place.gradient_start_bytes + own_start
        assert not all(in_place) or arena.num_bytes == sum(map(len, gradients))


BF16 = Precision(compute="bfloat16")


@proven
@given(ownerships(BF16, ("float32",)))
def test_with_two_owners_or_more_the_arena_is_at_most_one_bucket_larger_than_the_gradients(
    ownership: Ownership,
) -> None:
    gradients = [2 * bucket.num_elements for bucket in trained(ownership)]
    for owner in range(ownership.num_owners):
        extra = plan_arena(ownership, owner, BF16, num_microbatches=1).num_bytes - sum(gradients)
        slices = all(len(set(bucket.counts)) == 1 for bucket in ownership.buckets)
        if ownership.num_owners > 1 and slices:
            assert extra <= -(-max(gradients, default=0) // 64) * 64


@proven
@given(planned, microbatches)
def test_footprint_counts_every_byte(given_plan: tuple[Precision, Ownership], num_microbatches: int) -> None:
    precision, ownership = given_plan
    for owner in range(ownership.num_owners):
        working = [bucket.working for bucket in ownership.buckets for _ in range(bucket.num_elements)]
        masters = [
            bucket.master
            for bucket in ownership.buckets
            for _ in range(bucket.part(owner).start, bucket.part(owner).stop)
            if bucket.master != bucket.working
        ]
        owned = [
            (slot.name, element)
            for bucket in trained(ownership)
            for slot in bucket.slots
            for element in range(slot.num_elements)
            if bucket.part(owner).start <= slot.start + element < bucket.part(owner).stop
        ]
        found = footprint(OwnedLayout(ownership=ownership), owner, precision, num_microbatches=num_microbatches)
        assert found.working_bytes == sum(map(itemsize_bytes, working))
        assert found.master_bytes == sum(map(itemsize_bytes, masters))
        assert found.owned_elements == len(owned)
        arena = plan_arena(ownership, owner, precision, num_microbatches=num_microbatches)
        assert found.gradient_bytes == arena.num_bytes


@pytest.mark.parametrize(
    ("sums", "count", "goes_ahead", "num_bytes"),
    [
        ("exact", 4, False, 48 * 4),  # what the other owner sends of this one's part, of one bucket
        ("exact", 4, True, 2 * 48 * 4),  # of two
        ("exact", 1, False, 48 * 2),
        ("backend", 4, True, 0),  # added in place
        ("backend", 1, False, 48 * 2),  # in another dtype than the master's
        (None, 4, True, 0),
    ],
)
def test_what_arrives_takes_a_buffer_for_each_bucket_on_its_way(
    sums: Sums | None, count: int, goes_ahead: bool, num_bytes: int
) -> None:
    buckets = [Bucket(working="bfloat16", master="float32", trainable=True, slots=(), counts=(48, 48))] * 3
    ownership = Ownership(num_owners=2, num_replicas=1, buckets=tuple(buckets))
    found = footprint(
        OwnedLayout(ownership=ownership), 0, BF16, num_microbatches=count, sums=sums, goes_ahead=goes_ahead
    )
    assert found.reducing_bytes == num_bytes


def element_by_element(
    ownership: Ownership, owner: int, replica: int, precision: Precision, num_microbatches: int
) -> tuple[int, int]:
    """Bytes that one rank sends: each element of a gradient to its owner, each of a part to all other owners."""
    reduce_bytes = gather_bytes = 0
    replicas = ownership.num_replicas
    for bucket in trained(ownership):
        wire = itemsize_bytes(wire_dtype(bucket, precision, num_microbatches=num_microbatches))
        master = itemsize_bytes(bucket.master)
        for to in range(ownership.num_owners):
            for element in range(bucket.part(to).start, bucket.part(to).stop):
                if to != owner:
                    reduce_bytes += wire
                    continue
                gather_bytes += (ownership.num_owners - 1) * itemsize_bytes(bucket.working)
                share = bucket.counts[to] // replicas  # at least one element, for there is this one
                if (element - bucket.part(to).start) // share == replica:
                    reduce_bytes += (replicas - 1) * master
                else:
                    reduce_bytes += wire if ownership.num_owners == 1 else master
    return reduce_bytes, gather_bytes


@proven
@given(planned, microbatches, st.data())
def test_traffic_counts_every_element_sent(
    given_plan: tuple[Precision, Ownership], num_microbatches: int, data: st.DataObject
) -> None:
    precision, ownership = given_plan
    owner = data.draw(st.integers(0, ownership.num_owners - 1))
    replica = data.draw(st.integers(0, ownership.num_replicas - 1))
    found = traffic(OwnedLayout(ownership=ownership), owner, precision, num_microbatches=num_microbatches)
    expected = element_by_element(ownership, owner, replica, precision, num_microbatches)
    assert (found.reduce_bytes, found.gather_bytes) == expected


@pytest.mark.parametrize(
    ("working", "master", "settings", "count", "gradient", "wire"),
    [
        ("bfloat16", "float32", {}, 1, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", {}, 4, "float32", "float32"),
        ("bfloat16", "float32", {"reduce": "bfloat16"}, 4, "float32", "bfloat16"),
        ("bfloat16", "float32", {"accumulate": "bfloat16"}, 4, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", {"reduce": "float16"}, 1, "bfloat16", "bfloat16"),  # neither holds the other
        ("float32", "float32", {"accumulate": "bfloat16"}, 4, "float32", "float32"),
        ("float32", "float32", {"reduce": "bfloat16"}, 1, "float32", "bfloat16"),
        ("float64", "float64", {"reduce": "float32"}, 1, "float64", "float64"),  # wider than the plan's masters
        ("float64", "float64", {"master": "float64"}, 1, "float64", "float32"),
        ("complex64", "complex64", {}, 4, "complex64", "complex64"),
        ("complex64", "complex64", {"accumulate": "float64"}, 4, "complex128", "complex128"),
    ],
)
def test_gradients_are_held_and_travel_in_the_dtypes_asked(
    working: str, master: str, settings: dict[str, str], count: int, gradient: str, wire: str
) -> None:
    bucket = Bucket(working=working, master=master, trainable=True, slots=(), counts=(16,))
    precision = Precision(**settings)  # type: ignore[arg-type]
    assert gradient_dtype(bucket, precision, num_microbatches=count) == gradient
    assert wire_dtype(bucket, precision, num_microbatches=count) == wire
    assert promote(gradient, working) == gradient
