"""A batch is any nesting of what the model takes: its rows are cut, and nothing else of it."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import shardwise as sw
from shardwise.comm.nested_values import named_leaves
from shardwise.engine.forward.batches import BatchRows, count_rows, moved_to, split_batch, with_tensors
from tests.engine.given_words import Inputs, Sides
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA, TP, on_ranks, tower
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

CPU = torch.device("cpu")


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
    for each in (first, moved_to(batch, CPU)):
        each["more"].pop("y")
        each["new"] = 3
    assert all((list(whole), list(whole["more"])) == (["x", "more"], ["y"]) for whole in (batch, second))


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


# Training -------------------------------------------------------------------------------------------------------------


def pairs(rows: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(merge=sw.Merge(microbatches=2)),
        sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=3)),
        sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP),
    ],
    ids=["k = 2", "stage 3", "pp", "tp"],
)
def test_batches_of_a_loader_train_as_in_a_plain_loop(plan: sw.Plan) -> None:
    """As tuples and as lists, and at last a list of two of them."""
    loaded = [(x, y) for x, y in DataLoader(pairs(), batch_size=4)]

    def run(channel: sw.Channel) -> tuple[list[float], float]:
        engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
        mine = slice(plan.mesh.data_rank(channel.rank), None, plan.mesh.num_data_ranks)
        reports = [engine.step((x[mine], y[mine])) for x, y in loaded]
        reports += [engine.step([x[mine], y[mine]]) for x, y in loaded]
        given = [[x[mine], y[mine]] for x, y in loaded[:2]]
        reports.append(engine.step(given))
        assert reports[-1].num_microbatches == 2
        right = engine.evaluate(given, metrics={"right": lambda output, batch: output.argmax(-1) == batch[1]})
        return [each.loss for each in reports], right.metrics["right"]

    model = tower()
    optimizer, losses = adamw(list(model.parameters())), []
    x, y = pairs()[:8]
    for batches, k in (([{"x": x, 1: y} for x, y in [*loaded, *loaded]], 1), ([{"x": x, 1: y}], 2)):
        trained = train_in_one_process(model, optimizer, batches, loss=cross_entropy, num_microbatches=k)  # type: ignore[arg-type]
        losses += trained.losses
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
        "a nested entry that differs along tp": lambda: raise_of_all(2, unlike_along_tp),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rows_is_refused(case: str) -> None:
    REFUSED.check(case)
