"""Messages between the ranks of a pipeline: each says what it is, so that no order has to be agreed on.

    sender     header (fixed size), content     ...in the order in which it has them
    receiver   takes messages from that rank until the wanted one is there; the others wait in the box

    kind       key (microbatch, number)     content                     sent when
    VALUE      transfer in the forward      the tensor, strides kept    first use on another stage
    GRADIENT   the same transfer            the gradient, or none       backward has passed the arrival
    NEWS       announcement                 bytes or a tensor           only the owner knows a shape, number or text

    rank 0   VALUE 0.0  VALUE 1.0 ------>  rank 1 wants VALUE 0.0: takes it; VALUE 1.0 stays in the channel
    rank 0   wants GRADIENT 0.0 <--------  rank 1 sends NEWS 0.0, GRADIENT 0.0: NEWS waits in the box of rank 0

So a rank that waits for one message never blocks another one. Both sides count alike, and notice a value that is needed
at another place than announced.

Steps repeat themselves: what followed a message the last time mostly follows it again. So both sides of a direction
keep a record of it (`_Record`), and know without asking which content comes next. Small contents on the host travel in
one message with the header:

    recorded after VALUE 0     what comes                  messages
    nothing yet                VALUE 0 of 512 bytes        header | 512 bytes
    512 bytes                  VALUE 0 of 512 bytes        header and 512 bytes
    512 bytes                  VALUE 0 of 256 bytes        header and 512 bytes without a meaning | 256 bytes

A transfer between devices begins behind what the receiver's device had to do when it was called. So a receive that is
called where its content is needed waits for all computation before that, and none of it hides the transfer. In training
steps contents on devices are received one ahead::

    in time    host     take V 0 | launch F 0 | take V 1
               device            | F 0 ...... |          | transfer of V 1 | F 1
    one ahead  host     take V 0, post V 1 | launch F 0 | take V 1, post V 2
               device                      | F 0 .......| F 1
               transfers                   | V 1 |      | V 2 |

What differs from the record costs one content without a meaning:

    recorded  V 0, V 1, V 2     the receiver has posted room for the next one from the beginning of the step on
    sent      V 0, W 1, V 2     header of W 1 | content for the room of V 1 | content of W 1
    sent      V 0, V 1          end of the step | content for the room of V 2
"""

import functools
import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.local_tensors import dtype_name, torch_dtype
from shardwise.engine.torch_private import flagged
from shardwise.errors import MismatchError, PeerError

# Fixed, so that a header is one message of known size: the receiver cannot know dims before it has read something.
_MAX_DIMS = 16
_HEAD = struct.Struct("<BBBBHIIHHI")
"""kind, note, on_host, flags, lead, microbatch, number, source stage, target stage, progress: of every message anew."""
_FORM = struct.Struct(f"<BB24s48s{2 * _MAX_DIMS}q")
"""has_content, dims, dtype, maker, sizes and strides: the same for a transfer in every microbatch."""
_HEADER_BYTES = _HEAD.size + _FORM.size
_ALIGNMENT_BYTES = 64
"""At multiples of this torch allocates, on every device."""

SAME_FORWARD = "every rank has to run the same forward (no branch on the rank, the time or unseeded random numbers)"
"""The advice where ranks ran different ones."""

_PURPOSES = ("values", "gradients", "announcements")


class MessageKind(IntEnum):
    """The kinds of messages."""

    VALUE = 0
    GRADIENT = 1
    NEWS = 2


_KINDS = tuple(MessageKind)


class Key(NamedTuple):
    """Which message it is."""

    kind: MessageKind
    microbatch: int
    number: int
    """Of the transfer, or of the announcement, within the microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedMessage:
    """A message as it was received."""

    key: Key
    stages: tuple[int, int]
    """From which it comes, and for which it is."""
    progress: int
    """A checksum over the calls of the sender's forward so far."""
    maker: str
    content: torch.Tensor | None
    """None: a value that has no gradient."""
    note: int = 0
    """Of a gradient: its kind along `tp` (see `crossings.py`)."""


_MAX_JOINED_BYTES = 1 << 18
"""Contents up to this size are copied once more rather than sent apart: a message costs as much as 1 MiB of copies."""


