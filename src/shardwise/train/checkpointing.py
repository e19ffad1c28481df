"""Keeping a run: regular saves, the newest ones kept, and the save from which a run goes on.

    update    100            200                    300 (checkpoint.every = 100, keep = 2, in the background)
    save      copy, write..  wait, commit 100;      wait, commit 200;      end: wait, commit 300;
                             copy, write 200..      copy, write 300..      prune: 200 and 300 stay

A save in the background is known to be committed when the next one begins, or the run ends: only then are older ones
removed. At the beginning, `find_start` chooses a save before anything is built, and `take_up` loads it afterwards.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.checkpoint import AsyncSaver, Catalogue, Replicas, SaveReport, State, Store, load, save, store_of
from shardwise.checkpoint import open as look_into
from shardwise.checkpoint.commit import check_shared_storage
from shardwise.checkpoint.keeper_store import KeeperStore
from shardwise.checkpoint.saves import Listing, list_saves, read_head
from shardwise.checkpoint.states import CURSOR_KEY
from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, agreed, json_as, of_form, understood
from shardwise.engine import Engine
from shardwise.engine.step.loss_scaling import INITIAL
from shardwise.errors import CheckpointError, ConfigError, PlanError
from shardwise.plan import Plan
from shardwise.runs.callbacks import Callback, Position, StepMetrics, TrainingLoop
from shardwise.runs.copy_times import CopiesAtSteps
from shardwise.train.config import RunConfig
from shardwise.train.data_settings import BYTES
from shardwise.train.regrouping import RegroupedEngine, settle_settings
from shardwise.train.run_data import RunData
from shardwise.train.run_state import RandomStates, RunState, Settings, differences

_TOKENIZER = "tokenizer.json"
"""Under this name readers of Hugging Face files look for the tokenizer, which an export takes along."""


class RunKeeper(Callback):
    """Saves a run as [checkpoint] asks; the last callback, so that a save has the states of all others.

    data: its cursor goes along. settings: see `RunState`. Saves in the background are known to be committed when the
    next one begins. Every rank makes the same calls; errors are raised on all.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: State,
        channel: Channel,
        *,
        data: RunData,
        settings: Settings,
        replicas: Replicas | None = None,
    ) -> None:
        self._config = config
        every = config.checkpoint.replicas or 1
        self._copies = None if replicas is None else CopiesAtSteps(replicas, every=every)
        self._engine = engine
        self._channel = channel
        self._data = data
        self._settings = settings
        self._mesh = str(config.plan.mesh)
        self._background: AsyncSaver | None = None
        self.report: SaveReport | None = None
        """Of the newest save that is committed."""

    def open(self) -> None:
        """Open the folder of the saves, on all ranks: before callbacks whose files a refusal would leave."""
        config, channel, table = self._config, self._channel, self._config.checkpoint
        if table.every is None:
            return
        if config.data.tokenizer != BYTES:
            self._lay_tokenizer_beside()
        if table.background:
            self._background = AsyncSaver(
                config.saves,
                layout=table.layout,
                channel=channel,
                timeout_seconds=config.train.timeout_seconds,
                keep=table.keep,
                keep_every=table.keep_every,
            )
        # An `AsyncSaver` of several ranks checks this by itself.
        if self._background is None or channel.size == 1:
            check_shared_storage(config.saves, channel, timeout_seconds=config.train.timeout_seconds)

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Save when it is time: every so many updates, and after the last one, whatever has ended the run."""
        table = self._config.checkpoint
        if table.every is not None and (metrics.step % table.every == 0 or loop.is_last):
            self._save(loop)
        if self._copies is not None:
            self._copies.save(metrics.step, self._engine, extra=lambda: self.extra(loop), data=self._data.data)
        if self._background is not None and self._background.has_failed:
            loop.stop("a save in the background failed")  # this rank knows; all leave after the same update

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Wait for the save under way. Raises what it has failed with, on all ranks."""
        if self._background is None:
            return
        # After an error in training a failed save must not hide it, so its verdict is not asked for.
        if error is None:
            self._committed(loop, self._background.wait())
        self._background.__exit__(None if error is None else type(error), error, None)

    def words(self, step: int) -> str:
        """How far the run is, and whether that is saved."""
        words = f"after step {step} of {self._config.train.steps}"
        if self._config.checkpoint.every is None:
            return f"{words}; nothing was saved, because checkpoint.every is not set"
        return f"{words}, which is saved in {self._config.saves}; --resume auto goes on from there"

    def save_to(
        self,
        path: str,
        loop: TrainingLoop,
        *,
        extra: Mapping[str, object],
        keep: int | None,
        keep_every: int | None = None,
    ) -> SaveReport:
        """Save the run in another folder, at once."""
        return save(
            path,
            self._engine,
            extra={**self.extra(loop), **extra},
            layout=self._config.checkpoint.layout,
            channel=self._channel,
            data=self._data.data,
            keep=keep,
            keep_every=keep_every,
        )

    def extra(self, loop: TrainingLoop) -> dict[str, Any]:
        """The `extra` of a save, the same on all ranks."""
        purpose = "time and callbacks of a save"
        with agreed(self._channel, purpose=purpose) as agreement:
            agreement.value = json.dumps([loop.position.elapsed_s, loop.state_dict()]).encode()
        ((elapsed_s, states),) = understood(agreement.values[:1], json_as(tuple[float, Any]), purpose=purpose)
        random = RandomStates.gathered(self._channel, self._mesh)
        # Clocks differ between ranks, and what callbacks have noted may: rank 0 decides.
        at = replace(loop.position, elapsed_s=elapsed_s)
        return RunState.of(at, self._data.samples, self._settings, random, states).to_extra()

    def _save(self, loop: TrainingLoop) -> None:
        if self._background is None:
            table = self._config.checkpoint
            kept = {"keep": table.keep, "keep_every": table.keep_every}
            self._committed(loop, self.save_to(self._config.saves, loop, extra={}, **kept))
        else:
            extra = self.extra(loop)
            self._committed(loop, self._background.wait())
            self._background.save(self._engine, extra=extra, data=self._data.data)

    def _lay_tokenizer_beside(self) -> None:
        """Let the folder of the saves have the tokenizer; raises the same error on all ranks."""
        with agreed(self._channel, purpose="verdict on the tokenizer of the saves"):
            if self._channel.rank == 0:
                try:
                    store = store_of(self._config.saves)
                    store.delete(_TOKENIZER)  # of an earlier run
                    path = self._config.folder / self._config.data.tokenizer
                    path = path / _TOKENIZER if path.is_dir() else path
                    if path.is_file():  # of older tokenizers a folder has no such file
                        store.create(_TOKENIZER, path.read_bytes())
                except OSError as error:
                    why = error.strerror or error
                    raise CheckpointError(f"{self._config.saves}/{_TOKENIZER} cannot be written: {why}") from error

    def _committed(self, loop: TrainingLoop, report: SaveReport | None) -> None:
        """Tell the loop of a save that is committed now; before the first one there is none."""
        if report is not None:
            self.report = report
            loop.saved(report)


AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of a run, before anything is loaded; the same on all ranks."""

    address: str = ""
    """The save to go on from; empty for a fresh start."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The `extra` of that save."""
    plan: str = ""
    """The text of the plan that made it."""
    older: str = ""
    """The save before it, for the case that it is damaged."""
    replica: Store | None = None
    """That save, where it is a replica; as each rank reaches it."""
    words: str = ""
    """The line to print about it."""

    @property
    def is_fresh(self) -> bool:
        """There is no save to go on from."""
        return not self.address


def find_start(config: RunConfig, resume: str | None, channel: Channel, *, replicas: Replicas | None = None) -> Start:
    """Find where the run begins; rank 0 looks, and all ranks know.

    resume: None for a fresh start, "auto" for the newest save of the run, if there is one, else a path or address.
    replicas: of the run. "auto" takes the newest of them where no save is newer. Otherwise they go: what comes is
    another run.
    Raises ConfigError for a fresh start where saves are, and for a path without any; CheckpointError for damage.
    """
    newest = replicas.newest() if replicas is not None and resume == AUTO else None
    replica = newest if isinstance(newest, KeeperStore) else None
    # Rank 0 alone looks: a folder that changes meanwhile would show different saves to different ranks.
    purpose = "first step of the run"
    with agreed(channel, purpose=purpose, only=0) as agreement:
        if channel.rank == 0:
            if replica is None:
                found = _looked_up(config, resume)
            else:
                found = _start_from(look_into(replica), replica.location, "out of")
            agreement.value = json.dumps(asdict(found)).encode()
    if replicas is not None and resume != AUTO:
        replicas.forget()
    (start,) = understood(agreement.values[:1], _start_in, purpose=purpose)
    return replace(start, replica=replica)


def _start_in(answer: bytes) -> Start:
    start = Start(**a_table(answer))
    of_form(
        [start.extra, start.address, start.plan, start.older, start.words], tuple[dict[str, Any], str, str, str, str]
    )
    if start.replica is not None:
        raise TypeError("a replica")
    return start


def settings_of(engine: Engine) -> Settings:
    """The settings of the optimizers' groups, as JSON values."""
    return [[group["settings"] for group in each["groups"]] for each in engine.settings()["optimizers"]]


