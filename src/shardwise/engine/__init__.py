"""Tensors change here: a model is put under a plan, and trained one update at a time."""

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.engine.relayout import relayout
from shardwise.engine.step.reports import EvaluationReport, StepReport

__all__ = ["Engine", "EvaluationReport", "StepReport", "parallelize", "relayout"]
