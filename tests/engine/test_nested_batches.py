"""A batch is any nesting of what the model takes: its rows are cut, and the model is called with it."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
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
from shardwise.errors import BatchError, MismatchError, ModelError, SameRowsWarning
from tests.engine.expected import adamw, seeded

CPU = torch.device("cpu")


class Sides(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
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
                assert cut.untyped_storage()._cdata == whole.untyped_storage()._cdata, "a view"
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
        ({"in.*": 1, "table": None}, {"in": (torch.ones(3, 4),), "y": torch.ones(4), "table": torch.ones(7)}, None),
        ({"in": 2}, ({"in": (torch.ones(3, 5, 4),)}, torch.ones(4)), "refused"),
        ({"0": 2, "*": 0}, ({"in": (torch.ones(3, 5, 4),)}, torch.ones(4)), [(3, 5, 2), (2,)]),
    ],
)
def test_rows_may_be_in_any_dim(rows: Any, batch: Any, shapes: Any) -> None:
    if shapes == "refused":
        with pytest.raises(BatchError, match=r"rows: 'in' matches none of the entries \['0.in.0', '1'\]; the nearest"):
            split_batch(batch, 2, CPU, BatchRows(rows))
        return
    first, second = split_batch(batch, 2, CPU, BatchRows(rows))
    found = [tuple(leaf.shape) for _, leaf in named_leaves(first)]
    assert found == (shapes or [(3, 2), (2,), (7,)])
    assert count_rows(second, BatchRows(rows)) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (-1, "rows: -1 is no dim; give 0, 1, .."),
        ("x", "rows: 'x' is no dim"),
        ({"x": "0"}, "rows of 'x': '0' is no dim"),
        (1, "the batch's entry '1' has the shape [4], and no dim 1 with rows. Say where its rows are"),
    ],
)
def test_dims_that_are_none_are_refused_on_all_ranks(rows: Any, message: str) -> None:
    def run(channel: sw.Channel) -> str:
        with pytest.raises(BatchError) as caught:
            sw.parallelize(
                seeded(lambda: nn.Linear(4, 1))(),
                sw.Plan(mesh=sw.Mesh(dp_shard=2)),
                optimizer=adamw,
                rows=rows,
                loss=lambda output, batch: output.mean(),
                channel=channel,
            ).step((torch.ones(3, 4), torch.ones(4)))
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert message in first


def test_tensors_in_other_objects_are_refused_where_they_would_go_whole_to_several_microbatches() -> None:
    for held in (SimpleNamespace(y=column()), {column()}):
        batch = {"x": column(), "other": held}
        with pytest.raises(BatchError, match="entry 'other' is a"):
            split_batch(batch, 2, CPU)
        assert split_batch(batch, 1, CPU)[0]["other"] is held


class Moves:
    """An object that moves by a method of its own, as graphs and packed sequences do."""

    def __init__(self, x: torch.Tensor, moved: bool = False) -> None:
        self.x, self.moved = x, moved

    def to(self, device: torch.device) -> "Moves":
        return Moves(self.x.to(device), True)


def test_objects_move_by_their_own_method_and_may_be_microbatches() -> None:
    class TakesObject(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, graph: Moves) -> torch.Tensor:
            assert graph.moved
            out: torch.Tensor = self.linear(graph.x)
            return out

    def run(channel: sw.Channel) -> float:
        engine = sw.parallelize(
            seeded(TakesObject)(),
            sw.Plan(),
            optimizer=adamw,
            loss=lambda output, batch: output.square().mean(),
            loss_weight=lambda batch: len(batch.x),
            channel=channel,
        )
        return engine.step([Moves(torch.ones(2, 4)), Moves(torch.ones(1, 4))]).weight

    assert sw.simulate(1, run) == [3]


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
INPUTS = Inputs(x=X, more=Z)
SIDES = Sides(X, Y)


@pytest.mark.parametrize(
    ("kind", "batch", "args", "kwargs"),
    [
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
    ],
)
def test_a_loss_function_leaves_the_model_its_inputs(
    kind: Callable[[], Called], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    model, shown = kind(), list[Any]()

    def loss(output: torch.Tensor, whole: Any) -> torch.Tensor:
        shown.append(whole)
        return output

    LossOfModel(model, loss)(batch)
    ((got, named),) = model.calls
    assert [id(each) if not isinstance(each, list) else str(each) for each in got] == [
        id(each) if not isinstance(each, list) else str(each) for each in args
    ]
    assert {name: id(each) for name, each in named.items()} == {name: id(each) for name, each in kwargs.items()}
    assert shown[0] is batch


@pytest.mark.parametrize(
    ("kind", "batch", "message"),
    [
        (
            TakesMask,
            (X, Z, Y),
            "takes x, mask (1 of them required), and the batch is a tuple of 3 entries; say which of",
        ),
        (TakesAll, [X, Z, Y], "takes any arguments (0 of them required), and the batch is a list of 3 entries; say"),
        (TakesTwo, (X,), "takes one, two (2 of them required), and the batch is a tuple of 1 entries; give as many"),
    ],
)
def test_entries_that_may_be_inputs_or_not_are_refused(kind: Callable[[], Called], batch: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        LossOfModel(kind(), lambda output, _: output)(batch)
    assert message in str(caught.value)


def test_without_a_loss_function_the_model_gets_the_whole_microbatch() -> None:
    for batch, args in (((X, Y), (X, Y)), ([X, Y], (X, Y)), (INPUTS, (INPUTS,)), (X, (X,)), (SIDES, (X, Y))):
        model = TakesAll()
        LossOfModel(model, None)(batch)
        ((got, _),) = model.calls
        assert [*map(id, got)] == [*map(id, args)]


# Training -------------------------------------------------------------------------------------------------------------


def pairs(rows: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def tower() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))()


PP = sw.Pipeline(stages={"0": 0, "1": 0, "2": 1})


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(),
        sw.Plan(merge=sw.Merge(microbatches=2)),
        sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
        sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2), pipeline=PP),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
    ],
    ids=["one", "k = 2", "stage 3", "pp", "tp"],
)
def test_batches_of_a_loader_train_as_in_a_plain_loop(plan: sw.Plan) -> None:
    num_ranks = plan.mesh.num_data_ranks

    def run(channel: sw.Channel) -> tuple[list[float], list[float], float]:
        engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
        mine = slice(plan.mesh.data_rank(channel.rank), None, num_ranks)
        losses = [engine.step((x[mine], y[mine])).loss for x, y in DataLoader(pairs(), batch_size=4)]
        # As lists, as loaders give them, and a list of two of them.
        losses += [engine.step([each[mine] for each in batch]).loss for batch in DataLoader(pairs(), batch_size=4)]
        given = [[each[mine] for each in batch] for batch in DataLoader(pairs(8), batch_size=4)]
        report = engine.step(given)
        assert report.num_microbatches == 2
        right = engine.evaluate(given, metrics={"right": lambda output, batch: output.argmax(-1) == batch[1]})
        return losses, [report.loss, report.grad_norm], right.metrics["right"]

    model, losses = tower(), []
    optimizer = adamw(list(model.parameters()))
    for _ in range(2):
        for x, y in DataLoader(pairs(), batch_size=4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    optimizer.zero_grad()
    means = [nn.functional.cross_entropy(model(x), y) for x, y in DataLoader(pairs(8), batch_size=4)]
    loss = (means[0] + means[1]) / 2
    loss.backward()
    last = [loss.item(), float(nn.utils.get_total_norm([each.grad for each in model.parameters()]))]  # type: ignore[misc]
    optimizer.step()
    right = float((model(pairs(8)[:][0]).argmax(-1) == pairs(8)[:][1]).double().mean())
    for found, ends, share in sw.simulate(plan.mesh.size, run):
        assert found == pytest.approx(losses, rel=1e-5)
        assert ends == pytest.approx(last, rel=1e-5)
        assert share == right


class TakesNested(nn.Module):
    """Takes a dict of a tuple, a dataclass, and a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: dict[str, Any], mode: str, sides: Inputs) -> torch.Tensor:
        assert mode == "plain"
        hidden = torch.tanh(self.first(inputs["parts"][0] + inputs["parts"][1])) * sides.x
        out: torch.Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize("mesh", [sw.Mesh(), sw.Mesh(dp_shard=2), sw.Mesh(pp=2)], ids=["one", "dp", "pp"])
