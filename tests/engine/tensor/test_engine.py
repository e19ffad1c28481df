"""Training with cut parameters through the engine: the loss over a cut vocabulary, alone and between stages."""

import pytest
import torch

import shardwise as sw
from shardwise.engine.tensor.vocabulary import VocabularyCrossEntropy
from tests.engine.tensor.test_styles import SequenceModel

RULES = {"*.up": "column", "*.down": "row", "embedding": "vocab"}


def train(channel: sw.Channel, mesh: sw.Mesh, head: str, merge: int = 2) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of three updates in float64."""
    torch.manual_seed(0)
    model = SequenceModel().double()
    entropy = VocabularyCrossEntropy(model.head)

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return entropy(logits[:, :-1], batch["targets"][:, 1:])

    words = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(1))
    plan = sw.Plan(
        mesh=mesh,
        tensor=sw.Tensor(rules={**RULES, "head": head}) if mesh.tp > 1 else sw.Tensor(),
        precision=sw.Precision(compute=None),
        merge=sw.Merge(microbatches=merge),
        clip_grad_norm=1.0,
    )
    engine = sw.parallelize(
        model, plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), loss=loss, channel=channel
    )
    reports = [engine.step({"words": words, "targets": words}) for _ in range(3)]
    return [report.loss for report in reports], [report.grad_norm for report in reports]


@pytest.mark.parametrize("head", ["column", "vocab", "rowwise_split_input"])
@pytest.mark.parametrize("mesh", [sw.Mesh(tp=2), sw.Mesh(tp=3), sw.Mesh(tp=2, pp=2)], ids=str)
def test_training_is_that_of_one_process(mesh: sw.Mesh, head: str) -> None:
    (expected,) = sw.simulate(1, lambda channel: train(channel, sw.Mesh(), head))
    results = sw.simulate(mesh.size, lambda channel: train(channel, mesh, head))
    assert all(result == results[0] for result in results)
    # float64 throughout: sums are taken in another order.
    for got, wanted in zip(results[0], expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-12)
