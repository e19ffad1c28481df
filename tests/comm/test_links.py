"""Frames over real sockets: whole on arrival however they were cut, in order, with their descriptors."""

import os
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.process.frames import HEADER_BYTES, FrameKind, Header, frame
from shardwise.comm.process.link import READ_BYTES, PeerLink
from shardwise.comm.process.shared_memory import SharedSegment, map_segment
from tests.comm.boards import shared_descriptors
from tests.properties import tried

Arrived = list[tuple[int, int, bytes]]


def pair() -> tuple[PeerLink, PeerLink]:
    one, other = socket.socketpair()
    return PeerLink(one, rank=1, local=True), PeerLink(other, rank=0, local=True)


def drain(sender: PeerLink, receiver: PeerLink, count: int) -> Arrived:
    arrived: Arrived = []

    def take(link: PeerLink, header: Header, payload: bytes | memoryview) -> None:
        arrived.append((header[0], header[8], bytes(payload)))

    while (sender.wants_to_write or len(arrived) < count) and not receiver.ended:
        sender.flush()
        receiver.receive(take)
    receiver.receive(take)  # nothing more
    return arrived


lengths = st.sampled_from([0, 1, 47, 48, 4000, READ_BYTES - HEADER_BYTES, READ_BYTES, 300_000])


@tried(20)
@given(st.lists(lengths, max_size=12))
def test_frames_arrive_whole_and_in_order_whatever_their_lengths(sizes: list[int]) -> None:
    sender, receiver = pair()
    expected: Arrived = []
    for number, size in enumerate(sizes):
        payload = bytes([number + 1]) * size
        sender.put(frame(FrameKind.CHUNK, number=number, payload=payload))
        expected.append((FrameKind.CHUNK, number, payload))
    assert drain(sender, receiver, len(sizes)) == expected
    assert not sender.wants_to_write
    sender.close()
    receiver.close()


def test_segments_are_mapped_by_the_reader_and_announced_once() -> None:
    sender, receiver = pair()
    segments = [SharedSegment(number, 64) for number in range(3)]
    for segment in segments:
        map_segment(os.dup(segment.descriptor), 64).fill_(segment.number + 5)
        sender.put(frame(FrameKind.BYE, payload=b"x" * 100))
        sender.tell_segment(segment)
        sender.tell_segment(segment)

    def take(link: PeerLink, header: Header, payload: bytes | memoryview) -> None:
        if header[0] == FrameKind.SEGMENT:
            link.map_announced(header[2], header[7])

    while sender.wants_to_write:
        sender.flush()
        receiver.receive(take)
    for _ in range(6):
        receiver.receive(take)
    for segment in segments:
        assert torch.equal(
            receiver.shared(segment.number, 0, 7), torch.full((7,), segment.number + 5, dtype=torch.uint8)
        )
        segment.close()
    receiver.unmap(1)
    with pytest.raises(KeyError):
        receiver.shared(1, 0, 1)
    sender.close()
    receiver.close()


def test_last_words_overtake_what_has_not_begun_but_never_cut_a_frame() -> None:
    sender, receiver = pair()
    large = bytes(3_000_000)
    for number in range(2):
        sender.put(frame(FrameKind.CHUNK, number=number, payload=large))
    sender.flush()  # the first has begun: the socket does not take 3 MB
    sender.put_last(frame(FrameKind.FAILED, payload=b"words"))
    sender.put(frame(FrameKind.CHUNK, number=2))
    assert drain(sender, receiver, 2) == [(FrameKind.CHUNK, 0, large), (FrameKind.FAILED, 0, b"words")]
    sender.close()
    receiver.close()


def test_links_give_back_every_descriptor_and_every_mapping() -> None:
    sender, receiver = pair()
    segment = SharedSegment(0, 2)
    sender.tell_segment(segment)
    sender.flush()
    receiver.receive(lambda link, header, payload: None)  # received, never mapped
    segment.number = 1
    sender.tell_segment(segment)  # queued, never sent
    assert len(shared_descriptors()) == 3  # the own of the segment, and the two on their way
    for link in (sender, receiver):
        link.close()
    segment.close()
    del segment
    assert shared_descriptors() == []
