"""Sparse and nested tensors in batches: cut, compared and carried as dense ones, or refused by their names."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import BatchError, MismatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]

EYE = torch.eye(4) * torch.arange(1.0, 5.0)
ROWS = [torch.full((n, 4), 1.0 + n) for n in (1, 2, 3, 2)]
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": EYE.to_sparse,
    "uncoalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0, 3], [0, 0, 2]]), torch.ones(3), (4, 4)),
    "csr": EYE.to_sparse_csr,
    "csc": EYE.to_sparse_csc,
    "bsr": lambda: EYE.to_sparse_bsr((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor(ROWS, layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor(ROWS),
}


class Net(nn.Module):
    """Takes one tensor of another layout beside plain rows."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.mix, self.head = nn.Linear(4, 8), Mix(), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mix(self.map(rows), odd))
        return out


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 8)

    def forward(self, h: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        if odd.is_nested:
            return h + torch.stack([self.map(each).sum(0) for each in odd.unbind()])
        out: torch.Tensor = h + self.map(odd.to_dense())
        return out


def run(channel: sw.Channel, plan: sw.Plan, layout: str, *, cuts: bool, listed: bool = False) -> list[float]:
    torch.manual_seed(0)
    engine = sw.parallelize(
        Net(),
        plan,
        optimizer=lambda each: torch.optim.SGD(each, lr=0.001),
        loss=lambda output, batch: output.square().mean(),
        loss_weight=lambda batch: 1.0,
        rows={"rows": 0} if cuts else {"odd": None},
        channel=channel,
    )
    first = plan.mesh.coordinates(channel.rank)["dp_shard"]
    batch = {"rows": torch.ones(4, 4) + first, "odd": LAYOUTS[layout]()}
    found: list[float] = []
    for _ in range(2):
        given = [batch, dict(batch)] if listed else batch
        found += [engine.step(given).loss, engine.evaluate(given).loss]
        found += engine.predict(batch).flatten().tolist()
    return found


def simulated(plan: sw.Plan, layout: str, **settings: bool) -> list[float]:
    return sw.simulate(plan.mesh.size, lambda channel: run(channel, plan, layout, **settings))[0]


PLANS = {
    "data": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "stages": sw.Plan(mesh=sw.Mesh(pp=2)),
    "stages and stage 3": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=3)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"map": "colwise_gather_output"})),
    "run again": sw.Plan(activations=sw.Activations(checkpoint=("mix",))),
}
OF_STAGES = {"coo", "uncoalesced", "jagged"}
"""What pipelines take."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_any_layout_train_evaluate_and_predict(layout: str, plan: str) -> None:
    mesh = PLANS[plan].mesh
    if mesh.pp > 1 and layout not in OF_STAGES:
        with pytest.raises(BatchError, match=r"entry 'odd' is a .* Give a (jagged|sparse_coo) one"):
            simulated(PLANS[plan], layout, cuts=False)
        return
    for listed in (False, True):
        got = simulated(PLANS[plan], layout, cuts=False, listed=listed)
        if mesh.dp_shard == 1:
            assert got == pytest.approx(simulated(sw.Plan(), layout, cuts=False, listed=listed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_sparse_coo_and_nested_tensors_are_cut_and_others_refused_by_name(layout: str) -> None:
    plan = sw.Plan(merge=sw.Merge(microbatches=2))
    if layout in ("csr", "csc", "bsr"):
        with pytest.raises(BatchError, match=r"entry 'odd' has the layout torch.sparse_.*rows=.*a list.*sparse_coo"):
            simulated(plan, layout, cuts=True)
    else:
        whole = simulated(sw.Plan(), layout, cuts=True)
        assert simulated(plan, layout, cuts=True)[:2] == pytest.approx(whole[:2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_batch_compare_what_it_is_made_of(layout: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            Net(),
            PLANS["tp"],
            optimizer=lambda each: torch.optim.SGD(each, lr=0.001),
            loss=lambda output, batch: output.square().mean(),
            rows={"odd": None},
            channel=channel,
        )
        odd = LAYOUTS[layout]()
        engine.step({"rows": torch.ones(4, 4), "odd": odd * 2 if channel.rank else odd})

    with pytest.raises(MismatchError, match=r"odd \((nested|torch\.\w+)\) \d"):
        sw.simulate(2, run)
