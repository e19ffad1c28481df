"""Trainers of transformers whose models train under a plan: a script changes one import, and gives a plan.

Needs transformers and accelerate: `pip install "shardwise[hf]"`.
"""

from shardwise.errors import ConfigError

try:
    import accelerate
    import transformers
except ImportError as error:
    raise ConfigError(
        f'shardwise.hf needs the package {error.name}; pip install "shardwise[hf]" brings transformers and accelerate'
    ) from error
del accelerate, transformers

from shardwise.hf.engine_trainer import EngineTrainer
from shardwise.hf.plan_arguments import PlanArguments, Seq2SeqTrainingArguments, TrainingArguments
from shardwise.hf.trainers import PlanTaking, Seq2SeqTrainer, Trainer, trainer_class

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
