"""From a batch to losses: what is split how, what a model is called with, lists of microbatches, and refusals."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.forward.batches import LossOfModel
from shardwise.errors import SameRowsWarning, ShardwiseError
from tests.engine.channels import SharesMemory
from tests.engine.given_words import (
    Inputs,
    Sides,
    accumulated,
    count_words,
    entries,
    measured,
    word_metrics,
    words,
)
from tests.engine.loops import assert_alike, begun, plan_of
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import points, square_loss
from tests.oracle.decoder import DECODER, decoder
from tests.oracle.one_process import Trained
from tests.oracle.program import adamw
from tests.oracle.program import plan_of as plan_of_program
from tests.refusals import Refusals

CPU = torch.device("cpu")
STRESS = pytest.mark.stress
TWO = plan_of("dp_shard=2", k=3)


class ShiftsItsLabels(nn.Module):
    """Writes to what it is given, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        labels.masked_fill_(labels == 0, 1)
        labels[:, 1:] = labels[:, :-1].clone()
        logits = self.out(torch.tanh(self.embed(words) + self.embed(labels)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())}


@pytest.mark.parametrize("schedule", ["1f1b", "fthenb"])
def test_a_model_that_writes_to_its_microbatch_trains_on_stages_as_in_one_process(schedule: str) -> None:
    def run(channel: sw.Channel) -> tuple[list[float], list[int]]:
        plan = plan_of(f"pp={channel.size}", k=3, schedule=schedule, stages={"embed": 0, "out": 1})
        engine = begun(channel, ShiftsItsLabels, plan, loss=None, optimizer=adamw)
        batch = {"words": torch.arange(30).view(6, 5) % 11, "labels": torch.arange(30).view(6, 5) % 7}
        return [engine.step(batch).loss for _ in range(3)], batch["labels"].flatten().tolist()

    assert sw.simulate(2, run) == sw.simulate(1, run) * 2


class Called(nn.Module):
    """Remembers what it was called with, and gives what it was told to."""

    def __init__(self, gives: Callable[[torch.Tensor], Any] = lambda weight: weight * 2) -> None:
        super().__init__()
        self.weight, self.gives = nn.Parameter(torch.tensor(3.0)), gives
        self.calls: list[Any] = []

    def forward(self, *args: Any, **entries: Any) -> Any:
        self.calls.append((args, entries))
        return self.gives(self.weight)


class TakesOne(Called):
    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens)


class TakesMask(Called):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return super().forward(x, mask)


class TakesTwo(Called):
    def forward(self, one: Any, two: Any) -> Any:
        return super().forward(one, two)


X, Y, Z = torch.ones(2, 3), torch.zeros(2), torch.full((2,), 2.0)
INPUTS, SIDES = Inputs(x=X, more=Z), Sides(X, Y)
CALLS: list[tuple[type[Called], Any, tuple[Any, ...], dict[str, Any]]] = [
    (TakesOne, {"x": X, "y": Y}, (X,), {}),
    (TakesOne, {"token": X, "labels": Y}, (X,), {}),
    (TakesMask, {"x": X, "y": Y}, (X, None), {}),
    (TakesMask, {"x": X, "y": Y, "mask": Z}, (X, Z), {}),
    (Called, {"x": X, "y": Y}, (), {"x": X, "y": Y}),
    (TakesOne, X, (X,), {}),
    (TakesOne, [X, Y], (X,), {}),
    (TakesOne, (X, Y, Z), (X,), {}),
    (TakesOne, ([X, Z], Y), ([X, Z],), {}),
    (TakesOne, INPUTS, (INPUTS,), {}),
    (TakesOne, SIDES, (X,), {}),
    (TakesOne, ({"tokens": X, "mask": Z}, Y), (X,), {}),
    (TakesMask, (X, Y), (X, None), {}),
    (TakesMask, ((X, Z), Y), (X, Z), {}),
    (TakesMask, ({"x": X, "mask": Z, "other": 3}, Y), (X, Z), {}),
    (TakesMask, INPUTS, (X, None), {}),
    (TakesTwo, (X, Z, Y), (X, Z), {}),
    (TakesTwo, (X, Z), (X, Z), {}),
    (TakesTwo, ((X, Z), Y), (X, Z), {}),
    (Called, (X, Y), (X,), {}),
    (Called, ({"x": X, "mask": Z}, Y), (), {"x": X, "mask": Z}),
]
WHOLE = [((X, Y), (X, Y)), ([X, Y], (X, Y)), (INPUTS, (INPUTS,)), (X, (X,)), (SIDES, (X, Y))]
"""What a model gets that computes its own loss."""


