"""A batch is any nesting of what the model takes: its rows are cut, and the model is called with it."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import shardwise as sw
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.batch_rows import BatchRows
from shardwise.engine.batches import LossOfModel, count_rows, moved_to, split_batch, with_tensors
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA, TP, on_ranks, tower
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

CPU = torch.device("cpu")


class Sides(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    x: Any
    more: Any = None


class OwnMapping(MutableMapping[str, Any]):
    """Keeps its items in an attribute, which a shallow copy shares."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def column(rows: int = 5) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.float32).view(rows, 1)


NESTED: list[Any] = [
    {"a": {"b": column(), "c": [column(), (column(), "text")]}},
    (column(), column()),
    [column(), [column(), {"a": column()}]],
    Sides(column(), column()),
    Inputs(x=column(), more={"y": column(), "n": 3, "none": None}),
    OrderedDict(x=column()),
    UserDict(x=column()),
    BatchEncoding({"input_ids": column(), "labels": column()}),
    BaseModelOutput(last_hidden_state=column()),
    OwnMapping({"x": column(), "in": OwnMapping({"y": column()})}),
    MappingProxyType({"x": column(), "in": MappingProxyType({"y": column()})}),
    {"x": np.arange(5.0), "y": np.arange(5)[::-1], "z": np.arange(10).reshape(5, 2).astype(">i4"), "s": np.float32(2)},
    column(),
    {"x": column(), "scale": torch.tensor(2.0), "words": ["a", "b"], "kind": nn.Linear},
]


@pytest.mark.parametrize("batch", NESTED, ids=lambda batch: type(batch).__name__)
def test_rows_are_cut_in_any_nesting_and_nothing_else_changes(batch: Any) -> None:
    batch = with_tensors(batch)
    before = [
        (name, leaf, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf) for name, leaf in named_leaves(batch)
    ]
    parts = split_batch(batch, 2, CPU)
    assert [count_rows(part) for part in parts] == [3, 2]
    for rows, part in zip((slice(0, 3), slice(3, 5)), parts, strict=True):
        assert type(part) is (dict if isinstance(batch, OwnMapping) else type(batch))
        for (name, whole, _), (same, cut) in zip(before, named_leaves(part), strict=True):
            assert name == same
            if isinstance(whole, torch.Tensor) and whole.ndim:
                assert torch.equal(cut, whole[rows])
                assert cut.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "a view"
            else:
                assert cut is whole
    for (_, leaf, copied), (_, now) in zip(before, named_leaves(batch), strict=True):
        assert now is leaf
        assert torch.equal(now, copied) if isinstance(now, torch.Tensor) else now is copied


def test_what_a_program_puts_into_a_microbatch_stays_there() -> None:
    batch: dict[str, Any] = {"x": column(), "more": {"y": column()}}
    first, second = split_batch(batch, 2, CPU)
    first["more"].pop("y")
    first["new"] = 3
    given = moved_to(batch, CPU)
    given["more"]["new"] = 3
    for whole in (batch, second):
        assert list(whole) == ["x", "more"]
        assert isinstance(whole["more"], dict)
        assert list(whole["more"]) == ["y"]


def test_arrays_become_tensors_in_their_memory() -> None:
    array = np.arange(6.0).reshape(3, 2)
    made = with_tensors({"in": (array, np.ones(3, np.longdouble), np.array(["a", "b", "c"]))})["in"]
    made[0][0, 0] = 9
    assert array[0, 0] == 9
    first, _ = split_batch({"in": made}, 2, CPU)
    assert first["in"][2].tolist() == ["a", "b"], "arrays that are no tensors have rows too"
    assert len(first["in"][1]) == 2


