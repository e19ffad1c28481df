"""One tensor between layouts with autograd, against indexing the whole tensor in one process."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.routes.reshard import plan_reshard
from shardwise.space import Piece
from tests.engine.refusals import same_error_everywhere
from tests.moving.layouts import Side, sides, values
from tests.plan.strategies import proven
from tests.refusals import Refusals
from tests.space.plain import elements_of_piece

SHAPE = (4, 6)
X = torch.arange(24.0).view(SHAPE) / 7 - 1


def piece(dtype: str = "float32", **place: Any) -> Piece:
    return Piece(name="x", dtype=dtype, global_shape=SHAPE, **place)


def weight(rank: int, num_elements: int) -> torch.Tensor:
    """What a rank multiplies its target with, so that the order of sums shows in the last bits."""
    return torch.sin(torch.arange(float(num_elements)) + 10.0 * rank) / 3


def whole_side(num_ranks: int) -> st.SearchStrategy[Side]:
    """A layout of x in which every rank has one piece, maybe without elements."""

    def filled(side: Side) -> Side:
        return [each or [piece(run=(0, 0))] for each in side]

    return sides(num_ranks, [("x", "float32", SHAPE)]).map(filled)


def expected_gradients(held: list[Piece], wanted: list[Piece]) -> list[torch.Tensor]:
    """Element by element: the gradient of every target, in rank order, goes to the holder that the plan reads."""
    plan = plan_reshard([[each] for each in held], [[each] for each in wanted])
    gradients = [torch.zeros(each.num_elements) for each in held]
    for _, at in plan.tensors:
        route = plan.routes[at]
        for share in route.shares:
            giver, taker = route.ranks(share)
            factors = weight(taker, wanted[taker].num_elements)
            places = {element: place for place, element in enumerate(elements_of_piece(held[giver]))}
            shared = set(places)
            if share.box is not None:
                shared &= set(elements_of_piece(piece(offset=share.box.offset, shape=share.box.shape)))
            for place, element in enumerate(elements_of_piece(wanted[taker])):
                if element in shared:
                    gradients[giver][places[element]] += factors[place]
    return gradients


@proven
@given(st.integers(1, 4).flatmap(lambda size: st.tuples(whole_side(size), whole_side(size))), st.integers(64, 200))
def test_values_and_gradients_are_those_of_one_process(both: tuple[Side, Side], max_bytes: int) -> None:
    held, wanted = ([each[0] for each in side] for side in both)

    def move(channel: sw.Channel) -> torch.Tensor:
        mine, wants = held[channel.rank], wanted[channel.rank]
        x = values(mine, X).requires_grad_()
        y = sw.reshard_tensor(x, mine, wants, channel, max_bytes=max_bytes)
        assert torch.equal(y, values(wants, X))
        assert y.requires_grad
        (y.flatten() * weight(channel.rank, y.numel())).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        return x.grad.flatten()

    for gradient, expected in zip(sw.simulate(len(held), move), expected_gradients(held, wanted), strict=True):
        assert torch.equal(gradient, expected)


def test_several_pieces_of_one_tensor_on_one_rank() -> None:
    columns = [piece(offset=(0, at), shape=(4, 2)) for at in (0, 2, 4)]

    def move(channel: sw.Channel) -> list[list[float]]:
        mine = columns[:2] if channel.rank == 0 else columns[2:]
        tensors = [values(each, X).requires_grad_() for each in mine]
        runs = [piece(run=(0, 5)), piece(run=(3, 24))] if channel.rank == 1 else [piece(run=(0, 0))]
        results = sw.reshard_tensor(tensors, mine, runs, channel)
        assert [each.tolist() for each in results] == [values(each, X).tolist() for each in runs]
        sum(each.sum() for each in results).backward()  # type: ignore[union-attr]
        return [each.grad.flatten().tolist() for each in tensors if each.grad is not None]

    # Elements 3 and 4, the last of the second columns and the first of the third, go to both runs.
    assert sw.simulate(2, move) == [[[1.0] * 8, [1.0, 2.0] + [1.0] * 6], [[2.0] + [1.0] * 7]]


def test_without_gradients_nothing_is_recorded() -> None:
    def move(channel: sw.Channel) -> bool:
        with torch.no_grad():
            y = sw.reshard_tensor(X.clone().requires_grad_(), piece(), piece(), channel)
        indices = torch.arange(24).view(SHAPE)
        assert torch.equal(sw.reshard_tensor(indices, piece("int64"), piece("int64"), channel), indices)
        return y.requires_grad or sw.reshard_tensor(X, piece(), piece(), channel).requires_grad

    assert sw.simulate(2, move) == [False, False]


def wrongly(
    *, sources: list[Piece] | None = None, targets: list[Piece] | None = None, mode: Any = torch.enable_grad
) -> None:
    """Rank 1 asks for something else than rank 0, whose tensor needs a gradient."""

    def move(channel: sw.Channel) -> None:
        held, wanted = [piece()], [piece()]
        if channel.rank == 1:
            held, wanted = held if sources is None else sources, wanted if targets is None else targets
        with mode() if channel.rank == 1 else torch.enable_grad():
            sw.reshard_tensor([X.clone().requires_grad_(channel.rank == 0)], held, wanted, channel)

    raise same_error_everywhere(2, move)


REFUSED = Refusals(
    "moving.reshard_tensor",
    {
        "no gradient on one rank": lambda: wrongly(mode=torch.no_grad),
        "no piece": lambda: wrongly(targets=[]),
        "another dtype": lambda: wrongly(targets=[piece("float16")]),
        "two pieces of one tensor": lambda: wrongly(sources=[piece(), piece()]),
        "two tensors": lambda: wrongly(targets=[Piece(name="z", dtype="float32", global_shape=(0,))]),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_alike(case: str) -> None:
    REFUSED.check(case)


def test_a_second_derivative_is_refused() -> None:
    def move(channel: sw.Channel) -> None:
        x = X.clone().requires_grad_()
        y = sw.reshard_tensor(x, piece(), piece(), channel)
        (gradient,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    sw.simulate(1, move)
