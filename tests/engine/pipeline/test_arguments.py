"""From the second call of one key on, outcomes are replayed; each fact that decides an outcome makes another key."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.covering import covering
from tests.engine.formed import formed, linear
from tests.oracle.pipeline_programs import Block, square, vectors
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

STAGES = {"first": 0, "one": 0, "two": 1, "last": 1}


def engine_of(channel: sw.Channel, net: nn.Module, stages: Any = STAGES) -> sw.Engine:
    """On as many stages as there are ranks."""
    pipeline = sw.Pipeline(stages=stages) if channel.size > 1 else sw.Pipeline()
    plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), pipeline=pipeline)
    return sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)


def mixer(net: Any, x: torch.Tensor, *others: Any, **named: Any) -> Any:
    """Takes what the test gives it, and drops half of it in training mode."""
    out = net.norm(net.block(x)) * (2.0 if net.training else 0.5)
    for each in (*others, *named.values()):
        for part in each if isinstance(each, tuple) else (each,):
            out = out + part.sum().to(out.dtype) if isinstance(part, torch.Tensor) else out * (1 + len(str(part)))
    return out


def mixing(net: Any, x: torch.Tensor) -> Any:
    """What the mixers are given besides the value, and in which region, is the test's."""
    h = net.first(x)
    for each in (net.one, net.two):
        more, named = net.extra(h)
        with net.around():
            h = h + each(h, *more, **named).float()
    return net.last(h)


MIXER = formed(mixer, block=Block, norm=lambda: nn.BatchNorm1d(7))
MIXING = formed(mixing, first=linear(5, 7), one=MIXER, two=MIXER, last=linear(7, 3))


class State(NamedTuple):
    """What the mixers are given, where they run, what is done to the net, and how many rows there are."""

    extra: Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[Any], object] = lambda net: None
    rows: int = 12


def given(*more: Any, **named: Any) -> State:
    """Each is a value, or a function of the hidden value."""

    def of(h: torch.Tensor, each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple([of(h, part) for part in each])
        return each(h) if callable(each) else each

    return State(lambda h: (tuple([of(h, each) for each in more]), {name: of(h, each) for name, each in named.items()}))


PLAIN = given()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast(dtype: torch.dtype) -> State:
    return PLAIN._replace(around=lambda: torch.autocast("cpu", dtype=dtype))


def evaluating(*names: str) -> State:
    """Of each mixer itself, or of a module inside, and no other."""

    def prepare(net: Any) -> None:
        for name in names:
            net.get_submodule(name).training = False

    return PLAIN._replace(prepare=prepare)


def ones(*shape: int, **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: torch.ones(*shape, **settings)


def halves(_: torch.Tensor) -> Any:
    pair = torch.ones(8)
    return (pair[:4], pair[4:]), {}


STATES = [
    PLAIN,
    evaluating("one", "two"),
    evaluating("one.norm", "two.norm"),
    PLAIN._replace(rows=6),
    *(given(ones(2, 3)), given(ones(3, 2)), given(lambda _: torch.ones(3, 2).t())),
    *(given(lambda h: h.clone()), given(lambda h: h.t().contiguous().t()), given(lambda h: h)),
    *(given(lambda h: h.view_as(h)), given(lambda h: h * 2), given(lambda h: (h * 2).detach())),
    *(given(ones(2)), given(ones(2, dtype=torch.float64)), given(ones(2, requires_grad=True))),
    *(given("a"), given("bcd"), given(1), given(True), given(1.0), given(None), given(2)),
    *(given((1, 2), 3), given(1, (2, 3)), given(1, 1), given(a=1), given(b=1)),
    *(given(ones(4), ones(4)), State(halves)),
    PLAIN._replace(around=torch.no_grad),
    *(autocast(torch.bfloat16), autocast(torch.float16)),
    PLAIN._replace(around=lambda: default_dtype(torch.float64)),
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(1, 30))])
def test_every_fact_that_decides_an_outcome_makes_another_key(seed: int) -> None:
    """In any order, each state of the program twice."""
    states = [*STATES, *STATES]
    Random(seed).shuffle(states)

    def run(channel: sw.Channel) -> list[float]:
        net: Any = seeded(MIXING)()
        engine = engine_of(channel, net)
        losses = []
        for state in states:
            net.train()
            net.extra, net.around = state.extra, state.around
            state.prepare(net)
            losses.append(engine.step(vectors(3, state.rows)).loss)
        return losses

    assert sw.simulate(2, run) == sw.simulate(1, run) * 2


GIVINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "values": lambda x, out: out,
    "other values": lambda x, out: out * 3,
    "its input": lambda x, out: x,
    "a view": lambda x, out: x.view_as(x),
    "another shape": lambda x, out: out[:, :1],
    "another dtype": lambda x, out: out.double(),
    "no gradient": lambda x, out: out.detach(),
    "a written input": lambda x, out: x.mul_(2),
    "two values": lambda x, out: (out, out),
}
"""What a module gives, of its input and of what it computes."""


