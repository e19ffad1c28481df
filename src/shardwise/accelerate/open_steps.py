"""A step of an engine that a loop runs piece by piece: its forwards, its backwards and its update are other calls.

the loop, k = 2                       the engine, in the same thread
output = model(batch)    begin  --->  engine.step: open, then the loss function of microbatch 0 stops
loss = f(output)                      (its streams of random numbers and its stages are those of the loop now)
accelerator.backward(loss)   pause    the loss is kept, and the thread is the loop's own again
end of accumulate()      end_batch -> the loss function returns it: backward; the turn of microbatch 1 stops
output = model(batch)    begin  --->  the loss function of microbatch 1 stops
...
optimizer.step()         finish --->  backward of the last one, reduce, clip, update

Under a pipeline the engine asks for forwards and runs backwards in the order of its schedule. An update that ends with
fewer batches than k, at the end of the data, leaves the others out.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from shardwise.engine import Engine, StepReport
from shardwise.engine.forward.batches import NoMoreMicrobatches
from shardwise.engine.forward.precision import outside_autocast
from shardwise.engine.step.channels import StepLeft
from shardwise.errors import ModelError


class OpenStep:
    """One update, from its first forward on."""

    def __init__(
        self,
        engine: Engine[Any],
        inputs: Any,
        *,
        num_batches: int,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """inputs: of the first forward; ranks are compared by them. num_batches: at most. around: of the step."""
        self._engine = engine
        self._around = around
        self._num_batches = num_batches
        self._inputs = inputs
        self._greenlet = greenlet(self._run)
        self._pause = ExitStack()
        self._is_last = False
        self._is_left = False
        self.num_ended = 0
        """Batches whose backward is the engine's."""
        self.is_in_batch = False
        """Whether the first forward of a batch has run, and its backward has not."""
        self.losses: list[Any] = []
        """What the loop has called `backward` on in this batch."""
        self.begin()

    @property
    def is_over(self) -> bool:
        """Whether the step has ended, in an error maybe."""
        return bool(self._greenlet.dead)

    def begin(self) -> None:
        """A forward follows."""
        self._pause.close()
        if not self.is_in_batch:
            self.is_in_batch = True
            self._switch()

    def pause(self) -> None:
        """The thread is the loop's own until the next forward."""
        if self.is_in_batch:
            self._pause.close()
            self._pause.enter_context(self._engine.paused())

    def end_batch(self) -> None:
        """Backward of a batch that is not the last of the update. The last that the engine has room for waits."""
        if self.losses and self.num_ended < self._num_batches - 1:
            self._end()

    def finish(self) -> StepReport:
        """The last backward, and the update."""
        self._is_last = True
        found = self._end() if self.is_in_batch else self._switch()
        assert isinstance(found, StepReport)
        return found

    def leave(self) -> None:
        """End it without an update, on all ranks alike. Raises ModelError where a pipeline waits for a backward."""
        is_under_way = self._engine.pipeline is not None and self.num_ended
        if is_under_way and self.is_in_batch and not self.losses:
            raise ModelError(
                f"the update is left between a forward and its backward, after {self.num_ended} batches whose stages "
                "wait for it under pp. Call accelerator.backward(loss) before free_memory()"
            )
        self._pause.close()
        if not is_under_way:
            self._greenlet.throw(StepLeft)
            return
        # Ranks of a pipeline have messages under way, which they take first.
        self._is_last = self._is_left = True
        if self.is_in_batch:
            self._end()
        else:
            self._switch()

    def _end(self) -> Any:
        self._pause.close()
        loss = self.losses[0] if len(self.losses) == 1 else sum(self.losses)
        self.losses, self.is_in_batch = [], False
        self.num_ended += 1
        return self._switch(loss)

    def _run(self) -> StepReport | None:
        first = {"weight": 1.0, "inputs": self._inputs}
        others: list[Any] = [{"weight": 1.0, "turn": _NextBatch(self)} for _ in range(self._num_batches - 1)]
        try:
            with self._around():
                return self._engine.step([first, *others], loss=self._loss, stop=self._before_update)
        except StepLeft:
            return None

    def _loss(self, _: Any) -> Any:
        return self._stop()

    def _before_update(self) -> bool:
        if self._is_left:
            raise StepLeft
        return False

    def _stop(self) -> Any:
        """In the engine: the loop goes on."""
        parent = self._greenlet.parent
        assert parent is not None, "it runs"
        return parent.switch()

    def wait_for_batch(self) -> None:
        """In the engine: the loop goes on until its next batch. Raises NoMoreMicrobatches where there is none."""
        if not self._is_last:
            self._stop()
        if self._is_last:
            raise NoMoreMicrobatches

    def _switch(self, *value: Any) -> Any:
        """Let the engine go on, outside of the loop's region of autocast."""
        self._greenlet.parent = getcurrent()
        # A loop may end its batch, or update, where it computes no gradients.
        with outside_autocast(self._engine.channel.device), torch.enable_grad():
            return self._greenlet.switch(*value)


class _NextBatch:
    """In a microbatch, which an engine moves to its device when it has its turn."""

    def __init__(self, step: OpenStep) -> None:
        self._step = step

    def to(self, _: torch.device) -> "_NextBatch":
        """Wait for the loop's next batch."""
        self._step.wait_for_batch()
        return self
