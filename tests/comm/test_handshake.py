"""Who is let in: ranks that prove themselves by the key, whatever strangers say meanwhile, and how slowly."""

import contextlib
import dataclasses
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from shardwise.comm.process import connections, frames, handshake, interfaces, reception
from shardwise.comm.process.connections import connect
from shardwise.comm.process.handshake import HELLO, Hello, key_of, proof, say_hello, secret_of_the_run, without_a_secret
from shardwise.errors import MismatchError, PlanError, ShardwiseError, VersionsWarning
from tests.comm.boards import in_threads, meeting

KEY = b"k" * 32
SECRET = b"a secret of 24 letters.."


def received(listener: socket.socket, awaited: Collection[int], *, strangers: int = 0) -> reception.Awaiting:
    """What a listener knows once it has found the ranks, or has counted so many strangers."""
    awaiting = reception.Awaiting([listener], awaited, KEY, 0)
    deadline = time.monotonic() + 60
    try:
        while awaiting.missing and not 0 < strangers <= awaiting.num_strangers:
            assert time.monotonic() < deadline, awaiting.in_words()
            awaiting.turn(0.05)
    finally:
        awaiting.close()
        for each in awaiting.found.values():
            each.close()
    return awaiting


def called_by(*bodies: Callable[[socket.socket], object], strangers: int = 0) -> tuple[object, list[object]]:
    """The reception of rank 0, or its error, while callers do that, and what they return or raise."""
    said: dict[int, object] = {}

    def call(number: int) -> None:
        with socket.create_connection(listener.getsockname(), timeout=60) as connection:
            try:
                said[number] = bodies[number](connection)
            except (OSError, ShardwiseError) as error:
                said[number] = error

    (listener,) = interfaces.listen(["127.0.0.1"], None)
    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(bodies))]
    found: object
    with listener:
        for thread in threads:
            thread.start()
        try:
            found = received(listener, {3}, strangers=strangers)
        except MismatchError as error:
            found = error
        for thread in threads:
            thread.join(60)
    return found, [said[number] for number in range(len(bodies))]