def called_with(kind: type[Called], batch: Any, loss: Any = lambda output: output) -> Any:
    """What a batch is called with, and what the loss function is shown."""
    model, shown = kind(), list[Any]()

    def see(output: Any, whole: Any) -> Any:
        shown.append(whole)
        return loss(output)

    LossOfModel(model, loss and see)(batch)
    [(args, entries)] = model.calls
    return identities(args), {name: id(each) for name, each in entries.items()}, identities(shown)


def identities(values: Any) -> list[int]:
    """Of values and of those in lists, which are lists of the call's own."""
    return [inner for each in values for inner in (identities(each) if isinstance(each, list) else [id(each)])]


@pytest.mark.parametrize(("kind", "batch", "args", "entries"), CALLS)
def test_a_loss_function_leaves_the_model_its_inputs(kind: Any, batch: Any, args: Any, entries: Any) -> None:
    named = {name: id(each) for name, each in entries.items()}
    assert called_with(kind, batch) == (identities(args), named, identities([batch]))


@pytest.mark.parametrize(("batch", "args"), WHOLE)
def test_without_a_loss_function_the_model_gets_the_whole_microbatch(batch: Any, args: Any) -> None:
    assert called_with(Called, batch, None) == (identities(args), {}, [])


def test_a_hook_before_the_forward_may_give_what_the_batch_lacks() -> None:
    model = TakesMask()
    engine = sw.parallelize(model, sw.Plan(), optimizer=adamw)
    with pytest.raises(ShardwiseError, match="the batch has y; x is missing"):
        engine.step({"y": X})
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {"x": kwargs.pop("y"), **kwargs}), with_kwargs=True)
    engine.step({"y": X})
    [(args, _)] = model.calls
    assert torch.equal(args[0], X)


@pytest.mark.parametrize(
    "gives",
    [
        lambda weight: weight * 1,
        lambda weight: (weight * 1).reshape(1, 1),
        lambda weight: {"loss": weight * 1, "logits": None},
        lambda weight: SimpleNamespace(loss=weight * 1),
    ],
)
def test_without_a_loss_function_the_model_gives_its_loss(gives: Any) -> None:
    loss = LossOfModel(Called(gives), None)({"x": torch.ones(2)})
    assert loss.shape == ()
    assert loss.requires_grad
    assert loss == 3.0


def gave(gives: Any, *, in_loss: bool = False) -> None:
    model, loss = (Called(), lambda output, _: gives(output)) if in_loss else (Called(gives), None)
    LossOfModel(model, loss)({"x": torch.ones(2)})