@pytest.mark.parametrize(
    ("rows", "batch", "shapes"),
    [
        (1, {"x": torch.ones(5, 4, 3), "scale": torch.tensor(1.0)}, [(5, 2, 3), ()]),
        ({"x": 1}, {"x": torch.ones(5, 4, 3), "y": torch.ones(4, 5)}, [(5, 2, 3), (2, 5)]),
        (
            {"in.*": 1, "table": None},
            {"in": (torch.ones(3, 4),), "y": torch.ones(4), "table": torch.ones(7)},
            [(3, 2), (2,), (7,)],
        ),
        ({"0": 2, "*": 0}, ({"in": (torch.ones(3, 5, 4),)}, torch.ones(4)), [(3, 5, 2), (2,)]),
    ],
)
def test_rows_may_be_in_any_dim(rows: Any, batch: Any, shapes: Any) -> None:
    first, second = split_batch(batch, 2, CPU, BatchRows(rows))
    assert [tuple(leaf.shape) for _, leaf in named_leaves(first)] == shapes
    assert count_rows(second, BatchRows(rows)) == 2


# The call of the model ------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[Any] = []

    def remember(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        return self.weight * 2


class TakesOne(Called):
    def forward(self, tokens: Any) -> torch.Tensor:
        return self.remember(tokens)


class TakesMask(Called):
    def forward(self, x: Any, mask: Any = None) -> torch.Tensor:
        return self.remember(x, mask)


class TakesTwo(Called):
    def forward(self, one: Any, two: Any) -> torch.Tensor:
        return self.remember(one, two)


class TakesAll(Called):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.remember(*args, **kwargs)


X, Y, Z = torch.ones(2, 3), torch.zeros(2), torch.full((2,), 2.0)
INPUTS, SIDES = Inputs(x=X, more=Z), Sides(X, Y)


CALLS: list[tuple[Callable[[], Called], Any, tuple[Any, ...], dict[str, Any]]] = [
    (TakesOne, X, (X,), {}),
    (TakesOne, (X, Y), (X,), {}),
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
    (TakesAll, (X, Y), (X,), {}),
    (TakesAll, ({"x": X, "mask": Z}, Y), (), {"x": X, "mask": Z}),
]


def identities(values: Any) -> list[int]:
    """Of values and of those in lists, which are lists of the call's own."""
    return [inner for each in values for inner in (identities(each) if isinstance(each, list) else [id(each)])]


@pytest.mark.parametrize("case", CALLS)
def test_a_loss_function_leaves_the_model_its_inputs(case: Any) -> None:
    kind, batch, args, kwargs = case
    model, shown = kind(), list[Any]()

    def loss(output: torch.Tensor, whole: Any) -> torch.Tensor:
        shown.append(whole)
        return output

    LossOfModel(model, loss)(batch)
    ((got, named),) = model.calls
    assert identities(got) == identities(args)
    assert {name: id(each) for name, each in named.items()} == {name: id(each) for name, each in kwargs.items()}
    assert shown[0] is batch


def test_without_a_loss_function_the_model_gets_the_whole_microbatch() -> None:
    for batch, args in (((X, Y), (X, Y)), ([X, Y], (X, Y)), (INPUTS, (INPUTS,)), (X, (X,)), (SIDES, (X, Y))):
        model = TakesAll()
        LossOfModel(model, None)(batch)
        ((got, _),) = model.calls
        assert identities(got) == identities(args)


# Training -------------------------------------------------------------------------------------------------------------


def pairs(rows: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(),
        sw.Plan(merge=sw.Merge(microbatches=2)),
        sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=3)),
        sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP),
    ],
    ids=["one", "k = 2", "stage 3", "pp", "tp"],
)
def test_batches_of_a_loader_train_as_in_a_plain_loop(plan: sw.Plan) -> None:
    """As tuples and as lists, and at last a list of two of them."""

    def run(channel: sw.Channel) -> tuple[list[float], float]:
        engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
        mine = slice(plan.mesh.data_rank(channel.rank), None, plan.mesh.num_data_ranks)
        losses = [engine.step((x[mine], y[mine])).loss for x, y in DataLoader(pairs(), batch_size=4)]
        losses += [engine.step([each[mine] for each in batch]).loss for batch in DataLoader(pairs(), batch_size=4)]
        given = [[each[mine] for each in batch] for batch in DataLoader(pairs(8), batch_size=4)]
        report = engine.step(given)
        assert report.num_microbatches == 2
        right = engine.evaluate(given, metrics={"right": lambda output, batch: output.argmax(-1) == batch[1]})
        return [*losses, report.loss, report.grad_norm], right.metrics["right"]

    model, losses = tower(), []
    optimizer = adamw(list(model.parameters()))
    rounds = [[(x, y)] for _ in range(2) for x, y in DataLoader(pairs(), batch_size=4)]
    for given in [*rounds, list(DataLoader(pairs(8), batch_size=4))]:
        optimizer.zero_grad()
        loss: Any = sum(nn.functional.cross_entropy(model(x), y) for x, y in given) / len(given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(float(nn.utils.get_total_norm([each.grad for each in model.parameters()])))  # type: ignore[misc]
    x, y = pairs(8)[:]
    for found, right in on_ranks(plan, run):
        assert found == pytest.approx(losses, rel=1e-5)
        assert right == float((model(x).argmax(-1) == y).double().mean())


@pytest.mark.parametrize("listed", [False, True])
def test_data_know_nested_batches_of_theirs_again(listed: bool) -> None:
    def collate(samples: list[Any]) -> Any:
        x = np.stack([each[0].numpy() for each in samples])
        both = (Inputs(x), OwnMapping({"y": torch.stack([each[1] for each in samples])}))
        return [both] if listed else both

    class TakesInputs(nn.Sequential):
        def forward(self, both: Inputs) -> torch.Tensor:
            out: torch.Tensor = super().forward(both.x)  # type: ignore[no-untyped-call]
            return out

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            TakesInputs(*tower()),
            sw.Plan(mesh=DATA),
            optimizer=adamw,
            loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]["y"]),
            channel=channel,
        )
        data = sw.Data(pairs(12), global_batch=4, collate=collate)
        ahead = iter(data.on(engine))
        waiting = next(ahead)
        for number, batch in enumerate(ahead):  # one batch ahead: the cursor counts what was trained on
            engine.step(waiting)
            assert data.cursor()["position"] == 4 * (number + 1)
            waiting = batch

    sw.simulate(2, run)