def answer_to(connection: socket.socket, *words: bytes) -> bytes:
    """All that comes back to these words, up to the end of the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        for each in words:
            connection.sendall(each)
        while more := connection.recv(4096):
            answer += more
    return answer


def test_both_sides_prove_that_they_have_the_key() -> None:
    found, (said,) = called_by(lambda connection: say_hello(connection, KEY, 3, 0))
    assert said is None
    assert isinstance(found, reception.Awaiting)
    assert list(found.found) == [3]
    # The caller asks for a proof as well: who only answers at the address is no rank.
    one, other = socket.socketpair()
    with one, other:
        theirs = Hello.own(3, 0)
        other.sendall(theirs.packed + b"x" * handshake.PROOF_BYTES)
        with pytest.raises(ConnectionError, match="did not prove that it is a rank of this run"):
            say_hello(one, KEY, 3, 0)


def test_strangers_learn_nothing_and_are_counted() -> None:
    mine = Hello.own(3, 0)
    heard: dict[str, bytes] = {}

    def replayed(connection: socket.socket) -> bytes:
        """The proof that rank 3 once gave to another nonce."""
        return answer_to(connection, mine.packed, proof(KEY, b"caller", mine, Hello.own(3, 0)))

    def reflected(connection: socket.socket) -> bytes:
        """What the called rank would say itself."""
        connection.sendall(mine.packed)
        theirs = Hello.parsed(connection.recv(HELLO.size, socket.MSG_WAITALL))
        heard["hello"] = theirs.packed
        return answer_to(connection, proof(KEY, b"called", mine, theirs))

    strangers = [
        lambda connection: answer_to(connection, b"GET / HTTP/1.1\r\n\r\n" * 8),
        lambda connection: answer_to(connection, Hello.own(3, 1).packed),  # rank 1 is meant
        lambda connection: answer_to(connection, mine.packed, bytes(handshake.PROOF_BYTES)),
        replayed,
        reflected,
    ]
    found, (*answers, _) = called_by(*strangers, lambda connection: connection.close(), strangers=6)
    assert isinstance(found, reception.Awaiting)
    told = "no connection in time from rank 3; 6 that called did not prove to be ranks of this run"
    assert found.in_words() == told
    assert [len(answer) for answer in answers if isinstance(answer, bytes)] == [0, 0, HELLO.size, HELLO.size, 0]
    assert KEY not in heard["hello"]


def test_another_format_is_told_to_both_ranks_with_both_versions() -> None:
    def of_another_version(connection: socket.socket) -> None:
        mine = Hello.own(3, 0)
        other = dataclasses.replace(mine, packed=mine.packed.replace(frames.WIRE.encode(), b"00000000"))
        connection.sendall(other.packed)
        theirs = Hello.parsed(connection.recv(HELLO.size, socket.MSG_WAITALL))
        other = Hello.parsed(other.packed)
        connection.sendall(proof(KEY, b"caller", other, theirs))
        assert connection.recv(handshake.PROOF_BYTES, socket.MSG_WAITALL) == proof(KEY, b"called", other, theirs)
        handshake.check_formats(other, theirs)

    found, (said,) = called_by(of_another_version)
    for error in (found, said):
        assert isinstance(error, MismatchError)
        assert f"  - rank 0: wire format {frames.WIRE} (shardwise {handshake.own_version()})" in str(error)
        assert f"  - rank 3: wire format 00000000 (shardwise {handshake.own_version()})" in str(error)


def test_callers_that_say_nothing_or_drip_hold_up_nobody_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a proof is that of the whole of it, and others are accepted meanwhile."""
    with contextlib.ExitStack() as stack:
        (listener,) = interfaces.listen(["127.0.0.1"], None)
        stack.enter_context(listener)

        def caller() -> socket.socket:
            return stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))

        silent, dripping, ours = caller(), caller(), caller()
        dripping.sendall(b"s")
        rank = threading.Thread(target=say_hello, args=(ours, KEY, 3, 0), daemon=True)
        looks: list[int] = []

        def look_up(missing: Collection[int]) -> None:
            looks.append(len(missing))
            dripping.sendall(b"h")
            if len(looks) == 2:
                rank.start()

        found = reception.accept([listener], {3}, KEY, 0, deadline=time.monotonic() + 60, look_up=look_up)
        rank.join(60)
        assert list(found) == [3]
        found[3].close()
        monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.3)
        late, half = caller(), caller()
        half.sendall(Hello.own(4, 0).packed)  # a hello without a proof is no more than none
        assert received(listener, {4}, strangers=2).num_strangers == 2
        with pytest.raises(TimeoutError, match="no connection in time from rank 4"):
            reception.accept([listener], {4}, KEY, 0, deadline=time.monotonic(), look_up=lambda missing: None)
        for stranger in (silent, dripping, late):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_a_flood_of_callers_costs_a_bounded_number_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MAX_CALLERS", 4)
    (listener,) = interfaces.listen(["127.0.0.1"], None)
    awaiting = reception.Awaiting([listener], {1}, KEY, 0)
    callers = []
    for _ in range(20):
        callers.append(socket.create_connection(listener.getsockname()))
        awaiting.turn(5)
    assert awaiting.num_strangers == 16
    awaiting.close()
    for each in (*callers, listener):
        each.close()


@pytest.mark.parametrize("with_proof", [True, False])
def test_a_stranger_on_a_unix_socket_can_hand_over_what_it_likes(with_proof: bool) -> None:
    """An empty file cannot be mapped, and mapping it is not tried for one who does not know the key."""
    with tempfile.TemporaryFile() as empty, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0shardwise-test-{os.getpid()}-{with_proof}")
        listener.listen()
        mapped: list[int] = []

        def intrude() -> None:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(60)
                stranger.connect(listener.getsockname())
                mine = Hello.own(1, 0)
                socket.send_fds(stranger, [mine.packed], [empty.fileno()] * 3)
                theirs = Hello.parsed(stranger.recv(HELLO.size, socket.MSG_WAITALL))
                said = proof(KEY if with_proof else bytes(32), b"caller", mine, theirs)
                socket.send_fds(stranger, [said], [empty.fileno()])
                assert stranger.recv(1) == b""
                mapped.append(1)

        thread = threading.Thread(target=intrude, daemon=True)
        thread.start()
        assert received(listener, {1}, strangers=1).missing == {1}
        thread.join(60)
        assert mapped == [1]


