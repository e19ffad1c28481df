"""Buckets and owners: every element has one place and one owner."""

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Bucket, Ownership, Parameter, Sharding, plan_ownership
from shardwise.plan.buckets import ALIGNMENT_ELEMENTS
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Portion, even_cuts
from tests.plan.strategies import models, ownerships, precisions, proven, shardings

counts = st.integers(1, 9)
any_model = precisions.flatmap(models)


def of_size(*sizes: int, trainable: bool = True) -> list[Parameter]:
    return [
        Parameter(
            name=f"w{at}", shape=(size,), dtype="float32", trainable=trainable, working="bfloat16", master="float32"
        )
        for at, size in enumerate(sizes)
    ]


def names_in(bucket: Bucket) -> list[str]:
    return [slot.name for slot in bucket.slots]


def owners_in(bucket: Bucket) -> dict[str, set[int]]:
    """Who owns elements of each parameter of the bucket."""
    return {
        name: {owner for owner in range(len(bucket.counts)) for each in bucket.segments(owner) if each.name == name}
        for name in names_in(bucket)
    }


def test_whole_parameters_lie_alike_on_ranks_along_tp_that_have_more_and_less_of_others() -> None:
    sharding = Sharding(bucket_bytes=10**6)
    found = []
    for start, stop in even_cuts(10, 4, unit=2):
        cut = Portion(global_shape=(10, 40), dim=0, ranges=((start, stop),))
        model = [
            replace(each, portion=cut, shape=cut.shape) if at % 2 else each
            for at, each in enumerate(of_size(*[99] * 4))
        ]
        ownership = plan_ownership(model, sharding, num_owners=2, num_replicas=1)
        found.append([(names_in(each), each) for each in ownership.buckets if {"w0", "w2"} & {*names_in(each)}])
    assert [names for names, _ in found[0]] == [["w2", "w0"]]
    assert all(each == found[0] for each in found)


@proven
@given(any_model, shardings, counts, counts)
def test_every_fused_parameter_has_one_slot_in_a_bucket_of_its_kind(
    model: list[Parameter], sharding: Sharding, num_owners: int, num_replicas: int
) -> None:
    ownership = plan_ownership(model, sharding, num_owners=num_owners, num_replicas=num_replicas)
    assert (ownership.num_owners, ownership.num_replicas) == (num_owners, num_replicas)
    by_name = {parameter.name: parameter for parameter in model}
    placed = [(slot.name, slot.num_elements, bucket) for bucket in ownership.buckets for slot in bucket.slots]
    assert sorted(name for name, _, _ in placed) == sorted(each.name for each in model if each.fused)
    for name, num_elements, bucket in placed:
        spec = by_name[name]
        assert num_elements == math.prod(spec.shape)
        assert (bucket.working, bucket.master, bucket.trainable) == (spec.working, spec.master, spec.trainable)


@proven
@given(precisions.flatmap(ownerships))
def test_slots_are_aligned_and_disjoint_and_parts_cover_the_bucket(ownership: Ownership) -> None:
    for bucket in ownership.buckets:
        ends = [0]
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT_ELEMENTS == 0
            assert slot.run.start == slot.start >= ends[-1]
            ends.append(slot.run.stop)
        assert ends[-1] <= bucket.num_elements
        assert len(bucket.counts) == ownership.num_owners
        starts = [bucket.part(owner).start for owner in range(ownership.num_owners)]
        stops = [bucket.part(owner).stop for owner in range(ownership.num_owners)]
        assert [0, *stops] == [*starts, bucket.num_elements]
        assert all(count % (ALIGNMENT_ELEMENTS * ownership.num_replicas) == 0 for count in bucket.counts)


