"""What stages 2 and 3 gather, reduce and cast: the recorded channel, the counters and the plan agree."""

from typing import Any

import pytest

import shardwise as sw
from tests.engine.traffic import sent_by
from tests.oracle.batches import share_of
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS

KEPT = sw.Precision(compute="bfloat16", keep=("*norm*",))
UNITS = ("blocks.*", "blocks.*.attention")


@pytest.mark.parametrize(
    ("program", "mesh", "k", "stage", "settings"),
    [
        ("units", "dp_shard=2", 1, 2, {}),
        ("units", "dp_shard=4", 2, 3, {"partition": "whole"}),
        ("units", "dp_shard=2", 4, 3, {"keep_gathered": True}),
        ("units", "dp_shard=3", 2, 3, {"units": UNITS}),
        ("units tied", "dp_shard=3", 4, 2, {"partition": "whole"}),
        ("units tied", "dp_shard=4", 2, 3, {"keep_gathered": True}),
        ("units tied", "dp_shard=2", 1, 3, {"units": UNITS}),
        ("units twice", "dp_shard=3", 1, 3, {}),
        ("units twice", "dp_shard=2", 4, 3, {"units": UNITS}),
        ("units frozen", "dp_shard=3", 4, 2, {}),
        ("units frozen", "dp_shard=2", 1, 3, {"partition": "whole"}),
        ("units", "dp_replicate=2,dp_shard=2", 3, 2, {"owners": "dp_shard"}),
        ("units", "dp_replicate=2,dp_shard=2", 3, 3, {"owners": "dp_shard"}),
    ],
)
def test_bytes_sent_and_casts_equal_the_plan(
    program: str, mesh: str, k: int, stage: int, settings: dict[str, Any]
) -> None:
    net = PROGRAMS[program]
    trained = {name for name, each in net.make().named_parameters() if each.requires_grad}
    plan = plan_of(net, mesh, stage=stage, k=k, precision=KEPT, **settings)

    def run(channel: sw.Channel) -> tuple[int, int]:
        recorded = sw.Recorded(channel)
        engine = net.engine(plan, recorded)
        cast = engine.counters.cast_elements
        for _ in range(2):  # and the second like the first
            recorded.clear()
            engine.step(share_of(net.batches[0], channel.rank, channel.size))
            assert sent_by(recorded) == {
                "parameters": engine.traffic().gather_bytes,
                "gradients": engine.traffic().reduce_bytes,
            }
        masters = [
            each.numel()
            for piece, each in engine.state().items()
            if piece.name.endswith("/master") and piece.name.split("/")[1] in trained
        ]
        return engine.counters.cast_elements - cast, 2 * sum(masters)

    for cast, masters in sw.simulate(plan.mesh.size, run):
        assert cast == masters


@pytest.mark.parametrize("k", [1, 3])
def test_a_unit_is_gathered_twice_per_microbatch_less_what_is_kept(k: int) -> None:
    """Five units one after the other, and the model's own parameters, which stay all the while."""
    net = PROGRAMS["units"]

    def run(channel: sw.Channel, keeps: bool) -> int:
        recorded = sw.Recorded(channel)
        plan = plan_of(net, "dp_shard=2", stage=3, k=k, keep_gathered=keeps, bucket_bytes=1 << 20)
        engine = net.engine(plan, recorded)
        recorded.clear()
        engine.step(share_of(net.batches[0], channel.rank, channel.size))
        assert engine.counters.all_gathers == sum(call.operation == "all_gather" for call in recorded.calls)
        return sum(call.purpose.startswith("parameters of unit") for call in recorded.calls)

    assert sw.simulate(2, lambda channel: run(channel, False)) == [1 + 2 * 5 * k - k - (k - 1)] * 2
    assert sw.simulate(2, lambda channel: run(channel, True)) == [1 + 5] * 2
