"""What is said between a keeper and its callers. Each message is a head, and for some the bytes of a file::

    caller                                                       keeper
    length, {"do": "write", "name": "a/b", "bytes": 5}   ---->   is there room?
                                                         <----   length, {}
    5 bytes                                              ---->   the file is there as a whole
                                                         <----   length, {}          or {"error": [17, "File exists"]}

Heads are JSON of bounded length. A caller over TCP proves first that it knows the key of the program, and the keeper
that it does: each answers a random challenge of the other by HMAC, so that the key is not sent.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

SECRET_BYTES = 32

_LENGTH = struct.Struct(">I")

MAX_REQUEST_BYTES = 64 << 10
"""Of a head that a keeper reads: a name, numbers and addresses."""

MAX_ANSWER_BYTES = 64 << 20
"""Of a head that a caller reads: the names of all files."""

_DIGEST = "sha256"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer on a Unix socket, as the kernel gives them."""


def send_head(connection: socket.socket, head: Mapping[str, Any]) -> None:
    """Send one head."""
    data = json.dumps(head).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_head(connection: socket.socket, *, max_bytes: int) -> dict[str, Any]:
    """One head. Raises ConnectionError where the peer ends, or sends something else."""
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length))
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > max_bytes:
        raise ConnectionError(f"a head of {num_bytes} bytes; at most {max_bytes} are read")
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    try:
        head = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a head that is no JSON") from error
    if not isinstance(head, dict):
        raise ConnectionError("a head that is no table")
    return head


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises ConnectionError where the peer ends before."""
    rest = buffer
    while rest.nbytes:
        if (num_bytes := connection.recv_into(rest)) == 0:
            raise ConnectionResetError("the other end has closed the connection")
        rest = rest[num_bytes:]


def prove_to_keeper(connection: socket.socket, key: bytes) -> None:
    """The caller's side of the proof. Raises ConnectionError where the keeper does not know the key."""
    own = secrets.token_bytes(SECRET_BYTES)
    challenge = _received(connection)
    connection.sendall(own + _answer(key, b"caller", challenge, own))
    if not hmac.compare_digest(_received(connection), _answer(key, b"keeper", own, challenge)):
        raise ConnectionError("another program than the keeper answers there")


def prove_to_caller(connection: socket.socket, key: bytes) -> None:
    """The keeper's side of the proof. Raises ConnectionError where the caller does not know the key."""
    own = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(own)
    challenge = _received(connection)
    if not hmac.compare_digest(_received(connection), _answer(key, b"caller", own, challenge)):
        raise ConnectionError("a caller does not know the key")
    connection.sendall(_answer(key, b"keeper", challenge, own))


def _answer(key: bytes, side: bytes, challenge: bytes, own: bytes) -> bytes:
    # The side is in it: an answer of one side is none of the other, so that no stranger can send it back.
    return hmac.digest(key, side + challenge + own, _DIGEST)


def _received(connection: socket.socket) -> bytes:
    data = bytearray(SECRET_BYTES)
    receive_into(connection, memoryview(data))
    return bytes(data)


def checked_peer(connection: socket.socket) -> None:
    """Raise ConnectionError where the other end of a Unix socket belongs to another user."""
    # Names of abstract sockets have no owner: any user of the host could listen there, or call.
    assert sys.platform == "linux"
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.getuid():
        with contextlib.suppress(OSError):
            connection.close()
        raise ConnectionError(f"the other end belongs to user {user}")
