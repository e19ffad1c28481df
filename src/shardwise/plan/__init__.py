"""What will happen, decided before anything happens: specs, buckets and owners, memory and traffic.

Pure: no torch, no processes. A planner takes any rank, so that one process can plan for all.
"""

from shardwise.plan.buckets import Bucket, Ownership, Segment, Slot, plan_ownership
from shardwise.plan.memory import Arena, Footprint, Region, Traffic, footprint, plan_arena, traffic
from shardwise.plan.microbatches import split_rows
from shardwise.plan.parameters import Parameter
from shardwise.plan.specs import Merge, Plan, Precision, Sharding

__all__ = [
    "Arena",
    "Bucket",
    "Footprint",
    "Merge",
    "Ownership",
    "Parameter",
    "Plan",
    "Precision",
    "Region",
    "Segment",
    "Sharding",
    "Slot",
    "Traffic",
    "footprint",
    "plan_arena",
    "plan_ownership",
    "split_rows",
    "traffic",
]
