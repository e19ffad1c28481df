"""Trainers of transformers whose models train under a plan: a script changes one import, and gives a plan.

Needs transformers and accelerate: `pip install "shardwise[hf]"`.
"""

from shardwise.hf.packages import need_packages

need_packages()

from shardwise.hf.engine_trainer import EngineTrainer  # noqa: E402 - an error in words comes first
from shardwise.hf.plan_arguments import PlanArguments, Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from shardwise.hf.trainers import PlanTaking, Seq2SeqTrainer, Trainer, trainer_class  # noqa: E402

__all__ = [
    "EngineTrainer",
    "PlanArguments",
    "PlanTaking",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "trainer_class",
]