class Counted:
    """A weight that can be put right."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, batch: Any) -> Any:
        return float(len(batch["x"])) if self.weight is None else self.weight


def met(
    *batches: Any, weight: Any = None, method: str = "step", microbatches: Any = ({}, {}), make: Any = None
) -> Callable[[], None]:
    """What both of two ranks say to these batches. Nothing was computed, and both go on."""

    def run(channel: sw.Channel) -> None:
        weigh = Counted(weight)
        settings: Any = {"loss": square_loss, "optimizer": adamw, "loss_weight": None if weight is None else weigh}
        engine = begun(channel, lambda: nn.Linear(4, 1), TWO, **settings)
        before, given = engine.model.weight.detach().clone(), [*batches, points(1, 6)][channel.rank]
        try:
            getattr(engine, method)(given, **microbatches[channel.rank])
        finally:
            assert torch.equal(engine.model.weight, before)
            weigh.weight = None
            assert not engine.step(points(channel.rank, 6)).skipped
            assert not torch.equal(engine.model.weight, before)
            assert engine.counters.updates == 1

    def refused() -> None:
        raise same_error_everywhere(2, run)

    return refused


def met_along_tp(*batches: Any) -> Callable[[], None]:
    def run(channel: sw.Channel) -> None:
        plan = plan_of("tp=2", rules={"0": "column", "1": "row"})
        make = lambda: nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))  # noqa: E731
        begun(channel, make, plan).step(batches[channel.rank])

    def refused() -> None:
        raise same_error_everywhere(2, run)

    return refused


UNEQUAL = {"x": torch.ones(6, 4), "y": torch.ones(5, 1)}
BAD = {
    "None": None,
    "a list of no tensors": [3, "x"],
    "no rows to cut": {"x": 3, "w": torch.tensor(1)},
    "unequal rows": UNEQUAL,
    "unequal rows in a dict": {**points(0, 6), "more": {"deep": (1, torch.ones(3))}},
}
WEIGHTS = {str(each): each for each in (-1.0, math.nan, torch.tensor(-2), torch.ones(3), "many")}
GIVES: dict[str, Any] = {
    "no loss in a dict": lambda weight: {"logits": weight},
    "no loss in an object": lambda weight: SimpleNamespace(loss=None),
    "a tuple": lambda weight: (weight, weight),
    "several numbers": lambda weight: weight.expand(2),
    "several numbers in a dict": lambda weight: {"loss": weight.expand(2, 1)},
    "a number in a dict": lambda weight: {"loss": 3.0},
}

REFUSED = Refusals(
    "engine.batches",
    {
        "unequal rows, on both ranks": met(UNEQUAL, UNEQUAL),
        **{f"{case}, on one rank": met(points(0, 6), batch, method="evaluate") for case, batch in BAD.items()},
        "fewer rows than microbatches": met(points(0, 2), points(1, 2)),
        "fewer rows than microbatches on one rank": met(points(0, 2)),
        "different numbers of microbatches": met(points(0, 6), microbatches=({}, {"microbatches": 2})),
        **{
            f"microbatches={number!r}": met(points(0, 6), microbatches=({"microbatches": number},) * 2)
            for number in (0, 1.5, True, "2")
        },
        **{f"weight {case}": met(points(0, 6), weight=weight) for case, weight in WEIGHTS.items()},
        "weight -1.0 in an evaluation": met(points(0, 6), weight=-1.0, method="evaluate"),
        "all weights are zero": met(points(0, 6), weight=0),
        "an evaluation without rows": met(points(0, 0), points(1, 0), method="evaluate"),
        "a step without rows": met(points(0, 0), points(1, 0)),
        "an empty list": met([], []),
        "a list without rows": met([points(0, 0)] * 2, [points(0, 0)]),
        "a list and a number": met([points(0, 2)] * 2, [points(0, 2)] * 2, microbatches=({"microbatches": 3},) * 2),
        "a list with unequal rows": met([UNEQUAL], [UNEQUAL]),
        "different batches along tp": met_along_tp(points(0, 4, 2), points(1, 4, 2)),
        "different lists along tp": met_along_tp(*([points(0, 2, 2), points(at, 3, 2)] for at in (1, 2))),
        "none of the entries": lambda: called_with(TakesTwo, {"x": X, "y": Y}),
        "labels by position": lambda: called_with(TakesOne, {"labels": X, "token": Y}),
        "an optional name alone": lambda: called_with(TakesMask, {"inputs": X, "mask": Z}),
        "one of two names": lambda: called_with(TakesTwo, {"one": X, "too": Y}),
        "labels without a loss function": lambda: called_with(TakesMask, {"x": X, "labels": Y}, loss=None),
        "a name is missing without a loss function": lambda: called_with(TakesMask, {"mask": X}, loss=None),
        "entries that may be inputs or not": lambda: called_with(TakesMask, (X, Z, Y)),
        "entries for any arguments": lambda: called_with(Called, [X, Z, Y]),
        "too few entries": lambda: called_with(TakesTwo, (X,)),
        **{f"the model gives {case}": partial(gave, gives) for case, gives in GIVES.items()},
        "the loss function gives several numbers": partial(gave, GIVES["several numbers"], in_loss=True),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_alike_on_all_ranks(case: str) -> None:
    REFUSED.check(case)


class Modes(nn.Module):
    """Notes the mode and the grad mode of each call; one part of it is in evaluation mode all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.still = nn.Linear(4, 1), nn.Dropout(0.5), nn.Dropout(0.5).eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, self.dropout.training, torch.is_grad_enabled()))
        if bool(x[0, 0] == 99):
            raise ArithmeticError("evaluating")
        y: torch.Tensor = self.still(self.dropout(self.linear(x)))
        return y


