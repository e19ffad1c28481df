"""Settings of many ranks: what differs travels, and is read and merged once."""

from typing import Any

import pytest

from shardwise import Recorded, simulate
from shardwise.comm import Channel
from shardwise.engine.model.state import settings_texts
from shardwise.errors import MismatchError, PeerError
from shardwise.moving import Gathering
from shardwise.moving.piece_exchange import merged_settings

NAMES = [f"layers.{at}.weight" for at in range(50)]


def texts(rank: int, *, lr: float = 0.1) -> list[bytes]:
    """As an engine gives them: ranks differ in what is no tensor in their state, and the first has more."""
    settings: dict[str, Any] = {
        "optimizers": [
            {
                "groups": [{"parameters": NAMES, "settings": {"lr": lr}}],
                "plain": {"step": "int"} if rank % 2 else {},
                "none": {"buffer": True} if rank % 3 else {},
            }
        ],
        **({"model_files": {}} if rank == 0 else {}),
    }
    return settings_texts(settings)


def merged(of_ranks: list[list[bytes]]) -> dict[str, Any]:
    return merged_settings([*zip(*of_ranks, strict=True)], purpose="settings")


def test_they_are_merged_and_the_rank_that_differs_or_says_nothing_is_named() -> None:
    settings = merged([texts(rank) for rank in range(8)])
    assert settings["model_files"] == {}
    (optimizer,) = settings["optimizers"]
    assert (optimizer["plain"], optimizer["none"]) == ({"step": "int"}, {"buffer": True})
    assert optimizer["groups"] == [{"parameters": NAMES, "settings": {"lr": 0.1}}]
    for odd in (1, 6):
        with pytest.raises(MismatchError, match=rf"0.1 on the ranks before rank {odd}, and 0.2 there"):
            merged([texts(rank, lr=0.2 if rank == odd else 0.1) for rank in range(8)])
    with pytest.raises(PeerError, match="rank 2"):
        merged([texts(0), texts(1), [b"[]", b"{}"], [b"[]", b"{}"]])


def gathered(channel: Channel) -> tuple[list[list[bytes]], int]:
    recorded = Recorded(channel)
    found = Gathering("settings").gather(recorded, texts(channel.rank))
    return found, sum(each.num_elements for each in recorded.calls)


def test_names_that_all_ranks_have_do_not_travel() -> None:
    for found, num_bytes in simulate(3, gathered):
        assert [*zip(*found, strict=True)] == [tuple(texts(rank)) for rank in range(3)]
        assert num_bytes < len(texts(0)[1])
