"""From the second call of one key on, outcomes are replayed; each fact that decides an outcome makes another key."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.expected import seeded
from tests.engine.pipeline.models import VECTORS, Block, square, vectors
from tests.engine.pipeline.oracle import adamw

STAGES = {"first": 0, "one": 0, "two": 1, "last": 1}


class Mixer(nn.Module):
    """Takes what the test gives it, and drops half of it in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.block(x)) * (2.0 if self.training else 0.5)
        for each in (*others, *named.values()):
            parts = each if isinstance(each, tuple) else (each,)
            for part in parts:
                out = out + part.sum().to(out.dtype) if isinstance(part, torch.Tensor) else out * (1 + len(str(part)))
        return out


Extra = Callable[[torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


class Net(nn.Module):
    """What the mixers are given besides the value, and in which region, is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.one, self.two = Mixer(), Mixer()
        self.last = nn.Linear(7, 3)
        self.extra: Extra = plain
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for mixer in (self.one, self.two):
            more, named = self.extra(h)
            with self.around():
                h = h + mixer(h, *more, **named).float()
        out: torch.Tensor = self.last(h)
        return out


def plain(_: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {}


def given(*more: Any, **named: Any) -> Extra:
    """Each is a value, or a function of the hidden value."""

    def of(h: torch.Tensor, each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple([of(h, part) for part in each])
        return each(h) if callable(each) else each

    return lambda h: (tuple([of(h, each) for each in more]), {name: of(h, each) for name, each in named.items()})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype)


def with_extra(extra: Extra) -> Callable[[Net], None]:
    return lambda net: setattr(net, "extra", extra)


def with_around(around: Callable[[], Any]) -> Callable[[Net], None]:
    return lambda net: setattr(net, "around", around)


def frozen_norms(net: Net) -> None:
    net.one.norm.eval()
    net.two.norm.eval()


def evaluating(net: Net) -> None:
    # The mixers alone: the modules inside stay in training mode.
    net.one.training = net.two.training = False


def ones(*shape: int, **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: torch.ones(*shape, **settings)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Two states of the program that differ in one fact."""

    before: Callable[[Net], None] = lambda net: None
    after: Callable[[Net], None]
    rows: int = 12
    """In the batches afterwards."""


FACTS: dict[str, Fact] = {
    "mode of the module": Fact(after=evaluating),
    "mode of a module inside": Fact(after=frozen_norms),
    "shape": Fact(after=lambda net: None, rows=6),
    "shape of an argument": Fact(before=with_extra(given(ones(2, 3))), after=with_extra(given(ones(3, 2)))),
    "strides": Fact(before=with_extra(given(ones(2, 3))), after=with_extra(given(lambda _: torch.ones(3, 2).t()))),
    "strides of a value": Fact(
        before=with_extra(given(lambda h: h.clone())), after=with_extra(given(lambda h: h.t().contiguous().t()))
    ),
    "dtype": Fact(before=with_extra(given(ones(2))), after=with_extra(given(ones(2, dtype=torch.float64)))),
    "gradient": Fact(before=with_extra(given(ones(2))), after=with_extra(given(ones(2, requires_grad=True)))),
    "gradient of a value": Fact(
        before=with_extra(given(lambda h: h * 2)), after=with_extra(given(lambda h: (h * 2).detach()))
    ),
    "plain value": Fact(before=with_extra(given("a")), after=with_extra(given("bcd"))),
    "type of a plain value": Fact(before=with_extra(given(1)), after=with_extra(given(True))),
    "integer and float": Fact(before=with_extra(given(1)), after=with_extra(given(1.0))),
    "none and value": Fact(before=with_extra(given(None)), after=with_extra(given(2))),
    "structure": Fact(before=with_extra(given((1, 2), 3)), after=with_extra(given(1, (2, 3)))),
    "number of arguments": Fact(before=with_extra(given(1)), after=with_extra(given(1, 1))),
    "keyword": Fact(before=with_extra(given(a=1)), after=with_extra(given(1))),
    "name of a keyword": Fact(before=with_extra(given(a=1)), after=with_extra(given(b=1))),
    "one object twice": Fact(before=with_extra(given(lambda h: h.clone())), after=with_extra(given(lambda h: h))),
    "shared memory": Fact(
        before=with_extra(given(lambda h: h.clone())), after=with_extra(given(lambda h: h.view_as(h)))
    ),
    "shared memory of plain tensors": Fact(
        before=with_extra(given(ones(4), ones(4))),
        after=with_extra(lambda _: ((pair := torch.ones(8))[:4], pair[4:]) and ((pair[:4], pair[4:]), {})),
    ),
    "grad mode": Fact(after=with_around(torch.no_grad)),
    "autocast": Fact(after=with_around(autocast(torch.bfloat16))),
    "dtype of autocast": Fact(before=with_around(autocast(torch.bfloat16)), after=with_around(autocast(torch.float16))),
    "default dtype": Fact(after=with_around(lambda: default_dtype(torch.float64))),
}


def num_known(engine: sw.Engine, *names: str) -> int:
    """Keys of calls of these modules."""
    keys: Any = () if engine.pipeline is None else engine.pipeline.replay.known
    return sum(isinstance(key[0], tuple) and key[0][0].name in names for key in keys)


def train(fact: Fact, *, pp: int) -> list[tuple[list[float], list[int]]]:
    """Losses of the steps and known keys of the mixers, on each rank: twice before, twice after, once as before."""

    def run(channel: sw.Channel) -> tuple[list[float], list[int]]:
        net = seeded(Net)()
        pipeline = sw.Pipeline(stages=STAGES) if pp > 1 else sw.Pipeline()
        plan = sw.Plan(mesh=sw.Mesh(pp=pp), pipeline=pipeline)
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)
        losses, recorded = [], []
        for state in ("before", "before", "after", "after", "before"):
            net.train()
            net.extra, net.around = plain, nullcontext
            (fact.before if state == "before" else fact.after)(net)
            losses.append(engine.step(vectors(3, 12 if state == "before" else fact.rows)).loss)
            recorded.append(num_known(engine, "one", "two"))
        return losses, recorded

    return sw.simulate(pp, run)


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_that_changes_makes_another_key(fact: str) -> None:
    ((wanted, _),) = train(FACTS[fact], pp=1)
    for losses, known in train(FACTS[fact], pp=2):
        assert losses == wanted
        assert known == [2, 2, 4, 4, 4]


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda inner: inner.register_forward_pre_hook(lambda *_: None),
    "after": lambda inner: inner.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("place", HOOKS)
def test_hooks_on_modules_inside_are_seen(place: str) -> None:
    def run(channel: sw.Channel) -> list[tuple[int, int]]:
        net = seeded(Net)()
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=STAGES))
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)
        assert engine.pipeline is not None
        seen = []
        handle: Any = None
        for change in ("none", "none", "put on", "none", "exchanged", "taken off"):
            replayed = engine.pipeline.replay.num_replayed
            if change == "put on":
                handle = HOOKS[place](net.one.block)
            elif change == "exchanged":
                former, handle = handle, HOOKS[place](net.one.block)
                former.remove()
            elif change == "taken off":
                handle.remove()
            engine.step(vectors(3))
            seen.append((num_known(engine, "one"), engine.pipeline.replay.num_replayed - replayed))
        return seen

    for first, again, put_on, as_before, exchanged, taken_off in sw.simulate(2, run):
        assert first[0] == again[0] == 1
        all_calls = again[1]
        if place == "before":
            assert (put_on[0], exchanged[0]) == (2, 3)
            assert put_on[1] == exchanged[1] == all_calls - 1
            assert as_before[1] == all_calls
        else:
            # What hooks see goes to all ranks after the call: such calls go the long way.
            assert put_on == as_before == exchanged == (1, all_calls - 1)
        assert taken_off[1] == all_calls