# The secret of a run.


def test_the_secret_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert secret_of_the_run({}) is None
    assert secret_of_the_run({"SHARDWISE_SECRET": SECRET.decode()}) == SECRET
    assert secret_of_the_run({"SHARDWISE_SECRET_FILE": str(file)}) == SECRET
    assert key_of(b"token", SECRET) not in (key_of(b"token", None), key_of(b"other", SECRET), SECRET)
    for environment, said in (
        ({"SHARDWISE_SECRET": "short"}, "SHARDWISE_SECRET has 5 characters, but a secret needs 16; make one with"),
        ({"SHARDWISE_SECRET": ""}, "has 0 characters"),
        ({"SHARDWISE_SECRET_FILE": str(tmp_path / "none")}, "cannot be read: SHARDWISE_SECRET_FILE="),
        ({"SHARDWISE_SECRET": "x" * 20, "SHARDWISE_SECRET_FILE": str(file)}, "unset one of them"),
    ):
        with pytest.raises(PlanError, match=said) as caught:
            secret_of_the_run(environment)
        assert "x" * 20 not in str(caught.value)


def test_a_run_on_several_hosts_says_that_it_has_no_secret() -> None:
    (line,) = without_a_secret(["node1", "node1", "node2"], {})
    assert line.startswith("ranks on 2 hosts prove themselves by what is in the store: who reads it can join.")
    assert without_a_secret(["node1", "node1"], {}) == []
    assert without_a_secret(["node1", "node2"], {"SHARDWISE_SECRET": SECRET.decode()}) == []


def connected_with(store: HashStore, *secrets: bytes | None) -> list[object]:
    """What each rank has or raises, through TCP."""

    def start(rank: int) -> object:
        mine = dataclasses.replace(meeting(rank, len(secrets), store), secret=secrets[rank])
        try:
            found = connect(mine, shared_memory=False)
        except ShardwiseError as error:
            return error
        found.close()
        return sorted(found.links)

    return in_threads([partial(start, rank) for rank in range(len(secrets))])


def test_with_a_secret_the_store_does_not_say_enough_to_get_in() -> None:
    store = HashStore()
    assert connected_with(store, SECRET, SECRET, SECRET) == [[1, 2], [0, 2], [0, 1]]
    token = PrefixStore("meeting", store).get("token/0")
    assert key_of(token, SECRET) != key_of(token, None)
    readable = b"".join(PrefixStore("meeting", store).get(f"{key}/all") for key in ("host", "address"))
    assert SECRET not in token + readable


def test_ranks_of_which_only_some_have_the_secret_say_so_at_once() -> None:
    for error in connected_with(HashStore(), SECRET, None, None):
        assert isinstance(error, MismatchError)
        name = socket.gethostname()
        assert str(error).startswith(f"rank 0 on {name} has a secret of the run, and rank 1 on {name} has none (2 of 3")


@pytest.mark.parametrize(
    ("own", "other"),
    [(0, "shardwise 9.9.9), torch"), (1, "torch 1.13"), (2, "torch 1.13"), (3, "torch 2.99+cu130")],
)
def test_other_versions_with_equal_frames_are_told(own: int, other: str) -> None:
    record = connections.packed_record(
        connections.HostRecord(kernel="k", name="node", way="", store=[], has_secret=False)
    )
    own_shardwise, own_torch = f"shardwise {handshake.own_version()}), torch", f"torch {torch.__version__}"
    changed = record.replace(own_shardwise if "9.9.9" in other else own_torch, other)
    assert changed != record
    records = [record, changed, record, changed]
    if own == 2:  # like rank 0, which tells it
        assert len(connections.compared_records(records, own)) == 4
        return
    with pytest.warns(VersionsWarning, match=r"2 of 4 ranks have other versions than rank 0") as told:
        assert len(connections.compared_records(records, own)) == 4
    words = str(told[0].message)
    assert [f"rank {rank}: " in words for rank in range(4)] == [True, True, False, True]
    assert other in words
    assert own_torch in words