def steps_with(pp: int, before: str, change: str, *, writes: bool, one: int) -> list[list[float]]:
    """From its third call on, a module gives something else than before; nothing in its arguments says so."""

    def changing(net: Any, x: torch.Tensor) -> Any:
        net.num_calls += 1
        return GIVINGS[change if net.num_calls > 2 else before](x, Block.forward(net, x))

    def around(net: Any, x: torch.Tensor) -> Any:
        h = net.one(net.first(x)) * 1
        given = net.two(h)
        given = given[0] if isinstance(given, tuple) else given
        return net.last(h + (given.add_(1.0) if writes else given).float())

    two = formed(changing, base=Block, num_calls=lambda: 0)
    make = formed(around, first=linear(5, 7), one=Block, two=two, last=linear(7, 3))

    def run(channel: sw.Channel) -> list[float]:
        engine = engine_of(channel, seeded(make)(), {**STAGES, "one": one})
        return [engine.step(vectors(3)).loss for _ in range(4)]

    return sw.simulate(pp, run)


ALIKE = ("values", "other values", "its input", "a view")


@pytest.mark.parametrize(
    ("before", "change", "where"),
    [
        each if each[0] in ALIKE else pytest.param(*each, marks=pytest.mark.stress)
        for each in covering(list(GIVINGS), list(GIVINGS), [(False, 0), (True, 0), (True, 1)], strength=2)
    ],
)
def test_an_outcome_that_is_not_as_recorded_is_as_in_one_process_or_refused(
    before: str, change: str, where: tuple[bool, int]
) -> None:
    """Memory and values may differ from call to call; what ranks could not see of it is refused.

    where: whether the program writes to what it is given, and the stage of the module before.
    """
    writes, one = where
    with suppress(RuntimeError):  # where torch refuses it in one process, too
        (wanted,) = steps_with(1, before, change, writes=writes, one=one)
        found: Any = ()
        with suppress(sw.ShardwiseError):
            found = steps_with(2, before, change, writes=writes, one=one)
        may_refuse = writes or before not in ALIKE or change not in ALIKE
        assert found == [wanted, wanted] or (may_refuse and found == ())


REFUSED = Refusals(
    "engine.replays",
    {
        f"{before}, then {change}": partial(steps_with, 2, before, change, writes=writes, one=0)
        for before, change, writes in (
            *(("values", each, False) for each in GIVINGS if each not in ALIKE),
            ("a written input", "values", True),
            ("values", "a view", True),  # the sharing of a later call counts, not that of the first
        )
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_recorded_is_said(case: str) -> None:
    REFUSED.check(case)


def test_a_number_that_is_none_makes_no_new_key_each_time() -> None:
    """It is not even equal to itself. A rank that does not have the module tries it once."""

    def run(channel: sw.Channel) -> list[int]:
        calls: list[int] = []

        def counted(net: Any, x: torch.Tensor, *numbers: Any) -> Any:
            calls.append(1)
            return Block.forward(net, x)

        block = formed(counted, base=Block)
        net: Any = seeded(formed(mixing, first=linear(5, 7), one=block, two=block, last=linear(7, 3)))()
        net.extra, net.around = lambda h: ((float("nan"), complex(0, float("nan"))), {}), nullcontext
        engine = engine_of(channel, net)
        counts = []
        for step in range(3):
            engine.step(vectors(step))
            counts.append(len(calls))
        return counts

    assert sw.simulate(2, run) == [[2, 3, 4]] * 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_one_rank_alone_computes_again_is_news_to_all_afterwards(microbatches: int) -> None:
    """Backward runs a module with an argument that the forward did not have, and the next forward has it."""

    def reading(net: Any, x: torch.Tensor, number: int) -> Any:
        assert x.isfinite().all().item()  # no rank can try it
        return Block.forward(net, x) * number

    def run(channel: sw.Channel) -> list[float]:
        def checkpointed(net: Any, x: torch.Tensor) -> Any:
            runs: list[int] = []

            def region(h: torch.Tensor) -> Any:
                runs.append(1)
                return torch.tanh(net.two(h, net.shift + len(runs) % 2))

            return net.last(checkpoint(region, net.one(net.first(x), 5), use_reentrant=False))

        block = formed(reading, base=Block)
        net: Any = seeded(formed(checkpointed, first=linear(5, 7), one=block, two=block, last=linear(7, 3)))()
        plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=microbatches))
        if channel.size > 1:
            plan = replace(plan, pipeline=sw.Pipeline(stages=STAGES))
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)
        losses = []
        for net.shift in (1, 0, 2, 1):
            losses.append(engine.step(vectors(net.shift)).loss)
        return losses

    assert sw.simulate(2, run) == sw.simulate(1, run) * 2


def test_a_device_without_a_number_is_that_of_the_rank_which_infers(fake: str) -> None:
    """A tensor is made on the device of its rank by the kind alone, as programs do with "cuda"."""

    def run(channel: sw.Channel) -> list[float]:
        def shifted(net: Any, x: torch.Tensor) -> Any:
            return net.layer(x) + torch.ones(x.shape[0], 7, device=channel.device.type)

        shift = formed(shifted, layer=linear(7, 7))
        make = seeded(lambda: nn.Sequential(nn.Linear(5, 7), shift(), shift(), nn.Linear(7, 3)))
        engine = engine_of(channel, make(), {"0": 0, "1": 0, "2": 1, "3": 1})
        return [engine.step(vectors(seed)).loss for seed in range(2)]

    (wanted, _), found = sw.simulate(2, run), sw.simulate(2, run, device=fake)
    assert found[0] == found[1] == pytest.approx(wanted)
