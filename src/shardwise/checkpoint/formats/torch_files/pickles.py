"""Pickles as inert values: what a pickle describes, without importing, calling or making anything that it names.

A pickle is a program for a stack machine. Python's `pickletools` decodes its instructions, and runs none. This machine
knows those that `pickle` and `torch.save` write. Where the program names a class or function, it gets a `Named`. Where
it calls one, a `MadeObject` that says what was called with what.

    program                stack behind it
    c torch, Size          Named(torch.Size)
    ( K 2, K 3, t          Named(torch.Size), (2, 3)
    R                      MadeObject(of=torch.Size, args=(2, 3))       pickle would call torch.Size here
    .                      the value

So the worst that a hostile pickle can do is to take time and memory in proportion to its bytes. Every instruction has
a price, about the bytes of what it makes, and a pickle that costs much more than its length is refused. Whole numbers
of more than 60 bits are no keys: Python puts chosen ones of them into one slot of a dict.

The way back is `pickled`, for programs that read them. Nothing of what is named is imported either, so that metadata of
`torch.distributed` is written without it. Only what torch's formats need is known: plain values, lists, tuples, dicts,
and objects by the names of their classes.
"""

import io
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import CheckpointError

_FREE_BYTES = 16 << 20
_BYTES_PER_BYTE = 32
"""A pickle may make so much, and so much for each of its bytes. Those of torch make two thirds of the second."""
_MAX_KEY = 1 << 60
_MAX_LINE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class MadeObject:
    """What a pickle wants to be made by calling something."""

    of: object
    """What is called: a `Named`, in pickles that make sense."""
    args: object
    """The arguments: a tuple, in pickles that make sense."""
    state: object = None
    """What is set on the object afterwards."""
    pairs: list[tuple[object, object]] = field(default_factory=list)
    """What is put into the object afterwards, as into a dict."""
    elements: list[object] = field(default_factory=list)
    """What is appended to the object afterwards, as to a list or a set."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """What a pickle takes from outside: for torch, the storage of a tensor."""

    key: object


class CutShortError(CheckpointError):
    """The bytes end before the pickle does."""


def parse(data: bytes, allowed: Callable[[str, str], bool]) -> Any:
    """Return the value that a pickle describes, its objects as `MadeObject`.

    Raises `CheckpointError` when it names something that is not `allowed(module, name)`, and when it is damaged.
    """
    return parse_first(data, allowed)[0]


def parse_first(data: bytes, allowed: Callable[[str, str], bool], *, start: int = 0) -> tuple[Any, int]:
    """As `parse`, of the pickle that begins at `start`; returns also where it ends. More may follow it.

    Raises `CutShortError` when the bytes end before it does.
    """
    program = io.BytesIO(data)
    program.seek(start)
    try:
        return _Machine(allowed).run(program, len(data)), program.tell()
    # A damaged program fails anywhere in the machine: instructions check nothing
    # themselves, and all it may be is caught here. RecursionError: keys in keys.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"it is no pickle, or a damaged one: {kind} at byte {program.tell():,} of it") from None


class _Machine:
    """The stack machine. Methods after `run` are instructions; they raise anything at all on a damaged program."""

    def __init__(self, allowed: Callable[[str, str], bool]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        # Writers number what they remember one after the other; a place far away costs an entry of the dict alone.
        self._memo: list[Any] = []
        self._far_memo: dict[int, Any] = {}

    def run(self, program: io.BytesIO, size: int) -> Any:
        """Execute up to STOP. size: of all bytes."""
        left = _FREE_BYTES + _BYTES_PER_BYTE * size
        while (code := program.read(1)) != b".":
            step = _STEPS.get(code)
            if step is None:
                at = program.tell() - len(code)
                if not code:
                    raise CutShortError(f"it is no pickle, or a damaged one: it has no end in {size:,} bytes")
                raise CheckpointError(
                    f"it has the instruction {code[0]:#04x} at byte {at:,}, which no checkpoint needs; nothing of it "
                    "was run"
                )
            read, price, instruction = step
            left -= price
            if left < 0:
                raise CheckpointError(
                    f"it would make more than {_BYTES_PER_BYTE} times its own {size:,} bytes; that is no checkpoint"
                )
            try:
                argument = None if read is None else read(program)
            except ValueError as error:
                at = program.tell()
                raise CutShortError(f"it is no pickle, or a damaged one: at byte {at:,}, {error}") from None
            instruction(self, argument)
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        # Each mark begins a stack of its own, so what was pushed since is that stack: no search for the mark.
        items, self._stack = self._stack, self._below.pop()
        return items

    def nothing(self, _: Any) -> None:
        """The number of the protocol and the lengths of frames say nothing about the value."""

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, value: str) -> None:
        # Of Python 2, in whatever encoding: torch takes them as UTF-8.
        self._stack.append(value.encode("latin1").decode("utf-8", "surrogatepass"))

    def drop(self, _: Any) -> None:
        self._stack.pop()

    def twice(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def tuple_of(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def tuple_since_mark(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def frozen(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(_keys(items)))

    def append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def extend(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        # A MadeObject collects what is put into it: it is not known what kind of thing it would have been.
        if isinstance(target, set):
            target.update(_keys(values))
        else:
            (target.elements if isinstance(target, MadeObject) else target).extend(values)

    def put(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._put([key, value])

    def put_all(self, _: Any) -> None:
        self._put(self._since_mark())

    def _put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, MadeObject):
            target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, dict):
            target.update(zip(_keys(items[::2]), items[1::2], strict=True))
        else:
            raise TypeError

    def name(self, named: tuple[Any, Any] | None) -> None:
        name, module = (self._stack.pop(), self._stack.pop()) if named is None else named[::-1]
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError
        # Nothing would be run in any case. The refusal says early that this is no checkpoint, in place of odd values.
        if not self._allowed(module, name):
            raise CheckpointError(f"it names {module}.{name}, which does not belong there; nothing of it was run")
        self._stack.append(Named(module, name))

    def call(self, _: Any) -> None:
        args, of = self._stack.pop(), self._stack.pop()
        self._stack.append(MadeObject(of, args))

    def call_with_keywords(self, _: Any) -> None:
        keywords, args, of = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append(MadeObject(of, (args, keywords)))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        # AttributeError on anything but a MadeObject: plain values take no state.
        self._stack[-1].state = state

    def persistent(self, _: Any) -> None:
        self._stack.append(Persistent(self._stack.pop()))

    def remember(self, at: int) -> None:
        if at == len(self._memo):
            self._memo.append(self._stack[-1])
        elif at < len(self._memo):
            self._memo[at] = self._stack[-1]
        else:
            self._far_memo[at] = self._stack[-1]

    def remember_next(self, _: Any) -> None:
        # As pickle numbers them: by how many there are.
        if self._far_memo:
            raise ValueError
        self._memo.append(self._stack[-1])

    def recall(self, at: int) -> None:
        self._stack.append(self._memo[at] if at < len(self._memo) else self._far_memo[at])


_PLAIN = (str, int, float, bool, bytes, type(None), MadeObject, Named)


def _keys(values: list[Any]) -> list[Any]:
    """What may be a key. Tuples in tuples may not: Python hashes them by recursion without a bound."""
    for value in values:
        if type(value) is tuple:
            _check_key(*value)
        else:
            _check_key(value)
    return values


def _check_key(*values: Any) -> None:
    for value in values:
        if type(value) not in _PLAIN or (type(value) is int and abs(value) >= _MAX_KEY):
            raise TypeError


def _names(program: io.BytesIO) -> tuple[str, str]:
    """A module and a name in it. Not by pickletools, which knows ASCII alone, and lines without end."""
    module, name = (program.readline(_MAX_LINE_BYTES + 1) for _ in range(2))
    if not (module.endswith(b"\n") and name.endswith(b"\n")):
        raise ValueError("a name has no end")
    return module[:-1].decode(), name[:-1].decode()


def _frame(program: io.BytesIO) -> None:
    """The length of what follows, which has to be there. It is a hint for readers of streams."""
    num_bytes = int.from_bytes(program.read(8), "little")
    if program.tell() + num_bytes > len(program.getbuffer()):
        raise ValueError(f"a frame of {num_bytes:,} bytes is beyond the end")


def _reader(opcode: pickletools.OpcodeInfo) -> Callable[[io.BytesIO], Any] | None:
    if opcode.name in ("GLOBAL", "FRAME"):
        return _names if opcode.name == "GLOBAL" else _frame
    return None if opcode.arg is None else opcode.arg.reader


_Instruction = Callable[[_Machine, Any], None]

# By their names in pickletools; those of protocol 0 and 1 that neither writer uses are left out. Each has a price for
# what it makes, about the bytes of memory with the place on the stack; those of texts are in the pickle.
_CHEAP, _PLAIN_PRICE = 16, 72
_INSTRUCTIONS: Mapping[str, tuple[int, _Instruction]] = {
    **dict.fromkeys(("BININT", "BININT2", "LONG1", "LONG4", "BINFLOAT"), (_PLAIN_PRICE, _Machine.push)),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), (_PLAIN_PRICE, _Machine.push)),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), (_PLAIN_PRICE, _Machine.push)),
    "BYTEARRAY8": (_PLAIN_PRICE, lambda machine, value: machine.push(bytes(value))),
    "BININT1": (_CHEAP, _Machine.push),
    "NONE": (_CHEAP, _Machine.push),
    "NEWTRUE": (_CHEAP, lambda machine, _: machine.push(True)),
    "NEWFALSE": (_CHEAP, lambda machine, _: machine.push(False)),
    "EMPTY_TUPLE": (_CHEAP, lambda machine, _: machine.push(())),
    "EMPTY_LIST": (_PLAIN_PRICE, lambda machine, _: machine.push([])),
    "EMPTY_DICT": (200, lambda machine, _: machine.push({})),
    "EMPTY_SET": (240, lambda machine, _: machine.push(set())),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), (_PLAIN_PRICE, _Machine.text)),
    "PROTO": (_CHEAP, _Machine.nothing),
    "FRAME": (_PLAIN_PRICE, _Machine.nothing),
    "MARK": (_PLAIN_PRICE, _Machine.mark),
    "POP": (_CHEAP, _Machine.drop),
    "DUP": (_CHEAP, _Machine.twice),
    "TUPLE": (_PLAIN_PRICE, _Machine.tuple_since_mark),
    "TUPLE1": (_PLAIN_PRICE, lambda machine, _: machine.tuple_of(1)),
    "TUPLE2": (_PLAIN_PRICE, lambda machine, _: machine.tuple_of(2)),
    "TUPLE3": (_PLAIN_PRICE, lambda machine, _: machine.tuple_of(3)),
    "FROZENSET": (240, _Machine.frozen),
    "APPEND": (_CHEAP, _Machine.append),
    "APPENDS": (_CHEAP, _Machine.extend),
    "ADDITEMS": (_PLAIN_PRICE, _Machine.extend),
    "SETITEM": (120, _Machine.put),
    "SETITEMS": (_CHEAP, _Machine.put_all),
    "GLOBAL": (_PLAIN_PRICE, _Machine.name),
    "STACK_GLOBAL": (_PLAIN_PRICE, _Machine.name),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (200, _Machine.call)),
    "NEWOBJ_EX": (200, _Machine.call_with_keywords),
    "BUILD": (_PLAIN_PRICE, _Machine.build),
    "BINPERSID": (200, _Machine.persistent),
    "BINPUT": (_CHEAP, _Machine.remember),
    "LONG_BINPUT": (120, _Machine.remember),
    "MEMOIZE": (_CHEAP, _Machine.remember_next),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), (_CHEAP, _Machine.recall)),
}
_STEPS: Mapping[bytes, tuple[Callable[[io.BytesIO], Any] | None, int, _Instruction]] = {
    each.code.encode("latin1"): (_reader(each), *_INSTRUCTIONS[each.name])
    for each in pickletools.opcodes
    if each.name in _INSTRUCTIONS
}


# Written


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
