"""This host among those of a program: how to tell it from others, and where something of ours listens on it."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from shardwise.comm.process.connections import host_identity
from shardwise.comm.process.interfaces import is_loopback, own_addresses, seen_from_here
from shardwise.comm.process.rendezvous import store_host_here
from shardwise.launchers.environment import listening_ports


@dataclass(frozen=True, slots=True)
class OwnHost:
    """What a rank knows of its host."""

    kernel: str
    """Equal for ranks that can share a Unix socket."""
    name: str
    store: tuple[str, ...]
    """Addresses of the host that serves the store, as this one knows them."""

    @classmethod
    def here(cls) -> "OwnHost":
        """This one. Raises OSError where the system does not say which one it is."""
        return cls(host_identity(), socket.gethostname(), tuple(seen_from_here(store_host_here())))

    def pack(self) -> str:
        """As text."""
        return json.dumps(astuple(self))

    @classmethod
    def unpack(cls, text: str) -> "OwnHost":
        """From the text of `pack`. Raises ValueError or TypeError for any other text."""
        kernel, name, store = json.loads(text)
        if not all(isinstance(each, str) for each in (kernel, name, *store)):
            raise TypeError("no host")
        return cls(kernel, name, tuple(store))

    def listens_at(
        self, others: Sequence["OwnHost"], interface: str | None, ports: str | None
    ) -> tuple[list[str], range | None]:
        """The addresses and the ports to listen on, as ranks choose them. Raises PlanError for what cannot be."""
        interface = os.environ.get("SHARDWISE_INTERFACE") or interface
        addresses = own_addresses(store_host_here(), interface)
        if interface is None and all(map(is_loopback, addresses)) and len({each.name for each in others}) > 1:
            # The store is on this host, under a name that leads to the loopback address here, and elsewhere does not.
            addresses += list(dict.fromkeys(address for each in others for address in each.store))
        return addresses, listening_ports(os.environ, otherwise=ports)
