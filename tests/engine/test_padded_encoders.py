"""Encoders of torch, whose evaluation goes another way than their training: the numbers of one process in both."""

import pytest
import torch
from torch import nn

import shardwise as sw

CUTS = sw.Tensor(rules={"*.linear1": "colwise", "*.linear2": "rowwise"})
PLANS = {
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=CUTS),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "stage 3 and tp": sw.Plan(mesh=sw.Mesh(dp_shard=2, tp=2), sharding=sw.Sharding(stage=3), tensor=CUTS),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "run again": sw.Plan(activations=sw.Activations(checkpoint="blocks")),
}
PADDING = {"none": None, "right": [0, 2, 1, 0], "left": [0, -2, 0, 0]}
"""Places of padding in each row; negative: at its beginning, where torch takes no nested tensors."""


class Net(nn.Module):
    def __init__(self, kind: str, padding: str) -> None:
        super().__init__()
        self.kind, self.padding = kind, PADDING[padding]
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=kind == "norm first")
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        norm = nn.LayerNorm(8) if kind == "norm" else None
        self.body: nn.Module
        if kind == "transformer":
            self.body = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        else:
            self.body = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=kind != "norm first")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        mask = None
        if self.padding is not None:
            mask = torch.zeros(x.shape[:2], dtype=torch.bool)
            for row, count in enumerate(self.padding):
                mask[row, x.shape[1] - count if count >= 0 else 0 : x.shape[1] if count >= 0 else -count] = True
        if self.kind == "transformer":
            h = self.body(h, h, src_key_padding_mask=mask, memory_key_padding_mask=mask)
        else:
            h = self.body(h, src_key_padding_mask=mask)
        out: torch.Tensor = self.head(h)
        return out


X = torch.linspace(-1, 1, 120).view(4, 5, 6)


def by_one_process(kind: str, padding: str) -> list[float]:
    torch.manual_seed(0)
    model = Net(kind, padding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        loss = model.train()(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            output = model.eval()(X)
        found += [loss.item(), output.square().mean().item(), *output.flatten().tolist()]
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", ["plain", "norm", "norm first", "transformer"])
def test_encoders_train_evaluate_and_predict_as_in_one_process(kind: str, padding: str, plan: str) -> None:
    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            Net(kind, padding),
            PLANS[plan],
            loss=lambda output, _: output.square().mean(),
            channel=channel,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.1),
        )
        found: list[float] = []
        for _ in range(2):
            found += [engine.step({"x": X}).loss, engine.evaluate({"x": X}).loss]
            found += engine.predict({"x": X}).flatten().tolist()
        return found

    # Nested tensors and cut sums round in another order.
    got = sw.simulate(PLANS[plan].mesh.size, run)[0]
    assert got == pytest.approx(by_one_process(kind, padding), rel=1e-4, abs=1e-5)
