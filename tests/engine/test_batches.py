"""From a batch to losses: what is split how, what a model is called with, and what all ranks refuse."""

import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.batches import LossOfModel, count_rows, split_batch
from shardwise.errors import BatchError, MismatchError, ModelError, SameRowsWarning, ShardwiseError
from tests.engine.expected import adamw, points, seeded, square_loss

CPU = torch.device("cpu")


def test_every_tensor_is_split_on_dim_0_and_the_rest_goes_to_each_microbatch() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "y": torch.arange(5), "scale": torch.tensor(2.0), "name": "train"}
    parts = split_batch(batch, 2, CPU)
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert [part["y"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part["scale"] is batch["scale"] and part["name"] == "train" for part in parts)
    assert [count_rows(part) for part in parts] == [3, 2]


def test_microbatches_count_writes_apart_and_write_to_the_batch() -> None:
    tokens = torch.arange(24).view(6, 4)
    batch = {"words": tokens[:, :-1], "labels": tokens[:, 1:], "lengths": torch.arange(6)}
    first, second = split_batch(batch, 2, CPU)
    second["labels"].fill_(-100)
    assert first["labels"]._version == first["words"]._version == 0
    assert second["words"]._version == second["labels"]._version == 1, "what shares memory is protected as before"
    assert batch["labels"][:3].tolist() == torch.arange(24).view(6, 4)[:3, 1:].tolist()
    assert batch["labels"][3:].tolist() == [[-100] * 3] * 3, "as in a loop over chunks"
    assert [part["lengths"].data_ptr() - batch["lengths"].data_ptr() for part in (first, second)] == [0, 24]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3).expand(6, 3),
        torch.arange(18).view(3, 6).t(),
        torch.arange(8).unfold(0, 3, 1),
        torch.ones(6, 2, requires_grad=True),
    ],
    ids=["expanded", "turned", "windows", "with gradient"],
)
def test_microbatches_that_may_share_memory_share_their_count_of_writes(tensor: torch.Tensor) -> None:
    assert all(part["x"]._is_view() for part in split_batch({"x": tensor}, 2, CPU))


