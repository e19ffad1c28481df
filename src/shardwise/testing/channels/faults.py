"""The contract of `Channel`: calls that differ between the ranks, and ranks that stop."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from shardwise.testing.channels.oracles import Channel, Errors, full, gather_and_check, given, poisoning_case


def assert_mismatch(channel: Channel, errors: Errors, call: Callable[[], object], *words: str) -> None:
    """`call`, which the last rank makes differently, ends on every rank in an error that shows both sides."""
    if channel.size == 1:
        call()
        return
    with pytest.raises(errors.MismatchError) as caught:
        call()
    missing = [word for word in (*words, str(channel.size - 1)) if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def is_last(channel: Channel) -> bool:
    """Whether this rank is the one that differs."""
    return bool(channel.rank == channel.size - 1)


@poisoning_case
def another_purpose_is_refused(channel: Channel, errors: Errors) -> None:
    purpose = "beans" if is_last(channel) else "apples"
    output, own = full(channel, 3 * channel.size, torch.float32), given(channel, 3, torch.float32)
    assert_mismatch(channel, errors, lambda: channel.all_gather(output, own, purpose=purpose).wait(), "apples", "beans")


@poisoning_case
def another_purpose_is_refused_after_calls_that_agreed(channel: Channel, errors: Errors) -> None:
    output, own = full(channel, 3 * channel.size, torch.float32), given(channel, 3, torch.float32)
    for _ in range(3):
        channel.all_gather(output, own, purpose="apples").wait()
    purpose = "beans" if is_last(channel) else "apples"
    assert_mismatch(channel, errors, lambda: channel.all_gather(output, own, purpose=purpose).wait(), "apples", "beans")


@poisoning_case
def another_dtype_is_refused(channel: Channel, errors: Errors) -> None:
    dtype = torch.int32 if is_last(channel) else torch.float32  # as many bytes: only the metadata can tell
    output, own = full(channel, 3 * channel.size, dtype), given(channel, 3, dtype)
    assert_mismatch(
        channel, errors, lambda: channel.all_gather(output, own, purpose="dtype").wait(), "int32", "float32"
    )


@poisoning_case
def another_dtype_of_the_sum_is_refused(channel: Channel, errors: Errors) -> None:
    dtype = torch.float64 if is_last(channel) else torch.float32
    output, own = full(channel, 3, dtype), given(channel, 3 * channel.size, torch.bfloat16)
    assert_mismatch(
        channel, errors, lambda: channel.reduce_scatter(output, own, purpose="sum").wait(), "float64", "float32"
    )


@poisoning_case
def other_counts_are_refused(channel: Channel, errors: Errors) -> None:
    count = 5 if is_last(channel) else 3
    output, own = full(channel, count * channel.size, torch.float32), given(channel, count, torch.float32)
    assert_mismatch(channel, errors, lambda: channel.all_gather(output, own, purpose="counts").wait(), "5", "3")


@poisoning_case
def another_operation_is_refused(channel: Channel, errors: Errors) -> None:
    many, few = full(channel, 3 * channel.size, torch.float32), given(channel, 3, torch.float32)

    def call() -> None:
        if is_last(channel):
            channel.reduce_scatter(few, many, purpose="operation").wait()
        else:
            channel.all_gather(many, few, purpose="operation").wait()

    assert_mismatch(channel, errors, call, "all_gather", "reduce_scatter")


@poisoning_case
def an_exchange_for_another_purpose_is_refused(channel: Channel, errors: Errors) -> None:
    purpose = "beans" if is_last(channel) else "apples"
    assert_mismatch(channel, errors, lambda: channel.exchange(b"value", purpose=purpose), "apples", "beans")


def refuse_message(
    channel: Channel, errors: Errors, sent: torch.Tensor, received: torch.Tensor, purposes: Sequence[str]
) -> None:
    """Rank 0 sends to the last rank; both must refuse, with what differs in the text."""
    pair = channel.over([0, channel.size - 1]) if channel.rank in (0, channel.size - 1) and channel.size > 1 else None
    if pair is None:
        return
    call = (
        partial(pair.send, sent, 1, purpose=purposes[0])
        if pair.rank == 0
        else partial(pair.receive, received, 0, purpose=purposes[1])
    )
    with pytest.raises(errors.MismatchError) as caught:
        call().wait()
    words = [*purposes, *(str(tensor.dtype).removeprefix("torch.") for tensor in (sent, received))]
    missing = [word for word in (*words, str(sent.numel()), str(received.numel())) if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@poisoning_case
def a_message_for_another_purpose_is_refused(channel: Channel, errors: Errors) -> None:
    refuse_message(
        channel, errors, given(channel, 3, torch.float32), full(channel, 3, torch.float32), ["apples", "beans"]
    )


@poisoning_case
def a_message_of_another_dtype_is_refused(channel: Channel, errors: Errors) -> None:
    refuse_message(
        channel, errors, given(channel, 3, torch.float32), full(channel, 3, torch.int32), ["apples", "apples"]
    )


@poisoning_case
def a_message_of_another_length_is_refused(channel: Channel, errors: Errors) -> None:
    refuse_message(
        channel, errors, given(channel, 3, torch.float32), full(channel, 5, torch.float32), ["apples", "apples"]
    )


@poisoning_case
def an_abort_ends_the_wait_of_every_peer(channel: Channel, errors: Errors) -> None:
    gather_and_check(channel, [3] * channel.size, torch.float32, "before the abort")
    if is_last(channel):
        channel.abort("the kettle boils over")
        return
    output, own = full(channel, 3 * channel.size, torch.float32), given(channel, 3, torch.float32)
    for _ in range(2):  # a pending call, and a later one
        with pytest.raises(errors.PeerError, match="the kettle boils over") as caught:
            channel.all_gather(output, own, purpose="supper").wait()
        assert caught.value.rank == channel.size - 1
        assert (caught.value.operation, caught.value.purpose) == ("all_gather", "supper")


@poisoning_case
def an_abort_is_seen_in_every_channel(channel: Channel, errors: Errors) -> None:
    members = [rank for rank in range(channel.size) if rank != 0] if channel.rank else [0]
    part = channel.over(members)
    channel.exchange(b"", purpose="before the abort")
    if channel.rank == 0:
        part.abort("the milk is sour")
        return
    with pytest.raises(errors.PeerError, match="the milk is sour") as caught:
        channel.receive(full(channel, 3, torch.float32), 0, purpose="breakfast").wait()
    assert (caught.value.rank, caught.value.operation, caught.value.purpose) == (0, "receive", "breakfast")
