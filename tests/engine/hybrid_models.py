"""Until all have moved: `tests.oracle`, with plans for its decoder."""

from collections.abc import Mapping

import shardwise as sw
from tests.oracle.comparison import assert_close, in_one_process
from tests.oracle.decoder import DECODER, RULES, STAGES, Decoder, decoder
from tests.oracle.one_process import Trained
from tests.oracle.places import put_together, train

CASE = DECODER
Hybrid = Trained
together = put_together

__all__ = [
    "CASE",
    "RULES",
    "STAGES",
    "Decoder",
    "Hybrid",
    "assert_close",
    "data_rank",
    "decoder",
    "in_one_process",
    "num_data_ranks",
    "plan_of",
    "together",
    "train",
]


def plan_of(
    mesh: sw.Mesh | str,
    *,
    stage: int = 1,
    k: int = 1,
    sharding: Mapping[str, object] | None = None,
    schedule: str = "1f1b",
    clip: float | None = 0.2,
    precision: sw.Precision | None = None,
) -> sw.Plan:
    """The decoder on a mesh, in buckets so small that there are several."""
    mesh = sw.Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    chunks = 2 if schedule == "interleaved" else 1
    stages = DECODER.stages_for(mesh.pp * chunks) if mesh.pp > 1 else None
    return sw.Plan(
        mesh=mesh,
        sharding=sw.Sharding(**{"stage": stage, "bucket_bytes": 2000, **(sharding or {})}),  # type: ignore[arg-type]
        merge=sw.Merge(microbatches=k),
        precision=precision or sw.Precision(),
        pipeline=sw.Pipeline(schedule=schedule if mesh.pp > 1 else "1f1b", stages=stages),
        tensor=sw.Tensor(rules=RULES if mesh.tp > 1 else None),
        clip_grad_norm=clip,
    )


def num_data_ranks(mesh: sw.Mesh) -> int:
    return mesh.dp_replicate * mesh.dp_shard


def data_rank(mesh: sw.Mesh, rank: int) -> int:
    return mesh.peers(rank, ("dp_replicate", "dp_shard")).index(rank)
