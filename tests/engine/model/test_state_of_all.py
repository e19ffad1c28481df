"""Settings of many ranks: what several say travels, is read and is merged once."""

import json
from functools import partial
from typing import Any

import pytest

from shardwise.engine.model.state_of_all import merged_settings
from shardwise.errors import MismatchError, PeerError


def text(rank: int, *, lr: float = 0.1) -> bytes:
    """As an engine gives them: ranks differ in what is no tensor in their state, and the first has more."""
    names = [f"layers.{at}.weight" for at in range(50)]
    settings: dict[str, Any] = {
        "optimizers": [
            {
                "groups": [{"parameters": names, "settings": {"lr": lr}}],
                "plain": {"step": "int"} if rank % 2 else {},
                "none": {"buffer": True} if rank % 3 else {},
            }
        ],
        **({"model_files": {}} if rank == 0 else {}),
    }
    return json.dumps(settings).encode()


merged = partial(merged_settings, purpose="settings")


def test_they_are_merged_and_the_rank_that_differs_or_says_nothing_is_named() -> None:
    settings = merged([text(rank) for rank in range(8)])
    assert settings["model_files"] == {}
    (optimizer,) = settings["optimizers"]
    assert (optimizer["plain"], optimizer["none"]) == ({"step": "int"}, {"buffer": True})
    for odd in (1, 6):
        with pytest.raises(MismatchError, match=rf"0.1 on the ranks before rank {odd}, and 0.2 there"):
            merged([text(rank, lr=0.2 if rank == odd else 0.1) for rank in range(8)])
    with pytest.raises(PeerError, match="rank 2"):
        merged([text(0), text(1), b"[]", b"[]"])
