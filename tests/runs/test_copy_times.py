"""When a run is copied: at once after its start, and then at the same updates as any other start of it."""

from typing import Any

import pytest

from shardwise.runs.copy_times import CopiesAtSteps


class Noting:
    def __init__(self) -> None:
        self.extras: list[Any] = []

    def save(self, state: Any, *, extra: Any, data: Any) -> bool:
        self.extras.append((state, extra, data))
        return True


@pytest.mark.parametrize(("first", "copied"), [(1, [1, 4, 8]), (4, [4, 8]), (6, [6, 8])])
def test_the_first_update_of_a_start_is_copied_and_then_multiples(first: int, copied: list[int]) -> None:
    noting: Any = Noting()
    copies = CopiesAtSteps(noting, every=4)
    for step in range(first, 10):
        copies.save(step, "state", extra=lambda step=step: {"step": step}, data=None)  # type: ignore[misc, arg-type]
    assert noting.extras == [("state", {"step": step}, None) for step in copied]
