"""The loss over a cut vocabulary against torch's own, and what travels for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.recorded import Recorded, RecordedCall
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.styles import put_styles
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.tensor.vocabulary import VocabularyCrossEntropy
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.formed import formed, linear
from tests.engine.tensor.cut_models import assert_cut_is_right
from tests.engine.tensor.nets import SequenceModel
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import Program, plan_of, seeded
from tests.refusals import Refusals

NUM_TOKENS = 37


def make_head() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(6, NUM_TOKENS)))()


def make_batch(num_rows: int = 5, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, num_rows, 6, generator=generator) * 3
    labels = torch.randint(NUM_TOKENS, (2, num_rows), generator=generator)
    labels[0, 1] = labels[1, -1] = ignore_index
    labels[0, 0], labels[1, 0] = 0, NUM_TOKENS - 1
    return hidden, labels


def cut_head(channel: sw.Channel, rule: str = "column", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """With the part of the rank."""
    model = make_head().to(dtype)
    plan = plan_tensor(tensor_outline(model), {"0": rule}, num_ranks=channel.size)
    for name, portion in plan.portions(channel.rank).items():
        parameter = model.get_parameter(name)
        parameter.data = portion_of(parameter.detach(), portion).clone()
    put_styles(model, plan, channel)
    return model


Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[RecordedCall]]
"""Loss, gradient of the hidden values, gradient of this rank's weight, calls of the forward."""
Change = Callable[[torch.Tensor, int], torch.Tensor]


def on_ranks(
    num_ranks: int,
    settings: dict[str, Any],
    *,
    rule: str = "column",
    num_rows: int = 5,
    dtype: torch.dtype = torch.float64,
    ignored: int | None = None,
    change: Change = lambda logits, rank: logits,
) -> list[Found]:
    def run(channel: sw.Channel) -> Found:
        recorded = Recorded(channel)
        model = cut_head(recorded, rule, dtype)
        entropy = VocabularyCrossEntropy(model[0], **settings)
        hidden, labels = make_batch(num_rows, settings.get("ignore_index", -100) if ignored is None else ignored)
        hidden = hidden.to(dtype).requires_grad_()
        loss = entropy(change(model(hidden), channel.rank), labels)
        calls = list(recorded.calls)
        loss.sum().backward()
        weight = model[0].get_parameter("weight")
        assert hidden.grad is not None
        assert weight.grad is not None
        return loss.detach(), hidden.grad, weight.grad, calls

    return sw.simulate(num_ranks, run)


SETTINGS: list[dict[str, Any]] = [
    *({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}),
    {"masked": True, "ignore_index": 0},
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_are_those_of_torch(settings: dict[str, Any], num_ranks: int) -> None:
    """masked: no token of the first rank can be."""
    settings = dict(settings)
    masked = -(-NUM_TOKENS // num_ranks) if settings.pop("masked", False) else 0

    def mask(logits: torch.Tensor, rank: int) -> torch.Tensor:
        return logits.masked_fill(torch.full_like(logits, masked and rank == 0, dtype=torch.bool), -torch.inf)

    model = make_head().double()
    hidden, labels = make_batch(ignore_index=settings.get("ignore_index", -100))
    hidden = hidden.double().requires_grad_()
    logits = model(hidden)
    whole = torch.cat([mask(logits[..., :masked], 0), logits[..., masked:]], -1)
    expected = functional.cross_entropy(whole.transpose(1, 2), labels, **settings)
    expected.sum().backward()
    ranks = on_ranks(num_ranks, settings, change=mask)
    weight = model[0].get_parameter("weight")
    for loss, gradient, _, _ in ranks:
        assert torch.equal(loss, ranks[0][0])
        assert torch.equal(gradient, ranks[0][1])
    # float64: sums over the vocabulary are taken in another order.
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ranks[0][1], hidden.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.cat([each[2] for each in ranks]), weight.grad, rtol=1e-12, atol=1e-13)


def test_float32_is_near_to_torch_and_half_precision_is_read_as_float32() -> None:
    hidden, labels = make_batch()
    expected = functional.cross_entropy(make_head()(hidden).transpose(1, 2), labels).detach()
    (loss, *_), *_ = on_ranks(2, {}, dtype=torch.float32)
    # One exponential sum of 37 terms, one logarithm; logits below 32 lose up to 16 eps beside the largest.
    assert abs(float(loss - expected)) < 32 * torch.finfo(torch.float32).eps
    (half, *_), *_ = on_ranks(2, {}, dtype=torch.bfloat16)
    assert half.dtype == torch.float32


def test_a_head_that_is_not_cut_or_gathers_has_torchs_own_loss() -> None:
    hidden, labels = make_batch()
    whole = make_head().double()
    expected = functional.cross_entropy(whole(hidden.double()).transpose(1, 2), labels)
    losses = [on_ranks(2, {}, rule=rule)[0][0] for rule in ("vocab", "colwise_gather_output")]
    for loss in [*losses, VocabularyCrossEntropy(whole)(whole(hidden.double()), labels)]:
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)


