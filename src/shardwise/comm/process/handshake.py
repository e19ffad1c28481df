"""How two processes prove to each other that they are ranks of one run, before a frame passes between them.

    rank 3 calls rank 1                                        rank 1
    hello: format, version, 3, 1, a nonce                -->   is rank 1 meant?
    hello: format, version, 3, 1, another nonce          <--
    HMAC of "caller" and both hellos                     -->   is it right? else the connection is closed
    HMAC of "called" and both hellos                     <--
    is it right? are both formats the same?                    are both formats the same?

The key never travels. Each side has chosen a nonce, so nothing that was said before proves anything, and the words
"caller" and "called" keep a proof from being sent back. The caller proves first: one that is not of us gets the version
and a random number, and nothing that depends on the key. On one host the proof comes with a descriptor of shared memory
that holds it too, by which both know that they can read each other's memory.

The key is made of what rank 0 publishes for this channel, and of the secret of the run (`secret_of_the_run`). Without
such a secret, who reads the store knows the key.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from shardwise.comm.process.frames import HELLO_FORMAT, WIRE
from shardwise.comm.process.shared_memory import map_segment
from shardwise.errors import MismatchError, PlanError

HELLO_SECONDS = 5.0
"""How long a caller may take to prove itself, and the one that is called to answer."""

PROOF_BYTES = 32
SHORTEST_SECRET_BYTES = 16

HELLO = struct.Struct(HELLO_FORMAT)
"""Mark, wire format, version, rank that calls, rank that is called, nonce. An address may lead to another rank."""

_MARK = b"shardwis"
_VERSION_BYTES, _NONCE_BYTES = 32, 32

_SECRET, _SECRET_FILE = "SHARDWISE_SECRET", "SHARDWISE_SECRET_FILE"


def secret_of_the_run(environment: Mapping[str, str]) -> bytes | None:
    """The secret that the launcher gives to all ranks, or None; raises PlanError where it can be no secret."""
    text, file = environment.get(_SECRET), environment.get(_SECRET_FILE)
    if text is not None and file is not None:
        raise PlanError(f"both {_SECRET} and {_SECRET_FILE} are set; unset one of them")
    if text is not None:
        secret, name = text.encode(), _SECRET
    elif file is not None:
        name = f"{_SECRET_FILE}={file}"
        try:
            secret = Path(file).read_bytes()
        except OSError as error:
            raise PlanError(f"the secret of the run cannot be read: {name}: {error.strerror}") from None
    else:
        return None
    secret = secret.strip()
    if len(secret) < SHORTEST_SECRET_BYTES:
        raise PlanError(
            f"{name} has {len(secret)} characters, but a secret needs {SHORTEST_SECRET_BYTES}; make one with: "
            "openssl rand -hex 32"
        )
    return secret


def without_a_secret(hosts: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A line for a run on several hosts whose ranks can only prove that they read the store."""
    if len(set(hosts)) < 2 or secret_of_the_run(environment) is not None:
        return []
    return [
        f"ranks on {len(set(hosts))} hosts prove themselves by what is in the store: who reads it can join. "
        f"{_SECRET_FILE} names the file of a secret"
    ]


def key_of(token: bytes, secret: bytes | None) -> bytes:
    """The key of one channel, from what rank 0 publishes for it and from the secret of the run."""
    return hmac.digest(secret or b"", b"shardwise channel " + token, hashlib.sha256)


@cache
def own_version() -> str:
    """Found once: to parse what pip has installed takes longer than to meet."""
    try:
        return metadata.version("shardwise")
    except metadata.PackageNotFoundError:
        return "that is not installed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What one side says first."""

    wire: str
    version: str
    caller: int
    called: int
    packed: bytes

    @classmethod
    def own(cls, caller: int, called: int) -> "Hello":
        """The words of this process, with a nonce that is never used again."""
        version = own_version().encode()[:_VERSION_BYTES]
        packed = HELLO.pack(_MARK, WIRE.encode(), version, caller, called, secrets.token_bytes(_NONCE_BYTES))
        return cls.parsed(packed)

    @classmethod
    def parsed(cls, packed: bytes) -> "Hello":
        """Raises ValueError where it is no hello."""
        mark, wire, version, caller, called, _ = HELLO.unpack(packed)
        if mark != _MARK:
            raise ValueError("no hello")
        words = [each.rstrip(b"\0").decode("ascii") for each in (wire, version)]
        if not all(each.isprintable() for each in words):
            raise ValueError("no hello")
        return cls(wire=words[0], version=words[1], caller=caller, called=called, packed=packed)


def proof(key: bytes, role: bytes, caller: Hello, called: Hello) -> bytes:
    """What only one who has the key can say in answer to these two hellos."""
    return hmac.digest(key, role + caller.packed + called.packed, hashlib.sha256)


def check_formats(caller: Hello, called: Hello) -> None:
    """Raise MismatchError where two ranks that have proved themselves do not speak alike."""
    if caller.wire == called.wire:
        return
    lines = [
        f"  - rank {rank}: {format_and_version(each.wire, each.version)}"
        for rank, each in sorted([(caller.caller, caller), (caller.called, called)], key=lambda pair: pair[0])
    ]
    raise MismatchError("\n".join([OTHER_FORMAT, *lines]))


OTHER_FORMAT = "ranks run versions of shardwise that cannot talk to each other; install the same one on all hosts:"


