"""The state of a run in a save, besides the tensors, as JSON: its position, its samples, its random numbers.

Random numbers go on where they were under the same mesh, and are seeded anew under another one. Those that forwards
draw (dropout) are not among them: the engine derives them from seed, step and microbatch, and saves seed and step
itself. What is left are those that an optimizer draws.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.comm import Channel
from shardwise.errors import ConfigError
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus
from shardwise.train.loop import Position

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
            seed=config.train.seed,
            global_batch=config.train.global_batch,
            sequence_length=corpus.sequence_length,
            num_tokens=len(corpus.training),
            # Of the tokens, not of the files: another tokenizer makes other samples of the same files.
            text=xxhash.xxh3_128_hexdigest(corpus.training.tobytes()),
        )

    def differences(self, now: "Samples") -> list[str]:
        """Everything in which another run reads other samples, with both values."""
        return [
            f"{words} was {getattr(self, name)} and is {getattr(now, name)}"
            for name, words in _WORDS.items()
            if getattr(self, name) != getattr(now, name)
        ]


class RandomStates(BaseModel):
    """The states of torch's generators on every rank, and where they belong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mesh: str
    device: str
    """Kind of the device on which ranks compute: "cpu" or "cuda"."""
    ranks: list[dict[str, str]]
    """By rank: generator ("cpu", "cuda") -> its state in base64."""

    @classmethod
    def gathered(cls, channel: Channel, mesh: str) -> "RandomStates":
        """Those of all ranks, which call this together."""
        # All states in one JSON: a save has one `extra`, which rank 0 writes.
        texts = channel.exchange(json.dumps(_states_here(channel)).encode(), purpose="random states of a save")
        return cls(mesh=mesh, device=channel.device.type, ranks=[json.loads(text) for text in texts])

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
                "random numbers that are drawn outside of the model, as by an optimizer, are seeded anew: the run was "
                f"saved under mesh {self.mesh} on {self.device}, and goes on under mesh {mesh} on {channel.device.type}"
            )
        for name, text in self.ranks[channel.rank].items():
            state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            if name == "cuda":
                torch.cuda.set_rng_state(state, channel.device)
            else:
                torch.set_rng_state(state)
        return None


def derived_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of a run, the same on all ranks: replicas have to draw alike."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    # At most 2**63 - 1, as `train.seed` is.
    return int.from_bytes(digest[:8], "little") >> 1


def _states_here(channel: Channel) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if channel.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(channel.device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


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
            # JSON has no infinity and no nan.
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
        # `step` stands alone at the top, where every reader of a save looks for it.
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
