"""Stages 2 and 3 over real processes: the bits of simulated ranks, over shared memory and TCP."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from tests.engine.expected import adamw
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.sharded_nets import Net
from tests.engine.stages import values_of_all
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport
from tests.processes.simulated_bits import assert_bits_of_simulated_ranks

Outcome = tuple[list[sw.StepReport], list[float], dict[str, torch.Tensor]]

PLANS = {
    "stage 2": sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=2, bucket_bytes=600),
        merge=sw.Merge(microbatches=3),
        precision=sw.Precision(compute="bfloat16"),
    ),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3, partition="whole"), clip_grad_norm=0.3),
    "stage 3 merged": sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=3),
        merge=sw.Merge(microbatches=2),
        precision=sw.Precision(compute="bfloat16", keep=("*norm*",)),
        average=sw.Average(decay=0.5),
    ),
    "stage 3 with stages": sw.Plan(
        mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=3), merge=sw.Merge(microbatches=2)
    ),
}


def train(channel: Channel, text: str) -> Outcome:
    plan = sw.Plan.parse(text)
    torch.manual_seed(0)
    model = Net("checkpointed")
    engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, channel=channel)
    data_rank = plan.mesh.peers(channel.rank, ("dp_replicate", "dp_shard")).index(channel.rank)
    shares = [share_of(word_batch(seed, 24), data_rank, plan.mesh.dp_shard) for seed in range(3)]
    reports, held_out = [], []
    for share in shares:
        reports.append(engine.step(share))
        rows = 3 if data_rank else 0  # the first data rank has none
        held_out.append(engine.evaluate({name: value[:rows] for name, value in share.items()}).loss)
        engine.predict({"words": share["words"][:2]}, lambda inputs: model(inputs["words"]))
        if plan.average is not None:
            # Right after a prediction and before one: others may still read this rank's part in its place.
            with engine.averaged():
                held_out.append(engine.evaluate(share).loss)
                output = engine.predict({"words": share["words"][:2]}, lambda inputs: model(inputs["words"]))
            held_out.append(float(output.sum()))
    return reports, held_out, values_of_all(model, engine, channel)


@pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])
@pytest.mark.parametrize("name", PLANS)
def test_processes_train_to_the_bits_of_simulated_ranks(pool: Pool, name: str, transport: Transport) -> None:
    assert_bits_of_simulated_ranks(pool, train, PLANS[name], transport)
