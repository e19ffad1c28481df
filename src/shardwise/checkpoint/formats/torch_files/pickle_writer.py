"""Pickles of inert values, for programs that read them: the way back of `pickles.parse`.

    MadeObject(of=Named(torch.Size), args=((2, 3),))     c torch, Size ( ( K 2 K 3 t t R .

Nothing of what is named is imported, so that metadata of `torch.distributed` is written without it. Only what torch's
formats need is known: plain values, lists, tuples, dicts, and objects by the names of their classes.
"""

import struct
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.formats.torch_files.pickles import MadeObject, Named, Persistent


def pickled(value: Any) -> bytes:
    """The pickle of a value, of protocol 2 as torch.save writes it.

    An object with a state and no arguments is made without a call of its class, as pickle does it. Raises TypeError for
    values of other classes.
    """
    writing = _Writing()
    writing.add(value)
    return b"\x80\x02" + bytes(writing.data) + b"."


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A value that is in others at many places: its program is made once."""

    value: object


class _Writing:
    """Appends the program of one value after the other."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._memo: dict[Named, int] = {}
        self._repeated: dict[Repeated, bytes] = {}

    def add(self, value: Any) -> None:
        """Append the instructions that put a value on the stack."""
        if isinstance(value, dict):
            self.data += b"}"
            self._pairs(list(value.items()))
        elif isinstance(value, list):
            self.data += b"]("
            self._all(value)
            self.data += b"e"
        elif isinstance(value, tuple):
            self._tuple(value)
        elif isinstance(value, Named):
            self._named(value)
        elif isinstance(value, Persistent):
            self.add(value.key)
            self.data += b"Q"
        elif isinstance(value, MadeObject):
            self._object(value)
        elif isinstance(value, Repeated):
            self._again(value)
        else:
            self.data += _scalar(value)

    def _again(self, repeated: Repeated) -> None:
        if repeated in self._repeated:
            self.data += self._repeated[repeated]
            return
        start, num_names = len(self.data), len(self._memo)
        self.add(repeated.value)
        # The program that remembers a name is another one than those that recall it.
        if len(self._memo) == num_names:
            self._repeated[repeated] = bytes(self.data[start:])

    def _all(self, values: Any) -> None:
        for each in values:
            self.add(each)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if value:
            self.data += b"("
        self._all(value)
        self.data += b"t" if value else b")"

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        if pairs:
            self.data += b"("
            for pair in pairs:
                self._all(pair)
            self.data += b"u"

    def _named(self, value: Named) -> None:
        # Classes are named again and again, thousands of times in metadata of many tensors.
        if value in self._memo:
            self.data += b"j" + struct.pack("<I", self._memo[value])
            return
        self._memo[value] = len(self._memo)
        self.data += f"c{value.module}\n{value.name}\n".encode() + b"r" + struct.pack("<I", self._memo[value])

    def _object(self, value: MadeObject) -> None:
        self.add(value.of)
        self.add(value.args)
        self.data += b"\x81" if value.args == () and value.state is not None else b"R"
        if value.state is not None:
            self.add(value.state)
            self.data += b"b"
        self._pairs(value.pairs)


def _scalar(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8b" + struct.pack("<i", len(data)) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    raise TypeError(f"a {type(value).__name__} is no value of a pickle that is written here")