def test_a_model_that_takes_nested_inputs_trains_as_in_one_process(mesh: sw.Mesh) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, scale = torch.randn(8, 4, generator=generator), torch.rand(8, 1, generator=generator)
    labels = torch.randint(3, (8,), generator=generator)

    def batch_of(rows: slice) -> dict[str, Any]:
        return {
            "inputs": {"parts": (ids[rows], ids[rows].numpy())},
            "mode": "plain",
            "sides": Inputs(x=scale[rows]),
            "labels": OwnMapping({"of": labels[rows]}),
        }

    def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch["labels"]["of"])

    def run(channel: sw.Channel) -> list[float]:
        plan = sw.Plan(mesh=mesh, merge=sw.Merge(microbatches=2), pipeline=PP if mesh.pp > 1 else sw.Pipeline())
        plan = replace(plan, pipeline=sw.Pipeline(stages={"first": 0, "last": 1})) if mesh.pp > 1 else plan
        engine = sw.parallelize(seeded(TakesNested)(), plan, optimizer=adamw, loss=loss, channel=channel)
        mine = slice(mesh.data_rank(channel.rank), None, mesh.num_data_ranks)
        found = [engine.step(batch_of(mine)).loss for _ in range(3)]
        parts = [batch_of(mine), batch_of(slice(mine.start, None, 4))]
        return [*found, engine.evaluate(batch_of(mine)).loss, engine.step(parts).loss]

    model = seeded(TakesNested)()
    optimizer = adamw(list(model.parameters()))
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        whole = batch_of(slice(None))
        whole["inputs"]["parts"] = (ids, ids)
        value = loss(model(whole["inputs"], "plain", whole["sides"]), whole)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    for found in sw.simulate(mesh.size, run):
        assert found[:3] == pytest.approx(wanted, rel=1e-5)
    last = [each[3:] for each in sw.simulate(mesh.size, run)]
    assert all(each == last[0] for each in last)


