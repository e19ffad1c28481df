"""Pickles as inert values: what a pickle describes, without importing, calling or making anything that it names.

A pickle is a program for a stack machine (https://github.com/python/cpython/blob/main/Lib/pickletools.py describes its
instructions). This machine knows those that `pickle` and `torch.save` write. Where the program names a class or
function, it gets a `Named`. Where it calls one, a `MadeObject` that says what was called with what.

    program                stack behind it
    c torch, Size          Named(torch.Size)
    ( K 2, K 3, t          Named(torch.Size), (2, 3)
    R                      MadeObject(of=torch.Size, args=(2, 3))       pickle would call torch.Size here
    .                      the value

So the worst that a hostile pickle can do is to take time and memory in proportion to its bytes. Every instruction has
a price, about the bytes of what it makes, and a pickle that costs much more than its length is refused. Whole numbers
of more than 60 bits are no keys: Python puts chosen ones of them into one slot of a dict.
"""

import struct
from collections.abc import Callable
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
    machine = _Machine(data, allowed, start)
    try:
        return machine.run(), machine.at
    # A damaged program fails anywhere in the machine: instructions check nothing
    # themselves, and all it may be is caught here. RecursionError: keys in keys.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"it is no pickle, or a damaged one: {kind} at byte {machine.at:,} of it") from None


