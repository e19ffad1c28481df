"""Models that were built without values: the same parameters under every layout, and on no rank the whole of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.comm import Channel, Work, alone
from shardwise.engine.initialisation import initialise
from shardwise.errors import ModelError
from tests.checkpoint.layouts import Whole, assembled
from tests.checkpoint.test_matrix import same_bits, state_of
from tests.engine.hybrid_models import CASE, RULES, Decoder, assert_close, data_rank, plan_of, train
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


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2,tp=2", "pp=2,dp_shard=2,tp=2"])
def test_training_from_there_is_that_of_one_process(mesh: str) -> None:
    """Dropout included; float64, so that only the order of sums is left."""

    def filled() -> nn.Module:
        model = hollow()
        initialise(model, SEED)
        return model

    plan = plan_of(mesh, stage=3 if "dp" in mesh else 1, k=2)
    ranks = plan.mesh.dp_replicate * plan.mesh.dp_shard
    wanted = train(replace(CASE, make=filled), plan_of("single", k=2 * ranks))

    def run(channel: sw.Channel) -> tuple[list[float], list[float]]:
        # The seed is that of dropout too, so that it has to be the one of the engine that `train` builds.
        engine = sw.parallelize(
            hollow(), plan, optimizer=adamw, loss=word_loss, seed=SEED, channel=channel
        )
        engine._computation.random.seed = torch.initial_seed()
        reports = [
            engine.step(microbatch_share(batch, plan, channel.rank)) for batch in CASE.batches
        ]
        return [each.loss for each in reports], [each.grad_norm for each in reports]

    for losses, norms in sw.simulate(plan.mesh.size, run):
        assert losses == pytest.approx(wanted.losses, rel=1e-10)
        assert norms == pytest.approx(wanted.grad_norms, rel=1e-10)
