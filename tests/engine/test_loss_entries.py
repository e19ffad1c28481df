"""A loss function that returns a dict: "loss" is differentiated, and every entry is weighed and reported."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.recorded import Recorded
from shardwise.errors import ModelError
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.hybrid_models import data_rank, decoder, num_data_ranks, plan_of
from tests.engine.test_given_microbatches import Words, count_words, given, word_loss


def entries(output: torch.Tensor, batch: Words) -> dict[str, Any]:
    """A loss, and a tensor with a graph, one without, one of no stage, and a number."""
    return {
        "loss": word_loss(output, batch),
        "square": output.square().mean().reshape(1),
        "right": (output.argmax(-1) == batch["labels"]).float().mean().detach(),
        "first": batch["labels"][0, 0],
        "length": batch["labels"].shape[1],
    }


LAYOUTS = {
    "one": sw.Mesh(),
    "dp": sw.Mesh(dp_shard=2),
    "pp": sw.Mesh(pp=2),
    "tp": sw.Mesh(tp=2),
    "dp pp": sw.Mesh(dp_shard=2, pp=2),
    "dp tp": sw.Mesh(dp_shard=2, tp=2),
}


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("one", 1), ("dp", 0), ("dp", 3), ("pp", 0), ("pp", 3), ("tp", 2), ("dp pp", 1), ("dp pp", 3), ("dp tp", 3)],
)
def test_every_entry_is_the_weighted_mean_over_all_microbatches_of_all_ranks(layout: str, stage: int) -> None:
    mesh = LAYOUTS[layout]
    num_ranks = num_data_ranks(mesh)

    def run(channel: sw.Channel, loss: Callable[..., Any]) -> tuple[Any, Any, dict[str, torch.Tensor], int]:
        plan = plan_of(mesh, stage=stage, schedule="interleaved" if layout == "dp pp" and stage != 3 else "1f1b")
        engine = sw.parallelize(decoder(), plan, optimizer=adamw, loss=loss, loss_weight=count_words, channel=channel)
        parts = given(0, data_rank(mesh, channel.rank), num_ranks)
        report, held_out = engine.step(parts), engine.evaluate(parts)
        return report, held_out, dict(sw.full(engine)), engine.counters.exchanges

    with torch.no_grad():
        parts = [part for rank in range(num_ranks) for part in given(0, rank, num_ranks)]
        model = decoder()
        found = [entries(model(part["words"]), part) for part in parts]
    weights = [count_words(part) for part in parts]
    wanted = {
        name: math.fsum(weight * float(each[name]) for weight, each in zip(weights, found, strict=True))
        / math.fsum(weights)
        for name in found[0]
    }
    with_dicts = sw.simulate(mesh.size, lambda channel: run(channel, entries))
    plain = sw.simulate(mesh.size, lambda channel: run(channel, word_loss))
    for (report, held_out, state, exchanges), (plain_report, plain_held_out, plain_state, plain_exchanges) in zip(
        with_dicts, plain, strict=True
    ):
        assert report.losses == pytest.approx(wanted, rel=1e-12)
        assert report.losses["loss"] == report.loss == plain_report.loss
        assert plain_report.losses == {"loss": plain_report.loss}
        assert (held_out.loss, held_out.losses.keys()) == (plain_held_out.loss, wanted.keys())
        assert held_out.losses["first"] == wanted["first"]
        assert all(torch.equal(state[name], value) for name, value in plain_state.items()), "the same training"
        assert exchanges == plain_exchanges
        assert report == with_dicts[0][0]


class GivesBoth(nn.Module):
    """Gives what it has on both of its stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return hidden, self.last(hidden)


def test_entries_and_metrics_may_be_of_several_stages() -> None:
    def loss(output: tuple[torch.Tensor, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        hidden, last = output
        return {"loss": square_loss(last, batch), "hidden": hidden.mean(), "both": hidden.mean() + last.mean()}

    def hidden(output: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
        return output[0].mean(1) + output[1][:, 0]

    def run(channel: sw.Channel) -> tuple[Any, ...]:
        pipeline = sw.Pipeline(stages={"first": 0, "last": 1}) if channel.size > 1 else sw.Pipeline()
        plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=2), pipeline=pipeline)
        engine = sw.parallelize(seeded(GivesBoth)(), plan, optimizer=adamw, loss=loss, channel=channel)
        found = [engine.step(points(step, 5)).losses for step in range(2)]
        report = engine.evaluate(points(2, 5), metrics={"hidden": hidden})
        return found, report.losses, report.metrics

    (wanted,) = sw.simulate(1, run)
    assert sw.simulate(2, run) == [wanted] * 2


def linear_loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": square_loss(output, batch), "aux": output.mean(), "rows": len(output)}


def linear_engine(channel: sw.Channel, loss: Callable[..., Any], **settings: Any) -> sw.Engine:
    model = seeded(lambda: nn.Linear(4, 1))().to(channel.device)
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), clip_grad_norm=1.0)
    return sw.parallelize(model, plan, optimizer=adamw, loss=loss, channel=channel, **settings)