Giving = Callable[[torch.Tensor, torch.Tensor], Any]
"""What a module gives, of its input and of what it computes."""


class Changing(nn.Module):
    """From its third call on, gives something else than before; nothing in its arguments says so."""

    def __init__(self, change: Giving, before: Giving) -> None:
        super().__init__()
        self.block = Block()
        self.change = change
        self.before = before
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        return (self.change if self.num_calls > 2 else self.before)(x, self.block(x))


class Around(nn.Module):
    def __init__(self, change: Giving, before: Giving) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(5, 7), Block()
        self.two, self.last = Changing(change, before), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(self.first(x)) * 1
        out: torch.Tensor = self.last(h + self.two(h))
        return out


def computed(_: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out


def steps_with(change: Giving, pp: int, before: Giving = computed) -> list[tuple[list[float], list[int]]]:
    def run(channel: sw.Channel) -> tuple[list[float], list[int]]:
        net = seeded(lambda: Around(change, before))()
        pipeline = sw.Pipeline(stages=STAGES) if pp > 1 else sw.Pipeline()
        plan = sw.Plan(mesh=sw.Mesh(pp=pp), pipeline=pipeline)
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)
        losses = [engine.step(vectors(3)).loss for _ in range(4)]
        return losses, [] if engine.pipeline is None else [engine.pipeline.replay.num_unlike]

    return sw.simulate(pp, run)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, out: out[:, :1],
        lambda x, out: out.double(),
        lambda x, out: out.detach(),
        lambda x, out: x.mul_(2),
        lambda x, out: (out, out),
    ],
    ids=["shape", "dtype", "gradient", "write", "number"],
)
def test_an_outcome_that_is_not_as_recorded_is_refused(change: Giving) -> None:
    with pytest.raises(sw.ShardwiseError, match=r"'two' (gave|writes in place)"):
        steps_with(change, pp=2)


