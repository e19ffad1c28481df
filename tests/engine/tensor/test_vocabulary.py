"""The loss over a cut vocabulary against torch's own, and what travels for it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.recorded import Recorded, RecordedCall
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.styles import TensorParallel
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.tensor.vocabulary import VocabularyCrossEntropy
from shardwise.errors import ModelError, PlanError
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole

NUM_TOKENS = 37


def make_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, NUM_TOKENS))


def make_batch(num_rows: int = 5, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, num_rows, 6, generator=generator) * 3
    labels = torch.randint(NUM_TOKENS, (2, num_rows), generator=generator)
    labels[0, 1] = labels[1, -1] = ignore_index
    labels[0, 0], labels[1, 0] = 0, NUM_TOKENS - 1
    return hidden, labels


def on_ranks(
    num_ranks: int,
    settings: dict[str, Any],
    *,
    rule: str = "column",
    num_rows: int = 5,
    dtype: Any = torch.float64,
    ignored: int | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[RecordedCall]]]:
    """Loss, gradient of the hidden values, gradient of this rank's weight, calls of the forward: of each rank."""

    def run(channel: sw.Channel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[RecordedCall]]:
        model = make_head().to(dtype)
        plan = plan_tensor(tensor_outline(model), {"0": rule}, num_ranks=num_ranks)
        for name, portion in plan.portions(channel.rank).items():
            parameter = model.get_parameter(name)
            parameter.data = portion_of(parameter.detach(), portion).clone()
        recorded = Recorded(channel)
        TensorParallel(model, plan, recorded)
        entropy = VocabularyCrossEntropy(model[0], **settings)  # type: ignore[index]
        hidden, labels = make_batch(num_rows, settings.get("ignore_index", -100) if ignored is None else ignored)
        hidden = hidden.to(dtype).requires_grad_()
        loss = entropy(model(hidden), labels)
        calls = list(recorded.calls)
        loss.sum().backward()
        weight = model[0].weight  # type: ignore[index]
        assert isinstance(weight, nn.Parameter)
        assert hidden.grad is not None
        assert weight.grad is not None
        return loss.detach(), hidden.grad, weight.grad, calls

    return sw.simulate(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}],
    ids=str,
)
def test_loss_and_gradients_are_those_of_torch(settings: dict[str, Any], num_ranks: int) -> None:
    model = make_head().double()
    hidden, labels = make_batch(ignore_index=settings.get("ignore_index", -100))
    hidden = hidden.double().requires_grad_()
    logits = model(hidden)
    expected = functional.cross_entropy(logits.transpose(1, 2), labels, **settings)
    expected.sum().backward()
    ranks = on_ranks(num_ranks, settings)
    weight = model[0].weight  # type: ignore[index]
    assert isinstance(weight, nn.Parameter)
    assert hidden.grad is not None
    for loss, gradient, _, _ in ranks:
        assert torch.equal(loss, ranks[0][0])
        assert torch.equal(gradient, ranks[0][1])
    # float64: sums over the vocabulary are taken in another order.
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ranks[0][1], hidden.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([each[2] for each in ranks]), weight.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tokens_may_be_masked_out_on_all_of_a_rank(num_ranks: int) -> None:
    def run(channel: sw.Channel) -> tuple[torch.Tensor, torch.Tensor]:
        model = make_head().double()
        plan = plan_tensor(tensor_outline(model), {"0": "column"}, num_ranks=num_ranks)
        for name, portion in plan.portions(channel.rank).items():
            parameter = model.get_parameter(name)
            parameter.data = portion_of(parameter.detach(), portion).clone()
        TensorParallel(model, plan, channel)
        hidden, labels = make_batch()
        logits = model(hidden.double())
        if channel.rank == 0:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool), -torch.inf)
        loss = VocabularyCrossEntropy(model[0])(logits, labels.clamp(min=20).masked_fill(labels < 0, -100))  # type: ignore[index]
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    hidden, labels = make_batch()
    whole = make_head().double()(hidden.double()).detach()
    masked = -(-NUM_TOKENS // num_ranks)
    whole[..., :masked] = -torch.inf
    whole.requires_grad_()
    labels = labels.clamp(min=20).masked_fill(labels < 0, -100)
    expected = functional.cross_entropy(whole.transpose(1, 2), labels)
    expected.backward()
    assert torch.isfinite(expected)
    ranks = sw.simulate(num_ranks, run)
    # float64: sums over the vocabulary are taken in another order.
    torch.testing.assert_close(ranks[0][0], expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([each[1] for each in ranks], -1), whole.grad, rtol=1e-12, atol=1e-13)


def test_the_gradient_of_a_gradient_is_refused_and_not_zero() -> None:
    def run(channel: sw.Channel) -> None:
        model = make_head().double()
        TensorParallel(model, plan_tensor(tensor_outline(model), {"0": "column"}, num_ranks=1), channel)
        hidden, labels = make_batch()
        logits = model(hidden.double())
        loss = VocabularyCrossEntropy(model[0])(logits, labels)  # type: ignore[index]
        (gradient,) = torch.autograd.grad(loss.square(), logits, create_graph=True)
        gradient.square().sum().backward()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        sw.simulate(1, run)


def test_float32_is_near_to_torch_and_half_precision_is_read_as_float32() -> None:
    hidden, labels = make_batch()
    logits = make_head()(hidden)
    expected = functional.cross_entropy(logits.transpose(1, 2), labels).detach()
    eps = torch.finfo(torch.float32).eps
    (loss, *_), *_ = on_ranks(2, {}, dtype=torch.float32)
    # One exponential sum of 37 terms, one logarithm; logits below 32 lose up to 16 eps beside the largest.
    assert abs(float(loss - expected)) < 32 * eps
    (half, *_), *_ = on_ranks(2, {}, dtype=torch.bfloat16)
    assert half.dtype == torch.float32


def test_a_head_that_is_not_cut_or_gathers_has_torchs_own_loss() -> None:
    hidden, labels = make_batch()
    expected = functional.cross_entropy(make_head().double()(hidden.double()).transpose(1, 2), labels)
    for rule in ("vocab", "colwise_gather_output"):
        (loss, *_), *_ = on_ranks(2, {}, rule=rule)
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    whole = make_head().double()
    loss = VocabularyCrossEntropy(whole)(whole(hidden.double()), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)


def test_three_numbers_per_token_travel_and_no_logits() -> None:
    for num_rows in (5, 50):
        *_, calls = on_ranks(2, {}, num_rows=num_rows)[0]
        assert [(call.operation, call.num_elements) for call in calls] == [("all_gather", 2 * 3 * 2 * num_rows)]


def test_what_does_not_fit_is_refused() -> None:
    model = make_head()
    hidden, labels = make_batch()
    with pytest.raises(ModelError, match=r"labels of shape \(2, 4\)"):
        VocabularyCrossEntropy(model)(model(hidden), labels[:, 1:])
    with pytest.raises(PlanError, match="'average' is not one of"):
        VocabularyCrossEntropy(model, reduction="average")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="not between 0 and 1"):
        VocabularyCrossEntropy(model, label_smoothing=2.0)


def test_a_label_that_no_rank_has_is_refused_as_by_torch() -> None:
    with pytest.raises(IndexError, match="labels reach from -100 to 36, but there are 37 tokens"):
        on_ranks(2, {"ignore_index": -1}, ignored=-100)


def test_what_stands_between_a_cut_head_and_its_loss_has_a_gradient_of_each_rank() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 6)
            self.head = nn.Linear(6, NUM_TOKENS)
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.before(x)) * self.temperature
            return out

    def entropy_of(model: nn.Module) -> torch.Tensor:
        assert isinstance(model, Tempered)
        hidden, labels = make_batch()
        return VocabularyCrossEntropy(model.head)(model(hidden.double()), labels).reshape(1)

    got = compute_cut(Tempered, {"head": "column"}, 2, entropy_of, is_completed=True)
    assert got.plan is not None
    assert got.plan.summed == {"temperature"}
    assert_close(got, compute_whole(Tempered, entropy_of))
