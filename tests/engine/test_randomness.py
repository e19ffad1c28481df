"""Masks depend on seed, step, microbatch and the calls that a model makes, and on nothing that happens elsewhere."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.randomness import KeyedRandom
from shardwise.errors import MismatchError
from tests.engine.loops import mean_square, sgd
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import on_ranks, train
from tests.oracle.batches import points, square_loss
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import seeded

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


class Calls(nn.Module):
    """Calls what it is given, and draws at the end."""

    def __init__(self, *inner: nn.Module, act: Callable[..., object] = lambda *_: None) -> None:
        super().__init__()
        self.inner, self.act = nn.ModuleList(inner), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self, x)
        outputs = []
        for each in self.inner:
            with contextlib.suppress(ArithmeticError):
                outputs.append(each(x))
        return torch.stack([*outputs, nn.functional.dropout(x, 0.5)])


def test_what_a_call_draws_depends_neither_on_calls_before_it_nor_on_what_happens_inside() -> None:
    class Failing(nn.Module):
        runs = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            if self.runs:
                raise ArithmeticError
            return x

    block, failing, dropout = Block(), Failing(), nn.Dropout(0.5)
    compiled: Any = torch.compile(block, backend="eager", fullgraph=True)
    one, other, _ = masks(Calls(dropout, dropout))
    assert not torch.equal(one, other)
    assert torch.equal(masks(Calls(compiled, dropout))[-2:], masks(Calls(block, dropout))[-2:])
    for inner in (block, failing):
        model = Calls(nn.Sequential(nn.Identity(), inner), dropout)
        inner.runs = True
        expected = masks(model)[-2:]
        inner.runs = False
        assert torch.equal(masks(model)[-2:], expected)


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


def test_a_model_with_hooks_can_be_copied_pickled_and_saved_and_the_last_engine_over_it_acts() -> None:
    model = seeded(Chain)()
    expected = masks(model)
    random = KeyedRandom(model, CPU, 1)
    second = KeyedRandom(model, CPU, 1)
    with random.stream(0, 0), second.stream(0, 0):
        assert torch.equal(model(ONES), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        torch.manual_seed(3)
        plain = Chain.forward(each, ONES)
        with random.stream(0, 0):
            torch.manual_seed(3)
            assert torch.equal(each(ONES), plain)
        assert torch.equal(masks(each), expected)


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


def engine_of(channel: sw.Channel, k: int = 1, seed: int | None = None, model: Any = Dropping) -> sw.Engine:
    mesh, merge = sw.Mesh(dp_shard=channel.size), sw.Merge(microbatches=k)
    plan = sw.Plan(mesh=mesh, merge=merge, sharding=sw.Sharding(stage=0))
    return sw.parallelize(seeded(model)(), plan, optimizer=sgd, loss=square_loss, channel=channel, seed=seed)


def losses(
    num_ranks: int, k: int, *, seed: int | None = None, restart: bool = False, model_seed: int = 0
) -> list[float]:
    """Of four steps on simulated ranks; `restart`: in two engines, of which the second takes over from the first."""

    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(model_seed + channel.rank)
        engine = engine_of(channel, k, seed)
        reports = []
        for step in range(4):
            if restart and step == 2:
                settings, state = engine.settings(), {piece: value.clone() for piece, value in engine.state().items()}
                torch.manual_seed(99)
                engine = engine_of(channel, k, seed)
                restoration = engine.restore({piece.name: piece for piece in state}, settings)
                for piece, tensor in restoration.wanted.items():
                    tensor.copy_(state[piece])
                restoration.finish()
            before = torch.get_rng_state()
            reports += train(engine, [points(step, 12)])
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
            return super().forward(nn.functional.dropout(x, 0.5))

    engine = engine_of(sw.comm.alone(), model=Always)
    first = engine.evaluate(points(0, 4))
    torch.rand(3)
    assert engine.evaluate(points(0, 4)) == first


def test_ranks_with_different_seeds_refuse_together() -> None:
    assert isinstance(same_error_everywhere(2, lambda channel: engine_of(channel, seed=channel.rank)), MismatchError)


# -- generators of a model's own


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Noise(nn.Module):
    """Adds numbers of a generator that is kept in some way, or that it is given."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.draws_from = keep(self)

    def forward(self, x: torch.Tensor, given: torch.Generator | None = None) -> torch.Tensor:
        # Twice, and of no fixed number: a run more or less shows in every later call.
        given = given or self.draws_from()
        mask = torch.rand(4, generator=given) < 0.5 + 0.1 * torch.rand((), generator=given)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x * mask)))
        return out


class Noisy(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.first, self.noise, self.last = nn.Linear(4, 4), Noise(keep), nn.Linear(4, 1)
        self.drawn = generator() if keep is as_argument else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        output: torch.Tensor = self.last(self.noise(hidden) if self.drawn is None else self.noise(hidden, self.drawn))
        return output


class Sampler:
    def __init__(self) -> None:
        self.source = {"of masks": [generator()]}

    def given(self) -> torch.Generator:
        return self.source["of masks"][0]


def attribute(module: Any) -> Callable[[], torch.Generator]:
    module.generator = generator()
    return lambda: module.generator


def in_containers(module: Any) -> Callable[[], torch.Generator]:
    module.generators = {"masks": (generator(),)}
    return lambda: module.generators["masks"][0]


def in_closure(_: Any) -> Any:
    kept = generator()
    return lambda: kept


def as_argument(_: Any) -> Any:
    return None


KEPT: dict[str, Any] = {
    "attribute": attribute,
    "containers": in_containers,
    "object": lambda _: Sampler().given,
    "closure": in_closure,
    "partial": lambda _: partial(lambda kept: kept, generator()),
    "argument": as_argument,
}
STAGES = sw.Pipeline(stages={"first": 0, "noise": 1, "last": 1})
TENSOR = sw.Tensor(rules={"noise.up": "column", "noise.down": "row"})
AGAIN, TWO = sw.Activations(checkpoint=("noise",)), sw.Merge(microbatches=2)
PLANS = {
    "plain": sw.Plan(),
    "again": sw.Plan(activations=AGAIN, merge=TWO),
    "tp, proof": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR),
    "tp, auto": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
    "pp, k=2": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES, merge=TWO),
    "pp, measured": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance="flops")),
    "pp, again": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES, activations=AGAIN, merge=TWO),
    "tp, stage 3, again": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR, sharding=sw.Sharding(stage=3), activations=AGAIN),
}
TAKEN = [(keep, name) for keep in KEPT for name in PLANS if keep != "argument" or name in ("plain", "again")]


@pytest.mark.parametrize(("keep", "name"), TAKEN)
def test_a_generator_of_the_model_goes_on_as_in_a_plain_loop(keep: str, name: str) -> None:
    plan, make = PLANS[name], seeded(lambda: Noisy(KEPT[keep]))
    batches = [{"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(step))} for step in range(3)]

    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            make(), plan, optimizer=sgd, loss=mean_square, channel=channel, sample={"x": torch.ones(4, 4)}
        )
        return train(engine, batches)

    model, k = make(), plan.merge.microbatches
    expected = train_in_one_process(
        model, sgd(model.parameters()), batches, loss=mean_square, num_microbatches=k
    ).losses
    for found in on_ranks(plan, run):
        assert found == pytest.approx(expected, rel=1e-5)