class ShiftsItsLabels(nn.Module):
    """Writes to what it is given, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        labels.masked_fill_(labels == 0, 1)
        labels[:, 1:] = labels[:, :-1].clone()
        logits = self.out(torch.tanh(self.embed(words) + self.embed(labels)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())}


@pytest.mark.parametrize("schedule", ["1f1b", "fthenb"])
def test_a_model_that_writes_to_its_microbatch_trains_on_stages_as_in_one_process(schedule: str) -> None:
    def run(channel: sw.Channel) -> tuple[list[float], list[int]]:
        stages = sw.Pipeline(schedule=schedule, stages={"embed": 0, "out": 1}) if channel.size > 1 else sw.Pipeline()
        plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=3), pipeline=stages)
        engine = sw.parallelize(seeded(ShiftsItsLabels)(), plan, optimizer=adamw, channel=channel)
        batch = {"words": torch.arange(30).view(6, 5) % 11, "labels": torch.arange(30).view(6, 5) % 7}
        losses = [engine.step(batch).loss for _ in range(3)]
        return losses, batch["labels"].flatten().tolist()

    assert sw.simulate(2, run) == [sw.simulate(1, run)[0]] * 2


Call = dict[str, Any] | tuple[Any, ...]


class Called(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[Call] = []

    def remember(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(kwargs or args)
        return self.weight * 2


class TakesNames(Called):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.remember(x=x, mask=mask)


class TakesAnything(Called):
    def forward(self, **entries: torch.Tensor) -> torch.Tensor:
        return self.remember(**entries)


class TakesOne(Called):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.remember(tokens)


class TakesTwo(Called):
    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.remember(one, two)


BATCH = {"x": torch.ones(2, 3), "y": torch.zeros(2)}


def call_with_loss(model: Called, batch: dict[str, Any]) -> Call:
    LossOfModel(model, lambda output, _: output)(batch)
    return model.calls[-1]


def test_a_model_is_called_with_the_entries_that_its_forward_names() -> None:
    assert call_with_loss(TakesNames(), BATCH) == {"x": BATCH["x"], "mask": None}
    with_mask = {**BATCH, "mask": torch.ones(2)}
    assert call_with_loss(TakesNames(), with_mask) == {"x": BATCH["x"], "mask": with_mask["mask"]}
    assert call_with_loss(TakesAnything(), BATCH) == BATCH
    assert call_with_loss(TakesOne(), BATCH) == (BATCH["x"],)


def test_a_model_that_takes_none_of_the_entries_is_refused_with_both_lists() -> None:
    with pytest.raises(ModelError, match=r"forward takes one, two, and the batch has x, y; name the batch's entries"):
        call_with_loss(TakesTwo(), BATCH)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        # By position it would train on the labels.
        (
            TakesOne(),
            ["labels", "token"],
            r"forward takes tokens, and the batch has labels, token; rename token to tokens",
        ),
        (TakesNames(), ["inputs", "mask"], "forward takes x, mask, and the batch has inputs, mask; x is missing"),
        (TakesTwo(), ["one", "too"], "forward takes one, two, and the batch has one, too; two is missing"),
    ],
    ids=["position", "optional name", "one of two"],
)
def test_names_with_which_a_model_cannot_be_called_are_refused(model: Called, batch: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        call_with_loss(model, dict.fromkeys(batch, torch.ones(2)))
    assert not model.calls


def test_a_first_entry_of_another_name_is_the_argument_of_a_model_that_takes_one() -> None:
    for names in (["token", "labels"], ["x", "y"]):
        model = TakesOne()
        assert len(call_with_loss(model, dict.fromkeys(names, torch.ones(2)))) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (["x", "labels"], r"forward takes x, mask, and the batch has x, labels; leave out labels, or pass loss=f"),
        (["mask"], r"forward takes x, mask, and the batch has mask; x is missing"),
    ],
)
def test_without_a_loss_function_all_entries_are_arguments(batch: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LossOfModel(TakesNames(), None)(dict.fromkeys(batch, torch.ones(2)))


def test_a_hook_before_the_forward_may_give_what_the_batch_lacks() -> None:
    model = TakesNames()
    engine = sw.parallelize(model, sw.Plan(), optimizer=adamw)
    batch = {"y": torch.ones(1)}
    with pytest.raises(ModelError, match="the batch has y; x is missing"):
        engine.step(batch)
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {"x": kwargs.pop("y"), **kwargs}), with_kwargs=True)
    engine.step(batch)
    assert list(model.calls[-1]) == ["x", "mask"]


class Gives(nn.Module):
    """Gives what it was told to."""

    def __init__(self, output: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.output = output

    def forward(self, **_: torch.Tensor) -> Any:
        return self.output(self.weight)


@pytest.mark.parametrize(
    "output",
    [
        lambda weight: weight * 1,
        lambda weight: (weight * 1).reshape(1),
        lambda weight: (weight * 1).reshape(1, 1),
        lambda weight: {"loss": weight * 1, "logits": None},
        lambda weight: SimpleNamespace(loss=weight * 1),
    ],
)
def test_without_a_loss_function_the_model_gives_its_loss(output: Callable[[torch.Tensor], Any]) -> None:
    loss = LossOfModel(Gives(output), None)(BATCH)
    assert loss.shape == ()
    assert loss.requires_grad
    assert loss == 3.0


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda weight: {"logits": weight}, "NoneType"),
        (lambda weight: SimpleNamespace(loss=None), "NoneType"),
        (lambda weight: (weight, weight), "NoneType"),
        (lambda weight: weight.expand(2), "a tensor of shape [2]"),
        (lambda weight: {"loss": weight.expand(2, 1)}, "a tensor of shape [2, 1]"),
        (lambda weight: {"loss": 3.0}, "float"),
    ],
)
def test_an_output_without_a_scalar_loss_is_refused(output: Callable[[torch.Tensor], Any], found: str) -> None:
    with pytest.raises(ModelError) as caught:
        LossOfModel(Gives(output), None)(BATCH)
    assert str(caught.value) == (
        f"the model's output holds no scalar loss (found {found}). Give labels to a model that computes its loss, or "
        "pass loss=f(output, batch) (model.loss in a configuration)"
    )
    with pytest.raises(ModelError, match="the loss function's result holds no scalar loss"):
        LossOfModel(Gives(lambda weight: weight), lambda weight, _: _first_of(output(weight)))(BATCH)


def _first_of(value: Any) -> Any:
    return value["loss"] if isinstance(value, dict) and "loss" in value else value


def linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(4, 1))()


PLAN = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=3))


def assert_refused_and_usable(
    batches: Mapping[int, Any],
    message: str,
    *,
    kind: type[ShardwiseError] = BatchError,
    loss_weight: Any = None,
    method: str = "step",
    microbatches: Mapping[int, int] = {},
) -> None:
    """Give some of two ranks something bad: both refuse with the same words, nothing is computed, and both go on."""
    errors: list[str] = []

    def run(channel: sw.Channel) -> None:
        model = linear()
        engine = sw.parallelize(
            model, PLAN, optimizer=adamw, loss=square_loss, loss_weight=loss_weight, channel=channel
        )
        before = model.weight.detach().clone()
        settings = {"microbatches": microbatches[channel.rank]} if channel.rank in microbatches else {}
        with pytest.raises(kind) as caught:
            getattr(engine, method)(batches.get(channel.rank, points(channel.rank, 6)), **settings)
        errors.append(str(caught.value))
        assert torch.equal(model.weight, before)
        engine._opening.loss_weight = None
        assert not engine.step(points(channel.rank, 6)).skipped
        assert not torch.equal(model.weight, before)
        assert engine.counters.updates == 1

    sw.simulate(2, run)
    assert errors[0] == errors[1]
    assert message in errors[0]


UNEQUAL = {"x": torch.ones(6, 4), "y": torch.ones(5, 1)}

BAD_BATCHES = [
    ([torch.ones(6, 4)], "a batch is a dict of tensors, not a list; wrap it: {'input_ids': tensor, ...}"),
    (torch.ones(6, 4), "a batch is a dict of tensors, not a Tensor"),
    (None, "a batch is a dict of tensors, not a NoneType"),
    ({}, "the batch has no tensor with a dim 0 to split on; its entries are []"),
    ({"x": 3, "w": torch.tensor(1)}, "the batch has no tensor with a dim 0 to split on; its entries are ['w', 'x']"),
    (UNEQUAL, "all tensors of a batch have the same number of rows (dim 0), but x has 6, y has 5"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_batch_that_is_none_is_refused_on_all_ranks(batch: Any, message: str, method: str) -> None:
    assert_refused_and_usable({0: batch, 1: batch}, message, method=method)
    assert_refused_and_usable({1: batch}, f"rank 1: {message}", method=method)


def test_fewer_rows_than_microbatches_are_refused_with_both_numbers() -> None:
    message = "a batch of 2 rows cannot be split into 3 microbatches; give 3 rows or more, or set merge.microbatches"
    assert_refused_and_usable({0: points(0, 2), 1: points(1, 2)}, message)
    assert_refused_and_usable({0: points(0, 2)}, f"rank 0: {message} to at most 2")


def test_different_numbers_of_microbatches_are_refused() -> None:
    message = "every rank merges the same number of microbatches, but the ranks have [3, 2]; give step() the same"
    assert_refused_and_usable({}, message, kind=MismatchError, microbatches={1: 2})


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(-2)])
def test_a_weight_that_is_no_finite_number_of_at_least_zero_is_refused(weight: Any) -> None:
    message = f"loss_weight gave {float(weight)} for a microbatch; a weight is a finite number of at least 0"
    assert_refused_and_usable({}, message, loss_weight=lambda _: weight)
    assert_refused_and_usable({}, message, loss_weight=lambda _: weight, method="evaluate")


def test_weights_that_are_all_zero_are_refused() -> None:
    message = (
        "no microbatch on any rank has a weight above 0, so there is nothing to average; check loss_weight, and that"
    )
    assert_refused_and_usable({}, message, loss_weight=lambda _: 0)
    assert_refused_and_usable({0: points(0, 0), 1: points(1, 0)}, message, method="evaluate")


def mean_loss(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    x = torch.cat([batch["x"] for batch in batches])
    y = torch.cat([batch["y"] for batch in batches])
    return square_loss(model(x), {"y": y}).item()


@pytest.mark.parametrize("rows", [(5, 5), (7, 2), (1, 6), (4, 0), (0, 1)])
def test_an_evaluation_is_the_mean_over_all_rows_whatever_each_rank_has(rows: tuple[int, int]) -> None:
    def run(channel: sw.Channel) -> tuple[float, float]:
        model = linear()
        engine = sw.parallelize(model, PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        batch = points(channel.rank, rows[channel.rank])
        report = engine.evaluate(batch)
        assert engine.evaluate(batch) == report
        assert torch.equal(model.weight, linear().weight)
        return report.loss, report.weight

    expected = mean_loss(linear(), [points(rank, count) for rank, count in enumerate(rows)])
    for loss, weight in sw.simulate(2, run):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert weight == sum(rows)


class Modes(nn.Module):
    """Notes the mode and the grad mode of each call; one part of it is in evaluation mode all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.5)
        self.still = nn.Dropout(0.5).eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, self.dropout.training, torch.is_grad_enabled()))
        if self.training and bool(x[0, 0] == 99):
            raise ArithmeticError("training")
        if not self.training and bool(x[0, 0] == 99):
            raise ArithmeticError("evaluating")
        y: torch.Tensor = self.still(self.dropout(self.linear(x)))
        return y


