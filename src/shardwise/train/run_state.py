"""What a save says of a run beside the tensors, as JSON: how far it is, which samples it reads, its random numbers."""

import math
from collections.abc import Mapping
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.errors import ConfigError
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus
from shardwise.train.loop import Position
from shardwise.train.random_states import RandomStates

Settings = list[list[dict[str, Any]]]
"""For each optimizer and each of its groups: learning rate, weight decay and the like."""

_KEY = "run"
_WORDS = {
    "seed": "train.seed",
    "global_batch": "train.global_batch",
    "sequence_length": "data.sequence_length",
    "num_tokens": "the number of tokens of the training text",
    "text": "the digest of the training text",
}


class _StatePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Samples(_StatePart):
    """What decides which text makes which sample of a run."""

    seed: int
    global_batch: int
    sequence_length: int
    num_tokens: int
    text: str
    """xxh3_128 of the tokens to train on, in hexadecimal digits."""

    @classmethod
    def of(cls, config: RunConfig, corpus: Corpus) -> "Samples":
        """Those of a run."""
        return cls(
            seed=config.train.seed,
            global_batch=config.train.global_batch,
            sequence_length=corpus.sequence_length,
            num_tokens=len(corpus.training),
            text=xxhash.xxh3_128_hexdigest(corpus.training.tobytes()),
        )

    def differences(self, now: "Samples") -> list[str]:
        """Everything in which another run reads other samples, with both values."""
        return [
            f"{words} was {getattr(self, name)} and is {getattr(now, name)}"
            for name, words in _WORDS.items()
            if getattr(self, name) != getattr(now, name)
        ]


class RunState(_StatePart):
    """A run at a save."""

    step: int
    num_taken: int
    num_skipped: int
    held_out_loss: float | None
    elapsed_s: float
    samples: Samples
    settings: Settings
    """As the configuration made the optimizers, before any schedule."""
    random: RandomStates

    @classmethod
    def of(cls, position: Position, samples: Samples, settings: Settings, random: RandomStates) -> "RunState":
        """The state of a run that is at `position`."""
        loss = position.held_out_loss
        return cls(
            step=position.step,
            num_taken=position.num_taken,
            num_skipped=position.num_skipped,
            held_out_loss=loss if loss is not None and math.isfinite(loss) else None,
            elapsed_s=position.elapsed_s,
            samples=samples,
            settings=settings,
            random=random,
        )

    @property
    def position(self) -> Position:
        """How far the run is."""
        return Position(
            step=self.step,
            num_taken=self.num_taken,
            num_skipped=self.num_skipped,
            held_out_loss=self.held_out_loss,
            elapsed_s=self.elapsed_s,
        )

    def to_extra(self) -> dict[str, Any]:
        """As the `extra` of a save."""
        values = self.model_dump()
        return {"step": values.pop("step"), _KEY: values}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], location: str) -> "RunState":
        """From the `extra` of the save at `location`. Raises ConfigError for a save of something else than a run."""
        try:
            return cls.model_validate({"step": extra["step"], **extra[_KEY]})
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"--resume: {location} holds tensors, but not how far a run of `shardwise train` was (extra has no "
                f'"{_KEY}" with a position, samples and random numbers); name a save that `shardwise train` made'
            ) from error