def test_an_evaluation_is_in_evaluation_mode_without_gradients_and_puts_every_mode_back() -> None:
    model = Modes()
    engine = sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=square_loss)
    batch: Any = {**points(0, 6), "note": "x"}
    before = {name: value.clone() for name, value in points(0, 6).items()}
    engine.evaluate(batch)
    engine.step(batch)
    assert model.seen == [(False, False, False), (True, True, True)]
    assert all(torch.equal(batch[name], value) for name, value in before.items()), "the batch is left as it was"
    assert (list(batch), batch["x"].grad) == (["x", "y", "note"], None)
    batch["x"][0, 0] = 99
    with pytest.raises(ArithmeticError, match="evaluating"):
        engine.evaluate(batch)
    assert (model.training, model.dropout.training, model.still.training) == (True, True, False)


def warned(mesh: str, rows_of: Callable[[int, int], float], num_steps: int, wrap: Any = lambda each: each) -> list[str]:
    """What ranks are warned of in steps whose rows are all `rows_of(data rank, step)`."""

    def run(channel: sw.Channel) -> None:
        make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))  # noqa: E731
        engine = begun(wrap(channel), make, plan_of(mesh, rules={"0": "column", "2": "row"}))
        for step in range(num_steps):
            rank = engine.plan.mesh.data_rank(channel.rank)
            engine.step({"input": torch.full((2, 4), float(rows_of(rank, step)))})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.simulate(sw.Mesh.parse(mesh).size, run)
    return [str(each.message) for each in caught if each.category is SameRowsWarning]


class WithHosts(SharesMemory):
    hosts = ("node1", "node2")


