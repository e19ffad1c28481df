"""The trainers by name, each over the class of transformers with the same name."""

from pathlib import Path
from typing import Any

import transformers

from shardwise.comm import Channel
from shardwise.errors import ConfigError
from shardwise.hf.engine_trainer import EngineTrainer
from shardwise.plan import Plan


class PlanTaking:
    """Takes `plan` and `channel` in front of the arguments of a trainer."""

    def __init__(
        self, *args: Any, plan: Plan | str | Path | None = None, channel: Channel | None = None, **kwargs: Any
    ) -> None:
        """plan: a Plan, or a TOML file with one; None: that of `args.shardwise_plan`, else dp_shard over all ranks.

        channel: the ranks; None: the processes that torchrun announces. args, kwargs: of the trainer.
        Raises PlanError and ConfigError for what cannot be, before anything trains.
        """
        # Before the trainer's own: it reads the plan while it is made.
        if plan is not None:
            self.plan = plan
        self.channel = channel
        super().__init__(*args, **kwargs)


class Trainer(PlanTaking, EngineTrainer):
    """`transformers.Trainer` for a model that trains under a plan."""


class Seq2SeqTrainer(PlanTaking, transformers.Seq2SeqTrainer, EngineTrainer):
    """`transformers.Seq2SeqTrainer` for a model that trains under a plan."""


def trainer_class(of: type) -> type:
    """A class of trainers of any library, such as `trl.SFTTrainer`, whose models train under a plan.

    It takes `plan` and `channel` besides the arguments of the class. `of` derives from `transformers.Trainer`.
    The same as `class SFTTrainer(PlanTaking, trl.SFTTrainer, EngineTrainer): ...`.
    Raises ConfigError for other classes.
    """
    if not (isinstance(of, type) and issubclass(of, transformers.Trainer)):
        raise ConfigError(
            f"trainer_class takes a class that derives from transformers.Trainer, such as trl.SFTTrainer, not {of!r}. "
            "For another loop, give the model to shardwise.parallelize"
        )
    if issubclass(of, PlanTaking):
        return of
    if of is transformers.Trainer:
        return Trainer
    return type(of.__name__, (PlanTaking, of, EngineTrainer), {"__doc__": f"{of.__name__} under a plan."})
