"""What an engine counts. On a device a step is counted when its figures have come, or when somebody looks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol


class StepVerdict(Protocol):
    """Whether the gradient of a step was finite."""

    @property
    def is_known(self) -> bool:
        """Whether the host can say it without waiting."""

    @property
    def is_finite(self) -> bool:
        """Waits until it is known."""


class FilledOnLook:
    """Fields that are empty have a value when somebody reads one."""

    __slots__ = ()

    def _on_look(self, name: str) -> Any:
        """The value of an empty field. Several threads may ask at once."""
        raise NotImplementedError

    # Python calls it for a slot without a value only: fields that have one cost nothing more. `asdict`, `copy`, pickle,
    # comparison and printing read fields, and so ask for them.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in type(self).__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return self._on_look(name)


class _StepsOnLook(FilledOnLook):
    # One thread counts, and any may look: what they share is one tuple, which a count replaces and nobody changes.
    #
    #     updates 4  skipped 0    _state (4, 0, ())              all steps are known
    #     updates -  skipped -    _state (4, 0, (step, step))    a look adds the two, and leaves the tuple as it is
    __slots__ = ("_state",)
    _state: tuple[int, int, tuple[StepVerdict, ...]]
    updates: int
    skipped: int

    def __post_init__(self) -> None:
        self._state = self.updates, self.skipped, ()

    def count(self, step: StepVerdict) -> None:
        """Count a step as taken or as skipped: now if that is known, else later. It waits for none."""
        updates, skipped, pending = self._state
        if not pending:
            updates, skipped = self.updates, self.skipped  # somebody may have set them
        pending = (*pending, step)
        # No more wait here than the device is behind, also where nobody ever looks.
        while pending and pending[0].is_known:
            updates, skipped = _with(pending[:1], updates, skipped)
            pending = pending[1:]
        self._state = updates, skipped, pending
        if not pending:
            for name, value in (("updates", updates), ("skipped", skipped)):
                setattr(self, name, value)
            return
        for name in ("updates", "skipped"):
            with suppress(AttributeError):  # empty already
                delattr(self, name)

    def _on_look(self, name: str) -> int:
        updates, skipped, pending = self._state
        updates, skipped = _with(pending, updates, skipped)
        return updates if name == "updates" else skipped

    def __getstate__(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in type(self).__dataclass_fields__}  # type: ignore[attr-defined]

    def __setstate__(self, state: Mapping[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _with(steps: Sequence[StepVerdict], updates: int, skipped: int) -> tuple[int, int]:
    num_taken = sum(step.is_finite for step in steps)
    return updates + num_taken, skipped + len(steps) - num_taken


@dataclass(kw_only=True, slots=True)
class Counters(_StepsOnLook):
    """Counts since `parallelize` returned."""

    updates: int = 0
    """Optimizer steps taken."""
    skipped: int = 0
    """Updates left out because the gradient was not finite."""
    cast_elements: int = 0
    """Elements cast from a master to its working copy."""
    reduce_scatters: int = 0
    """Sums of the gradients of a bucket. Each part goes to its owner."""
    all_gathers: int = 0
    """Working copies of a bucket, or of a unit, brought together from their owners."""
    exchanges: int = 0
    """Small agreements between all data ranks."""
    early_reductions: int = 0
    """Reduce-scatters that were started while backward was still running."""