def test_an_evaluation_is_in_evaluation_mode_without_gradients_and_puts_every_mode_back() -> None:
    def run(channel: sw.Channel) -> None:
        model = seeded(Modes)()
        engine = sw.parallelize(model, sw.Plan(), optimizer=adamw, loss=square_loss, channel=channel)
        engine.evaluate(points(0, 4))
        engine.step(points(0, 4))
        assert model.seen == [(False, False, False), (True, True, True)]
        assert (model.training, model.dropout.training, model.still.training) == (True, True, False)
        bad = points(0, 4)
        bad["x"][0, 0] = 99
        with pytest.raises(ArithmeticError, match="evaluating"):
            engine.evaluate(bad)
        assert (model.training, model.dropout.training, model.still.training) == (True, True, False)

    sw.simulate(1, run)


def test_the_batch_itself_is_left_as_it_was() -> None:
    def run(channel: sw.Channel) -> None:
        batch: dict[str, Any] = {**points(0, 6), "note": "x"}
        copies = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
        engine = sw.parallelize(linear(), PLAN, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(batch)
        engine.evaluate(batch)
        assert list(batch) == ["x", "y", "note"]
        assert all(torch.equal(batch[name], value) for name, value in copies.items())
        assert batch["x"].grad is None

    sw.simulate(2, run)


def test_ranks_along_tp_that_are_given_different_batches_refuse_together() -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "1": "row"}))

    def refusal(channel: sw.Channel) -> str:
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        with pytest.raises(MismatchError) as raised:
            engine.step(points(channel.rank, 4))
        return str(raised.value)

    first, second = sw.simulate(2, refusal)
    assert first == second
    assert first.startswith("ranks along pp and tp need the same batch")