def take_up(
    start: Start,
    config: RunConfig,
    engine: Engine,
    channel: Channel,
    *,
    data: RunData,
    fresh: Settings,
) -> tuple[Position, Mapping[str, Any], list[str]]:
    """Restore the engine, the place in the data and the random numbers.

    Returns the position, the states of callbacks, and lines to print.

    fresh: the settings of the optimizers by the configuration. They win over other settings of the saved run. Raises
    ConfigError for a run that reads other samples, CheckpointError for a save that does not fit or is damaged.
    """
    state = RunState.from_extra(start.extra, start.address)
    # A step number means a place in one order of samples. In another order the run would see some text twice and
    # some never.
    seed_key = "train.seed" if config.data.seed is None else "data.seed"
    if found := differences(state.samples, data.samples, seed_key=seed_key):
        raise ConfigError(
            f"--resume: {start.address} was saved by a run that reads other samples: {'; '.join(found)}. Step "
            f"{state.step} is no step of this run; resume with the settings of that run, or begin another run"
        )
    has_cursor, target = CURSOR_KEY in start.extra, RegroupedEngine(engine)
    try:
        source = start.address if start.replica is None else start.replica
        loaded = load(source, target, channel=channel, data=data.data if has_cursor else None)
    except CheckpointError as error:
        raise _with_way_out(error, start.older) from error
    if not has_cursor:  # of an earlier version, whose samples were counted by steps alone
        data.data.resume({**data.data.cursor(), "epoch": 0, "position": state.step * config.train.global_batch})
    settled = settle_settings(engine, state.settings, fresh, has_other_groups=target.has_other_groups)
    words = [start.words, *loaded.report.notes, *settled, *_scale_words(start.plan, config.plan)]
    reseeded = state.random.restore(channel, str(config.plan.mesh), seed=config.train.seed, step=state.step)
    if state.step >= config.train.steps:
        words.append(
            f"nothing is left to do: the save is of step {state.step}, and train.steps is {config.train.steps}"
        )
    elif reseeded:
        words.append(reseeded)
    return state.position, state.callbacks, words


def _looked_up(config: RunConfig, resume: str | None) -> Start:
    address = config.saves if resume in (None, AUTO) else str(resume)
    listing = listing_at(address)
    if resume is None:
        # Refused, not continued: the saves of a run that is started twice by mistake must not be lost.
        if listing.committed:
            raise ConfigError(
                f"{address} holds saves of an earlier run, {_named(listing.committed)}. Go on with it (--resume "
                "auto), write elsewhere (--set train.output=FOLDER), or remove the folder"
            )
        return Start()
    if resume == AUTO and not listing.committed:
        return Start(words=f"--resume auto: {address} holds no save yet{listing.torn_note()}; the run begins at step 0")
    older = _older(address, listing)
    # The address of one save, not of their folder: a newer one may be committed between this and the load.
    chosen = _save_in(address, listing.committed[-1]) if any(listing.committed) else address
    try:
        catalogue = look_into(chosen)
    except CheckpointError as error:
        if not listing.committed:  # nothing of ours is there, and nothing else that we know
            raise ConfigError(f"--resume: {error}") from error
        raise _with_way_out(error, older) from error
    return _start_from(catalogue, chosen, "saved in", older)


def _start_from(catalogue: Catalogue, address: str, where: str, older: str = "") -> Start:
    return Start(
        address=address,
        extra=catalogue.extra,
        plan=catalogue.contents.settings.get("plan", ""),
        older=older,
        words=f"goes on from step {catalogue.step}, {where} {address}",
    )


def listing_at(address: str) -> Listing:
    """The saves at an address, none where nothing is there. Raises CheckpointError where they cannot be listed."""
    try:
        return list_saves(store_of(address))
    except NotADirectoryError:  # whatever is there is refused when it is needed
        return Listing(location=address, committed=(), torn=(), files={})
    except OSError as error:
        raise CheckpointError(f"{address} cannot be listed: {error.strerror or error}") from error


def _older(address: str, listing: Listing) -> str:
    """The newest save before the last one whose manifest can be read, and its step."""
    # Its manifest is read, so that the advice does not lead to a second damaged save.
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
    """The error, with the advice to take the save before, where there is one."""
    return CheckpointError(f"{error}\nto take the save before it: --resume {older}" if older else str(error))


def _scale_words(saved: str, plan: Plan) -> list[str]:
    """A line where losses are scaled otherwise than in the saved run."""
    try:
        was, now = Plan.parse(saved).precision.loss_scale, plan.precision.loss_scale
    except PlanError:
        return []  # of another version; the load understood what it needs
    if was == now:
        return []
    begins = f", beginning at {INITIAL:g}" if now == "dynamic" else ""
    then, here = ("left out" if each is None else str(each) for each in (was, now))
    return [f"precision.loss_scale was {then} in the saved run and is {here} from here on{begins}"]
