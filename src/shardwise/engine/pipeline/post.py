"""Messages between the ranks of a pipeline: each says what it is, so that no order has to be agreed on.

    sender     header (fixed size), content     ...in the order in which it has them
    receiver   takes messages from that rank until the wanted one is there; the others wait in the box

    kind       key (microbatch, number)     content                     sent when
    VALUE      transfer in the forward      the tensor, strides kept    first use on another stage
    GRADIENT   the same transfer            the gradient, or none       backward has passed the arrival
    NEWS       announcement                 bytes or a tensor           only the owner knows a shape, number or text

    rank 0   VALUE 0.0  VALUE 1.0 ------>  rank 1 wants VALUE 0.0: takes it; VALUE 1.0 stays in the channel
    rank 0   wants GRADIENT 0.0 <--------  rank 1 sends NEWS 0.0, GRADIENT 0.0: NEWS waits in the box of rank 0

A rank that waits for one message therefore never blocks another one, and a value that was announced for one place of
the program and is needed at another is noticed: both sides count what they do alike.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.local_tensors import dtype_name, torch_dtype
from shardwise.errors import MismatchError, PeerError

# Fixed, so that a header is one message of known size: the receiver cannot know dims before it has read something.
_MAX_DIMS = 16
_HEADER = struct.Struct(f"<BBBBBBHIIHHI24s48s{2 * _MAX_DIMS}q")
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
    source_stage: int
    target_stage: int
    progress: int
    """A checksum over the calls of the sender's forward so far."""
    maker: str
    content: torch.Tensor | None
    """None: a value that has no gradient."""
    note: int = 0
    """Of a gradient: its kind along `tp` (see `crossings.py`)."""


class Post:
    """The messages of one rank. `channel`: the ranks of the pipeline."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._box: dict[tuple[int, Key], ReceivedMessage] = {}
        self._sent: list[Work] = []

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
        kept = None if content is None else _kept(content.detach())
        if kept is not None and kept.dim() > _MAX_DIMS:
            raise MismatchError(f"a value of {kept.dim()} dims crosses stages; at most {_MAX_DIMS} can")
        purpose = f"{_PURPOSES[key.kind]} of stage {stages[0]} for stage {stages[1]}"
        # Stages of one rank exchange through the box. A copy, because the sender's forward may write to its tensor,
        # and the stages of one rank must not share memory that stages of two ranks would not share.
        if rank == self._channel.rank:
            content = None if kept is None else _flagged(_copied(_bare(kept)), _flags(kept))
            self._box[rank, key] = _message(key, stages, progress, maker, content, note)
            return
        flat = None if kept is None else _flat(_compact(_bare(kept)))
        if flat is not None and key.kind is MessageKind.VALUE and flat.data_ptr() == kept.data_ptr():  # type: ignore[union-attr]
            flat = flat.clone()  # the sender's forward may write to it before it has been read
        # Header and content follow each other on one channel, which keeps their order. So the receiver can make room
        # of the right size before the content comes, and an empty tensor needs no second message.
        header = torch.frombuffer(_packed(key, stages, progress, maker, kept, note), dtype=torch.uint8)
        self._sent.append(self._channel.send(header, rank, purpose="the next message of the pipeline"))
        if flat is not None and flat.numel():
            self._sent.append(self._channel.send(flat, rank, purpose=purpose))

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
                    f"the forward of microbatch {key.microbatch} differs between ranks: this one waits for transfer "
                    f"{key.number} from stage {stages[0]} to {stages[1]}, and rank {rank} of the pipeline went on to "
                    f"transfer {arrived.key.number} of {arrived.maker!r}; {SAME_FORWARD}"
                )
        return message

    def settle(self) -> None:
        """Wait until everything sent has been taken over by the channel."""
        # What is sent belongs to the channel until then; nothing else refers to the packed headers and flat copies.
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Drop messages that were not taken."""
        self._box.clear()
        self._sent.clear()

    def _receive(self, rank: int) -> ReceivedMessage:
        packed = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._channel.receive(packed, rank, purpose="the next message of the pipeline").wait()
        (
            kind,
            note,
            has_content,
            on_host,
            flags,
            lead,
            num_dims,
            microbatch,
            number,
            source,
            target,
            progress,
            dtype,
            maker,
            *sizes,
        ) = _HEADER.unpack(packed.numpy().tobytes())
        is_dtype = not has_content or isinstance(getattr(torch, _text(dtype), None), torch.dtype)
        if (
            kind >= len(MessageKind)
            or num_dims > _MAX_DIMS
            or lead >= _ALIGNMENT_BYTES
            or min(sizes) < 0
            or not is_dtype
        ):
            raise MismatchError(
                f"rank {rank} of the pipeline sent bytes that are no message between stages; every rank has to run the "
                "same version of shardwise, and nothing else may send to its ranks"
            )
        key, stages = Key(MessageKind(kind), microbatch, number), (source, target)
        content = None
        if has_content:
            shape, stride = sizes[:num_dims], sizes[_MAX_DIMS : _MAX_DIMS + num_dims]
            device = torch.device("cpu") if on_host else self._channel.device
            # Received in place where the memory has no holes: then no second buffer of that size exists.
            content, flat = _room(shape, stride, lead, torch_dtype(_text(dtype)), device)
            if flat.numel():
                purpose = f"{_PURPOSES[key.kind]} of stage {source} for stage {target}"
                self._channel.receive(flat, rank, purpose=purpose).wait()
            content = _flagged(_filled(content, flat), flags)
        return _message(key, stages, progress, _text(maker), content, note)


