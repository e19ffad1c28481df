"""When a run is copied to the memory of its hosts."""

from collections.abc import Callable, Mapping

from shardwise.checkpoint import Replicas
from shardwise.checkpoint.states import Positioned, State


class CopiesAtSteps:
    """Copies a run at the multiples of so many updates, whichever of them a loop has shown.

    A run that was started again makes them at the same updates. Its first one is made at once: after a loss, what is
    left is on one host alone.
    """

    def __init__(self, replicas: Replicas, *, every: int) -> None:
        """replicas: of the run, which copy at each call."""
        self.replicas = replicas
        self._every = every
        self._has_copied = False

    def save(
        self,
        step: int,
        state: State,
        *,
        extra: Callable[[], Mapping[str, object]],
        data: Positioned | None = None,
    ) -> None:
        """Begin a copy after an update, when it is time. extra: called by all ranks together, as this is."""
        if step % self._every == 0 or not self._has_copied:
            self.replicas.save(state, extra=extra(), data=data)
            self._has_copied = True
