"""Masks depend on seed, step, microbatch and the calls that a model makes, and on nothing that happens elsewhere."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.randomness import KeyedRandom
from tests.engine.expected import points, seeded, square_loss
from tests.engine.oracle import share_of

CPU = torch.device("cpu")
ONES = torch.ones(64)


class Block(nn.Module):
    """Draws by a module and by a function."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)
        self.is_checkpointed = is_checkpointed
        self.runs = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.runs:
            return x  # as on a rank that does not have it
        if self.is_checkpointed:
            out: torch.Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return out
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.dropout(self.linear(x)), 0.5)


class Chain(nn.Module):
    """Three calls of two blocks, and a draw between them; may recompute each call as a whole."""

    def __init__(self, *, around: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.first = Block(is_checkpointed=inside)
        self.second = nn.Sequential(Block(is_checkpointed=inside), nn.Dropout(0.5))
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second, self.first):
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
            x = nn.functional.dropout(x, 0.1)
        return x


def masks(model: nn.Module, seed: int = 1, step: int = 0, microbatch: int = 0) -> torch.Tensor:
    random = KeyedRandom(model, CPU, seed)
    with random.stream(step, microbatch):
        out: torch.Tensor = model(ONES)
    return out


def test_a_seed_a_step_and_a_microbatch_have_masks_of_their_own_and_have_them_again() -> None:
    model = nn.Dropout(0.5)
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 11, 0), (1, 1, 10)]
    drawn = [masks(model, *key) for key in keys]
    torch.rand(5)
    assert all(torch.equal(masks(model, *key), mask) for key, mask in zip(keys, drawn, strict=True))
    assert not any(torch.equal(one, other) for at, one in enumerate(drawn) for other in drawn[:at])


def test_what_a_call_draws_does_not_depend_on_what_calls_before_it_drew() -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), nn.Sequential(nn.Identity(), Block()), nn.Dropout(0.5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                block(x)
            out: torch.Tensor = nn.functional.dropout(self.blocks[2](x), 0.5)
            return out

    model = Modes()
    expected = masks(model)
    for block in model.modules():
        if isinstance(block, Block):
            block.runs = False
            assert torch.equal(masks(model), expected)


def test_calls_of_one_module_draw_different_numbers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.dropout(x), self.dropout(x)])

    one, other = masks(Twice())
    assert not torch.equal(one, other)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_recompute_draws_what_the_forward_drew(where: str) -> None:
    def gradients(model: Chain) -> list[torch.Tensor]:
        random = KeyedRandom(model, CPU, 1)
        with random.stream(0, 0):
            model(ONES).sum().backward()
        with random.stream(0, 1):
            loss = model(ONES).sum()
        torch.rand(3)  # backward comes later, out of the stream's turn
        with random.stream(0, 2):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients(seeded(Chain)())
    recomputed = gradients(seeded(lambda: Chain(around=where == "around", inside=where == "inside"))())
    assert len(plain) == 4
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def test_a_stream_goes_on_where_it_was_left_even_in_the_middle_of_a_call() -> None:
    class Parking(nn.Module):
        """Leaves the stream between two draws, in the middle of a call, and lets another one draw."""

        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.park: Callable[[], None] = lambda: None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.5)
            self.park()
            out: torch.Tensor = self.dropout(nn.functional.dropout(x, 0.1))
            return out

    parking = Parking()
    model = nn.Sequential(parking, nn.Dropout(0.1))
    expected = [masks(model, microbatch=0), masks(model, microbatch=1)]
    random = KeyedRandom(model, CPU, 1)
    first, second = random.stream(0, 0), random.stream(0, 1)
    others: list[torch.Tensor] = []

    def park() -> None:
        parking.park = lambda: None
        first.__exit__()
        with second:
            others.append(model(ONES))
        first.__enter__()

    parking.park = park
    with first:
        drawn = model(ONES)
    assert torch.equal(drawn, expected[0])
    assert torch.equal(others[0], expected[1])


def test_a_call_that_fails_leaves_the_stream_as_one_that_ends() -> None:
    class Failing(nn.Module):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            if self.fails:
                raise ArithmeticError
            return x

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Failing())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ArithmeticError):
                self.inner(x)
            return nn.functional.dropout(x, 0.5)

    model = Trying()
    failed = masks(model)
    Failing.fails = False
    assert torch.equal(masks(model), failed)


def test_suspended_calls_draw_nothing() -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.5)).eval()
    random = KeyedRandom(model, CPU, 1)
    with random.stream(0, 0):
        expected = torch.rand(4)
    with random.stream(0, 0):
        with random.suspended():
            model[1](ONES)
        assert torch.equal(torch.rand(4), expected)
    with random.stream(0, 0):
        model[0](ONES)
        assert not torch.equal(torch.rand(4), expected)


def test_the_generator_outside_of_a_stream_draws_as_if_there_were_none() -> None:
    model = Chain()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    masks(model)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(3)
    with pytest.raises(TypeError), KeyedRandom(model, CPU, 1).stream(0, 0):
        model(None)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(3)
    one = model(ONES)
    torch.manual_seed(3)
    assert torch.equal(one, Chain.forward(model, ONES))  # no hook acts there


