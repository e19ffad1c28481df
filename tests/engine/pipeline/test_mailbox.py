"""Messages between stages find their receivers in any order, with shapes, strides and dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm import Channel
from shardwise.engine.pipeline.mailbox import Key, Mailbox, MessageKind
from shardwise.errors import MismatchError

CONTENTS = [
    None,
    torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    torch.tensor(3, dtype=torch.int64),
    torch.zeros(0, 5, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.randn(3, 2, dtype=torch.complex64).conj(),
    torch.ones(1).expand(4, 3),
    torch.arange(12.0).view(3, 4)[:, ::2],
    torch.arange(12.0).view(3, 4).unfold(1, 3, 1),
    torch.zeros(200, 300)[:, 7],
    torch.randn(3, dtype=torch.complex64).conj().imag,
    torch.zeros((1 << 16) + 1),
]
VALUE = Key(MessageKind.VALUE, 0, 0)


def two_ranks(first: Callable[[Mailbox], Any], second: Callable[[Mailbox], Any]) -> list[Any]:
    def body(channel: Channel) -> object:
        mailbox = Mailbox(channel)
        answer = (first if channel.rank == 0 else second)(mailbox)
        mailbox.settle()
        return answer

    return sw.simulate(2, body)


def laid_out(tensor: torch.Tensor | None) -> object:
    """What decides whether a module that asks for a contiguous tensor, or for plain numbers, gets a copy."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.dtype)


kinds = st.sampled_from([MessageKind.VALUE, MessageKind.GRADIENT])
messages = st.lists(st.tuples(kinds, st.integers(0, len(CONTENTS) - 1)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(messages, st.randoms(use_true_random=False), st.sampled_from([0, 1]))
def test_messages_come_as_they_lay_in_whatever_order_they_are_taken(sent: Any, random: Any, to: int) -> None:
    """Gradients are taken in any order, values in the order in which they were sent; to oneself, too."""
    posted = [(Key(kind, number, 0), CONTENTS[at]) for number, (kind, at) in enumerate(sent)]
    order = [key for key, _ in posted if key.kind is MessageKind.GRADIENT]
    random.shuffle(order)
    order = [key for key, _ in posted if key.kind is MessageKind.VALUE] + order

    def send(mailbox: Mailbox) -> Any:
        for key, content in posted:
            mailbox.send(to, key, content)
        return take(mailbox) if to == 0 else None

    def take(mailbox: Mailbox) -> dict[Key, torch.Tensor | None]:
        return {key: mailbox.take(0, key).content for key in order}

    got = two_ranks(send, take if to == 1 else lambda mailbox: None)[to]
    for key, content in posted:
        same = content is got[key] is None or torch.equal(got[key], content)
        assert same
        assert key.kind is MessageKind.GRADIENT or laid_out(got[key]) == laid_out(content)


@pytest.mark.parametrize(
    "content", [b"\xff" * 352, b"\0" * 22 + b"\1" + b"\0" * 329, b"\0" * 22 + b"\1\xff" + b"\0" * 328]
)
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 0:
            packed = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            channel.send(packed, 1, purpose="the next message of the pipeline").wait()
        else:
            Mailbox(channel).take(0, VALUE)

    with pytest.raises(MismatchError, match="no message between stages"):
        sw.simulate(2, body)


def test_a_sender_that_went_past_the_wanted_value_is_noticed() -> None:
    def first(mailbox: Mailbox) -> None:
        mailbox.send(1, Key(MessageKind.VALUE, 3, 1), torch.ones(1), maker="block.7")

    with pytest.raises(MismatchError, match=r"microbatch 3 differs between ranks.*transfer 0.*'block\.7'"):
        two_ranks(first, lambda mailbox: mailbox.take(0, Key(MessageKind.VALUE, 3, 0)))


G, V = MessageKind.GRADIENT, MessageKind.VALUE
LARGE = (1 << 16) + 1
JOINED = {
    # The second 5. Nothing is recorded behind the first message, and nothing is expected behind none or a large one.
    "by what followed": ([(G, at, 0, size) for at, size in enumerate([3, 3, 5, 5, 0, 5, LARGE, LARGE, 5])], 1),
    # All of the second and third time, but the very first message, which has another one before it.
    "by kind and number": ([(V, at, 4, 4) if kind else (G, at, 7, 7) for at in range(3) for kind in (1, 0)], 3),
}


@pytest.mark.parametrize("case", JOINED)
def test_what_followed_the_last_time_comes_in_one_message(case: str) -> None:
    order, wanted = JOINED[case]

    def first(mailbox: Mailbox) -> int:
        for at, (kind, microbatch, number, size) in enumerate(order):
            mailbox.send(1, Key(kind, microbatch, number), torch.full((size,), float(at)))
        return mailbox.num_joined

    def second(mailbox: Mailbox) -> list[float]:
        taken = [mailbox.take(0, Key(kind, at, number)).content for kind, at, number, _ in order]
        return [float(each.sum()) for each in taken if each is not None]

    num_joined, got = two_ranks(first, second)
    assert got == [float(at * size) for at, (*_, size) in enumerate(order)]
    assert num_joined == wanted
