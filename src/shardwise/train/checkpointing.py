"""Keeping a run: saves every so many updates, of which the newest stay."""

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from shardwise.checkpoint import AsyncSaver, SaveReport, State, prune, save, store_of
from shardwise.checkpoint.commit import check_shared_storage
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.errors import CheckpointError
from shardwise.train.config import RunConfig
from shardwise.train.loop import Position
from shardwise.train.random_states import RandomStates
from shardwise.train.run_state import RunState, Samples, Settings
from shardwise.train.tables import BYTES

_TOKENIZER = "tokenizer.json"
"""Under this name readers of Hugging Face files look for the tokenizer, which an export takes along."""


class RunKeeper:
    """Saves a run as [checkpoint] asks. Used as a context, whose end waits for the last save.

    samples, settings: see `RunState`. on_commit: called on every rank when a save is known to be committed; with saves
    in the background that is when the next one begins. Every rank makes the same calls; errors are raised on all.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: State,
        channel: Channel,
        *,
        samples: Samples,
        settings: Settings,
        on_commit: Callable[[SaveReport], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._channel = channel
        self._samples = samples
        self._settings = settings
        self._on_commit = on_commit
        self._mesh = str(config.plan.mesh)
        self._step = 0
        self._saved_step = 0
        table = config.checkpoint
        if table.every is not None and config.data.tokenizer != BYTES:
            self._lay_tokenizer_beside()
        self._background = (
            AsyncSaver(config.saves, layout=table.layout, channel=channel, timeout_seconds=config.train.timeout_seconds)
            if table.every is not None and table.background
            else None
        )
        if table.every is not None and (self._background is None or channel.size == 1):
            check_shared_storage(config.saves, channel, timeout_seconds=config.train.timeout_seconds)

    def after_update(self, position: Position) -> None:
        """Save when it is time: every so many updates, and after the last one."""
        self._step = position.step
        table = self._config.checkpoint
        if table.every is not None and (position.step % table.every == 0 or position.step == self._config.train.steps):
            self._save(position)

    def leave(self, position: Position) -> None:
        """Save, unless this update is saved or nothing is to be saved at all: the run stops here."""
        if self._config.checkpoint.every is not None and self._saved_step != position.step:
            self._save(position)

    def words(self) -> str:
        """Where the run is, and what is kept of it."""
        words = f"after step {self._step} of {self._config.train.steps}"
        if self._config.checkpoint.every is None:
            return f"{words}; nothing was saved, because checkpoint.every is not set"
        return f"{words}, which is saved in {self._config.saves}; --resume auto goes on from there"

    def _save(self, position: Position) -> None:
        table = self._config.checkpoint
        self._saved_step = position.step
        extra = self._extra(position)
        if self._background is None:
            self._committed(
                save(self._config.saves, self._engine, extra=extra, layout=table.layout, channel=self._channel)
            )
        else:
            self._committed(self._background.wait())
            self._background.save(self._engine, extra=extra)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._background is None:
            return
        if error is None:
            self._committed(self._background.wait())
        self._background.__exit__(kind, error, traceback)

    def _extra(self, position: Position) -> dict[str, Any]:
        """What is saved beside the engine, the same on all ranks."""
        elapsed_s = self._channel.exchange(repr(position.elapsed_s).encode(), purpose="time of a save")[0]
        random = RandomStates.gathered(self._channel, self._mesh)
        at = replace(position, elapsed_s=float(elapsed_s))  # of all that is saved, clocks alone differ between ranks
        return RunState.of(at, self._samples, self._settings, random).to_extra()

    def _lay_tokenizer_beside(self) -> None:
        """Let the folder of the saves have the tokenizer; raises the same error on all ranks."""
        with agreed(self._channel, purpose="verdict on the tokenizer beside the saves"):
            if self._channel.rank == 0:
                try:
                    store = store_of(self._config.saves)
                    store.delete(_TOKENIZER)  # of an earlier run
                    store.create(_TOKENIZER, (self._config.folder / self._config.data.tokenizer).read_bytes())
                except OSError as error:
                    why = error.strerror or error
                    raise CheckpointError(f"{self._config.saves}/{_TOKENIZER} cannot be written: {why}") from error

    def _committed(self, report: SaveReport | None) -> None:
        """Remove what is older than the newest saves, now that one more is committed."""
        if report is None:
            return
        with agreed(self._channel, purpose="verdict on removing old saves"):
            if self._channel.rank == 0:
                prune(self._config.saves, keep=self._config.checkpoint.keep)
        self._on_commit(report)