class ContentPlace(NamedTuple):
    """The layout of a content in memory, and what it is for."""

    purpose: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lead: int
    """Elements before it, from the last aligned address on."""
    dtype: torch.dtype


class _Record:
    """The messages of one direction: which content comes with the next one. The same on both sides."""

    # It is made of nothing but the messages themselves, in their order: so both sides know the same without asking, and
    # a program that changes needs no agreement.
    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], tuple[int, ContentPlace | None]] = {}
        self.begin(0)

    def begin(self, num_microbatches: int) -> None:
        """A training step begins, whose messages are those of the last one of so many microbatches; 0: none does."""
        self._num_microbatches = num_microbatches
        self._expect((num_microbatches,))

    def _expect(self, last: tuple[int, ...]) -> None:
        self._last = last
        self.expected_bytes, self.expected_place = self._after.get(last, (0, None))

    def note(self, key: Key, flat: torch.Tensor | None, place: ContentPlace | None) -> None:
        """A message has come or gone, with this flat content; place: of a content on a device."""
        num_bytes = _num_host_bytes(flat)
        if num_bytes > _MAX_JOINED_BYTES:
            num_bytes = 0
        # Outside of training steps nothing is received ahead, and microbatches are alike.
        num_microbatches = self._num_microbatches
        self._after[self._last] = num_bytes, place if num_microbatches else None
        self._expect((num_microbatches, *key) if num_microbatches else (0, key.kind, key.number))

    def end(self) -> None:
        """A training step is done, if one was begun: nothing followed its last message."""
        if self._num_microbatches:
            self._after.pop(self._last, None)
            self.begin(0)

    def holds(self, content: torch.Tensor | None) -> bool:
        """Whether this content is what comes with the header."""
        return 0 < self.expected_bytes == _num_host_bytes(content)


def _num_host_bytes(content: torch.Tensor | None) -> int:
    if content is None or content.device.type != "cpu":
        return 0
    return content.numel() * content.element_size()


class _ContentForm(NamedTuple):
    """What a header says of the form of its content."""

    has_content: bool
    dtype: torch.dtype
    maker: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Posted(NamedTuple):
    """A content that is being received."""

    place: ContentPlace
    content: torch.Tensor
    flat: torch.Tensor
    """Its memory."""
    work: Work


