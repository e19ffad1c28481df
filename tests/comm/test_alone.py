"""What is special about a world of one rank; the rest is the contract of channels."""

from collections.abc import Callable

import pytest
import torch

from shardwise.comm import Channel, alone
from shardwise.errors import MismatchError


@pytest.mark.parametrize(
    "call",
    [
        lambda channel: channel.send(torch.zeros(1), 0, purpose="to myself"),
        lambda channel: channel.receive(torch.zeros(1), 1, purpose="from nobody"),
        lambda channel: channel.over([1]),
    ],
)
def test_there_is_nobody_else_to_name(call: Callable[[Channel], object]) -> None:
    with pytest.raises(MismatchError, match=r"rank 0 of a channel of 1|0 to 0"):
        call(alone())


def test_tensors_live_where_the_channel_was_asked_to_be() -> None:
    assert alone().device == torch.device("cpu")
    assert alone("meta").device == torch.device("meta")
    with pytest.raises(MismatchError, match="output is on cpu, but the channel on meta"):
        alone("meta").all_gather(torch.zeros(1), torch.zeros(1), purpose="elsewhere")
