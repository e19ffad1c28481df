"""What will happen, decided before anything happens: specs, buckets and owners, memory and traffic.

Pure: no torch, no processes. A planner takes any rank, so that one process can plan for all. By question:

    what the user asks for           specs, with the words of tensor_rules
    what the model is                outlines, names, dtypes
    which module is on which stage   stages, balance
    in which order a stage works     schedules, schedule_check, timeline
    who owns which elements          buckets, units, residency, memory
    which layout to take             layouts
    what is kept for backward        units, activation_budget
    what is cut along tp             tensor_rules -> tensor_matching -> tensor_cuts -> tensor_plan; tensor_inference
    what a save knows of training    saved_settings, optimizer_entries, model_records
"""

from shardwise.plan.buckets import Bucket, OwnedLayout, Ownership, Segment, Slot, plan_ownership
from shardwise.plan.memory import Arena, ArenaRegion, Footprint, Traffic, footprint, plan_arena, traffic
from shardwise.plan.outlines import Outline, Parameter
from shardwise.plan.schedules import Action, Schedule, make_schedule, split_rows
from shardwise.plan.specs import Activations, Average, Merge, Pipeline, Plan, Precision, Sharding, Tensor
from shardwise.plan.stages import Placement, place
from shardwise.plan.timeline import Timeline, TimeSpan, simulate_schedule

__all__ = [
    "Action",
    "Activations",
    "Arena",
    "ArenaRegion",
    "Average",
    "Bucket",
    "Footprint",
    "Merge",
    "Outline",
    "OwnedLayout",
    "Ownership",
    "Parameter",
    "Pipeline",
    "Placement",
    "Plan",
    "Precision",
    "Schedule",
    "Segment",
    "Sharding",
    "Slot",
    "Tensor",
    "TimeSpan",
    "Timeline",
    "Traffic",
    "footprint",
    "make_schedule",
    "place",
    "plan_arena",
    "plan_ownership",
    "simulate_schedule",
    "split_rows",
    "traffic",
]
