"""What a Trainer's run has besides its updates, by the code that every loop uses.

output_dir/run.json         how far the run is to go, and how it ended     `shardwise top output_dir` shows both
output_dir/metrics.jsonl    a line for each log of the Trainer
a signal to any rank        all ranks save after the step under way, and end: see `StopsOnSignals`
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging

from shardwise.checkpoint import Replicas
from shardwise.comm.timed import Timed
from shardwise.hf.checkpoint_folders import SAVE
from shardwise.hf.memory_copies import MemoryCopies
from shardwise.runs.callbacks import TrainingLoop
from shardwise.runs.preemption import Preemption
from shardwise.runs.recorded_runs import recorded
from shardwise.runs.run_trace import Tracer
from shardwise.runs.stop_signals import Stopped

_LOGGER = logging.get_logger("transformers.trainer")
"""`--log_level info` shows what a run says about itself."""

_OF_TIME = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class RunServices:
    """The part of a trainer around its updates."""

    preemption = Preemption()
    """Of the last `train`: after a signal, with `enable_jit_checkpoint`, its `exit_code` is for `sys.exit`."""
    _sw_loop: TrainingLoop
    _sw_copies: MemoryCopies | None = None
    """While a run is copied."""
    _sw_tracer: Tracer | None = None
    """Where the run leaves a trace."""

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        self.preemption = Preemption()
        with self._sw_copying(), suppress(Stopped), ExitStack() as self._sw_services:
            if self.args.enable_jit_checkpoint:
                self._sw_services.enter_context(self.preemption)
            found = super().train(*args, **kwargs)  # type: ignore[misc]
            if self._sw_tracer is not None:
                folder = Path(self.args.output_dir)
                for line in self._sw_tracer.leave(folder, title=folder.name):
                    _LOGGER.info(line)
            if code := self.preemption.exit_code:  # for those who leave the contexts: it is how the run has ended
                raise Stopped(code - 128, f"after step {self.state.global_step}, which is saved")
        return found

    @contextmanager
    def _sw_copying(self: Any) -> Iterator[None]:
        every = getattr(self.args, "shardwise_replicas", None)
        if every is None:
            yield
            return
        # The path is the name of the run, where no saves are: its checkpoints are compared by their steps.
        with Replicas(os.path.join(self.args.output_dir, SAVE), every=1, channel=self.channel) as replicas:
            self._sw_copies = MemoryCopies(self, replicas, every=every)
            try:
                yield
            finally:
                self._sw_copies = None

    def _sw_begin_loop(self: Any, steps: int) -> None:
        """Called when the engine has its state, and the loop is to begin."""
        if isinstance(self.channel, Timed):
            self._sw_tracer = Tracer(self.engine)
            self._sw_services.callback(self._sw_tracer.take_off)
        begin = self.state.global_step
        self._sw_loop = self._sw_services.enter_context(
            recorded(self.engine, self.args.output_dir, steps=steps, step=begin)
        )

    def _sw_hand_over(self: Any, logs: Sequence[Mapping[str, Any]], *, is_due: bool) -> None:
        """Tell those around the loop of an update, where the Trainer logs or has evaluated. logs: the entries since."""
        values = {name: each for entry in logs for name, each in entry.items() if name.startswith("eval_")}
        values = {short: each for name, each in values.items() if (short := name.removeprefix("eval_")) not in _OF_TIME}
        loop, step = self._sw_loop, self.state.global_step
        if step > loop.step and (is_due or values):
            rows = self.get_total_train_batch_size(self.args) * (step - loop.step)
            loop.after_step(self._sw_report, values or None, rows=rows, step=step)
        elif values:
            loop.evaluated(values)