# Refusals -------------------------------------------------------------------------------------------------------------


def rows_in(rows: Any) -> Callable[[], None]:
    def run(channel: sw.Channel) -> None:
        sw.parallelize(
            seeded(lambda: nn.Linear(4, 1))(),
            sw.Plan(mesh=DATA),
            optimizer=adamw,
            rows=rows,
            loss=lambda output, batch: output.mean(),
            channel=channel,
        ).step((torch.ones(3, 4), torch.ones(4)))

    return lambda: raise_of_all(2, run)


def unlike_along_tp(channel: sw.Channel) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP)
    engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
    engine.step(({"input": torch.full((2, 4), float(channel.rank))}, torch.ones(2, dtype=torch.int64)))


def called_with(kind: Callable[[], Called], batch: Any) -> Callable[[], object]:
    return lambda: LossOfModel(kind(), lambda output, _: output)(batch)


REFUSED = Refusals(
    "engine.batch_rows",
    {
        "a negative dim": rows_in(-1),
        "a word for a dim": rows_in("x"),
        "a word for the dim of an entry": rows_in({"x": "0"}),
        "a dim that an entry lacks": rows_in(1),
        "an entry that is none": lambda: split_batch(
            ({"in": (torch.ones(3, 5, 4),)}, torch.ones(4)), 2, CPU, BatchRows({"in": 2})
        ),
        "tensors in an object": lambda: split_batch({"x": column(), "other": SimpleNamespace(y=column())}, 2, CPU),
        "tensors in a set": lambda: split_batch({"x": column(), "other": {column()}}, 2, CPU),
        "entries that may be inputs or not": called_with(TakesMask, (X, Z, Y)),
        "entries for any arguments": called_with(TakesAll, [X, Z, Y]),
        "too few entries": called_with(TakesTwo, (X,)),
        "a nested entry that differs along tp": lambda: raise_of_all(2, unlike_along_tp),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rows_or_no_inputs_is_refused(case: str) -> None:
    REFUSED.check(case)
