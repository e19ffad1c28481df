"""Manual optimisation: a `training_step` that calls `manual_backward` and `opt.step()` itself.

An engine runs forward, backward and update in one call. So the user's program stops where a section of it begins and
ends, and goes on inside of the engine's step, in the same thread:

    strategy                    training_step                          engine
    go on                       self.toggle_optimizer(opt)  stops
    engine.step(only=opt)  ------------------------------------------> open
                                loss = f(self(x))           <--------- the loss function of the step
                                self.manual_backward(loss)  keeps the loss
                                opt.step()                  stops ---> backward, reduce, update
    go on                       what follows
"""

from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from shardwise.errors import ModelError

_TOGGLE = (
    "write this, which trains the same under any strategy: self.toggle_optimizer(opt) before the forward, then "
    "self.manual_backward(loss), opt.step(), self.untoggle_optimizer(opt); or opt.step(closure)"
)


class ManualProgram:
    """One call of `training_step`, for one microbatch."""

    def __init__(self, step: Callable[[], Any], *, number: int, begins: Any, looks_at_graphs: bool) -> None:
        """`number`: of the microbatch. `begins`: the optimizer whose section begins at once; None: a toggle says it.
        `looks_at_graphs`: whether losses are tensors here, with graphs."""
        self.number = number
        self.output: Any = None
        """What `training_step` returned."""
        self.section: Any = None
        """The optimizer whose section the program is in."""
        self._known: list[tuple[Any, float | None]] = []
        """Losses of sections that have ended, and their means over all ranks."""
        self._losses: list[Any] = []
        self._begun_at = 0
        self._looks_at_graphs = looks_at_graphs
        self._begins = begins
        self._step = step
        self._greenlet = greenlet(self._all)

    def go_on(self) -> Any:
        """Run until a section begins; its optimizer. None at the end of `training_step`."""
        try:
            found = self._switch()
        except ModelError as error:
            # Of a forward, say, for which the engine has no step. What began too late reads as an error of the plan.
            if _TOGGLE in str(error):
                raise
            raise ModelError(f"{error}\nUnder manual optimisation, {_TOGGLE}") from error
        if not self._greenlet.dead:
            return found
        self.output = found
        return None

    def loss(self) -> Any:
        """Run the section that has begun to its end; its loss."""
        found = self._switch()
        if not self._greenlet.dead:
            return found
        raise ModelError(
            "training_step ended without the opt.step() of an optimizer that it began, so nothing was trained. An "
            "engine keeps no gradients for the next batch. Call opt.step() in each training_step; to accumulate, give "
            "larger batches and Plan(merge=sw.Merge(microbatches=...)), merge.microbatches in TOML"
        )

    def ended(self, loss: float) -> None:
        """The step of the section is over, with this mean loss."""
        self._known[-1] = self._known[-1][0], loss

    def value_of(self, value: Any) -> Any:
        """A value that is logged after its section: of a loss its mean, which all ranks have."""
        return next((mean for loss, mean in self._known if value is loss), value)

    def abandon(self) -> None:
        """End it where it is."""
        if not self._greenlet.dead:
            self._greenlet.throw()

    # Called by the program ------------------------------------------------------------------------------------------

    def begin(self, optimizer: Any) -> None:
        """A section of this optimizer begins."""
        if self.section is optimizer:
            return
        if self.section is not None:
            raise ModelError(
                "another optimizer was toggled before the opt.step() of the first: an engine updates one group of "
                f"parameters at a time; {_TOGGLE}"
            )
        self.section = optimizer
        self._begun_at = _sequence_now()
        self._stop(optimizer)

    def backward(self, loss: Any, given: dict[str, Any]) -> None:
        """`manual_backward`."""
        if given.keys() - {"retain_graph"}:
            raise ModelError(f"manual_backward({', '.join(given)}=...) is not for an engine; give it a loss alone")
        if self.section is None or (self._looks_at_graphs and _is_older(loss, self._begun_at)):
            raise ModelError(
                "manual_backward was given a loss with a forward that ran before its optimizer was known, or for "
                f"another update. Run the forward of each update after its toggle; {_TOGGLE}"
            )
        self._losses.append(loss)

    def forget(self, optimizer: Any) -> None:
        """`opt.zero_grad()`: what `manual_backward` was called on before it does not count."""
        if optimizer in (None, self.section):
            self._losses.clear()

    def update(self, optimizer: Any, closure: Callable[[], Any], has_closure: bool) -> Any:
        """`opt.step()` or `opt.step(closure)`."""
        if has_closure:
            self.begin(optimizer)
        result = closure()
        if self.section is not optimizer or not self._losses:
            raise ModelError(
                f"opt.step() was called without a manual_backward of this optimizer: it would train nothing; {_TOGGLE}"
            )
        loss = self._losses[0] if len(self._losses) == 1 else sum(self._losses)
        self._known.append((loss, None))
        self.section, self._losses = None, []
        self._stop(loss)
        return result

    def _all(self) -> Any:
        if self._begins is not None:
            self.begin(self._begins)
        return self._step()

    def _switch(self) -> Any:
        self._greenlet.parent = getcurrent()
        return self._greenlet.switch()

    def _stop(self, value: Any) -> None:
        parent = self._greenlet.parent
        assert parent is not None, "it runs"
        parent.switch(value)


def _sequence_now() -> int:
    """The number that autograd gives the next node of a graph."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).mul(1).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _is_older(loss: torch.Tensor, number: int) -> bool:
    """Whether the graph of a loss has nodes that were made before `number`."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < number:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False
