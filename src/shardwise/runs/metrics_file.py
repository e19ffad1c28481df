"""`metrics.jsonl`: the figures of a run, a JSON object per line.

{"step": 0, "held_out_loss": 4.2}                                             an evaluation that comes with no update
{"step": 1, "loss": 4.1, "elapsed_s": 0.5, ..., "ranks": [{"rank": 0, ...}]}  an update, and its evaluation
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.engine.step.reports import slowest
from shardwise.runs.callbacks import Callback, EvaluationValues, StepMetrics, TrainingLoop
from shardwise.runs.json_lines import JsonLines, lines_up_to

_PACE = "tokens_per_second"
_MAY_BE_NAN = frozenset({"loss", "grad_norm"})
_IF_GIVEN = ("loss_scale", "losses", "held_out", "learning_rates", "ranks")
"""Lines of runs without them are as they were."""
_MOST_RANKS = 64
"""In a line of metrics."""


class MetricsFile(Callback):
    """`metrics.jsonl`: one JSON object per update, on disk as soon as the update is done.

    An evaluation that comes with no update has a line too, of its step, its losses and metrics alone: one before the
    first update, and one of an update that has its line already.

    `ranks` has the times of the ranks: of those that were busy longest, where there are more than 64.
    after_step: the file is continued: lines of updates up to this one stay, others go. 0: it begins anew.
    remember: gets the updates that stay, and the evaluation before them, without the times of ranks.
    """

    def __init__(self, path: Path, *, after_step: int = 0, remember: Callable[[Any], None] = lambda seen: None) -> None:
        self._path, self._after_step, self._remember = path, after_step, remember
        self._written_step = 0

    def on_begin(self, loop: TrainingLoop) -> None:
        """Open the file."""
        self._file = JsonLines(self._path, kept=self._kept() if self._after_step else ())

    def _kept(self) -> Iterator[str]:
        for line, values in lines_up_to(self._path, self._after_step, before="ranks"):
            if (seen := _meaning_of(values)) is not None:
                self._remember(seen)
                yield line

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Write a line, where no update comes with it."""
        if evaluation.step == self._written_step:
            held_out = {name: value for name, value in evaluation.values.items() if name != "loss"}
            said = {"step": evaluation.step, "held_out_loss": evaluation.loss}
            self._file.add({**said, **({"held_out": held_out} if held_out else {})})

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Write one line; a number that is not finite has no JSON and becomes null."""
        values = dataclasses.asdict(dataclasses.replace(metrics, ranks=()))
        values = {f"{metrics.rows}_per_second" if name == _PACE else name: each for name, each in values.items()}
        del values["rows"]
        for name in _IF_GIVEN:
            if not values[name]:
                del values[name]
        if metrics.ranks:
            shown = sorted(metrics.ranks, key=lambda each: -each.busy_s)[:_MOST_RANKS]
            shown.sort(key=lambda each: each.rank)
            values["ranks"] = [dataclasses.asdict(each) for each in shown]
            values["slowest"] = slowest(metrics.ranks)
        self._file.add(values)
        self._written_step = metrics.step

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Close the file."""
        self._file.close()


def _meaning_of(values: Mapping[str, Any]) -> StepMetrics | EvaluationValues | None:
    """What a line of metrics says; None where it is not whole."""
    try:
        if "elapsed_s" not in values:
            loss = values["held_out_loss"]
            return EvaluationValues(step=values["step"], values={"loss": math.nan if loss is None else loss})
        pace = {_PACE: values["rows_per_second"], "rows": "rows"} if "rows_per_second" in values else {}
        known = {name: each for name, each in values.items() if name != "rows_per_second"} | pace
        return StepMetrics(**known | {key: math.nan for key in _MAY_BE_NAN if values[key] is None})
    except (KeyError, TypeError):
        return None
