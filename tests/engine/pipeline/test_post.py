"""Messages between stages find their receivers in any order, with shapes, strides and dtypes."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.engine.pipeline.post import Key, MessageKind, Post
from shardwise.errors import MismatchError
from tests.moving.watched import Watched

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


@pytest.mark.parametrize(
    "content", [b"\xff" * 352, b"\0" * 22 + b"\1" + b"\0" * 329, b"\0" * 22 + b"\1\xff" + b"\0" * 328]
)
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


@pytest.mark.parametrize("num_messages", [4, 64])
def test_what_was_received_does_not_stay_with_its_sender(num_messages: int) -> None:
    def body(channel: Channel) -> int:
        watched = Watched(channel)
        post = Post(watched)
        for number in range(num_messages):
            value, gradient = (Key(kind, number, 0) for kind in (MessageKind.VALUE, MessageKind.GRADIENT))
            sent, taken = (value, gradient) if channel.rank == 0 else (gradient, value)
            if channel.rank == 1:
                post.take(0, taken)
            post.send(1 - channel.rank, sent, torch.ones(1 << 12))
            if channel.rank == 0:
                post.take(1, taken)
        post.settle()
        return watched.most_under_way

    # This message and the one before, with their headers, and the one that is received.
    assert max(sw.simulate(2, body)) <= 3 * ((4 << 12) + 1024)


def test_what_followed_the_last_time_comes_in_one_message_and_what_did_not_comes_all_the_same() -> None:
    sizes = [3, 3, 5, 5, None, None, 0, 5, (1 << 16) + 1, (1 << 16) + 1, 5]
    sent = [None if size is None else torch.arange(size, dtype=torch.float32) for size in sizes]
    keys = [Key(MessageKind.GRADIENT, number, 0) for number in range(len(sent))]

    def first(post: Post) -> int:
        for key, content in zip(keys, sent, strict=True):
            post.send(1, key, content)
        return post.num_joined

    def second(post: Post) -> list[torch.Tensor | None]:
        return [post.take(0, key).content for key in keys]

    num_joined, got = two_ranks(first, second)
    for one, other in zip(sent, got, strict=True):  # type: ignore[call-overload]
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    # The second 5. Nothing is recorded behind the first message, and nothing is expected behind none or a large one.
    assert num_joined == 1


def test_each_kind_and_number_has_a_successor_of_its_own() -> None:
    order = [(MessageKind.VALUE, 0, 4), (MessageKind.GRADIENT, 1, 7), (MessageKind.VALUE, 2, 9)] * 3

    def first(post: Post) -> int:
        for at, (kind, number, size) in enumerate(order):
            post.send(1, Key(kind, at // 3, number), torch.full((size,), float(at)))
        return post.num_joined

    def second(post: Post) -> list[float]:
        taken = [post.take(0, Key(kind, at // 3, number)).content for at, (kind, number, _) in enumerate(order)]
        return [float(each.sum()) for each in taken if each is not None]

    num_joined, got = two_ranks(first, second)
    assert got == [float(at * size) for at, (_, _, size) in enumerate(order)]
    # All of the second and third time, but the very first message, which has another one before it.
    assert num_joined == 5


def test_a_sender_that_went_past_the_wanted_value_is_noticed() -> None:
    def first(post: Post) -> None:
        post.send(1, Key(MessageKind.VALUE, 3, 1), torch.ones(1), maker="block.7")

    with pytest.raises(MismatchError, match=r"microbatch 3 differs between ranks.*transfer 0.*'block\.7'"):
        two_ranks(first, lambda post: post.take(0, Key(MessageKind.VALUE, 3, 0)))