class Mailbox:
    """The messages of one rank. `channel`: the ranks of the pipeline."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._box: dict[tuple[int, Key], ReceivedMessage] = {}
        self._sent: deque[Work] = deque()
        self._outgoing = [_Record() for _ in range(channel.size)]
        self._incoming = [_Record() for _ in range(channel.size)]
        self._ahead: dict[int, _Posted] = {}
        """By rank, what is received before its header has come."""
        self.num_joined = 0
        """Messages that were sent whole, the content with the header."""
        self.num_ahead = 0
        """Contents that were received ahead of their headers."""

    def begin(self, num_microbatches: int) -> None:
        """A training step begins: its contents come as in the last one of so many microbatches."""
        # Elsewhere a transfer goes on only while somebody waits: nothing would be won, and a second content held.
        if not self._channel.progresses_alone:
            return
        for each in (*self._outgoing, *self._incoming):
            each.begin(num_microbatches)
        for rank in range(self._channel.size):
            self._post_next(rank)

    def send(
        self,
        rank: int,
        key: Key,
        content: torch.Tensor | None,
        *,
        stages: tuple[int, int] = (0, 0),
        progress: int = 0,
        maker: str = "",
        note: int = 0,
    ) -> None:
        """Send a message; returns at once."""
        self._release()
        kept = None if content is None else _kept(content.detach())
        if kept is not None and kept.dim() > _MAX_DIMS:
            raise MismatchError(f"a value of {kept.dim()} dims crosses stages; at most {_MAX_DIMS} can")
        purpose = f"{_PURPOSES[key.kind]} of stage {stages[0]} for stage {stages[1]}"
        # Stages of one rank exchange through the box. A copy, because the sender's forward may write to its tensor,
        # and the stages of one rank must not share memory that stages of two ranks would not share.
        if rank == self._channel.rank:
            content = None if kept is None else _flagged(_copied(_bare(kept)), _flags(kept))
            self._box[rank, key] = ReceivedMessage(
                key=key, stages=stages, progress=progress, maker=maker, content=content, note=note
            )
            return
        flat = None if kept is None else _flat(_bare(kept))
        record = self._outgoing[rank]
        message = bytearray(_HEADER_BYTES + record.expected_bytes)
        _pack_into(message, key, stages, progress, maker, kept, note)
        packed = torch.frombuffer(message, dtype=torch.uint8)
        is_joined = record.holds(flat)
        if is_joined:
            assert flat is not None
            packed[_HEADER_BYTES:].copy_(flat.view(torch.uint8))
            self.num_joined += 1
        elif flat is not None and key.kind is MessageKind.VALUE and flat.data_ptr() == kept.data_ptr():  # type: ignore[union-attr]
            flat = flat.clone()  # the sender's forward may write to it before it has been read
        # Header and content follow each other on one channel, which keeps their order. So the receiver can make room
        # of the right size before the content comes, and an empty tensor needs no second message.
        self._send(packed, rank, "the next message of the pipeline")
        # Received ahead is what travels apart from its header, to a device.
        is_ahead = kept is not None and kept.device.type != "cpu" and kept.numel() > 0
        place = _place_of(kept, purpose) if kept is not None and is_ahead else None
        self._fill_expected(rank, place)
        if flat is not None and flat.numel() and not is_joined:
            self._send(flat, rank, purpose)
        record.note(key, flat, place)

    def _send(self, content: torch.Tensor, rank: int, purpose: str) -> None:
        work = self._channel.send(content, rank, purpose=purpose)
        if work.is_done:
            work.wait()
        else:
            self._sent.append(work)

    def take(self, rank: int, key: Key, *, stages: tuple[int, int] = (0, 0)) -> ReceivedMessage:
        """Wait for a message. Raises PeerError, and MismatchError where the sender is past it."""
        while (message := self._box.pop((rank, key), None)) is None:
            try:
                arrived = self._receive(rank)
            except PeerError as error:
                what = f"the {('value', 'gradient', 'announcement')[key.kind]} of microbatch {key.microbatch}"
                error.add_note(f"shardwise: waiting for {what} from stage {stages[0]} (rank {rank} of the pipeline)")
                raise
            # Filed under its own key first, whether it is the wanted one or not: the loop looks into the box again.
            self._box[rank, arrived.key] = arrived
            # Values of a microbatch come in ascending order from one rank; gradients and news need not.
            if key.kind is MessageKind.VALUE and arrived.key[:2] == key[:2] and arrived.key.number > key.number:
                raise MismatchError(
                    f"the forward of microbatch {key.microbatch} differs between ranks. This one waits for transfer "
                    f"{key.number} from stage {stages[0]} to {stages[1]}, and rank {rank} of the pipeline went on to "
                    f"transfer {arrived.key.number} of {arrived.maker!r}; {SAME_FORWARD}"
                )
        return message

    def settle(self) -> None:
        """The step is done: wait until everything sent has been taken over by the channel."""
        for rank in range(self._channel.size):
            self._fill_expected(rank, None)
        for each in (*self._outgoing, *self._incoming):
            each.end()
        # Fewer messages came than the last time: what comes instead has no meaning.
        for posted in self._ahead.values():
            posted.work.wait()
        self._ahead.clear()
        # What is sent belongs to the channel until then; nothing else refers to the packed headers and flat copies.
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _release(self) -> None:
        # Else every activation that was sent would stay until the step ends: k of them, where 1F1B needs as many as
        # there are stages behind this one. Only from the front: messages mostly end in the order of their beginning.
        while self._sent and self._sent[0].is_done:
            self._sent.popleft().wait()

    def forget(self) -> None:
        """Drop messages that were not taken."""
        self._box.clear()
        self._sent.clear()
        self._ahead.clear()
        for each in (*self._outgoing, *self._incoming):
            each.end()

    def _fill_expected(self, rank: int, place: ContentPlace | None) -> None:
        """Send something into the room that a rank has posted for another content than this."""
        expected = self._outgoing[rank].expected_place
        if expected is not None and expected != place:
            _, flat = _room_for(expected, self._channel.device)
            self._send(flat, rank, expected.purpose)

    def _post_next(self, rank: int) -> None:
        """Begin to receive what the next message of a rank brings, as far as that is known."""
        if (place := self._incoming[rank].expected_place) is not None:
            content, flat = _room_for(place, self._channel.device)
            work = self._channel.receive(flat, rank, purpose=place.purpose)
            self._ahead[rank] = _Posted(place, content, flat, work)

    def _receive(self, rank: int) -> ReceivedMessage:
        record = self._incoming[rank]
        packed = torch.empty(_HEADER_BYTES + record.expected_bytes, dtype=torch.uint8)
        self._channel.receive(packed, rank, purpose="the next message of the pipeline").wait()
        header = packed.numpy().data
        kind, note, on_host, flags, lead, microbatch, number, source, target, progress = _HEAD.unpack_from(header)
        form = _form_of(bytes(header[_HEAD.size : _HEADER_BYTES]))
        if form is None or kind >= len(MessageKind) or lead >= _ALIGNMENT_BYTES:
            raise MismatchError(
                f"rank {rank} of the pipeline sent bytes that are no message between stages. Run the same version of "
                "shardwise on every rank; no other program may send to them"
            )
        key, stages = Key(_KINDS[kind], microbatch, number), (source, target)
        content = flat = place = None
        if form.has_content:
            purpose = f"{_PURPOSES[kind]} of stage {source} for stage {target}"
            place = ContentPlace(purpose, form.shape, form.stride, lead, form.dtype)
        # One on the host, or without elements, is not received ahead: see `send`.
        ahead = None if place is None or on_host or 0 in place.shape else place
        works: list[Work] = []
        posted = self._ahead.pop(rank, None)
        if posted is not None:
            works.append(posted.work)
        if posted is not None and posted.place == ahead:
            content, flat = posted.content, posted.flat
            self.num_ahead += 1
        elif place is not None:
            # Received in place where the memory has no holes: then no second buffer of that size exists.
            content, flat = _room_for(place, torch.device("cpu") if on_host else self._channel.device)
            if record.holds(flat):
                flat.view(torch.uint8).copy_(packed[_HEADER_BYTES:])
            elif flat.numel():
                works.append(self._channel.receive(flat, rank, purpose=place.purpose))
        record.note(key, flat, ahead)
        # Before the wait, behind which the device computes.
        self._post_next(rank)
        for work in works:
            work.wait()
        if content is not None and flat is not None:
            content = _flagged(_filled(content, flat), flags)
        return ReceivedMessage(key=key, stages=stages, progress=progress, maker=form.maker, content=content, note=note)


class _Extent(NamedTuple):
    """The memory of a tensor, by its shape and strides."""

    num_elements: int
    """From the first element to the last one."""
    is_one_piece: bool
    """Whether it is sent as it is: it has no holes, or its elements share places (windows of `unfold`)."""
    shape: tuple[int, ...]
    """Without repetitions: dims that it was expanded in have one element."""


# Few forms cross stages, and each many times.
@functools.lru_cache(maxsize=1 << 10)
def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> _Extent:
    compact = tuple([1 if not step and size > 1 else size for size, step in zip(shape, stride, strict=True)])
    num_elements = 0 if 0 in compact else 1 + sum((size - 1) * step for size, step in zip(compact, stride, strict=True))
    is_one_piece = num_elements == math.prod(compact) or not _is_apart(compact, stride)
    return _Extent(num_elements, is_one_piece, compact)


def _room_for(place: ContentPlace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a content, and flat memory for the result of `_flat`: its own where that fits.

    It begins `lead` elements behind an aligned address, as the one that was sent.
    """
    _, shape, stride, lead, dtype = place
    extent = _extent(shape, stride)
    memory = torch.empty(lead + extent.num_elements, dtype=dtype, device=device)
    room = torch.empty(0, dtype=dtype, device=device)
    room.set_(memory.untyped_storage(), lead, shape, stride)  # no view of `memory`, so it can be written
    if extent.is_one_piece:
        return room, memory[lead:] if lead else memory
    return room, torch.empty(math.prod(extent.shape), dtype=dtype, device=device)


