"""Nested values that every rank gives to every rank: rollouts, rewards, the decision of one rank.

    rank 0    {"tokens": Tensor [2, 5], "score": 0.5}    a header in JSON, and 80 bytes of tensors
    rank 1    None                                       a header alone

[1] headers    one exchange, with the verdict of each rank
[2] tensors    one all-gather of bytes, where any rank has some

In a header, containers and tensors are lists that begin with their kind, so that nothing is called to read it:
["dict", [["tokens", ["tensor", "int64", [2, 5]]], ["score", 0.5]]].
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import aborting, agreed, understood
from shardwise.comm.given_channel import given_or_default
from shardwise.comm.local_tensors import bytes_of, dtype_name, torch_dtype
from shardwise.errors import PlanError
from shardwise.plan.dtypes import ITEMSIZE_BYTES

_LARGEST_NUMBER = 1 << 63

_LENGTH = struct.Struct("<Q")
"""Of a header."""

_LARGEST_BYTES = 1 << 47
"""What a processor can address: a header that claims more is no header."""


def exchange(value: Any, *, channel: Channel | None = None, purpose: str = "values") -> list[Any]:
    """Give a value to every rank, and get those of all, in rank order. All ranks of the channel call it together.

    value: None, a bool, number, text or tensor, or lists, tuples and dicts of them, with texts as keys; it may be of
        another kind and size on each rank.
    channel: None: see `default_channel`. purpose: the name of the values in errors, the same on all ranks.

    Each rank gets all bytes. Tensors are copies on the channel's device, without gradients. `exchange(None)` is a
    barrier; what rank 0 decides is `exchange(decision)[0]`. Raises PlanError, the same on all ranks, for other values,
    and PeerError where a rank is lost.
    """
    with given_or_default(channel, f"an exchange of {purpose}") as used:
        tensors: list[torch.Tensor] = []
        with agreed(used, purpose=purpose) as agreement:
            agreement.value = _header(value, tensors, purpose)
        headers = understood(agreement.values, _parsed, purpose=purpose)
        counts = [sum(map(_num_bytes, _tensors_in(header))) for header in headers]
        with aborting(used, f"an exchange of {purpose}, with {sum(counts)} bytes for every rank"):
            content = torch.empty(sum(counts), dtype=torch.uint8, device=used.device)
        if len(content):
            own = [_bytes_in(each.to(used.device)) for each in tensors]
            mine = torch.cat([*own, content[:0]])
            used.all_gather(content, mine, purpose=f"tensors of {purpose}", counts=counts).wait()
        parts = content.split([_num_bytes(each) for header in headers for each in _tensors_in(header)])
        following = iter(parts)
        return [_filled(header, following) for header in headers]


def packed(value: Any, purpose: str) -> bytes:
    """A value of these kinds with all its tensors, for what travels with other things. Raises PlanError for others."""
    tensors: list[torch.Tensor] = []
    header = _header(value, tensors, purpose)
    return b"".join([_LENGTH.pack(len(header)), header, *(bytes_of(_bytes_in(each.cpu())) for each in tensors)])


def unpacked(answer: bytes) -> Any:
    """What `packed` was given, with tensors on the CPU. For `understood`: raises its errors for other bytes."""
    (length,) = _LENGTH.unpack_from(answer)
    start = _LENGTH.size + length
    header = _parsed(answer[_LENGTH.size : start])
    sizes = [*map(_num_bytes, _tensors_in(header))]
    if sum(sizes) != len(answer) - start:
        raise ValueError(f"{len(answer) - start} bytes of {sum(sizes)}")
    content = torch.empty(sum(sizes), dtype=torch.uint8)
    bytes_of(content)[:] = answer[start:]
    return _filled(header, iter(content.split(sizes)))


def _header(value: Any, tensors: list[torch.Tensor], purpose: str) -> bytes:
    """What the others read first; its tensors are added to `tensors`."""
    problems: list[str] = []

    def written(part: Any, place: str) -> Any:
        if part is None or isinstance(part, bool | float | str):
            return part
        if isinstance(part, int) and abs(part) < _LARGEST_NUMBER:
            return int(part)
        if isinstance(part, torch.Tensor) and is_plain(part):
            tensors.append(part.detach())
            return ["tensor", dtype_name(part.dtype), list(part.shape)]
        if type(part) in (list, tuple):
            return [type(part).__name__, [written(each, f"{place}[{at}]") for at, each in enumerate(part)]]
        if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
            return ["dict", [[key, written(each, f"{place}[{key!r}]")] for key, each in part.items()]]
        problems.append(f"{place} {_why_not(part)}")
        return None

    try:
        found = written(value, purpose)
    except RecursionError:
        problems = [f"{purpose} hold themselves, or have too many levels"]
    if problems:
        raise PlanError(
            *problems,
            "sw.exchange takes None, numbers, texts and tensors, in lists, tuples and dicts with texts as keys. Make a "
            "tensor of an array, and a dict of an object",
        )
    return json.dumps(found).encode()


def _bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    # Not `view(-1)`: one element may have any stride, and cannot be viewed as bytes then.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _why_not(part: Any) -> str:
    if isinstance(part, Mapping):
        return "has keys that are no texts"
    if isinstance(part, int):
        return "needs more than 64 bits"
    if isinstance(part, torch.Tensor):
        return f"has no dense elements, or is a subclass ({type(part).__name__}, {part.layout}, {part.device})"
    return f"is of type {type(part).__name__}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with memory for its elements."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_dense and dtype_name(tensor.dtype) in ITEMSIZE_BYTES
    )


def _parsed(answer: bytes) -> Any:
    """The header of a rank. Raises ValueError, TypeError or LookupError for bytes that are none."""
    header = json.loads(answer)
    for dtype, shape in _tensors_in(header):
        if not all(type(size) is int and 0 <= size < _LARGEST_NUMBER for size in shape):
            raise ValueError(f"a tensor of shape {shape}")
        ITEMSIZE_BYTES[dtype]
    if (num_bytes := sum(map(_num_bytes, _tensors_in(header)))) > _LARGEST_BYTES:
        raise ValueError(f"tensors of {num_bytes} bytes")
    return header


def _tensors_in(header: Any) -> Iterator[tuple[str, list[int]]]:
    """The dtype and the shape of each tensor, in the order of the walk."""
    if isinstance(header, dict):
        raise ValueError("an object of JSON")
    if not isinstance(header, list):
        return
    kind, *rest = header
    if kind == "tensor":
        dtype, shape = rest
        yield dtype, shape
        return
    (items,) = rest
    if kind not in ("list", "tuple", "dict"):
        raise ValueError(f"a container of kind {kind}")
    for item in items:
        if kind == "dict":
            key, item = item
            if not isinstance(key, str):
                raise TypeError("a key that is no text")
        yield from _tensors_in(item)


def _num_bytes(tensor: tuple[str, list[int]]) -> int:
    dtype, shape = tensor
    return ITEMSIZE_BYTES[dtype] * math.prod(shape)


def _filled(header: Any, contents: Iterator[torch.Tensor]) -> Any:
    """The value of a header, with the next contents as its tensors."""
    if not isinstance(header, list):
        return header
    if header[0] == "tensor":
        content = next(contents)
        tensor = torch.empty(header[2], dtype=torch_dtype(header[1]), device=content.device)
        tensor.view(-1).view(torch.uint8).copy_(content)
        return tensor
    if header[0] == "dict":
        return {key: _filled(each, contents) for key, each in header[1]}
    items = [_filled(each, contents) for each in header[1]]
    return tuple(items) if header[0] == "tuple" else items