def steps_on(rows_of: Callable[[int, int], float], mesh: sw.Mesh, num_steps: int) -> list[str]:
    """What ranks are warned of in steps whose rows are all `rows_of(data rank, step)`."""

    def on_rank(channel: sw.Channel) -> None:
        rules = {"0": "column", "2": "row"} if mesh.tp > 1 else None
        engine = sw.parallelize(
            seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))(),
            sw.Plan(mesh=mesh, tensor=sw.Tensor(rules=rules)),
            optimizer=adamw,
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        for step in range(num_steps):
            engine.step({"input": torch.full((2, 4), float(rows_of(mesh.data_rank(channel.rank), step)))})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.simulate(mesh.size, on_rank)
    return [str(each.message) for each in caught if each.category is SameRowsWarning]


def test_data_ranks_with_the_same_rows_are_told_once() -> None:
    [words] = steps_on(lambda data_rank, step: step, sw.Mesh(dp_shard=2), 3)
    assert words.startswith("rank 0 and rank 1 are different data ranks, and got the same rows")
    [words] = steps_on(lambda data_rank, step: min(data_rank, 1 + step), sw.Mesh(dp_replicate=3, tp=2), 2)
    assert words.startswith("rank 2 and rank 4 are different data ranks")


def test_ranks_with_the_same_rows_are_named_with_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.engine.step_opening.hosts_of", lambda channel: ["node1", "node2"])
    [words] = steps_on(lambda data_rank, step: step, sw.Mesh(dp_shard=2), 1)
    assert words.startswith("rank 0 (node1) and rank 1 (node2) are different data ranks")


def test_peers_with_the_same_rows_and_late_repetitions_are_not_told() -> None:
    assert steps_on(lambda data_rank, step: data_rank, sw.Mesh(dp_shard=2, tp=2), 2) == []
    assert steps_on(lambda data_rank, step: data_rank if step < 3 else 0.0, sw.Mesh(dp_shard=2), 5) == []
