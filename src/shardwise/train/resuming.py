"""Where a run begins: at its beginning, or where a save left it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardwise.checkpoint import load, store_of
from shardwise.checkpoint import open as look_into
from shardwise.checkpoint.saves import Listing, list_saves, read_head
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.engine import Engine
from shardwise.errors import CheckpointError, ConfigError
from shardwise.plan.saved_settings import take_over
from shardwise.train.config import RunConfig
from shardwise.train.loop import Position
from shardwise.train.run_state import RunState, Samples, Settings

AUTO = "auto"
_OF_SCHEDULE = "lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known of a run's beginning before anything is loaded; the same on all ranks."""

    address: str = ""
    """The save to go on from; empty for a fresh start."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What that save has beside the tensors."""
    older: str = ""
    """The save before it, for the case that it is damaged."""
    words: str = ""
    """What to say about it."""

    @property
    def is_fresh(self) -> bool:
        """There is no save to go on from."""
        return not self.address


def find_start(config: RunConfig, resume: str | None, channel: Channel) -> Start:
    """Find where the run begins; rank 0 looks, and all ranks know.

    resume: None for a fresh start, "auto" for the newest save of the run, if there is one, else a path or address.
    Raises ConfigError for a fresh start where saves are, and for a path without any; CheckpointError for damage.
    """
    with agreed(channel, purpose="where the run begins", only=0) as agreement:
        if channel.rank == 0:
            agreement.value = json.dumps(asdict(_looked_up(config, resume))).encode()
    return Start(**json.loads(agreement.values[0]))


def settings_of(engine: Engine) -> Settings:
    """The settings of the optimizers' groups, as JSON values."""
    return [[group["settings"] for group in each["groups"]] for each in engine.settings()["optimizers"]]


def take_up(
    start: Start,
    config: RunConfig,
    engine: Engine,
    channel: Channel,
    *,
    samples: Samples,
    fresh: Settings,
) -> tuple[Position, list[str]]:
    """Make the engine and the random numbers what they were at the save; returns the position, and words about it.

    fresh: the settings of the optimizers as the configuration made them: where they are others than those of the run
    that was saved, they win. Raises ConfigError for a run that reads other samples, CheckpointError for a save that
    does not fit or is damaged.
    """
    state = RunState.from_extra(start.extra, start.address)
    if differences := state.samples.differences(samples):
        raise ConfigError(
            f"--resume: {start.address} was saved by a run that reads other samples: {'; '.join(differences)}. "
            f"Step {state.step} is no place in this run; resume with what that run had, or begin a run of its own"
        )
    try:
        load(start.address, engine, channel=channel)
    except CheckpointError as error:
        raise _with_way_out(error, start.older) from error
    words = [start.words, *_settle_settings(engine, state.settings, fresh)]
    reseeded = state.random.restore(channel, str(config.plan.mesh), seed=config.train.seed, step=state.step)
    if state.step >= config.train.steps:
        words.append(
            f"nothing is left to do: the save is of step {state.step}, and train.steps is {config.train.steps}"
        )
    elif reseeded:
        words.append(reseeded)
    return state.position, words


def _looked_up(config: RunConfig, resume: str | None) -> Start:
    address = config.saves if resume in (None, AUTO) else str(resume)
    listing = _listing(address)
    if resume is None:
        if listing.committed:
            raise ConfigError(
                f"{address} holds saves of an earlier run, {_named(listing.committed)}: go on with it (--resume auto), "
                "write elsewhere (--set train.output=FOLDER), or remove the folder"
            )
        return Start()
    if resume == AUTO and not listing.committed:
        return Start(words=f"--resume auto: {address} holds no save yet{listing.torn_note()}; the run begins at step 0")
    older = _older(address, listing)
    chosen = _save_in(address, listing.committed[-1]) if any(listing.committed) else address
    try:
        catalogue = look_into(chosen)
    except CheckpointError as error:
        if not listing.committed:  # nothing of ours is there, and nothing else that we know
            raise ConfigError(f"--resume: {error}") from error
        raise _with_way_out(error, older) from error
    return Start(
        address=chosen,
        extra=catalogue.extra,
        older=older,
        words=f"goes on from step {catalogue.step}, saved in {chosen}",
    )


def _listing(address: str) -> Listing:
    try:
        return list_saves(store_of(address))
    except NotADirectoryError:  # what is there will be refused by whoever needs it
        return Listing(location=address, committed=(), torn=(), files={})
    except OSError as error:
        raise CheckpointError(f"{address} cannot be listed: {error.strerror or error}") from error


def _older(address: str, listing: Listing) -> str:
    """The newest save before the last one whose manifest can be read, and its step."""
    for number in reversed(listing.committed[:-1]):
        try:
            step = read_head(store_of(address), number).step
        except CheckpointError:
            continue
        return f"{_save_in(address, number)} (step {step})"
    return ""


def _save_in(address: str, number: int) -> str:
    return f"{address.rstrip('/')}/save-{number:08d}"


def _named(numbers: Sequence[int]) -> str:
    first, last = (f"save-{number:08d}" for number in (numbers[0], numbers[-1]))
    return first if first == last else f"{first} to {last}"


def _with_way_out(error: CheckpointError, older: str) -> CheckpointError:
    """The error, with what to do about it where there is a save before the one that it is about."""
    return CheckpointError(f"{error}\nto take the save before it: --resume {older}" if older else str(error))


def _settle_settings(engine: Engine, then: Settings, fresh: Settings) -> list[str]:
    """Let the configuration win where it was changed, and let the schedule begin from its learning rate.

    Other settings stay as they were loaded: some optimizers count and measure in them.
    """
    words = []
    if [len(groups) for groups in then] != [len(groups) for groups in fresh]:
        words.append("optimizers have other groups than in the saved run: all of their settings but lr are the save's")
        then = fresh
    for number, (optimizer, before, now) in enumerate(zip(engine.optimizers, then, fresh, strict=True)):
        for at, (group, old, new) in enumerate(zip(optimizer.param_groups, before, now, strict=True)):
            changed = {key: value for key, value in new.items() if old.get(key) != value}
            words += [
                f"optimizer {number}, group {at}: {key} was {old.get(key)} in the saved run and is {value} from here on"
                for key, value in changed.items()
            ]
            take_over(group, {**changed, _OF_SCHEDULE: new[_OF_SCHEDULE]})
            rate = group[_OF_SCHEDULE]
            group["initial_lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
    return words
