"""A step of an engine that a loop runs piece by piece: its forward, its backward and its update are other calls.

the loop                              the engine, in the same thread
output = model(batch)    begin  --->  engine.step: open, then the loss function stops
loss = f(output)                      (its streams of random numbers and its stages are those of the loop now)
accelerator.backward(loss)            the loss is kept
optimizer.step()         finish --->  the loss function returns it: backward, reduce, clip, update
"""

from typing import Any

from greenlet import getcurrent, greenlet

from shardwise.engine import Engine, StepReport


class OpenStep:
    """One update, from its first forward on."""

    def __init__(self, engine: Engine[Any], inputs: Any) -> None:
        """inputs: of the first forward; ranks are compared by them."""
        self._engine, self._inputs = engine, inputs
        self._greenlet = greenlet(self._run)
        self.losses: list[Any] = []
        """What the loop has called `backward` on."""
        self._switch()

    def finish(self) -> StepReport:
        """Backward and update."""
        found = self._switch(self.losses[0] if len(self.losses) == 1 else sum(self.losses))
        assert isinstance(found, StepReport)
        return found

    def abandon(self) -> None:
        """End it where it is. The engine cannot go on afterwards."""
        self._greenlet.throw()

    def _run(self) -> StepReport:
        return self._engine.step([{"weight": 1.0, "inputs": self._inputs}], loss=self._loss)

    def _loss(self, _: Any) -> Any:
        parent = self._greenlet.parent
        assert parent is not None, "it runs"
        return parent.switch()

    def _switch(self, *value: Any) -> Any:
        self._greenlet.parent = getcurrent()
        return self._greenlet.switch(*value)
