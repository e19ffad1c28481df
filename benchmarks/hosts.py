"""Hosts of one machine: network namespaces on a switch, with links that can be shaped, cut and restored.

Each host has its own network, host name and /etc/hosts, and shares the machine's files and processors. All belong to a
user namespace of their own, so no rights are needed but that to make one, and they end with the program that made
them. Two hosts at 1 Gbit/s::

    host alpha 198.18.0.1   eth0 --[ tbf 1 Gbit/s ]-->  port0 +--------+ port1  <--[ tbf 1 Gbit/s ]-- eth0   host beta
                                                              | switch |                                  198.18.0.2
    cut("alpha"): port0 goes down, as when the cable is pulled. No connection hears of it.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("alpha", "beta", "gamma")
INTERFACE = "eth0"
_NETWORK = "198.18.0"  # set aside for measurements: no network of the machine has it
_PREFIX_BITS = 24
_QUEUE_MILLISECONDS = 20
_LEAST_BURST_BYTES = 256 << 10
_BURSTS_PER_SECOND = 1000
"""A bucket of tokens has to last from one tick of the kernel's clock to the next."""

_JOINED = ("user", "net", "uts", "mnt")  # the user namespace first: it gives the right to enter the others
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    process: int
    """A process that is there; its namespaces are the host's."""

    def enter(self) -> None:
        """Make this process, which must have one thread only, a process of the host."""
        # All are opened first: once within, /proc shows another mount.
        with contextlib.ExitStack() as opened:
            namespaces = []
            for kind in _JOINED:
                namespace = os.open(f"/proc/{self.process}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, namespace)
                namespaces.append(namespace)
            folder = Path.cwd()
            for namespace in namespaces:
                if _LIBC.setns(namespace, 0):
                    number = ctypes.get_errno()
                    raise OSError(number, f"host {self.name} cannot be entered: {os.strerror(number)}")
        os.chdir(folder)

    def command(self, *words: str) -> list[str]:
        """A command line that runs there."""
        return ["nsenter", *_flags(self.process, "--uts", "--mount", f"--wd={Path.cwd()}"), "--", *words]


class Hosts:
    """All hosts and the switch between them."""

    def __init__(self, holders: Sequence[subprocess.Popen[str]], hosts: Sequence[Host]) -> None:
        self._switch, *self._holders = holders
        self.hosts = tuple(hosts)

    def __getitem__(self, at: int) -> Host:
        return self.hosts[at]

    def shape(self, megabits: float | None) -> None:
        """Let no host send more than so much per second; None takes every limit away."""
        for host in self.hosts:
            if megabits is None:
                # Not there is as good as taken away.
                with contextlib.suppress(subprocess.CalledProcessError):
                    _run(host.command("tc", "qdisc", "delete", "dev", INTERFACE, "root"))
                continue
            burst = max(_LEAST_BURST_BYTES, int(megabits * 1e6 / 8 / _BURSTS_PER_SECOND))
            shaped = f"root tbf rate {int(megabits * 1000)}kbit burst {burst} latency {_QUEUE_MILLISECONDS}ms"
            _run(host.command("tc", "qdisc", "replace", "dev", INTERFACE, *shaped.split()))

    def cut(self, at: int) -> None:
        """Pull the cable of a host."""
        self._set_port(at, "down")

    def restore(self, at: int) -> None:
        """Plug the cable in again."""
        self._set_port(at, "up")

    def _set_port(self, at: int, state: str) -> None:
        _run(["nsenter", *_flags(self._switch.pid), "--", "ip", "link", "set", f"port{at}", state])


def why_not() -> str:
    """Why hosts cannot be made here; empty where they can."""
    for tool in ("unshare", "nsenter", "ip", "tc", "mount"):
        if shutil.which(tool) is None:
            return f"hosts as network namespaces need {tool}, which is not installed"
    try:
        with hosts(2) as made:
            made.shape(1000)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"this system does not allow network namespaces with shaped links ({' '.join(said.split())})"
    return ""


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts on one switch."""
    found = [Host(name=name, address=f"{_NETWORK}.{at + 1}", process=0) for at, name in enumerate(NAMES[:count])]
    with contextlib.ExitStack() as ended, tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "hosts")
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in found)]
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
        switch = ended.enter_context(_holder(["unshare", "--user", "--map-root-user", "--net"], "true"))
        _batch(switch.pid, ["link add switch type bridge", "link set switch up"])
        holders = [switch]
        for at, host in enumerate(found):
            inside = ["nsenter", *_flags(switch.pid), "--", "unshare", "--net", "--uts", "--mount"]
            holder = ended.enter_context(_holder(inside, f"hostname {host.name} && mount --bind {table} /etc/hosts"))
            holders.append(holder)
            found[at] = Host(name=host.name, address=host.address, process=holder.pid)
            _batch(
                switch.pid,
                [
                    f"link add port{at} type veth peer name {INTERFACE} netns {holder.pid}",
                    f"link set port{at} master switch up",
                ],
            )
            _batch(
                holder.pid,
                [
                    "link set lo up",
                    f"address add {host.address}/{_PREFIX_BITS} dev {INTERFACE}",
                    f"link set {INTERFACE} up",
                ],
            )
        yield Hosts(holders, found)


@contextlib.contextmanager
def _holder(enter: Sequence[str], prepare: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does nothing in new namespaces, which end with it."""
    # `cat` ends with its input, and so with this program, however that ends.
    process = subprocess.Popen(
        [*enter, "sh", "-c", f"{prepare} && echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise OSError(process.stderr.read().strip() or "a namespace was refused")
        yield process
    finally:
        process.kill()
        process.communicate()


def _flags(process: int, *more: str) -> list[str]:
    return [f"--target={process}", "--user", "--preserve-credentials", "--net", *more]


def _batch(process: int, lines: Sequence[str]) -> None:
    """Commands of `ip` in the namespaces of a process."""
    _run(["nsenter", *_flags(process), "--", "ip", "-batch", "-"], "\n".join(lines))


def _run(command: Sequence[str], given: str = "") -> None:
    subprocess.run(command, input=given, check=True, capture_output=True, text=True, timeout=60)
