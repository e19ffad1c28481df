"""Where a process listens: on the way to the store, or on the interface and the ports that the user names.

    nothing named                  the address from which packets to the store leave
    SHARDWISE_INTERFACE=ib0        the addresses of that interface; an address of this host serves as well
    SHARDWISE_PORTS=20000-20100    a free port of these; else the kernel chooses one

A host may believe that the way to its own name is the loopback address, as Debian writes into /etc/hosts. Other hosts
know better: the address under which they reach the store is one of the host that serves it.
"""

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import PeerError, PlanError

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: the IPv4 address of an interface."""


def own_addresses(store_host: str | None, interface: str | None) -> list[str]:
    """The addresses under which others may reach this process: those of the interface, else the way to the store.

    Raises PlanError where this host has no such interface.
    """
    if interface is not None:
        return addresses_of(interface)
    # A store without a host, such as a file, says nothing of the way: any address of this host may be it.
    return way_to(store_host) if store_host is not None else [*way_to("localhost"), *_resolved(socket.gethostname())]


def way_to(host: str) -> list[str]:
    """The addresses from which packets to a host leave; [] where it is unknown."""
    addresses = []
    for address in _resolved(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Connecting a datagram socket sends nothing; it only chooses the interface.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            addresses.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(addresses))


def seen_from_here(store_host: str | None) -> list[str]:
    """The addresses of the store, as this host knows them: only those that mean the same on all hosts."""
    return [] if store_host is None else [each for each in _resolved(store_host) if not is_loopback(each)]


def is_loopback(host: str) -> bool:
    """Whether the address means this host itself; a name that only leads to the loopback address does not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def addresses_of(interface: str) -> list[str]:
    """The addresses of an interface of this host, by its name or by one of its addresses."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(interface))]
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise PlanError(
            f"SHARDWISE_INTERFACE (train.interface) is {interface!r}, but this host, {socket.gethostname()}, has the "
            f"interfaces {', '.join(names)}; name one of them, or an address of this host"
        )
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != "20":  # an address of the link alone needs more than its digits
                found.append(str(ipaddress.IPv6Address(int(digits, 16))))
    if not found:
        raise PlanError(f"interface {interface!r} of this host, {socket.gethostname()}, has no address")
    return found


def listen(addresses: Sequence[str], ports: range | None, *, first: int = 0) -> list[socket.socket]:
    """Listeners at one port, each bound to one of the addresses, as far as they are this host's.

    first: where in the range to begin; ranks that begin elsewhere do not get in each other's way.
    Raises PeerError where there is no such address, or no port of the range is free.
    """
    numbers = [0] if ports is None else [*ports[first % len(ports) :], *ports[: first % len(ports)]]
    for number in numbers:
        listeners, problems = _listening(addresses, number)
        if listeners:
            return listeners
        if not all(error.errno == errno.EADDRINUSE for _, error in problems):
            break  # another port is no better
    else:
        if ports is not None and addresses:
            raise _refusal(
                f"no port from {ports[0]} to {ports[-1]} is free at {', '.join(addresses)} ({socket.gethostname()}); "
                "each rank of a host needs one: widen SHARDWISE_PORTS (train.ports)"
            )
    said = "; ".join(f"{address}: {error}" for address, error in problems) or "it has none"
    raise _refusal(f"this rank cannot listen at any of its addresses ({said})")


def listener_of_the_store(host: str, port: int) -> socket.socket | None:
    """A listener for a store that this process serves, where the others look for it; None if that cannot be known.

    The store takes one listener. A name may lead elsewhere from other hosts, where it has several addresses or means
    this host's loopback address here.
    """
    if host == "localhost":
        addresses = ["127.0.0.1"]
    else:
        addresses = _resolved(host)
        is_name = host not in addresses
        if len(addresses) != 1 or (is_name and is_loopback(addresses[0])):
            return None
    found, _ = _listening(addresses, port)  # taken: by an earlier store of this process, or the store will say by whom
    return found[0] if found else None


def _listening(addresses: Sequence[str], port: int) -> tuple[list[socket.socket], list[tuple[str, OSError]]]:
    listeners: list[socket.socket] = []
    problems = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            # One port for all addresses: a caller need not guess.
            number = listeners[0].getsockname()[1] if listeners else port
            listeners.append(socket.create_server((address, number), family=family, backlog=socket.SOMAXCONN))
        except OSError as error:
            problems.append((address, error))
    return listeners, problems


def _resolved(host: str) -> list[str]:
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))
    return []


def _refusal(text: str) -> PeerError:
    return PeerError(text, operation="start", purpose="connections")