def test_entries_of_a_microbatch_without_weight_do_not_count() -> None:
    def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {**linear_loss(output, batch), **({"strange": 1.0} if batch["x"].isnan().any() else {})}

    def weight(batch: Mapping[str, torch.Tensor]) -> float:
        return 0.0 if batch["x"].isnan().any() else float(len(batch["x"]))

    def run(channel: sw.Channel) -> tuple[Any, Any]:
        engine = linear_engine(channel, loss, loss_weight=weight)
        nothing = {"x": torch.full((2, 4), math.nan), "y": torch.ones(2, 1)}
        # The second rank computes nothing at all.
        parts = [points(0, 3), nothing, points(1, 1)] if channel.rank == 0 else [nothing]
        held_out = engine.evaluate(parts)
        report = engine.step(parts)
        return report.losses, held_out.losses

    report, held_out = sw.simulate(2, run)[0]
    assert report == held_out
    assert report["rows"] == (3 * 3 + 1) / 4
    assert sw.simulate(2, run)[1] == (report, held_out)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_entries_on_a_device_are_those_of_the_host_and_wait_for_nothing(fake: str, num_ranks: int) -> None:
    from shardwise.testing.accelerator import counted

    def run(channel: sw.Channel) -> list[dict[str, float]]:
        engine = linear_engine(channel, linear_loss)
        found = []
        for step in range(4):
            parts = [points(step, 2), points(9 + step, 3)][: 2 - channel.rank]
            report = engine.step(parts)
            found.append({**report.losses, **{f"held {name}": x for name, x in engine.evaluate(parts).losses.items()}})
        return found

    def waits(channel: sw.Channel, loss: Callable[..., Any]) -> list[Any]:
        engine = linear_engine(channel, loss)
        for step in range(4):
            engine.step(points(step, 2))
        with counted() as counts:
            for step in range(3):
                engine.step(points(step, 2))
        return [each.syncs for each in counts]

    wanted = sw.simulate(num_ranks, run)
    for one, other in zip(sw.simulate(num_ranks, run, device=fake), wanted, strict=True):
        for step, known in zip(one, other, strict=True):
            assert step == pytest.approx(known, rel=1e-5)
    plain, dicts = (sw.simulate(1, partial(waits, loss=loss), device=fake) for loss in (square_loss, linear_loss))
    assert dicts == plain


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        (
            lambda batch, rank: batch["x"][0, 0] > 0,
            "gives loss, aux on rank 0, and loss, aux, more on rank",
        ),
        (lambda batch, rank: rank == 1, "gives loss, aux on rank 0, and loss, aux, more on rank 1"),
    ],
    ids=["microbatches", "ranks"],
)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_entries_that_differ_are_refused_on_all_ranks(
    unlike: Callable[[Any, int], bool], message: str, method: str
) -> None:
    def run(channel: sw.Channel) -> str:
        def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            more = {"more": 1.0} if unlike(batch, channel.rank) else {}
            return {"loss": square_loss(output, batch), "aux": 1.0, **more}

        engine = linear_engine(channel, loss)
        x = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
        with pytest.raises(ModelError) as caught:
            getattr(engine, method)([{"x": x[at : at + 1], "y": torch.ones(1, 1)} for at in range(2)])
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert message in first


WITHOUT_LOSS = {"aux": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": None}, "holds no scalar loss"),
        (WITHOUT_LOSS, "the loss function's result holds no scalar loss"),
        ({"aux": torch.ones(3)}, "the loss function gives 'aux' in its dict, a tensor of shape [3]"),
        ({"aux": "text"}, "the loss function gives 'aux' in its dict, str"),
    ],
)
def test_a_dict_of_something_else_is_refused(given: dict[str, Any], message: str) -> None:
    def run(channel: sw.Channel) -> None:
        def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
            return given if given is WITHOUT_LOSS else {"loss": square_loss(output, batch), **given}

        with pytest.raises(ModelError) as caught:
            linear_engine(channel, loss).step(points(0, 2))
        assert message in str(caught.value)

    sw.simulate(1, run)


def test_a_dict_costs_no_exchange_and_no_transfer_of_tensors() -> None:
    def calls(channel: sw.Channel, loss: Callable[..., Any]) -> list[tuple[str, str]]:
        watched = Recorded(channel)
        engine = linear_engine(watched, loss)
        engine.step(points(channel.rank, 4))
        watched.calls.clear()
        engine.step(points(channel.rank, 4))
        engine.evaluate(points(channel.rank, 4))
        return [(call.operation, call.purpose) for call in watched.calls]

    one, other = (sw.simulate(2, partial(calls, loss=loss)) for loss in (square_loss, linear_loss))
    assert one == other