def test_torch_modules_that_draw_nothing_have_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.LayerNorm(2)), nn.Sequential(nn.Dropout(0.5)))
    changed = nn.Linear(2, 2)
    changed.forward = lambda x: nn.functional.dropout(x, 0.5)  # type: ignore[method-assign, assignment]
    model.append(changed)
    random = KeyedRandom(model, CPU, 1)
    hooked = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    assert hooked == {"", "2", "2.0", "3"}
    assert random.seed == 1


def test_another_engine_over_a_model_takes_the_place_of_the_first() -> None:
    model = Chain()
    first = KeyedRandom(model, CPU, 1)
    second = KeyedRandom(model, CPU, 1)
    assert all(len(module._forward_hooks) <= 1 for module in model.modules())
    with first.stream(0, 0), second.stream(0, 0):
        one = model(ONES)
    assert torch.equal(one, masks(model))


def test_a_model_with_hooks_can_be_copied_pickled_and_saved_and_the_copy_acts_alone() -> None:
    model = seeded(Chain)()
    expected = masks(model)
    random = KeyedRandom(model, CPU, 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for each in copies:
        torch.manual_seed(3)
        plain = Chain.forward(each, ONES)
        with random.stream(0, 0):
            torch.manual_seed(3)
            assert torch.equal(each(ONES), plain)
        assert torch.equal(masks(each), expected)
        assert all(len(module._forward_hooks) <= 1 for module in each.modules())


def test_a_compiled_module_is_one_call_whatever_happens_inside() -> None:
    class Outer(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.block(x).detach() * 0 + x, 0.5)

    block = Block()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(masks(Outer(compiled)), masks(Outer(block)))


# -- in an engine


class Dropping(nn.Module):
    """Every row has a mask of its own, so that a mean over microbatches shows whose masks were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.dropout(self.dropout(self.first(x)), 0.2, self.training))
        return out


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def losses(
    num_ranks: int, k: int, *, seed: int | None = None, restart: bool = False, model_seed: int = 0
) -> list[float]:
    """Of four steps on simulated ranks; `restart`: in two engines, of which the second takes over from the first."""
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), merge=sw.Merge(microbatches=k), sharding=sw.Sharding(stage=0))

    def run(channel: sw.Channel) -> list[float]:
        def build() -> sw.Engine:
            return sw.parallelize(seeded(Dropping)(), plan, optimizer=sgd, loss=square_loss, channel=channel, seed=seed)

        torch.manual_seed(model_seed + channel.rank)
        engine = build()
        reports = []
        for step in range(4):
            if restart and step == 2:
                settings, state = engine.settings(), {piece: value.clone() for piece, value in engine.state().items()}
                torch.manual_seed(99)
                engine = build()
                restoration = engine.restore({piece.name: piece for piece in state}, settings)
                for piece, tensor in restoration.wanted.items():
                    tensor.copy_(state[piece])
                restoration.finish()
            before = torch.get_rng_state()
            reports.append(engine.step(share_of(points(step, 12), channel.rank, num_ranks)).loss)
            engine.evaluate(points(step, 2))
            assert torch.equal(torch.get_rng_state(), before)
        return reports

    first, *others = sw.simulate(num_ranks, run)
    assert all(other == first for other in others)
    return first


def test_masks_do_not_depend_on_how_microbatches_lie_over_data_ranks() -> None:
    expected = losses(1, 4)
    assert losses(2, 2) == pytest.approx(expected, rel=1e-6)
    assert losses(4, 1) == pytest.approx(expected, rel=1e-6)
    assert losses(1, 2) != pytest.approx(expected, rel=1e-3)


def test_without_a_seed_the_masks_are_those_of_the_random_state_of_rank_0() -> None:
    assert losses(2, 1, seed=5, model_seed=7) == losses(2, 1, seed=5, model_seed=8)
    assert losses(2, 1, model_seed=7) == losses(2, 1, seed=7)
    assert losses(2, 1, model_seed=7) != losses(2, 1, model_seed=8)


def test_an_engine_that_is_restored_draws_what_the_saved_one_would_have_drawn() -> None:
    assert losses(1, 2, restart=True) == losses(1, 2)


def test_an_evaluation_draws_the_same_every_time_also_where_it_drops() -> None:
    class Always(Dropping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(nn.functional.dropout(self.first(x), 0.5))
            return out

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(seeded(Always)(), sw.Plan(), optimizer=sgd, loss=square_loss, channel=channel)
        first = engine.evaluate(points(0, 4))
        torch.rand(3)
        assert engine.evaluate(points(0, 4)) == first

    sw.simulate(1, run)


def test_ranks_with_different_seeds_refuse_together() -> None:
    def run(channel: sw.Channel) -> str:
        with pytest.raises(sw.errors.MismatchError) as caught:
            sw.parallelize(
                seeded(Dropping)(),
                sw.Plan(mesh=sw.Mesh(dp_shard=2)),
                optimizer=sgd,
                loss=square_loss,
                channel=channel,
                seed=channel.rank,
            )
        return str(caught.value)

    assert len(set(sw.simulate(2, run))) == 1