def test_three_numbers_per_token_travel_and_no_logits() -> None:
    for num_rows in (5, 50):
        *_, calls = on_ranks(2, {}, num_rows=num_rows)[0]
        assert [(call.operation, call.num_elements) for call in calls] == [("all_gather", 2 * 3 * 2 * num_rows)]


def gradient_of_a_gradient(channel: sw.Channel) -> None:
    model = cut_head(channel)
    hidden, labels = make_batch()
    logits = model(hidden.double())
    loss = VocabularyCrossEntropy(model[0])(logits, labels)
    (gradient,) = torch.autograd.grad(loss.square(), logits, create_graph=True)
    gradient.square().sum().backward()


def too_few_labels() -> None:
    model, (hidden, labels) = make_head(), make_batch()
    VocabularyCrossEntropy(model)(model(hidden), labels[:, 1:])


REFUSED = Refusals(
    "engine.vocabulary",
    {
        "too few labels": too_few_labels,
        "another reduction": lambda: VocabularyCrossEntropy(make_head(), reduction="average"),  # type: ignore[arg-type]
        "too much smoothing": lambda: VocabularyCrossEntropy(make_head(), label_smoothing=2.0),
        "a label that no rank has": lambda: on_ranks(2, {"ignore_index": -1}, ignored=-100),
    },
    kind=(sw.ShardwiseError, IndexError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_the_gradient_of_a_gradient_is_refused_and_not_zero() -> None:
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sw.simulate(1, gradient_of_a_gradient)


def test_what_stands_between_a_cut_head_and_its_loss_has_a_gradient_of_each_rank() -> None:
    tempered = formed(
        lambda net, x: net.head(net.before(x)) * net.temperature,
        before=linear(6, 6),
        head=linear(6, NUM_TOKENS),
        temperature=lambda: nn.Parameter(torch.tensor(1.5)),
    )

    def entropy_of(model: Any) -> torch.Tensor:
        hidden, labels = make_batch()
        return VocabularyCrossEntropy(model.head)(model(hidden.double()), labels).reshape(1)

    assert_cut_is_right(tempered, {"head": "column"}, entropy_of)


WORDS = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(1))


def loss_with(model: Any) -> Callable[[Any], torch.Tensor]:
    entropy = VocabularyCrossEntropy(model.head)
    return lambda batch: entropy(model(batch["words"])[:, :-1], batch["targets"][:, 1:])


@pytest.mark.parametrize(
    ("mesh", "head"), [("tp=2", "column"), ("tp=3", "vocab"), ("tp=2,pp=2", "column"), ("tp=2", "rowwise_split_input")]
)
def test_training_is_that_of_one_process(mesh: str, head: str) -> None:
    program = Program(
        make=seeded(SequenceModel),
        batches=[{"words": WORDS, "targets": WORDS}] * 3,
        loss_with=loss_with,
        rules={"*.up": "column", "*.down": "row", "embedding": "vocab", "head": head},
    )
    assert_trains_like_one_process(program, plan_of(program, mesh, k=2, clip=1.0))
