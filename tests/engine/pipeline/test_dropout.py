"""Random numbers depend on the seed, the update, the microbatch and the call, never on where a module is computed.

The oracle is the engine on one rank: one process in plain torch draws in another order.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.pipeline.models import CASES, CHAIN, NUM_WORDS, Block, Chain, case, on_words, vectors
from tests.engine.pipeline.oracle import Case, Trajectory, adamw
from tests.engine.pipeline.stages import assert_same, plan_for, train
from tests.engine.pipeline.transformers_models import case_of

LAYOUTS = [("1f1b", 2, 3), ("1f1b", 4, 2), ("interleaved", 2, 3), ("fthenb", 4, 4)]


def trained(case: Case, *, seed: int = 7, **layout: Any) -> Trajectory:
    """From this random state of the program on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return train(case, plan_for(case, **layout))


def assert_same_on_one_rank(case: Case, *, schedule: str, pp: int, k: int) -> None:
    assert_same(trained(case, schedule=schedule, pp=pp, k=k), trained(case, pp=1, k=k))


@pytest.mark.parametrize(
    ("schedule", "pp", "k", "checkpointing"), [("1f1b", 2, 4, True), ("1f1b", 4, 2, False), ("interleaved", 2, 2, True)]
)
@pytest.mark.parametrize("name", ["gpt2 with dropout", "bert with dropout"])
def test_models_with_their_own_dropout(name: str, schedule: str, pp: int, k: int, checkpointing: bool) -> None:
    assert_same_on_one_rank(case_of(name, tied=False, checkpointing=checkpointing), schedule=schedule, pp=pp, k=k)


@pytest.mark.parametrize("name", ["gpt2 with dropout", "bert with dropout"])
def test_models_with_their_own_dropout_and_ties(name: str) -> None:
    assert_same_on_one_rank(case_of(name), schedule="1f1b", pp=4, k=1)


@pytest.mark.parametrize("name", ["gpt2 with dropout", "bert with dropout"])
def test_recomputed_activations_have_the_masks_of_the_first_time(name: str) -> None:
    kept, recomputed = (
        trained(case_of(name, tied=False, checkpointing=checkpointing), pp=2, k=2) for checkpointing in (False, True)
    )
    assert_same(recomputed, kept)


class DropBlock(Block):
    """Draws inside, in a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(self.drop(x)), 0.2, self.training)


class DropChain(Chain):
    """Draws in blocks, in modules that lie nowhere, and between modules, also what decides on the way to go."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropBlock() for _ in range(4))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.first(x))
        for at, block in enumerate(self.blocks):
            if self.training and torch.rand(()) < 0.3:
                continue
            h = h + checkpoint(block, h, use_reentrant=False) if at == 2 else h + block(h)
            h = F.dropout(h, 0.1, self.training)
        if self.training:
            h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.randn(7)
        h = h * torch.empty_like(h).bernoulli_(0.9)
        out: torch.Tensor = self.last(self.drop(h))
        return out


class DropRecurrent(nn.Module):
    """torch's own layers with dropout inside, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 6)
        self.memory = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.2, batch_first=True)
        self.out = nn.Linear(6, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embed(words)
        for _ in range(2):
            h = self.layer(self.memory(h)[0])
        out: torch.Tensor = self.out(h)
        return out


DROP_CHAIN = case(DropChain, CHAIN)
NETS = {
    "chain": DROP_CHAIN,
    "recurrent": on_words(DropRecurrent, {"embed": 0, "memory": 1, "layer": 2, "out": 3}),
}


@pytest.mark.parametrize(("schedule", "pp", "k"), LAYOUTS)
@pytest.mark.parametrize("name", NETS)
def test_draws_of_every_kind(name: str, schedule: str, pp: int, k: int) -> None:
    assert_same_on_one_rank(NETS[name], schedule=schedule, pp=pp, k=k)


def test_another_seed_gives_other_masks_and_the_same_one_the_same() -> None:
    one, again, other = (trained(DROP_CHAIN, pp=2, k=2, seed=seed) for seed in (7, 7, 8))
    assert_same(again, one)
    assert one.losses[0] != other.losses[0]


def test_data_ranks_draw_as_without_stages() -> None:
    for mesh in (sw.Mesh(pp=2, dp_shard=2), sw.Mesh(pp=2, dp_replicate=2)):
        alone = sw.Mesh(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
        assert_same(trained(DROP_CHAIN, mesh=mesh, k=2), trained(DROP_CHAIN, mesh=alone, k=2))


def losses_of(case: Case, k: int, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Losses of updates that change nothing (rate 0), on two stages."""

    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            case.make(),
            plan_for(case, pp=2, k=k),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            loss=case.loss,
            channel=channel,
        )
        return [engine.step(batch).loss for batch in batches]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return sw.simulate(2, run)[0]


@pytest.mark.parametrize(("name", "num_different"), [("chain", 1), ("drop chain", 3)])
def test_updates_and_microbatches_draw_masks_of_their_own(name: str, num_different: int) -> None:
    """The same row in every microbatch and update; a net without dropout has one loss for all."""
    net = {"chain": CASES["chain"], "drop chain": DROP_CHAIN}[name]
    row = {name: value[:1] for name, value in vectors(0).items()}
    first, second = losses_of(net, 1, [row, row])
    [both] = losses_of(net, 2, [{name: value.expand(2, -1) for name, value in row.items()}])
    assert len({first, second, both}) == num_different


@pytest.mark.parametrize("evaluations", [0, 2])
def test_evaluations_draw_alike_and_change_no_later_mask(evaluations: int) -> None:
    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            DROP_CHAIN.make(), plan_for(DROP_CHAIN, pp=2), optimizer=adamw, loss=DROP_CHAIN.loss, channel=channel
        )
        told = [engine.step(vectors(0)).loss]
        assert len({engine.evaluate(vectors(1)).loss for _ in range(evaluations)}) == min(evaluations, 1)
        return [*told, engine.step(vectors(2)).loss]

    case = Case(make=DROP_CHAIN.make, batches=[vectors(0), vectors(2)], stages=CHAIN, loss=DROP_CHAIN.loss)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert sw.simulate(2, run) == [trained(case, pp=2).losses] * 2