def _room(
    shape: Sequence[int], stride: Sequence[int], lead: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of this shape and these strides, and flat memory for the result of `_flat`: its own where that fits.

    It begins `lead` elements behind an aligned address, as the one that was sent.
    """
    memory = torch.empty(lead + _extent(shape, stride), dtype=dtype, device=device)
    room = torch.empty(0, dtype=dtype, device=device)
    room.set_(memory.untyped_storage(), lead, tuple(shape), tuple(stride))  # no view of `memory`, so it can be written
    compact = _compact(room)
    if _is_one_piece(compact):
        return room, _flat(compact)
    return room, torch.empty(compact.numel(), dtype=dtype, device=device)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last one."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _copied(kept: torch.Tensor) -> torch.Tensor:
    room, flat = _room(kept.shape, kept.stride(), _lead(kept), kept.dtype, kept.device)
    flat.copy_(_flat(_compact(kept)))
    return _filled(room, flat)


def _filled(room: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The tensor once its flat memory has been written."""
    compact = _compact(room)
    if not _is_one_piece(compact):
        compact.copy_(flat.view(compact.shape))
    return room


def _message(
    key: Key, stages: tuple[int, int], progress: int, maker: str, content: torch.Tensor | None, note: int
) -> ReceivedMessage:
    return ReceivedMessage(
        key=key,
        source_stage=stages[0],
        target_stage=stages[1],
        progress=progress,
        maker=maker,
        content=content,
        note=note,
    )


def _packed(
    key: Key, stages: tuple[int, int], progress: int, maker: str, content: torch.Tensor | None, note: int
) -> bytearray:
    sizes = [0] * (2 * _MAX_DIMS)
    dtype, num_dims = b"", 0
    if content is not None:
        dtype, num_dims = dtype_name(content.dtype).encode(), content.dim()
        sizes[:num_dims] = content.shape
        sizes[_MAX_DIMS : _MAX_DIMS + num_dims] = content.stride()
    # The end of a long name says more than its beginning: "...layers.31.mlp".
    name = maker.encode(errors="replace")[-48:]
    on_host = content is not None and content.device.type == "cpu"
    head = (
        key.kind,
        note,
        content is not None,
        on_host,
        0 if content is None else _flags(content),
        0 if content is None else _lead(content),
        num_dims,
        key.microbatch,
        key.number,
        *stages,
        progress,
        dtype,
        name,
    )
    return bytearray(_HEADER.pack(*head, *sizes))


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that can be sent.

    It arrives with its strides and its alignment: kernels for matrices round differently by them, and they decide
    whether a module that asks for a contiguous tensor gets a copy. Holes between elements (a slice of a larger tensor)
    take memory where they arrive, as they do where it comes from, and are not sent.
    """
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _flags(tensor: torch.Tensor) -> int:
    """Whether the elements are read conjugated (1), or negated (2)."""
    return int(tensor.is_conj()) + 2 * int(tensor.is_neg())


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they are in memory."""
    if not _flags(tensor):
        return tensor
    bare = tensor.detach()
    torch._C._set_conj(bare, False)
    torch._C._set_neg(bare, False)
    return bare


def _flagged(bare: torch.Tensor, flags: int) -> torch.Tensor:
    if flags:
        torch._C._set_conj(bare, bool(flags & 1))
        torch._C._set_neg(bare, bool(flags & 2))
    return bare


def _lead(tensor: torch.Tensor) -> int:
    """Elements between the last aligned address and the first element."""
    return tensor.data_ptr() % _ALIGNMENT_BYTES // tensor.element_size()


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without repetitions: dims that it was expanded in have one element."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without holes and overlaps, in some order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_apart(tensor: torch.Tensor) -> bool:
    """Whether no two elements share a place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _is_one_piece(compact: torch.Tensor) -> bool:
    """Whether the memory is sent as it is: it has no holes, or its elements share places (windows of `unfold`)."""
    return _is_dense(compact) or not _is_apart(compact)


def _flat(compact: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as they are sent: its memory as a view, or a copy without the holes."""
    if _is_one_piece(compact):
        return compact.as_strided((_extent(compact.shape, compact.stride()),), (1,))
    return compact.contiguous().view(-1)