@pytest.mark.parametrize(
    ("change", "num_unlike"),
    [(lambda x, out: out * 3, 0), (lambda x, out: x, 2), (lambda x, out: x.view_as(x), 2)],
    ids=["values", "input", "view"],
)
def test_other_values_and_other_sharing_are_as_in_one_process(change: Giving, num_unlike: int) -> None:
    ((wanted, _),) = steps_with(change, pp=1)
    first, second = steps_with(change, pp=2)
    assert first[0] == second[0] == wanted
    # The rank that executes the call compares memory; the other one executes nothing.
    assert (first[1], second[1]) == ([0], [num_unlike])


@pytest.mark.parametrize("before", [lambda x, out: x, lambda x, out: x.view_as(x)], ids=["input", "view"])
def test_a_module_that_is_left_out_at_first_is_computed_later(before: Giving) -> None:
    ((wanted, _),) = steps_with(computed, pp=1, before=before)
    for losses, _ in steps_with(computed, pp=2, before=before):
        assert losses == wanted


def writing(self: Around, x: torch.Tensor) -> torch.Tensor:
    h = self.one(self.first(x)) * 1
    given = self.two(h).add_(1.0)
    out: torch.Tensor = self.last(h + given)
    return out


@pytest.mark.parametrize("before", [lambda x, out: x, lambda x, out: x.view_as(x)], ids=["input", "view"])
def test_new_memory_where_other_ranks_assume_a_view_may_be_written_to(
    before: Giving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Around, "forward", writing)
    monkeypatch.setitem(STAGES, "one", 1)  # what crosses to the stage may not be written to through a view
    ((wanted, _),) = steps_with(computed, pp=1, before=before)
    for losses, _ in steps_with(computed, pp=2, before=before):
        assert losses == wanted


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        (lambda x, out: x.mul_(2), computed, "'two' gave an input that it wrote to before"),
        # The sharing of a later call counts, not that of the first.
        (computed, lambda x, out: x.view_as(x), "writes in place to what 'two' gave or was given"),
    ],
    ids=["written input", "view later"],
)
def test_memory_that_is_not_as_recorded_is_refused_where_it_matters(
    before: Giving, change: Giving, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Around, "forward", writing)
    with pytest.raises(ModelError, match=message):
        steps_with(change, pp=2, before=before)