class _Machine:
    """The stack machine. Methods after `run` are instructions; they raise anything at all on a damaged program."""

    def __init__(self, data: bytes, allowed: Callable[[str, str], bool], start: int) -> None:
        self.at = start
        self._data = data
        self._allowed = allowed
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        # Writers number what they remember one after the other; a place far away costs an entry of the dict alone.
        self._memo: list[Any] = []
        self._far_memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute up to STOP."""
        data, size = self._data, len(self._data)
        left = _FREE_BYTES + _BYTES_PER_BYTE * size
        while True:
            if self.at >= size:
                raise CutShortError(f"it is no pickle, or a damaged one: it has no end in {size:,} bytes")
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self._stack.pop()
            step = _STEPS[code]
            if step is None:
                raise CheckpointError(
                    f"it has the instruction {code:#04x} at byte {self.at - 1:,}, which no checkpoint needs; nothing "
                    "of it was run"
                )
            instruction, price = step
            left -= price
            if left < 0:
                raise CheckpointError(
                    f"it would make more than {_BYTES_PER_BYTE} times its own {size:,} bytes; that is no checkpoint"
                )
            instruction(self)

    def _take(self, num_bytes: int) -> bytes:
        start, self.at = self.at, self.at + num_bytes
        # A slice past the end would be short without a word, and a number read from it wrong.
        if self.at > len(self._data):
            raise CutShortError(
                f"it is no pickle, or a damaged one: at byte {start:,} it has {num_bytes:,} bytes more, which is "
                f"beyond its {len(self._data):,}"
            )
        return self._data[start : self.at]

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _line(self) -> str:
        # No name is longer: a search through all that follows, at each of many names, would take long.
        end = self._data.find(b"\n", self.at, self.at + _MAX_LINE_BYTES)
        if end < 0:
            raise CutShortError(f"it is no pickle, or a damaged one: a name at byte {self.at:,} has no end")
        line = self._data[self.at : end].decode()
        self.at = end + 1
        return line

    def _since_mark(self) -> list[Any]:
        # Each mark begins a stack of its own, so what was pushed since is that stack: no search for the mark.
        items, self._stack = self._stack, self._below.pop()
        return items

    def skip(self, num_bytes: int) -> None:
        self._take(num_bytes)

    def frame(self) -> None:
        # Only looked at: a frame is a hint for readers of streams.
        num_bytes = self._number(8)
        if self.at + num_bytes > len(self._data):
            raise CutShortError(
                f"it is no pickle, or a damaged one: a frame of {num_bytes:,} bytes at byte {self.at:,} is beyond its "
                f"{len(self._data):,}"
            )

    def push(self, value: object) -> None:
        self._stack.append(value)

    def number(self, num_bytes: int) -> None:
        self._stack.append(self._number(num_bytes))

    def signed(self) -> None:
        self._stack.append(struct.unpack("<i", self._take(4))[0])

    def long(self, num_bytes: int) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(num_bytes)), "little", signed=True))

    def real(self) -> None:
        # Big-endian here, and nowhere else in a pickle.
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, num_bytes: int) -> None:
        self._stack.append(self._take(self._number(num_bytes)).decode("utf-8", "surrogatepass"))

    def raw(self, num_bytes: int) -> None:
        self._stack.append(self._take(self._number(num_bytes)))

    def drop(self) -> None:
        self._stack.pop()

    def twice(self) -> None:
        self._stack.append(self._stack[-1])

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def empty(self, kind: type) -> None:
        self._stack.append(kind())

    def tuple_since_mark(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def tuple_of(self, num_items: int) -> None:
        items = [self._stack.pop() for _ in range(num_items)]
        self._stack.append(tuple(reversed(items)))

    def frozen(self) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(_keys(items)))

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def extend(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        # A MadeObject collects what is put into it: it is not known what kind of thing it would have been.
        if isinstance(target, set):
            target.update(_keys(values))
        else:
            (target.elements if isinstance(target, MadeObject) else target).extend(values)

    def put(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._put([key, value])

    def put_all(self) -> None:
        self._put(self._since_mark())

    def _put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, MadeObject):
            target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, dict):
            target.update(zip(_keys(items[::2]), items[1::2], strict=True))
        else:
            raise TypeError

    def named(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError
        # Nothing would be run in any case. The refusal says early that this is no checkpoint, in place of odd values.
        if not self._allowed(module, name):
            raise CheckpointError(f"it names {module}.{name}, which does not belong there; nothing of it was run")
        self._stack.append(Named(module, name))

    def call(self) -> None:
        args, of = self._stack.pop(), self._stack.pop()
        self._stack.append(MadeObject(of, args))

    def call_with_keywords(self) -> None:
        keywords, args, of = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append(MadeObject(of, (args, keywords)))

    def build(self) -> None:
        state = self._stack.pop()
        # AttributeError on anything but a MadeObject: plain values take no state.
        self._stack[-1].state = state

    def persistent(self) -> None:
        self._stack.append(Persistent(self._stack.pop()))

    def remember(self, num_bytes: int) -> None:
        at = self._number(num_bytes)
        if at == len(self._memo):
            self._memo.append(self._stack[-1])
        elif at < len(self._memo):
            self._memo[at] = self._stack[-1]
        else:
            self._far_memo[at] = self._stack[-1]

    def remember_next(self) -> None:
        # As pickle numbers them: by how many there are.
        if self._far_memo:
            raise ValueError
        self._memo.append(self._stack[-1])

    def recall(self, num_bytes: int) -> None:
        at = self._number(num_bytes)
        self._stack.append(self._memo[at] if at < len(self._memo) else self._far_memo[at])


_STOP = ord(".")

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


_Instruction = Callable[[_Machine], None]


def _table() -> dict[int, _Instruction]:
    machine = _Machine
    # The codes are those of pickletools; letters of protocol 0 and 1 that neither writer uses are left out.
    constants = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
    table: dict[int, _Instruction] = {
        0x28: machine.mark,
        0x30: machine.drop,
        0x32: machine.twice,
        0x47: machine.real,
        0x4A: machine.signed,
        0x51: machine.persistent,
        0x52: machine.call,
        0x61: machine.append,
        0x62: machine.build,
        0x63: machine.named,
        0x65: machine.extend,
        0x73: machine.put,
        0x74: machine.tuple_since_mark,
        0x75: machine.put_all,
        0x81: machine.call,
        0x90: machine.extend,
        0x91: machine.frozen,
        0x92: machine.call_with_keywords,
        0x93: machine.named_on_stack,
        0x94: machine.remember_next,
        0x95: machine.frame,
    }
    for code, value in constants.items():
        table[code] = _with(machine.push, value)
    for code, kind in {0x5D: list, 0x7D: dict, 0x8F: set}.items():
        table[code] = _with(machine.empty, kind)
    sized: list[tuple[Callable[[_Machine, int], None], dict[int, int]]] = [
        # The number of the protocol says nothing about the value.
        (machine.skip, {0x80: 1}),
        (machine.number, {0x4B: 1, 0x4D: 2}),
        (machine.long, {0x8A: 1, 0x8B: 4}),
        # T and U are texts of Python 2, in whatever encoding: torch takes them as UTF-8.
        (machine.text, {0x54: 4, 0x55: 1, 0x58: 4, 0x8C: 1, 0x8D: 8}),
        (machine.raw, {0x42: 4, 0x43: 1, 0x8E: 8, 0x96: 8}),
        (machine.tuple_of, {0x85: 1, 0x86: 2, 0x87: 3}),
        (machine.remember, {0x71: 1, 0x72: 4}),
        (machine.recall, {0x68: 1, 0x6A: 4}),
    ]
    for instruction, sizes in sized:
        for code, size in sizes.items():
            table[code] = _with(instruction, size)
    return table


def _with(instruction: Callable[[_Machine, Any], None], argument: object) -> _Instruction:
    return lambda machine: instruction(machine, argument)


_INSTRUCTIONS = _table()

# A price for what each makes, about the bytes of memory with the place on the stack; those of texts are in the pickle.
_PRICES = (
    dict.fromkeys(_INSTRUCTIONS, 72)
    | dict.fromkeys((0x4E, 0x88, 0x89, 0x29, 0x30, 0x32, 0x4B, 0x61, 0x65, 0x68, 0x6A, 0x71, 0x75, 0x80, 0x94), 16)
    | dict.fromkeys((0x72, 0x73), 120)
    | dict.fromkeys((0x51, 0x52, 0x7D, 0x81, 0x92), 200)
    | dict.fromkeys((0x8F, 0x91), 240)
)
_STEPS = [(_INSTRUCTIONS[code], _PRICES[code]) if code in _INSTRUCTIONS else None for code in range(256)]
