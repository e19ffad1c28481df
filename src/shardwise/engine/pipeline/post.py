"""Messages between the ranks of a pipeline: each says what it is, so that no order has to be agreed on.

    sender     header (fixed size), content     ...in the order in which it has them
    receiver   takes messages from that rank until the wanted one is there; the others wait in the box

A rank that waits for one message therefore never blocks another one, and a value that was announced for one place of
the program and is wanted at another is noticed: both sides count what they do alike.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from shardwise.comm import Channel, Work
from shardwise.engine.inventory import dtype_name, torch_dtype
from shardwise.errors import MismatchError, PeerError

_MAX_DIMS = 16
_HEADER = struct.Struct(f"<BBBHIIHHI24s48s{2 * _MAX_DIMS}q")
_PURPOSES = ("values", "gradients", "announcements")


class Kind(IntEnum):
    """What a message carries."""

    VALUE = 0
    GRADIENT = 1
    NEWS = 2


class Key(NamedTuple):
    """Which message it is."""

    kind: Kind
    microbatch: int
    number: int
    """Of the transfer, or of the announcement, within the microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message as it was received."""

    key: Key
    source_stage: int
    target_stage: int
    progress: int
    """A checksum over what the sender's forward had done so far."""
    maker: str
    content: torch.Tensor | None
    """None: a value that has no gradient."""


class Post:
    """The messages of one rank. `channel`: the ranks of the pipeline."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._box: dict[tuple[int, Key], Message] = {}
        self._sent: list[Work] = []
        self.num_values = 0
        """Values sent to other ranks since the beginning."""
        self.num_gradients = 0

    def send(
        self,
        rank: int,
        key: Key,
        content: torch.Tensor | None,
        *,
        stages: tuple[int, int] = (0, 0),
        progress: int = 0,
        maker: str = "",
    ) -> None:
        """Send a message; returns at once."""
        dense = None if content is None else _dense(content.detach())
        if dense is not None and key.kind is Kind.VALUE and dense.data_ptr() == content.data_ptr():  # type: ignore[union-attr]
            dense = dense.clone()  # the sender's forward may write to it before it has been read
        if dense is not None and dense.dim() > _MAX_DIMS:
            raise MismatchError(f"a value of {dense.dim()} dims crosses stages; at most {_MAX_DIMS} can")
        self.num_values += key.kind is Kind.VALUE
        self.num_gradients += key.kind is Kind.GRADIENT
        purpose = f"{_PURPOSES[key.kind]} of stage {stages[0]} for stage {stages[1]}"
        if rank == self._channel.rank:
            self._box[rank, key] = _message(key, stages, progress, maker, None if dense is None else dense)
            return
        header = torch.frombuffer(_packed(key, stages, progress, maker, dense), dtype=torch.uint8)
        self._sent.append(self._channel.send(header, rank, purpose="headers"))
        if dense is not None and dense.numel():
            self._sent.append(self._channel.send(_flat(dense), rank, purpose=purpose))

    def take(self, rank: int, key: Key, *, stages: tuple[int, int] = (0, 0)) -> Message:
        """Wait for a message. Raises PeerError, and MismatchError where the sender is past it."""
        while (message := self._box.pop((rank, key), None)) is None:
            try:
                arrived = self._receive(rank)
            except PeerError as error:
                what = f"the {('value', 'gradient', 'announcement')[key.kind]} of microbatch {key.microbatch}"
                error.add_note(f"shardwise: waiting for {what} from stage {stages[0]} (rank {rank} of the pipeline)")
                raise
            self._box[rank, arrived.key] = arrived
            if (
                arrived.key.kind == key.kind
                and arrived.key.microbatch == key.microbatch
                and self._is_past(arrived, key)
            ):
                raise MismatchError(
                    f"the forward of microbatch {key.microbatch} differs between ranks: this one waits for transfer "
                    f"{key.number} from stage {stages[0]} to {stages[1]}, and rank {rank} of the pipeline went on to "
                    f"transfer {arrived.key.number} of {arrived.maker!r}; every rank has to run the same forward"
                )
        return message

    def settle(self) -> None:
        """Wait until everything sent has been taken over by the channel."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Drop what nobody asked for."""
        self._box.clear()
        self._sent.clear()

    @staticmethod
    def _is_past(arrived: Message, key: Key) -> bool:
        """Values of a microbatch come in ascending order from one rank; gradients and news may not."""
        return key.kind is Kind.VALUE and arrived.key.number > key.number

    def _receive(self, rank: int) -> Message:
        packed = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._channel.receive(packed, rank, purpose="headers").wait()
        (kind, has_content, on_host, num_dims, microbatch, number, source, target, progress, dtype, maker, *sizes) = (
            _HEADER.unpack(packed.numpy().tobytes())
        )
        key, stages = Key(Kind(kind), microbatch, number), (source, target)
        content = None
        if has_content:
            shape, stride = sizes[:num_dims], sizes[_MAX_DIMS : _MAX_DIMS + num_dims]
            device = torch.device("cpu") if on_host else self._channel.device
            content = torch.empty_strided(shape, stride, dtype=torch_dtype(_text(dtype)), device=device)
            if content.numel():
                purpose = f"{_PURPOSES[key.kind]} of stage {source} for stage {target}"
                self._channel.receive(_flat(content), rank, purpose=purpose).wait()
        return _message(key, stages, progress, _text(maker), content)


def _message(key: Key, stages: tuple[int, int], progress: int, maker: str, content: torch.Tensor | None) -> Message:
    return Message(
        key=key, source_stage=stages[0], target_stage=stages[1], progress=progress, maker=maker, content=content
    )


def _packed(key: Key, stages: tuple[int, int], progress: int, maker: str, content: torch.Tensor | None) -> bytearray:
    sizes = [0] * (2 * _MAX_DIMS)
    dtype, num_dims = b"", 0
    if content is not None:
        dtype, num_dims = dtype_name(content.dtype).encode(), content.dim()
        sizes[:num_dims] = content.shape
        sizes[_MAX_DIMS : _MAX_DIMS + num_dims] = content.stride()
    name = maker.encode(errors="replace")[-48:]
    on_host = content is not None and content.device.type == "cpu"
    head = (
        key.kind,
        content is not None,
        on_host,
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


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, without holes or overlaps: in the order of its own strides where it can be kept."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order in which they lie, as a view."""
    return dense.as_strided((dense.numel(),), (1,))
