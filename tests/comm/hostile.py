"""Bytes that nobody should send: what a rank would say, changed in a few places."""

import random
from collections.abc import Sequence

WORDS = (
    *(b"1e999", b"-1e999", b"NaN", b"9" * 5000, b"1" + b"0" * 400, b"null", b"true", b"-", b"9", b"\\u0000"),
    *(b"[", b"]", b"{", b"{}", b'"', b"[" * 5000),
)
"""Of JSON, in places where they mean nothing."""


def mutated(content: bytes, chance: random.Random, *, changes: Sequence[int] = (1, 1, 2, 6)) -> bytes:
    """With bytes and bits changed, cut out, repeated, and words put in; changes: how many there may be."""
    changed = bytearray(content or b"x")
    for _ in range(chance.choice(changes)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = chance.choice([chance.randbytes(1), b"\0", b"\x7f", b"\x80", b"\xff"])
            case 1:
                changed[at : at + chance.randrange(4)] = chance.choice(WORDS)
            case 2:
                del changed[at : at + chance.randrange(1, 9)]
            case 3:
                changed[at:at] = changed[at : at + 8]
            case 4 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case _:
                changed = changed[:at]
    return bytes(changed)
