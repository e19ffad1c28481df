"""Digests: short bytes that are equal on all hosts where texts or elements are, and else almost surely are not.

They find damage and what ranks have in different ways. Nothing is protected by them: for that `handshake.py` has keys.
"""

import hashlib

import torch
import xxhash

from shardwise.comm.local_tensors import bytes_of


def checksum(data: bytes | memoryview) -> bytes:
    """Eight bytes, as saves have them for blocks and files: xxh3_64 in its canonical form (big-endian)."""
    return bytes(xxhash.xxh3_64_digest(data))


def digest_of(data: bytes) -> bytes:
    """Sixteen bytes, for texts that stand for themselves where their digests are equal: xxh3_128."""
    return bytes(xxhash.xxh3_128_digest(data))


def number_of(text: str) -> int:
    """A number of 64 bits for a text, by which messages name it: of blake2b. Python's `hash` differs by process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def digest_of_values(tensor: torch.Tensor) -> str:
    """The checksum of the row-major bytes of a tensor, in hexadecimal digits."""
    # Of the bytes, not of the values: NaNs and the sign of zero count.
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu().view(torch.uint8)
    return checksum(bytes_of(flat)).hex()
