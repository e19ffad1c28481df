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

The first section has all optimizers and begins at once, as a forward may come first. Its first `opt.step()` updates
them all, and the others have to step before anything else trains. Where a toggle comes first, the step is left, and
the next `training_step` waits for its toggle.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from shardwise.engine.step.channels import StepLeft
from shardwise.errors import ModelError

_FORMS = (
    "a training_step begins with one forward and one manual_backward, and then all optimizers step. Or, for each "
    "update of one, it calls self.toggle_optimizer(opt), the forward, self.manual_backward(loss), opt.step() and "
    "self.untoggle_optimizer(opt). Or it calls opt.step(closure)"
)


class ManualProgram:
    """One call of `training_step`, for one microbatch."""

    def __init__(self, step: Callable[[], Any], *, number: int, begins: Sequence[Any], looks_at_graphs: bool) -> None:
        """`number`: of the microbatch. `begins`: the optimizers whose section begins at once; none: a toggle decides.
        `looks_at_graphs`: whether losses are tensors here, with graphs."""
        self.number = number
        self.output: Any = None
        """What `training_step` returned."""
        self.section: Sequence[Any] = ()
        """The optimizers whose section the program is in."""
        self._is_begun = False
        """Whether it has stopped at the beginning of its section."""
        self._to_step: dict[Any, Any] = {}
        """Optimizers that were updated with the one that stepped, and the settings of that update."""
        self._known: list[tuple[Any, float | None]] = []
        """Losses of sections that have ended, and their means over all ranks."""
        self._losses: list[Any] = []
        self._forgotten: list[Any] = []
        """Optimizers of the section whose `zero_grad` came after the losses."""
        self.clipped: list[Any] = []
        """Optimizers of the section whose gradients were clipped by value, as the plan does for all of them."""
        self._begun_at = 0
        self._looks_at_graphs = looks_at_graphs
        self._begins = begins
        self._step = step
        self._is_refused = False
        self._greenlet = greenlet(self._all)

    def go_on(self) -> Any:
        """Run until a section begins; its optimizers. None at the end of `training_step`."""
        if self._is_begun or self._greenlet.dead:
            return self.section if self._is_begun else None
        try:
            found = self._switch()
        except ModelError as error:
            # Of a forward, say, for which the engine has no step. What began too late reads as an error of the plan.
            if self._is_refused:
                raise
            raise ModelError(f"Under manual optimisation, {_FORMS}. In this one:\n{error}") from error
        if self._is_begun:
            return found
        if not self._greenlet.dead:
            raise ModelError("training_step calls opt.step() for some microbatches of a batch and not for others")
        self._check_stepped("training_step ended")
        self.output = found
        return None

    def loss(self) -> Any:
        """Run the section that has begun to its end; its loss. Raises StepLeft where it is another one's section."""
        self._is_begun = False
        found = self._switch()
        if self._is_begun:
            raise StepLeft
        if not self._greenlet.dead:
            return found
        if len(self.section) > 1 and not self._losses:
            self.output = found
            raise StepLeft
        raise ModelError(
            "training_step ended without the opt.step() of an optimizer that it began, so nothing was trained. An "
            "engine keeps no gradients for the next batch. Call opt.step() in each training_step; to accumulate, give "
            "larger batches and Plan(merge=sw.Merge(microbatches=...)), merge.microbatches in TOML"
        )

    def left(self, section: Sequence[Any]) -> bool:
        """The step of this section was left; whether the program has begun another one."""
        self._is_begun = self._is_begun and self.section is not section
        return self._is_begun

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

    def begin(self, optimizers: Sequence[Any]) -> None:
        """A section of these optimizers begins."""
        if list(self.section) == list(optimizers):
            return
        self._check_stepped("another section began")
        # A section of several begins by itself, before it is known who updates.
        if len(self.section) == 1 or self._losses:
            raise self._refused(
                "another optimizer was toggled before the opt.step() of the first: an engine updates one group of "
                "parameters at a time"
            )
        self.section, self._is_begun = optimizers, True
        self._begun_at = _sequence_now()
        self._stop(optimizers)

    def backward(self, loss: Any, given: dict[str, Any]) -> None:
        """`manual_backward`."""
        if given.keys() - {"retain_graph"}:
            raise ModelError(f"manual_backward({', '.join(given)}=...) is not for an engine; give it a loss alone")
        self._check_stepped("manual_backward was called again")
        if not self.section or (self._looks_at_graphs and _is_older(loss, self._begun_at)):
            raise self._refused(
                "manual_backward was given a loss with a forward that ran before its optimizer was known, or for "
                "another update. Run the forward of each update after its toggle"
            )
        self._check_remembered()
        self._losses.append(loss)

    def forget(self, optimizer: Any) -> None:
        """`opt.zero_grad()`: what `manual_backward` was called on before it does not count."""
        if self._losses and (optimizer is None or optimizer in self.section):
            self._forgotten.append(optimizer)
            if optimizer is None or all(each in self._forgotten for each in self.section):
                self._losses, self._forgotten = [], []

    def update(self, optimizer: Any, closure: Callable[[], Any], has_closure: bool) -> Any:
        """`opt.step()` or `opt.step(closure)`."""
        if has_closure:
            self.begin((optimizer,))
        result = closure()
        if optimizer in self._to_step:
            # Other microbatches go on after this one, which may have stepped schedulers.
            if self._to_step.pop(optimizer) != _settings(optimizer) and not self.number:
                raise self._refused(
                    "settings of an optimizer changed between the opt.step() of the first and its own, and the engine "
                    "has updated both. Step schedulers after the opt.step() of their optimizer"
                )
            return result
        if optimizer not in self.section or not self._losses:
            raise self._refused(
                "opt.step() was called without a manual_backward of this optimizer: it would train nothing"
            )
        self._check_remembered()
        if self.clipped and any(each not in self.clipped for each in self.section):
            raise self._refused(
                "gradients of some optimizers were clipped by value, and a plan clips those of all optimizers"
            )
        loss = self._losses[0] if len(self._losses) == 1 else sum(self._losses)
        self._known.append((loss, None))
        self._to_step = {each: _settings(each) for each in self.section if each is not optimizer}
        self.section, self._losses, self.clipped = (), [], []
        self._stop(loss)
        return result

    def _check_stepped(self, what: str) -> None:
        if self._to_step:
            raise self._refused(
                f"{what}, and {len(self._to_step)} optimizers have not stepped since the manual_backward that was for "
                "all: an engine updates them together"
            )

    def _check_remembered(self) -> None:
        if self._forgotten:
            raise self._refused(
                "zero_grad() of some optimizers came between a manual_backward for all and opt.step(): an engine drops "
                "the gradients of all of them, or of none"
            )

    def _refused(self, words: str) -> ModelError:
        self._is_refused = True
        return ModelError(f"{words}; {_FORMS}")

    def _all(self) -> Any:
        if self._begins:
            self.begin(self._begins)
        return self._step()

    def _switch(self) -> Any:
        self._greenlet.parent = getcurrent()
        return self._greenlet.switch()

    def _stop(self, value: Any) -> None:
        parent = self._greenlet.parent
        assert parent is not None, "it runs"
        parent.switch(value)


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """The numbers in its groups that an update reads, as they are now."""
    return [
        {name: float(each) for name, each in group.items() if isinstance(each, float | int) or torch.is_tensor(each)}
        for group in optimizer.param_groups
    ]


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