@proven
@given(precisions.flatmap(ownerships))
def test_segments_of_all_owners_hold_every_element_exactly_once(ownership: Ownership) -> None:
    for bucket in ownership.buckets:
        at_in_bucket: dict[str, list[int]] = {slot.name: [] for slot in bucket.slots}
        for owner in range(ownership.num_owners):
            end = 0
            for segment in bucket.segments(owner):
                assert segment.start >= end  # in order, and none over another
                end = segment.start + segment.run.num_elements
                assert segment.run.num_elements > 0
                assert end <= bucket.counts[owner]
                assert segment.run.start == len(at_in_bucket[segment.name])  # goes on where the last owner stopped
                first = bucket.part(owner).start + segment.start
                at_in_bucket[segment.name] += range(first, first + segment.run.num_elements)
        for slot in bucket.slots:
            assert at_in_bucket[slot.name] == list(range(slot.start, slot.start + slot.num_elements))


@proven
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_whole_parameters_weigh_on_no_owner_more_than_the_least_possible_and_one_parameter(
    sizes: list[int], num_owners: int
) -> None:
    ownership = plan_ownership(
        of_size(*sizes), Sharding(partition="whole", bucket_bytes=8), num_owners=num_owners, num_replicas=1
    )
    loads = [
        sum(segment.run.num_elements for bucket in ownership.buckets for segment in bucket.segments(owner))
        for owner in range(num_owners)
    ]
    least = min(
        max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == each) for each in range(num_owners))
        for owners in itertools.product(range(num_owners), repeat=len(sizes))
    )
    assert sum(loads) == sum(sizes)
    assert max(loads) <= least + max(sizes)


def test_trained_parameters_are_balanced_first_for_they_carry_the_state() -> None:
    frozen = [replace(each, name=f"frozen{at}") for at, each in enumerate(of_size(999, 999, 999, trainable=False))]
    ownership = plan_ownership([*frozen, *of_size(10, 10)], Sharding(partition="whole"), num_owners=2, num_replicas=1)
    owners = {name: owner for bucket in ownership.buckets for name, owner in owners_in(bucket).items()}
    assert owners["w0"] | owners["w1"] == {0, 1}


@proven
@given(any_model, shardings, counts, counts)
def test_buckets_hold_what_was_asked_and_no_two_neighbours_of_a_kind_would_fit_in_one(
    model: list[Parameter], sharding: Sharding, num_owners: int, num_replicas: int
) -> None:
    """Whole parameters have one owner, slices are of one size."""
    ownership = plan_ownership(model, sharding, num_owners=num_owners, num_replicas=num_replicas)
    position = {parameter.name: at for at, parameter in enumerate(model)}
    before: dict[tuple[str, str, bool], int] = {}
    for bucket in ownership.buckets:
        sizes = {slot.name: slot.num_elements * itemsize_bytes(bucket.working) for slot in bucket.slots}
        assert len(sizes) == 1 or sum(sizes.values()) <= sharding.bucket_bytes
        if sharding.partition == "whole":
            assert all(len(owners) <= 1 for owners in owners_in(bucket).values())
        else:
            assert len(set(bucket.counts)) == 1
        kind = (bucket.working, bucket.master, bucket.trainable)
        first = max(sizes, key=position.__getitem__)
        assert kind not in before or before[kind] + sizes[first] > sharding.bucket_bytes
        before[kind] = sum(sizes.values())


@proven
@given(any_model, shardings, counts)
def test_buckets_follow_backward_from_the_last_parameter_to_the_first(
    model: list[Parameter], sharding: Sharding, num_owners: int
) -> None:
    position = {parameter.name: at for at, parameter in enumerate(model)}
    ownership = plan_ownership(model, sharding, num_owners=num_owners, num_replicas=1)
    completed = [min(position[name] for name in names_in(bucket)) for bucket in ownership.buckets]
    assert completed == sorted(completed, reverse=True)
    for bucket in ownership.buckets if sharding.partition == "slice" else ():
        positions = [position[name] for name in names_in(bucket)]
        assert positions == sorted(positions, reverse=True)
