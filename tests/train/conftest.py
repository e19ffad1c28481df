"""What all tests of the trainer share."""

from collections.abc import Iterator

import pytest

from shardwise.train import continuations, observers, rank


class _Undrawn(observers.LossCurve):
    def draw(self) -> None:
        """A picture takes as long as a small run; `test_run` and `test_reports` look at one."""


@pytest.fixture(scope="module", autouse=True)
def short_ends() -> Iterator[None]:
    """What a model says at the end of a run takes as long as the run; those of `tests/cli` say all of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuations, "_DEFAULT_TOKENS", 8)
        patch.setattr(rank, "LossCurve", _Undrawn)
        yield
