"""Messages between stages find their receivers in any order, with shapes, strides and dtypes."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.engine.pipeline.post import Key, MessageKind, Post
from shardwise.errors import MismatchError

CONTENTS = [
    torch.arange(24.0).view(2, 3, 4),
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
]


def two_ranks(first: object, second: object) -> list[object]:
    def body(channel: Channel) -> object:
        post = Post(channel)
        answer = (first if channel.rank == 0 else second)(post)  # type: ignore[operator]
        post.settle()
        return answer

    return sw.simulate(2, body)


def test_messages_are_taken_in_another_order_than_they_were_sent() -> None:
    def first(post: Post) -> None:
        for number, content in enumerate(CONTENTS):
            post.send(1, Key(MessageKind.GRADIENT, 0, number), content)
        post.send(1, Key(MessageKind.GRADIENT, 1, 0), None)

    def second(post: Post) -> list[torch.Tensor | None]:
        nothing = post.take(0, Key(MessageKind.GRADIENT, 1, 0)).content
        order = reversed(range(len(CONTENTS)))
        return [nothing, *(post.take(0, Key(MessageKind.GRADIENT, 0, number)).content for number in order)]

    answer = two_ranks(first, second)[1]
    assert isinstance(answer, list)
    assert answer[0] is None
    for sent, got in zip(CONTENTS, reversed(answer[1:]), strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def laid_out(tensor: torch.Tensor) -> tuple[object, ...]:
    """What decides whether a module that asks for a contiguous tensor, or for plain numbers, gets a copy."""
    return tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: f"{tuple(content.shape)} {content.stride()}")
def test_a_value_arrives_as_it_lay(content: torch.Tensor, to: int) -> None:
    key = Key(MessageKind.VALUE, 0, 0)

    def first(post: Post) -> torch.Tensor | None:
        post.send(to, key, content)
        return post.take(0, key).content if to == 0 else None

    got = two_ranks(first, lambda post: post.take(0, key).content if to == 1 else None)[to]
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, content)
    assert laid_out(got) == laid_out(content)


@pytest.mark.parametrize("content", [b"\xff" * 352, b"\0\0\1" + b"\0" * 349, b"\0\0\1\1\0\xff" + b"\0" * 346])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 0:
            packed = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            channel.send(packed, 1, purpose="the next message of the pipeline").wait()
        else:
            Post(channel).take(0, Key(MessageKind.VALUE, 0, 0))

    with pytest.raises(MismatchError, match="no message between stages"):
        sw.simulate(2, body)


def test_a_value_that_is_written_to_after_it_was_sent_arrives_as_it_was() -> None:
    key = Key(MessageKind.VALUE, 0, 0)

    def first(post: Post) -> None:
        value = torch.ones(3)
        post.send(1, key, value)
        value.zero_()

    _, got = two_ranks(first, lambda post: post.take(0, key).content)
    assert got.tolist() == [1, 1, 1]  # type: ignore[attr-defined]


def test_both_may_send_first() -> None:
    key = Key(MessageKind.VALUE, 0, 0)

    def swap(own: float, other: int) -> object:
        def body(post: Post) -> float:
            post.send(other, key, torch.full((1000,), own))
            content = post.take(other, key).content
            assert content is not None
            return float(content[0])

        return body

    assert two_ranks(swap(1.0, 1), swap(2.0, 0)) == [2.0, 1.0]


def test_a_sender_that_went_past_the_wanted_value_is_noticed() -> None:
    def first(post: Post) -> None:
        post.send(1, Key(MessageKind.VALUE, 3, 1), torch.ones(1), maker="block.7")

    with pytest.raises(MismatchError, match=r"microbatch 3 differs between ranks.*transfer 0.*'block\.7'"):
        two_ranks(first, lambda post: post.take(0, Key(MessageKind.VALUE, 3, 0)))