def test_data_ranks_with_the_same_rows_are_told_once_and_others_are_not() -> None:
    [text] = warned("dp_shard=2", lambda rank, step: step, 3)
    assert text.startswith("rank 0 and rank 1 are different data ranks, and got the same rows")
    [text] = warned("dp_replicate=3,tp=2", lambda rank, step: min(rank, 1 + step), 2)
    assert text.startswith("rank 2 and rank 4 are different data ranks")
    [text] = warned("dp_shard=2", lambda rank, step: step, 1, WithHosts)
    assert text.startswith("rank 0 (node1) and rank 1 (node2) are different data ranks")
    assert warned("dp_shard=2,tp=2", lambda rank, step: rank, 2) == []
    assert warned("dp_shard=2", lambda rank, step: rank if step < 3 else 0.0, 5) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage", "schedule", "counts", "by_words"),
    [
        ("single", 1, "1f1b", [(6,)] * 3, True),
        *(("dp_shard=2", stage, "1f1b", [((1, 3), (2, 0))[stage % 2]] * 3, True) for stage in range(4)),
        *[("dp_shard=3", 2, "1f1b", [(2, 2, 2)] * 2, False), ("tp=2", 3, "1f1b", [(6,)] * 2, True)],
        *[("pp=2", 0, "fthenb", [(6,)] * 2, False), ("pp=2", 1, "interleaved", [(6,)] * 2, True)],
        ("pp=2,dp_shard=2", 3, "1f1b", [(2, 4), (0, 1), (2, 2)], True),
        pytest.param("pp=2,dp_shard=2", 3, "interleaved", [(4, 2), (2, 0)], True, marks=STRESS),
        pytest.param("pp=2,dp_shard=2,dp_replicate=2", 2, "interleaved", [(2, 0, 2, 4)], True, marks=STRESS),
        pytest.param("pp=2,dp_shard=2,tp=2", 3, "1f1b", [(1, 2)], True, marks=STRESS),
    ],
)
def test_microbatches_of_any_shapes_and_numbers_are_trained_reported_and_measured_as_in_a_plain_loop(
    mesh: str, stage: int, schedule: str, counts: Any, by_words: bool
) -> None:
    """Every entry of the loss is a weighted mean; metrics are those of an evaluation at the end."""
    plan = plan_of_program(DECODER, mesh, stage=stage, k=2, schedule=schedule, clip=0.2)
    weigh = count_words if by_words else lambda batch: len(batch["words"])
    steps = [
        [[words(100 * step + 10 * rank + at, 1 + (at + rank) % 3, 2 + (step + at + rank) % 5) for at in range(count)]
         for rank, count in enumerate(each)]
        for step, each in enumerate(counts)
    ]  # fmt: skip

    def run(channel: sw.Channel) -> tuple[Trained, Any]:
        engine = DECODER.engine(plan, channel, loss=entries, loss_weight=count_words if by_words else None)
        rank, trained = plan.mesh.data_rank(channel.rank), Trained()
        for step in steps:
            report = engine.step(step[rank])
            assert report.num_microbatches == len(step[rank])
            assert report.loss == report.losses["loss"]
            trained.losses += [value for _, value in sorted(report.losses.items())]
            trained.grad_norms.append(report.grad_norm)
        trained.parameters = {name: tensor.clone() for name, tensor in sw.full(engine)}
        return trained, engine.evaluate(steps[0][rank], metrics=word_metrics()).metrics

    model, together = decoder(), [[part for parts in each for part in parts] for each in steps]
    expected, is_alone = accumulated(model, together, weigh=weigh), plan.mesh.size == 1
    metrics = measured(model, together[0])
    for trained, found in sw.simulate(plan.mesh.size, run):
        assert_alike(trained, expected, rtol=1e-7, atol=1e-7)
        assert not is_alone or all(map(torch.equal, trained.parameters.values(), expected.parameters.values()))
        assert trained.losses == pytest.approx(expected.losses, rel=1e-10)
        assert trained.grad_norms == pytest.approx(expected.grad_norms, rel=1e-10)
        assert found == pytest.approx(metrics, rel=1e-6)


def test_lists_train_on_a_device_as_on_the_host(fake: str) -> None:
    def run(channel: sw.Channel, on_device: bool) -> list[float]:
        weigh = (lambda batch: batch["x"].new_tensor(len(batch["x"]))) if on_device else None
        settings: Any = {"optimizer": adamw, "loss": square_loss, "loss_weight": weigh}
        engine = begun(channel, lambda: nn.Linear(4, 1).to(channel.device), plan_of("dp_shard=2"), **settings)
        found = []
        for step in range(3):
            batch = [points(step, 2), points(10 + step, 3)][: 2 - channel.rank]
            if on_device:
                batch = [{name: value.to(channel.device) for name, value in part.items()} for part in batch]
            report = engine.step(batch)
            found += [report.loss, report.grad_norm, report.weight]
        return found

    wanted = sw.simulate(2, partial(run, on_device=False))
    for on_device in (False, True):
        assert sw.simulate(2, partial(run, on_device=on_device), device=fake) == [pytest.approx(wanted[0])] * 2
