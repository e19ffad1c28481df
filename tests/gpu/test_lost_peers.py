"""A rank that is killed in the middle of training on devices: all others raise, and say which it was."""

import os
import signal

import pytest

from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.gpu.conftest import Place, runs
from tests.gpu.layouts import engine_of, plan_of, share


def lose_the_last(channel: Channel, layout: str) -> tuple[str, int | None]:
    plan = plan_of(layout, channel.size)
    engine = engine_of(channel, plan)
    engine.step(share(plan, channel.rank, 0))
    if channel.rank == channel.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        for step in range(1, 100):  # the device may be some steps behind
            _ = engine.step(share(plan, channel.rank, step)).loss

    with pytest.raises(PeerError) as caught:
        go_on()
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize(
    ("place", "size", "layout"),
    runs((2, "stage 3"), (2, "stage 1"), (2, "pp"), (4, "tp"), fake=False),
    indirect=["place"],
)
def test_all_others_name_a_rank_that_is_killed(place: Place, size: int, layout: str) -> None:
    last = size - 1
    for result in place.run(size, lose_the_last, layout, lost=[last], poisons=True)[:last]:
        text, culprit = result
        assert text.startswith(f"rank {last} is gone (its process died)")
        assert culprit == last
