"""The layouts under which programs train: what `plan_of` is told beside the program.

They differ in the mesh, in what is cut over data ranks, in microbatches, schedules and precision, in what runs again.
"""

from collections.abc import Mapping
from typing import Any

import shardwise as sw

KEPT = sw.Precision(compute="bfloat16")
NARROW = sw.Precision(compute="bfloat16", accumulate="bfloat16", reduce="bfloat16")
AGAIN = sw.Activations(checkpoint="blocks")

OF_DATA: Mapping[str, dict[str, Any]] = {
    "one rank, k=3": {"k": 3, "clip": 0.3},
    "stage 0, k=2": {"mesh": "dp_shard=2", "stage": 0, "k": 2, "clip": 0.3},
    "two ranks": {"mesh": "dp_shard=2", "clip": 0.3},
    "two ranks, k=3, tiny buckets": {"mesh": "dp_shard=2", "k": 3, "bucket_bytes": 1},
    "three ranks, whole": {"mesh": "dp_shard=3", "partition": "whole", "k": 2},
    "five ranks": {"mesh": "dp_shard=5", "bucket_bytes": 1 << 20},
    "replicas, k=2": {"mesh": "dp_replicate=2,dp_shard=2", "owners": "dp_shard", "k": 2, "clip": 0.3},
    "replicas without owners": {"mesh": "dp_replicate=3", "stage": 0},
    "stage 2, k=3": {"mesh": "dp_shard=2", "stage": 2, "k": 3, "clip": 0.3},
    "stage 2, whole": {"mesh": "dp_shard=3", "stage": 2, "partition": "whole"},
    "stage 3": {"mesh": "dp_shard=2", "stage": 3, "clip": 0.3},
    "stage 3, whole, k=2": {"mesh": "dp_shard=3", "stage": 3, "partition": "whole", "k": 2},
    "stage 3, kept gathered": {"mesh": "dp_shard=2", "stage": 3, "keep_gathered": True, "k": 2},
    "stage 3, one unit": {"mesh": "dp_shard=2", "stage": 3, "units": (".",), "k": 2},
    "stage 3, replicas": {"mesh": "dp_replicate=2,dp_shard=2", "stage": 3, "owners": "dp_shard", "k": 2},
    "run again": {"mesh": "dp_shard=2", "k": 2, "activations": AGAIN},
    "stage 3, run again": {"mesh": "dp_shard=2", "stage": 3, "activations": AGAIN},
}

IN_BFLOAT16: Mapping[str, dict[str, Any]] = {
    "bfloat16, one rank": {"precision": KEPT, "k": 2},
    "bfloat16, narrow sums": {"mesh": "dp_shard=2", "precision": NARROW, "k": 2, "clip": 0.3},
    "bfloat16, stage 3": {"mesh": "dp_shard=2", "stage": 3, "precision": KEPT, "k": 2},
}

OF_STAGES: Mapping[str, dict[str, Any]] = {
    "two stages": {"mesh": "pp=2", "clip": 0.05},
    "two stages, k=5": {"mesh": "pp=2", "k": 5},
    "two stages, all forwards first": {"mesh": "pp=2", "schedule": "fthenb", "k": 3},
    "six stages of two ranks": {"mesh": "pp=2", "schedule": "interleaved", "chunks": 3, "k": 4},
    "two stages, interleaved": {"mesh": "pp=2", "schedule": "interleaved", "k": 4},
    "four stages": {"mesh": "pp=4", "k": 4},
    "stages x data": {"mesh": "pp=2,dp_shard=2", "k": 2, "clip": 0.05},
    "stages x replicas, whole": {
        "mesh": "pp=2,dp_replicate=2",
        "partition": "whole",
        "schedule": "interleaved",
        "k": 2,
    },
    "stages x stage 3": {"mesh": "pp=2,dp_shard=2", "stage": 3, "k": 2},
    "stages x stage 2, bfloat16": {"mesh": "pp=2,dp_shard=2", "stage": 2, "precision": KEPT},
}

OF_PARTS: Mapping[str, dict[str, Any]] = {
    "tp": {"mesh": "tp=2", "k": 3, "clip": 0.2},
    "tp x stage 3": {"mesh": "dp_shard=2,tp=2", "stage": 3, "k": 2},
    "tp x replicas, whole": {"mesh": "dp_replicate=3,tp=2", "stage": 2, "partition": "whole"},
    "tp x stages": {"mesh": "pp=2,tp=2", "schedule": "interleaved", "k": 3, "clip": 0.2},
    "all": {"mesh": "pp=2,dp_shard=2,tp=2", "stage": 3, "k": 2, "clip": 0.2},
}

LAYOUTS = {**OF_DATA, **IN_BFLOAT16, **OF_STAGES, **OF_PARTS}