def test_ranks_that_share_a_batch_see_which_nested_entry_differs() -> None:
    def run(channel: sw.Channel) -> str:
        plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"}))
        engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
        with pytest.raises(MismatchError) as caught:
            engine.step(({"input": torch.full((2, 4), float(channel.rank))}, torch.ones(2, dtype=torch.int64)))
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert "Rank 0 has '0.input' [2, 4] float32 with digest" in first


def test_data_ranks_with_the_same_nested_rows_are_named() -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(tower(), plan, optimizer=adamw, loss=cross_entropy, channel=channel)
        engine.step([(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))])

    with pytest.warns(SameRowsWarning, match="rank 0 and rank 1 are different data ranks, and got the same rows"):
        sw.simulate(2, run)


@pytest.mark.parametrize("listed", [False, True])
def test_data_know_nested_batches_of_theirs_again(listed: bool) -> None:
    @dataclass
    class Both:
        x: Any
        y: Any

    def collate(samples: list[Any]) -> Any:
        x = np.stack([each[0].numpy() for each in samples])
        y = torch.stack([each[1] for each in samples])
        both = (Both(x, None), OwnMapping({"y": y}))
        return [both] if listed else both

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1]["y"])

    class TakesBoth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tower()

        def forward(self, both: Both) -> torch.Tensor:
            out: torch.Tensor = self.inner(both.x)
            return out

    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(seeded(TakesBoth)(), plan, optimizer=adamw, loss=loss, channel=channel)
        data = sw.Data(pairs(12), global_batch=4, collate=collate)
        ahead = iter(data.on(engine))
        waiting = next(ahead)
        for number, batch in enumerate(ahead):  # one batch ahead: the cursor counts what was trained on
            engine.step(waiting)
            assert data.cursor()["position"] == 4 * (number + 1)
            waiting = batch

    sw.simulate(2, run)
