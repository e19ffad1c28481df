"""Until all have moved: `tests.oracle.units`, and plans for its nets."""

from typing import Any

import shardwise as sw
from tests.oracle.units import BATCHES, WIDTH, Block, Net, Positions, net

__all__ = ["BATCHES", "WIDTH", "Block", "Net", "Positions", "net", "plan_of"]


def plan_of(stage: int, *, ranks: int = 2, k: int = 1, **settings: Any) -> sw.Plan:
    precision = settings.pop("precision", sw.Precision())
    mesh = settings.pop("mesh", sw.Mesh(dp_shard=ranks))
    sharding = sw.Sharding(stage=stage, bucket_bytes=settings.pop("bucket_bytes", 600), **settings)
    merge = sw.Merge(microbatches=k)
    return sw.Plan(mesh=mesh, sharding=sharding, merge=merge, precision=precision, clip_grad_norm=0.3)
