"""What is refused of plans with several axes, and what a user may have done before: the same on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError, ShardwiseError
from tests.checkpoint.layouts import assembled, state_of
from tests.engine.hybrid_models import CASE, RULES, decoder, plan_of
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import Optimizers
from tests.engine.pipeline.oracle import adamw
from tests.engine.pipeline.stages import share_of


def refusal(plan: sw.Plan, kind: type[ShardwiseError], *, optimizer: Any = adamw) -> str:
    """What every rank is told."""

    def run(channel: sw.Channel) -> str:
        model = decoder()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        with pytest.raises(kind) as caught:
            sw.parallelize(
                model,
                plan,
                optimizer=optimizer(model) if optimizer is not adamw else adamw,
                loss=word_loss,
                channel=channel,
            )
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items()), "the model is as it was"
        assert model(word_batch(0, 2)["words"]).shape == (2, 5, 11)
        return str(caught.value)

    told = sw.simulate(plan.mesh.size, run)
    assert len(set(told)) == 1
    return told[0]


def ruled(mesh: str, rules: Any) -> sw.Plan:
    sizes = sw.Mesh.parse(mesh)
    return sw.Plan(mesh=sizes, tensor=sw.Tensor(rules=rules))


def test_more_ranks_than_groups_of_heads_are_refused_with_both_numbers() -> None:
    said = refusal(ruled("tp=4", RULES), PlanError)
    assert "it works with 3 key-value heads, which cannot be cut over 4 ranks" in said
    assert said.count("it works with 3 key-value heads") == 2 * 4, "every projection of both blocks is named"


def test_a_rank_without_columns_is_refused() -> None:
    said = refusal(ruled("tp=3", {"head": "vocab(unit=4)", "embedding": "vocab(unit=4)"}), PlanError)
    assert "11 indices are no whole number of units of 4" in said
    said = refusal(ruled("tp=4", {"blocks.*.up": "column(unit=11)", "blocks.*.down": "row(unit=11)"}), PlanError)
    assert "33 indices in units of 11 are 3 for 4 ranks; give mesh.tp at most 3" in said


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"layers.*": "column"}, "'layers.*' means none of the"),
        ("auto", '"auto" takes the plan that the model carries, and it carries none'),
        ({"norm": "replicate"}, "no rule cuts a parameter over the 2 ranks along tp"),
        ({"embedding": "vocab"}, "are one parameter (a tie)"),
        ({"norm": "column"}, "it is not a linear map"),
    ],
)
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp_shard=2,tp=2"])
def test_rules_that_do_not_fit_the_model_are_refused(mesh: str, rules: Any, words: str) -> None:
    assert words in refusal(ruled(mesh, rules), PlanError)


def test_several_findings_come_at_once() -> None:
    said = refusal(ruled("tp=4", {**RULES, "nothing": "row"}), PlanError)
    assert "'nothing' means none" in said
    assert "it works with 3 key-value heads" in said


def trained_before(make_optimizer: Optimizers) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two updates of plain PyTorch."""
    model = decoder()
    optimizer = make_optimizer(list(model.parameters()))
    for seed in (7, 8):
        optimizer.zero_grad()
        word_loss(model(word_batch(seed, 6)["words"]), word_batch(seed, 6)).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Has state from the first."""
    return torch.optim.Adagrad([each for each in parameters if each.requires_grad], lr=1e-2)


class Accumulating(torch.optim.Optimizer):
    """Makes its state when it is built, in every version of torch, as Adagrad does before 2.12."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["sum"] = torch.zeros_like(each)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["sum"].addcmul_(each.grad, each.grad)
                    each.addcdiv_(each.grad, self.state[each]["sum"].sqrt().add_(1e-10), value=-group["lr"])


def accumulating(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Accumulating([each for each in parameters if each.requires_grad], lr=1e-2)


@pytest.mark.parametrize(
    ("mesh", "make_optimizer"),
    [
        ("tp=2", adamw),
        pytest.param("tp=2", adagrad, marks=pytest.mark.stress),  # which "pp=2,tp=2" has too
        ("tp=2", accumulating),
        ("pp=2,tp=2", adagrad),
        ("dp_shard=2,tp=2", adamw),
        ("pp=2,dp_shard=2", adamw),
    ],
    ids=["tp adamw", "tp adagrad", "tp accumulating", "pp x tp adagrad", "dp x tp adamw", "pp x dp adamw"],
)
def test_an_optimizer_that_has_trained_before_goes_on(mesh: str, make_optimizer: Optimizers) -> None:
    """float64: what is left is the order of sums."""

    def run(channel: sw.Channel, plan: sw.Plan) -> tuple[list[float], dict[sw.Piece, torch.Tensor]]:
        model, optimizer = trained_before(make_optimizer)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=word_loss, channel=channel)
        losses = [engine.step(share_of(batch, plan.mesh, channel.rank)).loss for batch in CASE.batches]
        if plan.mesh.size > 1:
            engine = sw.relayout(engine, moved)
            losses += [engine.step(share_of(batch, moved.mesh, channel.rank)).loss for batch in CASE.batches]
        else:
            losses += [engine.step(batch).loss for batch in CASE.batches]
        return losses, state_of(engine)

    plan = plan_of(mesh, stage=3 if "dp" in mesh else 1)
    moved = plan_of("tp=2" if plan.mesh.size == 2 else "dp_replicate=2,tp=2")
    ranks = sw.simulate(plan.mesh.size, lambda channel: run(channel, plan))
    [(losses, state)] = sw.simulate(1, lambda channel: run(channel, plan_of("single")))
    assert all(told == pytest.approx(losses, rel=1e-10) for told, _ in ranks)
    got, wanted = assembled(each for _, each in ranks), assembled([state])
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-10)


class Dropping(nn.Module):
    """Dropout on what each rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(11, 6), nn.Linear(6, 64)
        self.dropout, self.down = nn.Dropout(0.5), nn.Linear(64, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.dropout(self.up(self.embedding(words)) * 0 + 1))
        return out


def test_ranks_agree_on_what_is_whole_though_masks_of_parts_are_their_own() -> None:
    """Dropout inside a cut region draws for a part: replicated parameters stay equal on all ranks all the same."""
    plan = ruled("tp=2", {"up": "column", "down": "row"})

    def run(channel: sw.Channel) -> tuple[list[float], dict[sw.Piece, torch.Tensor]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Dropping()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)
        return [engine.step(batch).loss for batch in CASE.batches], engine.state()

    (losses, state), (others, other) = sw.simulate(2, run)
    assert losses == others
    shared = state.keys() & other.keys()
    assert {piece.name for piece in shared} >= {"embedding.weight", "down.bias"}
    assert all(torch.equal(state[piece], other[piece]) for piece in shared)