def _place_of(kept: torch.Tensor, purpose: str = "") -> ContentPlace:
    return ContentPlace(purpose, tuple(kept.shape), kept.stride(), _lead(kept), kept.dtype)


def _copied(kept: torch.Tensor) -> torch.Tensor:
    room, flat = _room_for(_place_of(kept), kept.device)
    flat.copy_(_flat(kept))
    return _filled(room, flat)


def _filled(room: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The tensor once its flat memory has been written."""
    extent = _extent(room.shape, room.stride())
    if not extent.is_one_piece:
        _compact(room, extent).copy_(flat.view(extent.shape))
    return room


def _pack_into(
    message: bytearray,
    key: Key,
    stages: tuple[int, int],
    progress: int,
    maker: str,
    content: torch.Tensor | None,
    note: int,
) -> None:
    if content is None:
        head, form = (False, 0, 0), _packed_form(None, maker, (), ())
    else:
        head = (content.device.type == "cpu", _flags(content), _lead(content))
        form = _packed_form(content.dtype, maker, content.shape, content.stride())
    _HEAD.pack_into(message, 0, key.kind, note, *head, key.microbatch, key.number, *stages, progress)
    message[_HEAD.size : _HEADER_BYTES] = form


@functools.lru_cache(maxsize=1 << 10)
def _packed_form(dtype: torch.dtype | None, maker: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    sizes = [0] * (2 * _MAX_DIMS)
    sizes[: len(shape)] = shape
    sizes[_MAX_DIMS : _MAX_DIMS + len(stride)] = stride
    name = b"" if dtype is None else dtype_name(dtype).encode()
    # The end of a long name says more than its beginning: "...layers.31.mlp".
    return _FORM.pack(dtype is not None, len(shape), name, maker.encode(errors="replace")[-48:], *sizes)


@functools.lru_cache(maxsize=1 << 10)
def _form_of(packed: bytes) -> _ContentForm | None:
    """What `_packed_form` has packed; None for bytes that it never gives."""
    has_content, num_dims, dtype, maker, *sizes = _FORM.unpack(packed)
    is_dtype = not has_content or isinstance(getattr(torch, _text(dtype), None), torch.dtype)
    if num_dims > _MAX_DIMS or min(sizes) < 0 or not is_dtype:
        return None
    return _ContentForm(
        has_content=bool(has_content),
        dtype=torch_dtype(_text(dtype)) if has_content else torch.float32,
        maker=_text(maker),
        shape=tuple(sizes[:num_dims]),
        stride=tuple(sizes[_MAX_DIMS : _MAX_DIMS + num_dims]),
    )


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that can be sent.

    It arrives with its strides and its alignment, because kernels for matrices round by them. They also decide whether
    a module that asks for a contiguous tensor gets a copy. Holes between elements (a slice of a larger tensor) take
    memory on both sides, and are not sent.
    """
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _flags(tensor: torch.Tensor) -> int:
    """Whether the elements are read conjugated (1), or negated (2)."""
    return int(tensor.is_conj()) + 2 * int(tensor.is_neg())


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they are in memory."""
    return flagged(tensor.detach(), is_conj=False, is_neg=False) if _flags(tensor) else tensor


def _flagged(bare: torch.Tensor, flags: int) -> torch.Tensor:
    return flagged(bare, is_conj=bool(flags & 1), is_neg=bool(flags & 2)) if flags else bare


def _lead(tensor: torch.Tensor) -> int:
    """Elements between the last aligned address and the first element."""
    return tensor.data_ptr() % _ALIGNMENT_BYTES // tensor.element_size()


def _compact(tensor: torch.Tensor, extent: _Extent) -> torch.Tensor:
    return tensor.as_strided(extent.shape, tensor.stride())


def _is_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share a place."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step <= reach:
                return False
            reach += (size - 1) * step
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as they are sent: its memory as a view, or a copy without the holes."""
    extent = _extent(tensor.shape, tensor.stride())
    if extent.is_one_piece:
        return tensor.as_strided((extent.num_elements,), (1,))
    return _compact(tensor, extent).contiguous().view(-1)
