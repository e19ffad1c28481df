"""Where a process listens: where others look for it, in the ports of the user, and nowhere else."""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.comm.process import rendezvous
from shardwise.comm.process.interfaces import addresses_of, listen, listener_of_the_store, own_addresses
from shardwise.errors import PeerError, PlanError
from shardwise.launchers.environment import announced, listening_ports


def test_a_process_listens_on_the_way_to_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_addresses("127.0.0.1", None) == ["127.0.0.1"]  # whoever meets there is on this host
    assert set(own_addresses("localhost", None)) <= {"127.0.0.1", "::1"}
    assert own_addresses(None, None)  # a store in a file: any address may be the way
    monkeypatch.setattr(socket, "gethostname", lambda: "of another interface")
    assert own_addresses("127.0.0.1", None) == ["127.0.0.1"]
    assert own_addresses("no such host.invalid", None) == []


def test_an_interface_is_named_by_its_name_or_its_address() -> None:
    assert "127.0.0.1" in addresses_of("lo")
    assert own_addresses("192.0.2.1", "lo") == addresses_of("lo")
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses_of("::1") == ["::1"]
    with pytest.raises(PlanError, match=r"SHARDWISE_INTERFACE .* is 'ib9', but this host, .*, has the interfaces .*lo"):
        addresses_of("ib9")


@pytest.mark.parametrize(
    ("text", "ports"), [("20000-20100", (20000, 20100)), (" 7 ", (7, 7)), ("1 - 65535", (1, 65535)), (None, None)]
)
def test_a_range_of_ports_as_text(text: str | None, ports: tuple[int, int] | None) -> None:
    for found in (
        listening_ports({} if text is None else {"SHARDWISE_PORTS": text}),
        listening_ports({}, otherwise=text and text.strip()),
    ):
        assert (None if found is None else (found[0], found[-1])) == ports


@pytest.mark.parametrize("text", ["", "0-5", "9-8", "1-65536", "1,2"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no range of ports from 1 to 65535: 20000-20100"):
        listening_ports({}, otherwise=text)


def test_the_port_that_tasks_find_without_asking_is_in_the_range() -> None:
    task = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
    found = announced({**task, "SHARDWISE_PORTS": "20000-20003"})
    assert found is not None
    assert found.port in range(20000, 20004)


def free_ports(count: int) -> range:
    """So many ports in a row that are free now."""
    for start in range(30_000 + os.getpid() % 100 * 16, 32_700, 16):  # other tests look elsewhere at the same time
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(start, start + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(start, start + count)
    raise AssertionError("no ports are free")


def test_ranks_of_one_host_take_one_port_of_the_range_each_and_say_when_there_are_no_more() -> None:
    ports = free_ports(3)
    taken: list[socket.socket] = []
    for rank in (1, 1, 0):
        taken += listen(["127.0.0.1"], ports, first=rank)
    assert [each.getsockname()[1] - ports[0] for each in taken] == [1, 2, 0]
    with pytest.raises(
        PeerError, match=f"no port from {ports[0]} to {ports[-1]} is free at 127.0.0.1 .*SHARDWISE_PORTS"
    ):
        listen(["127.0.0.1"], ports)
    for each in taken:
        each.close()
    with pytest.raises(PeerError, match=r"cannot listen at any of its addresses \(192.0.2.7: "):
        listen(["192.0.2.7"], ports)
    with pytest.raises(PeerError, match="it has none"):
        listen([], None)


@pytest.mark.parametrize(
    ("found", "listens"),
    [
        (["192.0.2.1", "::2"], False),  # which of them do others use?
        (["127.0.1.1"], False),  # other hosts know another address of this name
        (["127.0.0.1"], True),
    ],
)
def test_a_store_listens_where_others_look_for_it(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[str], listens: bool
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in found])
    listener = listener_of_the_store("127.0.0.1" if listens else "node1", 0)
    assert (listener is not None) == listens
    if listener is not None:
        assert listener.getsockname()[0] == "127.0.0.1"
        listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_of_rank_0_is_served_to_the_ranks_of_its_world_and_listens_nowhere_else(host: str) -> None:
    (port,) = free_ports(1)
    stores: list[object] = []

    def join() -> None:
        stores.append(TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=20)))

    other = threading.Thread(target=join, daemon=True)
    other.start()
    store, rank, size = rendezvous.meet_at(f"tcp://{host}:{port}", 20, rank=0, size=2)
    other.join(20)
    again, _, _ = rendezvous.meet_at(f"tcp://{host}:{port}", 20, rank=0, size=2)  # a second channel of this process
    store.set("key", "value")
    assert [each.get("key") for each in (*stores, again)] == [b"value"] * 2  # type: ignore[attr-defined]
    assert (rank, size) == (0, 2)
    # Any other address of this host is not listened on.
    with socket.create_server(("127.0.0.2", port)):
        pass
