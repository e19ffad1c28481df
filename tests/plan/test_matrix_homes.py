"""Who updates what must be whole: every matrix has one home, and work and bytes are even."""

import math
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Parameter, Sharding, plan_ownership
from shardwise.plan.matrix_homes import Home, rooms_of, rounds_of, share_out
from tests.properties import tried


def parameters_of(shapes: Mapping[str, tuple[int, ...]]) -> list[Parameter]:
    return [
        Parameter(name=name, shape=shape, dtype="float32", working="float32", master="float32", trainable=True)
        for name, shape in shapes.items()
    ]


def cubic(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * min(shape)


# A block of a model with groups of heads: k and v cost a sixteenth of q, at a fourth of its bytes.
BLOCK = {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64), "up": (256, 64), "down": (64, 256)}
MODEL = {f"{layer}.{name}": shape for layer in range(8) for name, shape in BLOCK.items()} | {"embed": (2000, 64)}


@pytest.mark.parametrize(("num_owners", "num_homes"), [(2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_work_and_bytes_of_a_model_are_even(num_owners: int, num_homes: int) -> None:
    parameters = [(each, 4 * each.num_elements) for each in parameters_of(MODEL)]
    work = {name: cubic(shape) for name, shape in MODEL.items() if name != "embed"}
    owner_of, homes = share_out(parameters, work, num_owners=num_owners, num_homes=num_homes)
    done = [0] * (num_owners * num_homes)
    held = [0] * num_owners
    for name, owner in owner_of.items():
        rank = homes[name].rank if name in homes else 0
        done[owner * num_homes + rank] += work.get(name, 0)
        held[owner] += math.prod(MODEL[name])
    assert max(done) <= 1.1 * sum(done) / len(done)
    # One owner has the embedding, and as much of the work as the others.
    assert max(held) <= sum(held) / len(held) + 2000 * 64
    assert (homes.keys() == work.keys()) == (num_homes > 1)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=12),
    num_owners=st.integers(1, 3),
    num_homes=st.integers(1, 3),
)
@tried(60)
def test_every_matrix_has_one_owner_one_home_and_one_round(
    sizes: list[tuple[int, int]], num_owners: int, num_homes: int
) -> None:
    shapes = {f"w{at}": size for at, size in enumerate(sizes)}
    work = {name: cubic(shape) for name, shape in shapes.items() if math.prod(shape) and name != "w1"}
    ownership = plan_ownership(
        parameters_of(shapes),
        Sharding(bucket_bytes=100),
        num_owners=num_owners,
        num_replicas=1,
        work=work,
        num_homes=num_homes,
    )
    whole = {
        segment.name: owner
        for bucket in ownership.buckets
        for owner in range(num_owners)
        for segment in bucket.segments(owner)
        if segment.run.num_elements == math.prod(shapes[segment.name])
    }
    assert work.keys() <= whole.keys()
    assert ownership.homes.keys() == (work.keys() if num_homes > 1 else set())
    for owner in range(num_owners):
        names = [name for name, home in ownership.homes.items() if home.owner == owner]
        assert all(whole[name] == owner for name in names)
        rounds = rounds_of(ownership.homes, list(shapes), owner)
        assert sorted(name for each in rounds for name in each) == sorted(names)


def test_rounds_take_some_of_each_home() -> None:
    """About eight rounds, in which all homes have as much to do."""
    shapes = {f"w{at}": (256, 256) for at in range(64)}
    _, homes = share_out(
        [(each, 4 * each.num_elements) for each in parameters_of(shapes)],
        dict.fromkeys(shapes, 1),
        num_owners=1,
        num_homes=2,
    )
    rounds = rounds_of(homes, list(shapes), 0)
    assert [len(each) for each in rounds] == [8] * 8
    assert all(sorted(homes[name].rank for name in each) == [0] * 4 + [1] * 4 for each in rounds)


@given(
    homes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), max_size=14),
    cuts=st.lists(st.integers(0, 14), max_size=8),
)
@tried(60)
def test_rooms_in_use_do_not_overlap(homes: list[tuple[int, int]], cuts: list[int]) -> None:
    """Of masters those of three rounds, and of gradients those of two: others may be read or updated when one comes."""
    home_of = {f"w{at}": Home(owner=0, rank=rank, num_bytes=size, work=1) for at, (rank, size) in enumerate(homes)}
    ends = [0, *sorted(min(cut, len(homes)) for cut in cuts), len(homes)]
    rounds = [list(home_of)[first:last] for first, last in pairwise(ends)]
    rooms = rooms_of(home_of, rounds, 3)
    assert rooms.masters.keys() == rooms.gradients.keys() == home_of.keys()
    for number in range(len(rounds)):
        taken: set[tuple[int, int]] = set()
        num_bytes = 0
        for starts, num_turns in ((rooms.masters, 3), (rooms.gradients, 2)):
            for names in rounds[max(0, number + 1 - num_turns) : number + 1]:
                for name in names:
                    home, start = home_of[name], starts[name]
                    taken |= {(home.rank, start + at) for at in range(home.num_bytes)}
                    num_bytes += home.num_bytes
                    assert start % 64 == 0
                    assert start + home.num_bytes <= rooms.num_bytes
        assert len(taken) == num_bytes
