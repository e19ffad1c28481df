"""What travels, what is cast and what is held, counted: bytes equal the plan's, once per update whatever is merged."""

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covering
from tests.engine.loops import begun, plan_of
from tests.engine.memory import counted_from_now
from tests.oracle.batches import points, square_loss
from tests.oracle.places import data_share
from tests.oracle.program import adamw
from tests.oracle.programs import PROGRAMS

SHARDINGS: dict[str, dict[str, Any]] = {
    "slice": {"bucket_bytes": 500},
    "one bucket": {},
    "whole": {"bucket_bytes": 500, "partition": "whole"},
    "dp_shard": {"bucket_bytes": 500, "owners": "dp_shard"},
    "whole of dp_shard": {"bucket_bytes": 500, "owners": "dp_shard", "partition": "whole"},
}
OF_STAGE_3: dict[str, dict[str, Any]] = {
    "one bucket": {"keep_gathered": True},
    "whole": {"units": ("blocks.*", "blocks.*.attention")},
}
PRECISIONS = {
    "fp32": sw.Precision(),
    "bf16": sw.Precision(compute="bfloat16"),
    "bf16-kept": sw.Precision(compute="bfloat16", keep=("*norm*",)),
    "bf16-narrow": sw.Precision(compute="bfloat16", accumulate="bfloat16"),
    "fp32-sent-bf16": sw.Precision(reduce="bfloat16"),
}


@pytest.mark.parametrize(
    ("program", "mesh", "stage", "k", "sharding", "precision"),
    covering(
        ["units", "units tied", "units twice", "units frozen"],
        ["single", "dp_shard=2", "dp_shard=3", "dp_replicate=2,dp_shard=3", "dp_replicate=3"],
        [0, 1, 2, 3],
        [1, 3],
        list(SHARDINGS),
        list(PRECISIONS),
        strength=2,
    ),
)
def test_bytes_sent_and_elements_cast_equal_the_plan(
    program: str, mesh: str, stage: int, k: int, sharding: str, precision: str
) -> None:
    """Each call is counted, each owned element is cast once per update, and an update may have other microbatches."""
    net = PROGRAMS[program]
    trained = {name for name, each in net.make().named_parameters() if each.requires_grad}
    settings = SHARDINGS[sharding] | (OF_STAGE_3.get(sharding, {}) if stage == 3 else {})
    plan = plan_of(mesh, stage, k, sharding=settings, precision=PRECISIONS[precision])

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = net.engine(plan, recorded)
        counters, before = engine.counters, engine.counters.cast_elements
        operations: list[str] = []
        for count in (k, 4 - k):
            recorded.clear()
            engine.step(data_share(net.batches[0], plan.mesh, channel.rank), microbatches=count)
            sent = dict.fromkeys(("parameters", "gradients"), 0)
            for call in recorded.calls:
                operations.append(call.operation)
                for what in sent:
                    if call.operation != "exchange" and call.purpose.startswith(what):
                        sent[what] += call.bytes_sent
            planned = engine.traffic(microbatches=count)
            assert sent == {"parameters": planned.gather_bytes, "gradients": planned.reduce_bytes}
        assert operations.count("exchange") == counters.exchanges
        assert operations.count("all_gather") == counters.all_gathers
        assert operations.count("reduce_scatter") == counters.reduce_scatters
        masters = [each for each in engine.state() if each.name.endswith("/master")]
        owned = [each.num_elements for each in masters if each.name.split("/")[1] in trained]
        assert counters.cast_elements - before == 2 * sum(owned)
        assert counters.updates == 2

    sw.simulate(plan.mesh.size, run)


WIDTHS = (4, 40, 9, 30, 1)
NUM_ELEMENTS = sum((one + 1) * two for one, two in pairwise(WIDTHS))


def tower() -> nn.Module:
    """Four layers, of which one may be kept in float32."""
    layers = [nn.Sequential(nn.Linear(one, two), nn.Tanh()) for one, two in pairwise(WIDTHS)]
    return nn.Sequential(OrderedDict(zip(("first", "second", "norm", "last"), layers, strict=True)))


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    batch = points(seed, rows)
    return {"input": batch["x"], "y": batch["y"]}


def engine_of(channel: sw.Channel, plan: sw.Plan) -> Any:
    return begun(channel, tower, plan, optimizer=adamw, loss=lambda output, batch: square_loss(output.float(), batch))


@pytest.mark.parametrize(
    ("num_ranks", "stage", "k", "sharding", "precision"),
    covering([1, 2, 3], [0, 1], [1, 4], ["slice", "one bucket", "whole"], list(PRECISIONS), strength=2),
)
def test_memory_that_is_held_is_what_the_plan_says(
    num_ranks: int, stage: int, k: int, sharding: str, precision: str
) -> None:
    """All of it together: what AdamW keeps are two moments of what ranks own, and some numbers."""
    plan = plan_of(f"dp_shard={num_ranks}", stage, k, sharding=SHARDINGS[sharding], precision=PRECISIONS[precision])
    counted = counted_from_now()
    engines: dict[int, Any] = {}

    def run(channel: sw.Channel) -> Any:
        engines[channel.rank] = engine = engine_of(channel, plan)
        for seed in range(2):
            engine.step(batch_of(k, seed))
        moments = [state["exp_avg"].numel() for state in engine.optimizer.state.values()]
        assert sum(moments) == engine.footprint().owned_elements
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        return engine.footprint()

    planned = sw.simulate(num_ranks, run)
    buffers = sum(each.working_bytes + each.gradient_bytes + each.master_bytes for each in planned)
    moments = 2 * 4 * sum(each.owned_elements for each in planned)
    # And the state of a generator for each rank, which has 5,056 bytes.
    assert buffers + moments <= counted() <= buffers + moments + 5300 * num_ranks
    assert sum(each.owned_elements for each in planned) == NUM_ELEMENTS * (1 if stage else num_ranks)
