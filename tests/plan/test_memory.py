"""Bytes: the arena of gradients, byte by byte; footprint and traffic against the count of every element."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Arena, Bucket, Ownership, Precision, footprint, plan_arena, traffic
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
def test_no_result_is_written_over_a_gradient_to_be_reduced_or_over_another_result(
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


def test_the_figure_of_the_arena_holds() -> None:
    buckets = tuple(
        Bucket(working=working, master="float32", trainable=True, slots=(), counts=(32, 32))
        for working in ("bfloat16", "float32", "bfloat16")
    )
    ownership = Ownership(num_owners=2, num_replicas=1, buckets=buckets)
    arena = plan_arena(ownership, 1, BF16, num_microbatches=1)
    assert [(region.start, region.stop) for region in bytes_of_gradients(arena, ownership)] == [
        (128, 256),
        (384, 640),
        (256, 384),
    ]
    assert [(region.start, region.stop) for region in bytes_of_results(arena, ownership, 1)] == [
        (0, 128),
        (512, 640),
        (128, 256),
    ]


@proven
@given(planned, microbatches)
def test_every_view_of_the_arena_starts_at_a_multiple_of_32_bytes(
    given_plan: tuple[Precision, Ownership], num_microbatches: int
) -> None:
    precision, ownership = given_plan
    for owner in range(ownership.num_owners):
        for region in plan_arena(ownership, owner, precision, num_microbatches=num_microbatches).regions:
            assert region.gradient_start_bytes % 32 == region.reduced_start_bytes % 32 == 0


@proven
@given(planned, microbatches)
def test_gradients_of_the_masters_dtype_are_reduced_where_they_are_and_take_no_headroom(
    given_plan: tuple[Precision, Ownership], num_microbatches: int
) -> None:
    precision, ownership = given_plan
    for owner in range(ownership.num_owners):
        arena = plan_arena(ownership, owner, precision, num_microbatches=num_microbatches)
        buckets = trained(ownership)
        for region, bucket in zip(arena.regions, buckets, strict=True):
            if region.gradient_dtype == bucket.master:
                own_start = bucket.part(owner).start * itemsize_bytes(bucket.master)
                assert region.reduced_start_bytes == region.gradient_start_bytes + own_start
        if all(region.gradient_dtype == bucket.master for region, bucket in zip(arena.regions, buckets, strict=True)):
            assert arena.num_bytes == sum(len(region) for region in bytes_of_gradients(arena, ownership))


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
        found = footprint(ownership, owner, precision, num_microbatches=num_microbatches)
        assert found.working_bytes == sum(map(itemsize_bytes, working))
        assert found.master_bytes == sum(map(itemsize_bytes, masters))
        assert found.owned_elements == len(owned)
        arena = plan_arena(ownership, owner, precision, num_microbatches=num_microbatches)
        assert found.gradient_bytes == arena.num_bytes


class Kept:
    """What one channel has taken for its sums, from step to step."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._free) + sum(self._used.values())

    def take(self, bucket: int, num_bytes: int) -> None:
        fitting = [each for each in self._free if each >= num_bytes]
        if self._free:
            self._free.remove(min(fitting) if fitting else max(self._free))
        self._used[bucket] = min(fitting) if fitting else num_bytes

    def give(self, bucket: int) -> None:
        self._free.append(self._used.pop(bucket))


def held_in_the_order_of_events(
    ownership: Ownership,
    owner: int,
    precision: Precision,
    num_microbatches: int,
    sums: Sums | None,
    *,
    goes_ahead: bool,
) -> int:
    """The most that is held in three steps that send buckets, wait for them and add them over replicas."""
    owners, replicas = ownership.num_owners, ownership.num_replicas
    buckets = trained(ownership)
    wires = [wire_dtype(each, precision, num_microbatches=num_microbatches) for each in buckets]
    held = [gradient_dtype(each, precision, num_microbatches=num_microbatches) for each in buckets]
    copied = [wire != dtype and owners * replicas > 1 for wire, dtype in zip(wires, held, strict=True)]
    of_owners, of_replicas = Kept(), Kept()
    seen = [0]

    def received(num_elements: int, num_ranks: int, wire: str, master: str) -> int:
        if sums is None or num_ranks == 1:
            return 0
        if sums == "exact":
            return sum(num_elements * itemsize_bytes(wire) for _ in range(num_ranks - 1))
        return num_elements * itemsize_bytes(wire) if wire != master else 0

    def see(*of_copies: int) -> None:
        copies = sum(buckets[each].num_elements * itemsize_bytes(wires[each]) for each in of_copies if copied[each])
        seen.append(of_owners.num_bytes + of_replicas.num_bytes + copies)

    def complete(index: int) -> None:
        of_owners.give(index)
        master, own = buckets[index].master, buckets[index].counts[owner]
        of_replicas.take(index, received(own // replicas, replicas, wires[index] if owners == 1 else master, master))
        see(*([index] if owners == 1 else []))
        of_replicas.give(index)

    for _ in range(3):
        waits: list[int] = []
        for index, bucket in enumerate(buckets):
            while waits and (len(waits) == 1 + goes_ahead or copied[index] or copied[index - 1]):
                complete(waits.pop(0))
            of_owners.take(index, received(bucket.counts[owner], owners, wires[index], bucket.master))
            waits.append(index)
            see(*(waits if owners > 1 else []))
        for index in waits:
            complete(index)
    return max(seen)


@proven
@given(planned, microbatches, st.sampled_from((None, "exact", "backend")), st.booleans())
def test_what_travels_takes_what_is_counted(
    given_plan: tuple[Precision, Ownership], num_microbatches: int, sums: Sums | None, goes_ahead: bool
) -> None:
    """To the byte where buckets are of one size; else channels may have kept less."""
    precision, ownership = given_plan
    for owner in range(ownership.num_owners):
        found = footprint(
            ownership, owner, precision, num_microbatches=num_microbatches, sums=sums, goes_ahead=goes_ahead
        )
        expected = held_in_the_order_of_events(
            ownership, owner, precision, num_microbatches, sums, goes_ahead=goes_ahead
        )
        assert found.reducing_bytes >= expected
        if len({(each.counts, each.working, each.master) for each in trained(ownership)}) <= 1:
            assert found.reducing_bytes == expected


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
    found = traffic(ownership, owner, precision, num_microbatches=num_microbatches)
    expected = element_by_element(ownership, owner, replica, precision, num_microbatches)
    assert (found.reduce_bytes, found.gather_bytes) == expected


@pytest.mark.parametrize("num_owners", [1, 2, 3, 8])
def test_traffic_of_equal_slices_is_the_formula(num_owners: int) -> None:
    num_elements = 48 * num_owners
    bucket = Bucket(working="bfloat16", master="float32", trainable=True, slots=(), counts=(48,) * num_owners)
    ownership = Ownership(num_owners=num_owners, num_replicas=1, buckets=(bucket,))
    one = traffic(ownership, 0, BF16, num_microbatches=1)
    assert one.reduce_bytes == (num_owners - 1) * num_elements * 2 // num_owners
    assert one.gather_bytes == (num_owners - 1) * num_elements * 2 // num_owners
    merged = traffic(ownership, 0, BF16, num_microbatches=4)
    assert merged.reduce_bytes == 2 * one.reduce_bytes
    assert merged.gather_bytes == one.gather_bytes


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