@pytest.mark.parametrize(("schedule", "pp", "k"), [("1f1b", 2, 4), ("interleaved", 2, 4)])
def test_every_signature_is_inferred_once_and_all_other_calls_are_replayed(schedule: str, pp: int, k: int) -> None:
    names = ("first", *(f"blocks.{at}" for at in range(6)), "last")

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = h + block(h)
            return F.relu(self.last(h))

    num_stages = pp * (2 if schedule == "interleaved" else 1)
    stages = {name: at * num_stages // len(names) for at, name in enumerate(names)}

    def run(channel: sw.Channel) -> tuple[int, ...]:
        plan = sw.Plan(
            mesh=sw.Mesh(pp=pp),
            merge=sw.Merge(microbatches=k),
            pipeline=sw.Pipeline(stages=stages, schedule=schedule),
        )
        engine = sw.parallelize(seeded(Deep)(), plan, optimizer=adamw, loss=square, channel=channel)
        runner = engine.pipeline
        assert runner is not None
        for batch in VECTORS:
            engine.step(batch)
        return (
            runner.inference.num_tried,
            runner.inference.num_lookups,
            runner.replay.num_recorded,
            runner.replay.num_replayed,
            runner.replay.num_unlike,
        )

    # 6 sums, relu, and the loss.
    num_operations = 6 + 1 + 1
    for tried, lookups, recorded, replayed, unlike in sw.simulate(pp, run):
        # Blocks are alike, so are their sums with and without the first: by gradient and leaf they are one signature.
        assert tried <= 3 + num_operations
        assert lookups == recorded
        assert recorded + replayed == 3 * k * (len(names) + num_operations)
        assert recorded < 2 * (len(names) + num_operations)
        assert unlike == 0


class Drawing(nn.Module):
    """Dropout between and after blocks whose hooks draw too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.one, self.two = Block(), Block()
        self.drop = nn.Dropout(0.5)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.one(self.first(x)))
        h = h + self.two(h)
        self.drawn.append(float(torch.rand(())))
        out: torch.Tensor = self.last(h)
        return out


@pytest.mark.parametrize("place", ["none", "module", "inside"])
def test_hooks_that_draw_find_the_stream_of_their_call_on_every_rank(place: str) -> None:
    stages = {"first": 0, "one": 0, "drop": 1, "two": 1, "last": 1}

    def run(channel: sw.Channel) -> tuple[list[float], list[float]]:
        net = seeded(Drawing)()
        for block in (net.one, net.two) if place != "none" else ():
            at = block if place == "module" else block.inner
            at.register_forward_hook(lambda *_: net.drawn.append(float(torch.rand(()))))
        pipeline = sw.Pipeline(stages=stages) if channel.size > 1 else sw.Pipeline()
        plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=2), pipeline=pipeline)
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel)
        losses = [engine.step(batch).loss for batch in VECTORS]
        return losses, sorted(net.drawn)

    wanted = sw.simulate(1, run)[0]
    assert sw.simulate(2, run) == [wanted, wanted]


class Shifted(nn.Linear):
    """Makes a tensor on the device of its rank by the kind alone, as programs do with "cuda"."""

    def __init__(self, kind: str) -> None:
        super().__init__(7, 7)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.ones(x.shape[0], 7, device=self.kind)


def test_a_device_without_a_number_is_that_of_the_rank_which_infers(fake: str) -> None:
    def run(channel: sw.Channel) -> list[float]:
        kind = channel.device.type
        make = lambda: nn.Sequential(nn.Linear(5, 7), Shifted(kind), Shifted(kind), nn.Linear(7, 3))  # noqa: E731
        pipeline = sw.Pipeline(stages={"0": 0, "1": 0, "2": 1, "3": 1})
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=pipeline)
        engine = sw.parallelize(seeded(make)(), plan, optimizer=adamw, loss=square, channel=channel)
        return [engine.step(vectors(seed)).loss for seed in range(2)]

    (wanted, _), found = sw.simulate(2, run), sw.simulate(2, run, device=fake)
    assert found[0] == found[1] == pytest.approx(wanted)
