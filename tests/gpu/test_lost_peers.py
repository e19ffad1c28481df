"""A rank that is killed in the middle of training on devices: all others raise, and say which it was."""

import os
import signal
import time

import pytest

from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.gpu.conftest import PROCESSES, Place
from tests.gpu.layouts import engine_of, plan_of, share


def lose_the_last(channel: Channel, layout: str) -> tuple[str, int | None, float]:
    plan = plan_of(layout, channel.size)
    engine = engine_of(channel, plan)
    engine.step(share(plan, channel.rank, 0))
    if channel.rank == channel.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        for step in range(1, 100):  # the device may be some steps behind
            _ = engine.step(share(plan, channel.rank, step)).loss

    begun = time.monotonic()
    with pytest.raises(PeerError) as caught:
        go_on()
    return str(caught.value), caught.value.rank, time.monotonic() - begun


@pytest.mark.parametrize("place", PROCESSES, indirect=True)
@pytest.mark.parametrize(("size", "layout"), [(2, "stage 1"), (2, "stage 3"), (2, "pp"), (4, "tp")])
def test_all_others_name_a_rank_that_is_killed(place: Place, size: int, layout: str) -> None:
    last = size - 1
    for result in place.run(size, lose_the_last, layout, lost=[last], poisons=True)[:last]:
        text, culprit, seconds = result
        assert text.startswith(f"rank {last} is gone (its process died)")
        assert culprit == last
        assert seconds < 30
