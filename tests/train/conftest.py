"""What all tests of the trainer share."""

from collections.abc import Iterator

import pytest

from shardwise.train import observers, rank


class Undrawn(observers.LossCurve):
    def draw(self) -> None:
        """A picture takes as long as a small run; `test_observers` looks at one, and tests of the command at others."""


@pytest.fixture(scope="module", autouse=True)
def runs_without_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "LossCurve", Undrawn)
        yield
