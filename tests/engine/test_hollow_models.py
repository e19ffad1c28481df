"""Models that were built without values: the same parameters under every layout, and on no rank the whole of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import alone
from shardwise.errors import ModelError
from tests.checkpoint.layouts import Whole, assembled
from tests.checkpoint.test_matrix import same_bits, state_of
from tests.engine.hybrid_models import CASE, Decoder, assert_close, num_data_ranks, plan_of, train
from tests.engine.initialised import initialise
from tests.engine.memory import peak_bytes
from tests.engine.models import word_loss
from tests.engine.pipeline.oracle import adamw
from tests.engine.pipeline.transformers_models import DECODER

SEED = 7


def hollow() -> Decoder:
    with torch.device("meta"):
        return Decoder(0.1).double()


def started(make: Callable[[], nn.Module], plan: sw.Plan, **settings: Any) -> tuple[Whole, Whole]:
    """Whole parameters that the ranks of a plan start with, and all buffers."""

    def run(channel: sw.Channel) -> tuple[dict[sw.Piece, torch.Tensor], Whole]:
        engine = sw.parallelize(make(), plan, optimizer=adamw, seed=SEED, channel=channel, **settings)
        held = {name: each.clone() for name, each in engine.model.named_buffers() if not each.is_meta}
        return state_of(engine), held

    states, buffers = zip(*sw.simulate(plan.mesh.size, run), strict=True)
    return assembled(states), {name: each for held in buffers for name, each in held.items()}


def in_one_process(make: Callable[[], nn.Module]) -> tuple[Whole, Whole]:
    model = make()
    initialise(model, SEED)
    return {name: each.detach() for name, each in model.named_parameters()}, dict(model.named_buffers())


LAYOUTS = [
    plan_of("single"),
    plan_of("dp_shard=2", stage=0),
    plan_of("dp_shard=3", stage=1, sharding={"partition": "whole"}),
    plan_of("dp_shard=2", stage=2),
    plan_of("dp_shard=3", stage=3),
    plan_of("tp=2"),
    plan_of("tp=3"),
    plan_of("pp=2"),
    plan_of("pp=2", schedule="interleaved"),
    plan_of("pp=2,tp=2"),
    plan_of("dp_replicate=2,tp=2", stage=3, sharding={"partition": "whole"}),
    plan_of("pp=2,dp_shard=2,tp=2", stage=3),
]


def named(plan: sw.Plan) -> str:
    return f"{plan.mesh} stage {plan.sharding.stage} {plan.sharding.partition} {plan.pipeline.schedule}"


@pytest.mark.parametrize("plan", LAYOUTS, ids=named)
def test_every_layout_starts_with_the_same_bits(plan: sw.Plan) -> None:
    wanted, _ = in_one_process(hollow)
    got, _ = started(hollow, plan, loss=word_loss)
    assert got.keys() == wanted.keys()
    assert [name for name in got if not same_bits(got[name], wanted[name])] == []
    assert all(bool(each.isfinite().all()) for each in got.values())


def llama() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    with torch.device("meta"):
        config = tf.LlamaConfig(**{**DECODER, "num_hidden_layers": 2, "num_key_value_heads": 2})
        return tf.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("mesh", "stage"), [("tp=2", 1), ("pp=2,tp=2", 1), ("dp_shard=2", 3), ("pp=2,dp_shard=2,tp=2", 3)]
)
def test_a_model_with_a_plan_of_its_own_and_buffers_that_are_not_saved(mesh: str, stage: int) -> None:
    wanted, buffers = in_one_process(llama)
    plan = replace(
        plan_of(mesh, stage=stage),
        tensor=sw.Tensor(rules="auto" if "tp" in mesh else None),
        pipeline=sw.Pipeline(),
    )
    got, held = started(llama, plan)
    assert [name for name in wanted if not same_bits(got[name], wanted[name])] == []
    assert held.keys() == buffers.keys()
    assert [name for name in held if not same_bits(held[name], buffers[name])] == []


# From equal bits, which `test_every_layout_starts_with_the_same_bits` has on all axes, all axes train alike in
# `test_compose`.
@pytest.mark.parametrize(
    "mesh", ["dp_shard=2", "pp=2,tp=2", pytest.param("pp=2,dp_shard=2,tp=2", marks=pytest.mark.stress)]
)
def test_training_from_there_is_that_of_one_process(mesh: str) -> None:
    """Dropout included; float64, so that only the order of sums is left."""
    case = replace(CASE, make=hollow)
    plan = plan_of(mesh, stage=3 if "dp" in mesh else 1, k=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        wanted = train(case, plan_of("single", k=2 * num_data_ranks(plan.mesh)))
        assert_close(train(case, plan), wanted, relative=1e-10)


WIDTH, LAYERS = 384, 8
"""Two layers are more than the mebibyte that small values are computed in together."""
LAYER_BYTES = WIDTH * WIDTH * 4


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    ("mesh", "stage"), [("tp=2", 1), ("pp=2", 1), ("dp_shard=2", 3), ("pp=2,tp=2", 1), ("pp=2,dp_shard=2,tp=2", 3)]
)
def test_a_rank_has_memory_for_its_share_and_one_layer_at_a_time(mesh: str, stage: int) -> None:
    """What a layer draws is there twice for a moment: as it was drawn, and cast or cut."""
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 * LAYER_BYTES),
        tensor=sw.Tensor(rules={str(at): ("column", "row")[at % 2] for at in range(LAYERS)} if "tp" in mesh else None),
    )
    num_ranks = plan.mesh.size
    for rank in range(num_ranks):
        engines: list[sw.Engine] = []

        def start(rank: int = rank, engines: list[sw.Engine] = engines) -> None:
            channel = Silence(rank=rank, size=num_ranks, progresses_alone=False) if num_ranks > 1 else alone()
            engines.append(sw.parallelize(layers(), plan, optimizer=sgd, loss=word_loss, seed=SEED, channel=channel))

        peaks = []
        for _ in range(2):  # a part of a layer in a cycle stays until the collector comes, sometimes too late
            peaks.append(peak_bytes(start))
            engines.clear()
        share = LAYERS * LAYER_BYTES // num_ranks
        assert share <= min(peaks) <= share + 2 * LAYER_BYTES + SMALL_BYTES


SMALL_BYTES = 30_000
"""States of generators, 5 KB each; seeds; vectors on which optimizers are tried."""


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Gap(Decoder):
    """Nobody says what its scale begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2,tp=2"])
def test_what_nobody_initialises_is_named_on_all_ranks(mesh: str) -> None:
    def run(channel: sw.Channel) -> str:
        with torch.device("meta"):
            model = Gap()
        with pytest.raises(ModelError, match="'scale'") as caught:
            sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)
        return str(caught.value)

    plan = replace(plan_of(mesh), pipeline=sw.Pipeline())
    assert len(set(sw.simulate(plan.mesh.size, run))) == 1
