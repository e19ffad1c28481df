"""What happens around the updates of a loop: callbacks, in the loop of `shardwise train` and in loops of your own.

    entered      on_begin       of all callbacks; a wish to stop then ends the loop before its first step
    after_step   on_evaluation  where the update was evaluated
                 on_step        an update is complete, with its evaluation
    saved        on_save        a save is committed
    left         on_end         of all, the last one first, after an error too

Every rank has a loop, and its callbacks are called at the same places. The wish of one to stop travels in the exchange
that each step makes: all ranks stop after the same one. What a callback of one rank raises ends the others in words.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from shardwise.checkpoint import SaveReport, save
from shardwise.checkpoint.states import SomeData
from shardwise.engine import Engine
from shardwise.engine.step.reports import EvaluationReport, RankTimes, StepReport
from shardwise.errors import CallbackError, CheckpointError, ConfigError, ShardwiseError, in_words
from shardwise.moving.nested_exchange import exchange

STATES_KEY = "callbacks"
"""Of the states of callbacks, in the `extra` of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationValues:
    """An evaluation of the model after so many updates."""

    step: int
    values: Mapping[str, float]
    """By name: "loss", and further losses and metrics."""

    @property
    def loss(self) -> float | None:
        """The held-out loss, where there is one."""
        return self.values.get("loss")

    def curves(self) -> dict[str, float]:
        """Its figures by the names of their curves."""
        return {"held_out_loss" if name == "loss" else f"held_out/{name}": each for name, each in self.values.items()}

    def value(self, name: str, wanted_by: str) -> float:
        """One of the values. Raises ConfigError for a name that the evaluation does not have."""
        if name not in self.values:
            raise ConfigError(f"{wanted_by}: evaluations have no {name!r}; they have {', '.join(self.values)}")
        return self.values[name]


