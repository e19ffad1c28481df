"""Layouts to choose from: their bytes are those of a run, and the choice is that of a look at all of them."""

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.plan.layouts import Job, Layout, ModelSize, best_of, layouts

TINY = ModelSize(parameters=2 * 48 * 8 + 6 * 1000, layers=6, hidden=8, vocabulary=48)
TIED = ModelSize(parameters=48 * 8 + 6 * 1000, layers=6, hidden=8, vocabulary=48, is_tied=True)
JOB = Job(ranks=4, memory_bytes=1e9, tokens=4)


class Block(nn.Module):
    """One flat parameter for each matrix that the planner sees, and one for the norms."""

    def __init__(self, matrices: Mapping[str, int], tp: int) -> None:
        super().__init__()
        for name, count in matrices.items():
            cut = 1 if name == "norms" else tp
            setattr(self, name, nn.Parameter(torch.zeros(-(-count // cut))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(each.sum() for each in self.parameters())


class Decoder(nn.Module):
    """The model that `size` describes; for tp, a rank's part of it."""

    def __init__(self, size: ModelSize, tp: int) -> None:
        super().__init__()
        words = -(-size.vocabulary // tp)
        self.embedding = nn.Embedding(words, size.hidden)
        self.layers = nn.ModuleList(Block(size.matrices, tp) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, words, bias=False)
        if size.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input)
        for layer in self.layers:
            x = layer(x)
        output: torch.Tensor = self.head(x)
        return output


def counted(size: ModelSize, layout: Layout) -> tuple[list[dict[str, float]], list[float]]:
    """Of each rank of a run: bytes by part, and bytes sent. Ranks along tp have parts of all, as another model."""
    plan = layout.plan
    mesh = sw.Mesh(pp=plan.mesh.pp, dp_replicate=plan.mesh.dp_replicate, dp_shard=plan.mesh.dp_shard)
    run = sw.Plan(
        mesh=mesh, sharding=plan.sharding, merge=plan.merge, precision=plan.precision, activations=plan.activations
    )

    def train(channel: sw.Channel) -> tuple[dict[str, float], float]:
        engine = sw.parallelize(
            Decoder(size, plan.mesh.tp),
            run,
            optimizer=torch.optim.AdamW,
            loss=lambda output, batch: output.float().mean(),
            channel=channel,
        )
        held, sent = engine.footprint(), engine.traffic()
        return {
            "weights": held.working_bytes,
            "gradients": held.gradient_bytes,
            "masters, AdamW": held.master_bytes + 8 * held.owned_elements,
        }, sent.reduce_bytes + sent.gather_bytes

    held, sent = zip(*sw.simulate(mesh.size, train), strict=True)
    return list(held), list(sent)


@pytest.mark.parametrize(("ranks", "size"), [(1, TINY), (2, TINY), (4, TINY), (6, TINY), (1, TIED), (4, TIED)])
def test_bytes_are_those_of_a_run(ranks: int, size: ModelSize) -> None:
    job = Job(ranks=ranks, memory_bytes=1e9, tokens=4, ranks_per_host=2)
    found = [each for each in layouts(size, job) if each.plan.activations.checkpoint is None]
    assert {each.plan.mesh.size for each in found} == {ranks}
    for layout in found:
        held, _ = counted(size, layout)
        assert any({name: layout.held[name] for name in each} == each for each in held), layout.plan.text()


def test_what_is_sent_is_what_a_run_sends() -> None:
    for layout in layouts(TINY, JOB):
        if layout.plan.mesh.pp == layout.plan.mesh.tp == 1 and layout.plan.sharding.stage < 3:
            assert set(counted(TINY, layout)[1]) == {layout.sent["data"]}


def test_the_choice_is_the_simplest_of_those_that_are_nearly_as_fast() -> None:
    size = ModelSize(parameters=7_000_000_000, layers=32, hidden=4096)
    for gigabytes, ranks in product((12, 24, 80), (2, 8, 16)):
        job = Job(ranks=ranks, memory_bytes=gigabytes * 1e9)
        found = layouts(size, job)
        best = best_of(found, job)
        fitting = [each for each in found if each.total_bytes <= 0.9 * job.memory_bytes]
        assert found[: len(fitting)] == sorted(fitting, key=lambda each: each.total_seconds)
        if not fitting:
            assert best is None
            continue
        assert best in fitting
        assert best.total_seconds <= 1.1 * fitting[0].total_seconds
        simpler = [each for each in fitting if each.complexity < best.complexity]
        assert all(each.total_seconds > 1.1 * fitting[0].total_seconds for each in simpler)


def test_a_configuration_says_how_large_a_model_is() -> None:
    """Parameters of two models of transformers, as `num_parameters` counts them; norms of their ends are left out."""
    llama = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    assert ModelSize.from_config(llama).parameters == 6_738_415_616 - 4096
    mixtral = {
        **llama,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    size = ModelSize.from_config(mixtral)
    routers = 32 * 8 * 4096
    assert size.parameters == 46_702_792_704 - 4096 - routers
    assert round(size.block * size.active_part * 32 + 2 * 32000 * 4096, -8) == 12_900_000_000


def test_a_head_is_the_embedding_where_a_configuration_does_not_say() -> None:
    """`tie_word_embeddings` is true by default in transformers, which writes what differs from its defaults alone."""
    gemma = {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_attention_heads": 16,
        "head_dim": 256,
        "vocab_size": 256000,
    }
    assert ModelSize.from_config(gemma).parameters == 8_537_680_896 - 3072


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelSize(parameters=1000, layers=4, hidden=8, vocabulary=100),
            "parameters: 1000 in all leave -150 for each of 4 layers, besides 1600 of the embedding and the head; "
            "is one of the numbers wrong?",
        ),
        (
            lambda: ModelSize(parameters=0, layers=1, hidden=8),
            "parameters: 0 is not a whole number of at least 1",
        ),
        (
            lambda: ModelSize.from_config({"hidden_size": 8}),
            "config.json does not say layers, vocabulary; give --layers and --vocabulary",
        ),
        (
            lambda: layouts(TINY, Job(ranks=1, memory_bytes=0)),
            "ranks, ranks per host, tokens, memory, flops and bandwidths are numbers above 0",
        ),
        (
            lambda: layouts(TINY, Job(ranks=1, memory_bytes=1e9, flops=float("nan"))),
            "ranks, ranks per host, tokens, memory, flops and bandwidths are numbers above 0",
        ),
        (
            lambda: layouts(TINY, Job(ranks=8, memory_bytes=1e9, batch_tokens=4_000_000)),
            "no layout of 8 ranks cuts an update of 4000000 tokens into microbatches of 4096; take a multiple of "
            "32768, such as 3997696",
        ),
        (
            lambda: ModelSize.from_config({"hidden_size": 0, "num_hidden_layers": 2, "vocab_size": 10}),
            "config.json does not say hidden; give --hidden",
        ),
    ],
)
def test_numbers_that_cannot_hold_are_refused(make: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == message
