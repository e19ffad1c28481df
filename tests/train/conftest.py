"""What all tests of the trainer share."""

import pytest

from shardwise.train import rank


@pytest.fixture(autouse=True)
def short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model says at the end of a run takes as long as the run; those of `tests/cli` say all of it."""
    monkeypatch.setattr(rank, "_SAMPLE_TOKENS", 8)