def values_of(given: EvaluationReport | Mapping[str, Any]) -> dict[str, float]:
    """The values of an evaluation by name: of a report its loss, further losses and metrics.

    Metrics that are no numbers, such as a matrix, are left out. Raises ConfigError for a name that two have.
    """
    if not isinstance(given, Mapping):
        # Loops of users may have reports of their own.
        metrics, losses = getattr(given, "metrics", {}), getattr(given, "losses", {})
        if both := sorted(metrics.keys() & losses.keys()):
            raise ConfigError(
                f"{both[0]!r} is a metric (train.metrics in a configuration) and an entry of the loss; give one of "
                "them another name"
            )
        others = {**metrics, **losses}
        given = {"loss": given.loss} | {name: value for name, value in others.items() if name != "loss"}
    return {name: float(value) for name, value in given.items() if isinstance(value, float | int)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One update."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the global batch, before the update."""
    learning_rate: float
    """Of the first group of the first optimizer."""
    grad_norm: float
    """2-norm of the averaged gradient, before clipping."""
    tokens_per_second: float
    """Of all ranks together, since the last update; evaluation not counted. Of `rows`, where the data are no text."""
    skipped: bool
    """The gradient was not finite, and the update was left out."""
    held_out_loss: float | None
    """Mean over the evaluation windows, after the update; None when not evaluated."""
    elapsed_s: float
    """Since training began."""
    loss_scale: float | None = None
    """The factor on the losses of this update; None where the plan has none."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """By name, further entries of a loss that is a dict."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """By name, further losses and the metrics of the evaluation after the update."""
    learning_rates: tuple[float, ...] = ()
    """Of all groups of all optimizers, where they differ."""
    rows: str = "tokens"
    """What `tokens_per_second` counts: "tokens", or "rows" where files and curves have "rows_per_second"."""
    ranks: tuple[RankTimes, ...] = ()
    """What each rank did with its time, up to the norm of this update. On rank 0."""

    def curves(self) -> dict[str, float]:
        """Every figure of the update that makes a curve, by its name; those of ranks are left out."""
        known = {
            "loss": self.loss,
            **{f"loss/{name}": value for name, value in self.losses.items()},
            "learning_rate": self.learning_rate,
            **{f"learning_rate/group {at}": rate for at, rate in enumerate(self.learning_rates)},
            "grad_norm": self.grad_norm,
            f"{self.rows}_per_second": self.tokens_per_second,
            "held_out_loss": self.held_out_loss,
            **{f"held_out/{name}": value for name, value in self.held_out.items()},
            "loss_scale": self.loss_scale,
            # A dynamic scale is halved where it is 1.
            "skipped": None if self.loss_scale is None else float(self.skipped),
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run is: all that the loop has to know to go on from there."""

    step: int = 0
    """Updates that were tried."""
    num_taken: int = 0
    """Updates that were taken. The schedule counts these: a skipped one does not use up its learning rate."""
    num_skipped: int = 0
    """Updates that were skipped in a row, up to now."""
    held_out_loss: float | None = None
    """The result of the last evaluation."""
    elapsed_s: float = 0.0
    """Since training began."""


BEGINNING = Position()
"""Of a run that nothing has been done of."""


class Callback:
    """Something that happens around updates. Derive from it, and write those of the five methods that you need.

    Every rank calls every method of its callbacks at the same places. So they may do what all ranks do together, such
    as `sw.save` or an evaluation. What only one is to do (a file, a message) asks `loop.is_first`. All ranks have the
    same callbacks in the same order, but for those that only read what they are given.

    A method may ask to stop: `loop.stop("why")`. An error in one ends all ranks with CallbackError.

    A callback with `state_dict() -> dict` of JSON values and `load_state_dict(state)` goes on where it was: both are
    called in runs that save. The state of rank 0 is saved, and is loaded before `on_begin`.
    """

    def on_begin(self, loop: "TrainingLoop") -> None:
        """The loop begins, or goes on from `loop.position`. To stop here ends it before its first step."""

    def on_evaluation(self, loop: "TrainingLoop", evaluation: EvaluationValues) -> None:
        """The model was evaluated, after an update or before the first. `on_step` of the update comes behind."""

    def on_step(self, loop: "TrainingLoop", metrics: StepMetrics) -> None:
        """One update is complete, and its evaluation."""

    def on_save(self, loop: "TrainingLoop", report: SaveReport) -> None:
        """A save is committed. In the background, that is known when the next one begins or the loop ends."""

    def on_end(self, loop: "TrainingLoop", error: BaseException | None) -> None:
        """The loop is over. error: what ended it, which is raised afterwards; None after its last update."""


METHODS = ("on_begin", "on_evaluation", "on_step", "on_save", "on_end")


class TrainingLoop:
    """A loop of updates and its callbacks, on one rank. Used as a context; all ranks enter and leave it together.

    engine: what trains. callbacks: in the order in which they are called.
    steps: the number of the last update, where it is known.
    begin: where the loop is; left out: at the engine's steps. is_fresh: whether it goes on from no save; left out: at
        step 0.
    folder: where callbacks may write files. saves: folder or address of its saves. data: whose cursor `save` saves.
    save_with: how it saves; left out: by `sw.save`. say_with: what prints lines on rank 0.
    settings: of the run, for records of it. rows: what `after_step` counts.

    Raises ConfigError for a callback without all five methods.

    >>> with TrainingLoop(engine, [EarlyStopping(patience=3)]) as loop:      # doctest: +SKIP
    ...     for batch in data.on(engine):
    ...         report = engine.step(batch)
    ...         evaluation = engine.evaluate(held_out) if engine.steps % 100 == 0 else None
    ...         if loop.after_step(report, evaluation):
    ...             break
    """

    def __init__(
        self,
        engine: Engine[nn.Module],
        callbacks: Sequence[Callback] = (),
        *,
        steps: int | None = None,
        begin: Position | None = None,
        is_fresh: bool | None = None,
        folder: Path | str | None = None,
        saves: str | None = None,
        data: SomeData | None = None,
        save_with: Callable[..., SaveReport] | None = None,
        say_with: Callable[[str], None] = print,
        settings: Mapping[str, Any] | None = None,
        rows: str = "tokens",
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.steps = steps
        """The number of the last update, where it is known."""
        self._position = begin if begin is not None else Position(step=engine.steps)
        self._uncounted: list[StepReport] = []
        """Reports that have not been asked yet whether their updates were taken."""
        self.is_fresh = self.step == 0 if is_fresh is None else is_fresh
        self.folder = None if folder is None else Path(folder)
        self.saves = saves
        self.settings = settings or {}
        self.stopped_by = ""
        """Why callbacks have ended the loop; empty where they have not. The same on all ranks."""
        self._callbacks = named_callbacks(callbacks)
        # On a device a look at the figures of a step waits for them: none is made for callbacks that see no steps.
        self._sees_steps = any(getattr(type(each), "on_step", None) is not Callback.on_step for each in callbacks)
        self._begun: list[tuple[str, Callback]] = []
        self._data = data
        self._save_with = save_with
        self._say_with = say_with
        self._now_s = now_s
        self._wish, self._rows = "", rows
        self._stop_asking: Callable[[], None] = lambda: None
        self._rates: list[float | torch.Tensor] = []
        # As if the run had begun so long ago: the time between two parts of it does not count.
        self._began_s = now_s() - self._position.elapsed_s
        self._last_s = now_s()

    @property
    def step(self) -> int:
        """Updates that were tried; in `on_evaluation` and `on_step`, with the one that they get."""
        return self._position.step

    @property
    def position(self) -> Position:
        """How far the loop is; in `on_evaluation` and `on_step`, after the update that they get."""
        self._count_updates()
        return self._position

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.engine.channel.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether no update comes after this one; the same on all ranks."""
        return self.step == self.steps or bool(self.stopped_by) or self.engine.asked_to_stop

    @property
    def is_interrupted(self) -> bool:
        """Whether something else than the callbacks, such as a signal, has ended the loop; the same on all ranks."""
        return self.engine.asked_to_stop and not self.stopped_by

    def say(self, *lines: str) -> None:
        """Print lines, on rank 0."""
        for line in lines if self.is_first else ():
            self._say_with(line)

    def stop(self, why: str) -> None:
        """Ask that the loop ends: on all ranks after the next step, or before the first where `on_begin` asks."""
        self._wish = self._wish or why

    def save(self, path: str, *, extra: Mapping[str, object], keep: int | None = None) -> SaveReport:
        """Save the run as it is, so that it can go on from there, on all ranks. The save is committed on return."""
        if self._save_with is not None:
            return self._save_with(path, extra=extra, keep=keep)
        extra = {"step": self.step, STATES_KEY: self.state_dict(), **extra}
        return save(path, self.engine, extra=extra, keep=keep, data=self._data)

    def ends(self) -> bool:
        """Whether callbacks have ended the loop; the same on all ranks, which ask this after a step."""
        # The exchange of the step has said whether any rank wants to stop. Why is asked once, at the end.
        if not self.stopped_by and self.engine.asked_to_stop:
            self._agree()
        return bool(self.stopped_by)

    def evaluated(self, evaluation: EvaluationReport | Mapping[str, float]) -> None:
        """Hand the callbacks an evaluation that belongs to no update, such as one before the first."""
        values = values_of(evaluation)
        self._position = replace(self._position, held_out_loss=values.get("loss", self._position.held_out_loss))
        self._call_all("on_evaluation", EvaluationValues(step=self.step, values=values))

    def after_step(
        self,
        report: StepReport,
        evaluation: EvaluationReport | Mapping[str, float] | None = None,
        *,
        rows: float | None = None,
        seconds: float | None = None,
        step: int | None = None,
    ) -> bool:
        """Hand the callbacks an update. Returns whether to leave the loop; the same on all ranks, which call it alike.

        evaluation: of the model after it, if there was one: a report, or values by name, with "loss" for the loss.
        rows: of the update, on all ranks; left out: its weight. seconds: that it took; left out: since the last call.
        step: its number, in a loop that hands over some updates alone; rows are those of all since the last call then.
        """
        ends, before, now_s = self.ends(), self._position, self._now_s()
        values = None if evaluation is None else values_of(evaluation)
        held_out_loss = None if values is None else values.get("loss")
        self._position = replace(
            before,
            step=before.step + 1 if step is None else step,
            held_out_loss=before.held_out_loss if held_out_loss is None else held_out_loss,
            elapsed_s=now_s - self._began_s,
        )
        self._uncounted.append(report)
        self._count_updates(but=1)  # a device has done the steps before this one, or has enough to do meanwhile
        if values is not None:
            self._call_all("on_evaluation", EvaluationValues(step=self.step, values=values))
        if self._sees_steps:
            seconds = now_s - self._last_s if seconds is None else seconds
            rows = report.weight if rows is None else rows
            self._call_all("on_step", self._metrics(report, values or {}, rows / seconds if seconds > 0 else 0.0))
        self._last_s = self._now_s()
        return ends

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count as that of an update, as in an evaluation or a save."""
        began_s = self._now_s()
        try:
            yield
        finally:
            self._last_s += self._now_s() - began_s

    def _metrics(self, report: StepReport, held_out: Mapping[str, float], rows_per_second: float) -> StepMetrics:
        rates = tuple(map(float, self._rates)) or (0.0,)
        return StepMetrics(
            step=self.step,
            loss=report.loss,
            learning_rate=rates[0],
            grad_norm=report.grad_norm,
            tokens_per_second=rows_per_second,
            rows=self._rows,
            skipped=report.skipped,
            held_out_loss=held_out.get("loss"),
            elapsed_s=self._position.elapsed_s,
            loss_scale=report.loss_scale,
            losses={name: value for name, value in getattr(report, "losses", {}).items() if name != "loss"},
            held_out={name: value for name, value in held_out.items() if name != "loss"},
            learning_rates=rates if len(set(rates)) > 1 else (),
            ranks=report.ranks if self.is_first else (),
        )

    def _count_updates(self, *, but: int = 0) -> None:
        """Count updates that were taken or skipped, all but so many of the last ones."""
        while len(self._uncounted) > but:
            skipped, before = self._uncounted.pop(0).skipped, self._position
            self._position = replace(
                before,
                num_taken=before.num_taken + (not skipped),
                num_skipped=before.num_skipped + 1 if skipped else 0,
            )

    def saved(self, report: SaveReport) -> None:
        """Hand the callbacks a save that is committed."""
        self._call_all("on_save", report)

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks by name: their class, with a number where there are several.

        Raises CheckpointError for a state that JSON does not hold.
        """
        states: dict[str, Any] = {}
        for name, callback in self._callbacks:
            if _has_state(callback):
                with self._blaming(name, "state_dict"):
                    states[name] = callback.state_dict()  # type: ignore[attr-defined]  # see `_has_state`
                try:
                    json.dumps(states[name], allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"callback {name}: JSON does not hold what state_dict gives ({error}); give finite numbers, "
                        "texts, lists and dicts"
                    ) from error
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> list[str]:
        """Give the callbacks the states of a save, before the loop is entered. Returns a line for each misfit."""
        with_state = {name: each for name, each in self._callbacks if _has_state(each)}
        for name, callback in with_state.items():
            if name in states:
                with self._blaming(name, "load_state_dict"):
                    callback.load_state_dict(states[name])  # type: ignore[attr-defined]  # see `_has_state`
        new = [
            f"callback {name} has no state in the save, and begins anew" for name in with_state if name not in states
        ]
        gone = [f"callback {name} of the saved run is left out here" for name in states if name not in with_state]
        return new + gone

    def __enter__(self) -> Self:
        self._stop_asking = self.engine.ask_in_steps(self._asked)
        try:
            for name, callback in self._callbacks:
                with self._blaming(name, "on_begin"):
                    callback.on_begin(self)
                self._begun.append((name, callback))
            self._agree()
        except BaseException as error:
            self._leave(error)
            raise
        self._last_s = self._now_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(error)

    def _asked(self) -> bool:
        """Asked once in every step, before its update: these are the rates that it takes."""
        groups = (group for optimizer in self.engine.optimizers for group in optimizer.param_groups)
        rates = [group["lr"] for group in groups if "lr" in group] if self._sees_steps else []
        # Schedulers write in place to a rate that is a tensor.
        self._rates = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        return bool(self._wish)

    def _agree(self) -> None:
        wishes = exchange(self._wish, channel=self.engine.channel, purpose="callbacks that end the loop")
        self.stopped_by = next(filter(None, wishes), "")

    def _call_all(self, method: str, *given: object) -> None:
        for name, callback in self._callbacks:
            with self._blaming(name, method):
                getattr(callback, method)(self, *given)

    @contextlib.contextmanager
    def _blaming(self, name: str, method: str) -> Any:
        """Name the callback in what it raises, and let the peers know."""
        try:
            yield
        except ShardwiseError:  # in words already, and ranks that do something together raise it alike
            raise
        except Exception as error:
            words = f"callback {name}: {method} raised {in_words(error)}"
            self.engine.channel.abort(words)
            raise CallbackError(words) from error

    def _leave(self, error: BaseException | None) -> None:
        """End all that have begun, whatever one of them raises; the first error counts, others are notes of it."""
        self._stop_asking()
        first = error
        while self._begun:
            name, callback = self._begun.pop()
            try:
                with self._blaming(name, "on_end"):
                    callback.on_end(self, first)
            except Exception as raised:
                if first is None:
                    first = raised
                else:
                    first.add_note(str(raised))
        if first is not error:
            assert first is not None
            raise first


def named_callbacks(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """Callbacks with their names: their class, with a number where there are several.

    Raises ConfigError for one without all five methods.
    """
    named, seen = [], Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        if missing := [method for method in METHODS if not callable(getattr(callback, method, None))]:
            raise ConfigError(
                f"train.callbacks: {kind} has no {', '.join(missing)}; derive it from shardwise.train.Callback, which "
                "has all five methods"
            )
        seen[kind] += 1
        named.append((kind if seen[kind] == 1 else f"{kind}-{seen[kind]}", callback))
    return named


def _has_state(callback: Callback) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))
