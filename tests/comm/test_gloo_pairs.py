"""The pairs of gloo between ranks of other hosts: what is told when gloo has no way, and what a fault leaves alone."""

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.process import gloo_pairs
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.messages import INLINE_BYTES_BETWEEN_HOSTS
from shardwise.errors import PeerError
from tests.comm.boards import on_threads, until_no_thread_has

LARGE = INLINE_BYTES_BETWEEN_HOSTS + 1


def swap(channel: ProcessChannel, value: int = 1) -> torch.Tensor:
    """A tensor from the other one of two ranks, which gloo carries."""
    got = torch.empty(LARGE, dtype=torch.uint8)
    channel.send(torch.full((LARGE,), value, dtype=torch.uint8), 1 - channel.rank, purpose="a large one")
    channel.receive(got, 1 - channel.rank, purpose="a large one").wait()
    return got


def test_a_rank_that_gloo_cannot_reach_is_named_with_the_words_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a firewall lets the connections of the channel through, whose ports were chosen, and not gloo's."""

    def refuse(self: GlooPairs, peer: int, address: str) -> None:
        raise RuntimeError(f"connect {address}: no route")

    def body(channel: ProcessChannel) -> PeerError:
        with pytest.raises(PeerError) as caught:
            swap(channel)
        return caught.value

    monkeypatch.setattr(GlooPairs, "connect", refuse)
    monkeypatch.setattr(gloo_pairs, "GRACE_SECONDS", 0.1)
    for rank, error in enumerate(on_threads(2, body, remote=(0, 1), timeout_seconds=60.0)):
        assert str(error).startswith(
            f"rank {error.rank} cannot be reached by gloo, which moves tensors between hosts ("
        )
        assert "RuntimeError: connect 127.0.0.1: no route); let ports of" in str(error)
        assert f"while rank {rank} was in receive for 'a large one'" in str(error)


def test_a_rank_that_never_connects_keeps_no_thread_of_a_closed_channel() -> None:
    pairs = GlooPairs(0, HashStore(), timeout_seconds=60.0)
    pairs.pair(1, lambda: "127.0.0.1").send(torch.zeros(LARGE, dtype=torch.uint8))
    pairs.close()
    pairs.close()
    until_no_thread_has("shardwise gloo pair")
