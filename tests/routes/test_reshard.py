"""Reshard plans, against the plain question: which elements come from where, one by one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.routes.reshard import plan_reshard
from shardwise.routes.reshard_plan import Lot, ReshardPlan, batches_of, message_bytes
from shardwise.space import Box, Piece
from shardwise.space.moves import BlockPart
from tests.costs import calls_in
from tests.plan.strategies import proven
from tests.space.plain import Shape, elements_of_box, elements_of_piece, pieces_of, shapes

Sides = tuple[list[list[Piece]], list[list[Piece]]]


@st.composite
def sides(draw: st.DrawFn, *, everything: bool) -> Sides:
    """What 1 to 4 ranks hold and want of 1 to 3 tensors: any pieces. everything: somebody holds each tensor whole."""
    num_ranks = draw(st.integers(1, 4))
    held: list[list[Piece]] = [[] for _ in range(num_ranks)]
    wanted: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = draw(shapes().filter(lambda shape: len(shape) <= 3))
        for side in (held, wanted):
            for pieces in side:
                pieces += draw(st.lists(pieces_of(shape, name), max_size=2))
        if everything:
            cut = draw(cuts(name, shape))
            for at, piece in enumerate(cut):
                held[(draw(st.integers(0, num_ranks - 1)) + at) % num_ranks].append(piece)
    return held, wanted


def cuts(name: str, shape: Shape) -> st.SearchStrategy[list[Piece]]:
    """The tensor as a whole, or in two along a dim, or in two runs."""

    def half(first: bool, dim: int) -> Piece:
        low = shape[dim] // 2
        offset, size = (0, low) if first else (low, shape[dim] - low)
        box = [*shape[:dim], size, *shape[dim + 1 :]]
        return Piece(
            name=name,
            dtype="float32",
            global_shape=shape,
            offset=[0] * dim + [offset] + [0] * (len(shape) - dim - 1),
            shape=box,
        )

    whole = Piece(name=name, dtype="float32", global_shape=shape)
    size = whole.num_elements
    choices = [[whole], [whole.within(0, size // 3), whole.within(size // 3, size)]]
    choices += [[half(True, dim), half(False, dim)] for dim in range(len(shape))]
    return st.sampled_from(choices)


def of_name(pieces: list[list[Piece]], name: str) -> list[tuple[int, Piece]]:
    return [(rank, piece) for rank, each in enumerate(pieces) for piece in each if piece.name == name]


@proven
@given(sides(everything=True))
def test_every_element_that_is_wanted_comes_once_from_its_place_in_one_holder(given_sides: Sides) -> None:
    held, wanted = given_sides
    plan = plan_reshard(held, wanted)
    routes = {name: plan.routes[at] for name, at in plan.tensors}
    for name in {piece.name for each in wanted for piece in each}:
        sources, targets = of_name(held, name), of_name(wanted, name)
        came: list[dict[int, int]] = [{} for _ in targets]
        for share in routes[name].shares if name in routes else ():
            rank, source = sources[share.source]
            to, target = targets[share.target]
            assert routes[name].ranks(share) == (rank, to)
            elements = elements_of_piece(source)
            own = {each for holder, piece in sources if holder == to for each in elements_of_piece(piece)}
            for move in routes[name].moves(share):
                out = [
                    move.source.start + at for at in elements_of_box(move.source.block, box(move.source, move.shape))
                ]
                put = [
                    move.target.start + at for at in elements_of_box(move.target.block, box(move.target, move.shape))
                ]
                for taken, place in zip(out, put, strict=True):
                    assert place not in came[share.target]
                    came[share.target][place] = elements[taken]
                    assert rank == to or elements[taken] not in own
        for (_, target), places in zip(targets, came, strict=True):
            assert [places[place] for place in range(target.num_elements)] == elements_of_piece(target)


def box(part: BlockPart, shape: Shape) -> Box:
    return Box(part.offset, shape)


@proven
@given(sides(everything=False))
def test_what_nobody_holds_is_found_in_every_tensor(given_sides: Sides) -> None:
    held, wanted = given_sides
    lacking: dict[str, tuple[int, int]] = {}
    for rank, pieces in enumerate(wanted):
        for piece in pieces:
            there = {each for _, source in of_name(held, piece.name) for each in elements_of_piece(source)}
            missing = [each for each in elements_of_piece(piece) if each not in there]
            if missing:
                lacking.setdefault(piece.name, (rank, len(missing)))
    if not lacking:
        plan_reshard(held, wanted)
        return
    with pytest.raises(PlanError) as error:
        plan_reshard(held, wanted)
    named: list[str] = []
    for problem in error.value.problems:
        names, _, finding = problem.partition(": ")
        for name in names.split(", "):
            rank, number = lacking[name]
            assert f"rank {rank} wants" in finding
            assert "no rank holds a tensor of this name" in finding or f"no rank holds {number} of its" in finding
            named.append(name)
    assert sorted(named) == sorted(lacking)


@proven
@given(sides(everything=True), st.sampled_from(["int8", "float32", "complex128"]), st.integers(64, 400), st.booleans())
def test_batches_have_every_element_once_and_no_more_bytes_than_they_may(
    given_sides: Sides, dtype: str, max_bytes: int, in_order: bool
) -> None:
    held, wanted = ([[replace(each, dtype=dtype) for each in pieces] for pieces in side] for side in given_sides)
    plan = plan_reshard(held, wanted, max_bytes=max_bytes)
    gone: dict[tuple[int, int], list[int]] = {}
    order: list[tuple[int, int]] = []
    for batch in batches_of(plan, in_order=in_order):
        out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
        for lot in batch:
            route = plan.routes[plan.tensors[lot.tensor][1]]
            for at in range(len(route.shares)) if lot.share is None else [lot.share]:
                share = route.shares[at]
                start, stop = lot.bounds(share.num_elements)
                gone.setdefault((lot.tensor, at), []).extend(range(start, stop))
                order.append((lot.tensor, at))
                giver, taker = route.ranks(share)
                if giver != taker:
                    out[giver] += message_bytes(stop - start, route.dtype)
                    into[taker] += message_bytes(stop - start, route.dtype)
        assert max(*out, *into) <= max_bytes // 4
    shares = {
        (tensor, at): list(range(share.num_elements))
        for tensor, (_, route) in enumerate(plan.tensors)
        for at, share in enumerate(plan.routes[route].shares)
    }
    assert gone == shares
    assert not in_order or order == sorted(order)


def piece(name: str = "w", whole: Shape = (8, 4), dtype: str = "float32", **place: object) -> Piece:
    return Piece(name=name, dtype=dtype, global_shape=whole, **place)  # type: ignore[arg-type]


def test_replicas_are_read_from_the_rank_itself_else_from_the_holder_with_least_to_send() -> None:
    names = [f"layers.{layer}" for layer in range(9)]
    held = [[piece(name) for name in names] for _ in range(3)] + [[], []]
    wanted = [[piece(name) for name in names], [], [], [piece(name) for name in names], [piece("layers.0")]]
    plan = plan_reshard(held, wanted)
    of = {name: plan.routes[at] for name, at in plan.tensors}
    givers = [of[name].ranks(share) for name in names for share in of[name].shares]
    assert sum(giver == taker == 0 for giver, taker in givers) == 9
    sent = plan.sent_bytes()
    assert sum(sent) == 10 * 32 * 4
    assert sorted(sent[:3]) == [3 * 128, 3 * 128, 4 * 128]
    assert sent[3:] == [0, 0]


def test_the_narrower_dtype_travels() -> None:
    half = piece(dtype="bfloat16")
    assert plan_reshard([[piece()], []], [[], [half]], cast=True).sent_bytes() == [64, 0]
    assert plan_reshard([[half], []], [[], [piece()]], cast=True).sent_bytes() == [64, 0]


def test_planning_takes_four_times_as_many_calls_for_four_times_as_many_tensors() -> None:
    def plan_all(num_tensors: int) -> tuple[ReshardPlan, list[list[Lot]]]:
        tensors = [f"layers.{at}" for at in range(num_tensors)]
        held, wanted = (
            [[piece(name, (64, 64), "bfloat16", **place(rank)) for name in tensors] for rank in range(8)]
            for place in (
                lambda rank: {"run": (512 * rank, 512 * rank + 512)},
                lambda rank: {"offset": (0, 8 * rank), "shape": (64, 8)},
            )
        )
        plan = plan_reshard(held, wanted)
        return plan, list(batches_of(plan))

    plan, batches = plan_all(400)
    assert len(plan.routes) == 1
    assert sum(map(len, batches)) == 400
    assert len(plan.text()) < 100 * 400
    assert calls_in(lambda: plan_all(400)) < 4.1 * calls_in(lambda: plan_all(100))
