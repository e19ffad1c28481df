"""The state of a run in a save, besides the tensors, as JSON: its position, its samples, its random numbers.

Random numbers go on where they were under the same mesh, and are seeded anew under another one. Those that forwards
draw (dropout) are not among them: the engine derives them from seed, step and microbatch, and saves seed and step
itself. What is left are those that an optimizer draws.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.comm import Channel
from shardwise.comm.accelerators import random_states, set_random_states
from shardwise.errors import ConfigError
from shardwise.moving.nested_exchange import exchange
from shardwise.runs.callbacks import Position
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus

Settings = list[list[dict[str, Any]]]
"""For each optimizer and each of its groups: learning rate, weight decay and the like."""

_KEY = "run"
_WORDS = {
    "global_batch": "train.global_batch",
    "num_samples": "the number of samples to train on",
    "sequence_length": "data.sequence_length",
    "num_tokens": "the number of tokens of the training text",
    "text": "the digest of the training text",
}


# `forbid`: a save of a later version with a key that decides something must not be taken for one without it.
class _StatePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Samples(_StatePart):
    """The settings that decide which text makes which sample of a run."""

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
            seed=config.order_seed,
            global_batch=config.train.global_batch,
            sequence_length=corpus.sequence_length,
            num_tokens=len(corpus.training),
            # Of the tokens, not of the files: another tokenizer makes other samples of the same files.
            text=xxhash.xxh3_128_hexdigest(corpus.training.tobytes()),
        )


class OtherSamples(_StatePart):
    """The same for a dataset that the configuration names. What its samples are is not looked into."""

    seed: int
    global_batch: int
    num_samples: int | None
    """In an epoch; None where that is not known."""

    @classmethod
    def of(cls, config: RunConfig, num_samples: int | None) -> "OtherSamples":
        """Those of a run."""
        return cls(seed=config.order_seed, global_batch=config.train.global_batch, num_samples=num_samples)


def differences(then: Samples | OtherSamples, now: Samples | OtherSamples, *, seed_key: str) -> list[str]:
    """Everything in which another run reads other samples, with both values. seed_key: the setting that decides now."""
    if type(then) is not type(now):
        words = {Samples: "a text", OtherSamples: "a dataset of your own"}
        return [f"it read {words[type(then)]}, and this one reads {words[type(now)]}"]
    return [
        f"{seed_key if name == 'seed' else _WORDS[name]} was {value} and is {getattr(now, name)}"
        for name, value in then
        if value != getattr(now, name)
    ]


class RandomStates(BaseModel):
    """The states of torch's generators on every rank, and where they belong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mesh: str
    device: str
    """Kind of the device on which ranks compute, as torch calls it."""
    ranks: list[dict[str, str]]
    """By rank: kind of device that a generator is for -> its state in base64. The CPU's, and that of `device`."""

    @classmethod
    def gathered(cls, channel: Channel, mesh: str) -> "RandomStates":
        """Those of all ranks, which call this together."""
        # All states in one JSON: a save has one `extra`, which rank 0 writes.
        ranks = exchange(_states_here(channel), channel=channel, purpose="random states of a save")
        return cls(mesh=mesh, device=channel.device.type, ranks=ranks)

    def restore(self, channel: Channel, mesh: str, *, seed: int, step: int) -> str | None:
        """Go on from these states. Under another mesh or device seed anew, and return words that say so.

        States that are those of this rank now, from which nothing was drawn since the model was built, stay.
        """
        # The state of a generator belongs to one rank of one mesh. Under another mesh a rank owns other elements,
        # and an optimizer draws for those: no state of the save is the right one.
        if (mesh, channel.device.type, channel.size) != (self.mesh, self.device, len(self.ranks)):
            now = _states_here(channel)
            if all(states == now for states in self.ranks):
                return None
            torch.manual_seed(derived_seed(seed, step))
            return (
                "random numbers outside of the model, as in an optimizer, are seeded anew. The run was saved under "
                f"mesh {self.mesh} on {self.device}, and goes on under mesh {mesh} on {channel.device.type}"
            )
        states = self.ranks[channel.rank].items()
        set_random_states(
            channel.device,
            {kind: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for kind, text in states},
        )
        return None


def derived_seed(seed: int, step: int) -> int:
    """Another seed for each step of a run, the same on all ranks: replicas have to draw alike."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    # At most 2**63 - 1, as `train.seed` is.
    return int.from_bytes(digest[:8], "little") >> 1


def _states_here(channel: Channel) -> dict[str, str]:
    states = random_states(channel.device)
    return {kind: base64.b64encode(state.numpy().tobytes()).decode() for kind, state in states.items()}


class RunState(_StatePart):
    """A run at a save."""

    step: int
    num_taken: int
    num_skipped: int
    held_out_loss: float | None
    elapsed_s: float
    samples: Samples | OtherSamples
    settings: Settings
    """As the configuration made the optimizers, before any schedule."""
    random: RandomStates
    callbacks: dict[str, Any] = {}
    """Their states by name."""

    @classmethod
    def of(
        cls,
        position: Position,
        samples: Samples | OtherSamples,
        settings: Settings,
        random: RandomStates,
        callbacks: dict[str, Any],
    ) -> "RunState":
        """The state of a run that is at `position`."""
        if position.held_out_loss is not None and not math.isfinite(position.held_out_loss):
            position = replace(position, held_out_loss=None)  # JSON has no infinity and no nan
        return cls(**asdict(position), samples=samples, settings=settings, random=random, callbacks=callbacks)

    @property
    def position(self) -> Position:
        """How far the run is."""
        return Position(**{each.name: getattr(self, each.name) for each in fields(Position)})

    def to_extra(self) -> dict[str, Any]:
        """As the `extra` of a save."""
        # `step` stands alone at the top, where every reader of a save looks for it.
        values = self.model_dump(exclude={"callbacks"} if not self.callbacks else None)
        return {"step": values.pop("step"), _KEY: values}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], location: str) -> "RunState":
        """From the `extra` of the save at `location`. Raises ConfigError for a save of something else than a run."""
        try:
            return cls.model_validate({"step": extra["step"], **extra[_KEY]})
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f'--resume: {location} holds tensors, but no position of a run: extra has no "{_KEY}" with a step, '
                "samples and random numbers. Name a save that `shardwise train` made"
            ) from error