def format_and_version(wire: str = WIRE, version: str | None = None) -> str:
    """As messages and records name them."""
    return f"wire format {wire} (shardwise {own_version() if version is None else version})"


def say_hello(connection: socket.socket, key: bytes, caller: int, called: int) -> None:
    """Be the caller. Raises OSError unless the other side proves in time that it is the rank that is called.

    Raises MismatchError where it is, and speaks another format.
    """
    deadline = time.monotonic() + HELLO_SECONDS
    connection.settimeout(HELLO_SECONDS)
    local = connection.family == socket.AF_UNIX
    if not local:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = Hello.own(caller, called)
    connection.sendall(mine.packed)
    try:
        theirs = Hello.parsed(_received(connection, HELLO.size, deadline, "it did not answer"))
    except ValueError:
        raise ConnectionError("it did not answer as a rank does") from None
    if (theirs.caller, theirs.called) != (caller, called):
        raise ConnectionError(f"it is not rank {called}")
    my_proof = proof(key, b"caller", mine, theirs)
    if local:
        descriptor = os.memfd_create("shardwise-hello")
        try:
            os.write(descriptor, my_proof)
            socket.send_fds(connection, [my_proof], [descriptor])
        finally:
            os.close(descriptor)
    else:
        connection.sendall(my_proof)
    # The other side takes a proof within its own limit, which began before this one. So this rank is still there when
    # it is taken in: the end of a connection would pass for its death.
    deadline = time.monotonic() + 2 * HELLO_SECONDS
    turned_away = f"it turned this rank away: is {_SECRET} or {_SECRET_FILE} the same on all ranks?"
    answer = _received(connection, PROOF_BYTES, deadline, turned_away)
    if not hmac.compare_digest(answer, proof(key, b"called", mine, theirs)):
        raise ConnectionError("it did not prove that it is a rank of this run")
    check_formats(mine, theirs)


def _received(connection: socket.socket, num_bytes: int, deadline: float, otherwise: str) -> bytes:
    # The timeout of a socket counts anew with each byte; the deadline is for the whole.
    content = b""
    while len(content) < num_bytes:
        if (left_seconds := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the hello was not answered in time")
        connection.settimeout(left_seconds)
        more = connection.recv(num_bytes - len(content))
        if not more:
            raise ConnectionError(otherwise)
        content += more
    return content


class Caller:
    """A connection whose other side has not proved yet that it is one of us."""

    def __init__(
        self, connection: socket.socket, key: bytes, own_rank: int, admits: Callable[[int], bool] = lambda rank: True
    ) -> None:
        """admits: whether a rank that has proved itself gets an answer, after which it takes itself for connected."""
        connection.setblocking(False)
        self.connection = connection
        self.is_of_us = False
        """It has proved itself."""
        self.deadline = time.monotonic() + HELLO_SECONDS
        self.hellos: tuple[Hello, Hello] | None = None
        """Of the caller and of this rank, once both are said."""
        self._key = key
        self._own_rank = own_rank
        self._admits = admits
        self._said = b""
        self._descriptors: list[int] = []

    def hear(self) -> int | None:
        """Take in what has come; the rank, once it has proved itself.

        Raises OSError or ValueError for one that is not of us, hangs up, or wants another rank.
        """
        awaited = HELLO.size if self.hellos is None else PROOF_BYTES
        if time.monotonic() > self.deadline:
            raise TimeoutError("too late")
        with contextlib.suppress(BlockingIOError):
            self._said += self._read(awaited - len(self._said))
        if len(self._said) < awaited:
            return None
        said, self._said = self._said, b""
        if self.hellos is None:
            theirs = Hello.parsed(said)
            if theirs.called != self._own_rank:
                raise ValueError("another rank is meant")
            mine = Hello.own(theirs.caller, theirs.called)
            self._send(mine.packed)
            self.hellos = theirs, mine
            return None
        # In constant time: how long a comparison takes must not say how much of a guess was right.
        if not hmac.compare_digest(said, proof(self._key, b"caller", *self.hellos)):
            raise ValueError("no proof")
        if self.connection.family == socket.AF_UNIX:
            # The memory behind a descriptor is touched only for one who has proved itself.
            shared = map_segment(self._descriptors.pop(), PROOF_BYTES) if self._descriptors else None
            if shared is None or not hmac.compare_digest(shared.numpy().tobytes(), said):
                raise ValueError("no memory in common")
        else:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_of_us = True
        if not self._admits(self.hellos[0].caller):
            raise ConnectionError("this rank is not awaited")
        self._send(proof(self._key, b"called", *self.hellos))
        return self.hellos[0].caller

    def _read(self, num_bytes: int) -> bytes:
        if self.connection.family == socket.AF_UNIX:
            more, descriptors, _, _ = socket.recv_fds(self.connection, num_bytes, 1)
            self._descriptors += descriptors
            while len(self._descriptors) > 1:  # one is sent
                os.close(self._descriptors.pop(0))
        else:
            more = self.connection.recv(num_bytes)
        if not more:
            raise ConnectionError("the caller hung up")
        return more

    def _send(self, content: bytes) -> None:
        # A connection that has sent nothing else has room for it.
        if self.connection.send(content) < len(content):
            raise ConnectionError("no room for an answer")

    def release(self) -> None:
        """Close what came along and was not used."""
        while self._descriptors:
            os.close(self._descriptors.pop())
