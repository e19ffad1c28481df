"""Programs in processes forked from one interpreter, which has imported torch: `python -m tests.forks.interpreter`.

A started interpreter imports for five seconds before it does anything. Here only that start is missing: processes,
signals, groups, pipes and exit codes are the kernel's own, and each process ends as an interpreter ends.

    tests          ask for a program      -> the interpreter forks a keeper, which forks the program and notes its end
    program        `--nproc 2`            -> has forked two idle ranks before it did anything
    its launcher   Popen(rank 0), (rank 1)-> gives each idle rank its arguments, environment and pipes

Its argument is the descriptor of the socket at which it listens. Each process of tests asks on a connection of its own.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

READY = b"ready"
"""Its first word on a connection."""

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a forked process needs to become a program: `-c TEXT ...`, or the arguments of a `shardwise`."""

    arguments: Sequence[str]
    environment: dict[str, str]
    folder: str

    def send(self, to: socket.socket, descriptors: Sequence[int]) -> None:
        socket.send_fds(to, [json.dumps(asdict(self)).encode()], descriptors)

    @staticmethod
    def received(at: socket.socket) -> "tuple[Order, list[int]] | None":
        """The next order, and the descriptors that came with it; None where no more will come."""
        try:
            text, descriptors, _, _ = socket.recv_fds(at, _MOST_BYTES, 4)
        except ConnectionError:  # it left before it read
            return None
        return (Order(**json.loads(text)), descriptors) if text else None

    def take_up(self, standard: Sequence[int]) -> None:
        """Be a process that was started with this order and with these standard streams."""
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        for descriptor in set(standard):
            os.close(descriptor)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            by_line = name == "stderr" or os.isatty(number)
            mode = "w" if number else "r"
            stream = open(number, mode, buffering=1 if by_line else -1, closefd=False)  # noqa: SIM115, until the end
            setattr(sys, name, stream)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[0] = self.folder
        sys.argv = ["shardwise", *self.arguments]


class _IdleRank:
    """A forked process that will be a rank of the launcher which has forked it, and which sees it as a Popen."""

    def __init__(self, idle: "list[_IdleRank]") -> None:
        ours, self._orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        self.returncode: int | None = None
        self.stdout: Any = None
        self._ending = threading.Lock()
        if self.pid:
            ours.close()
            return
        for other in [*idle, self]:  # so that the end of the launcher closes them
            other._orders.close()
        received = Order.received(ours)
        if received is None:
            os._exit(0)
        order, standard = received
        order.take_up(standard)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the launcher: the command in front of a rank does so
        ours.send(b"started")
        ours.close()

    def start(self, arguments: Sequence[str], environment: dict[str, str], standard: Sequence[int]) -> None:
        Order(arguments=arguments, environment=environment, folder=os.getcwd()).send(self._orders, standard)
        assert self._orders.recv(16) == b"started"
        self._orders.close()

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._ending:
            if self.returncode is None:
                os.kill(self.pid, number)

    def dismiss(self) -> None:
        self._orders.close()
        self.wait()


def _dismiss(idle: list[_IdleRank]) -> None:
    """Those that the launcher did not need end with it."""
    for rank in idle:
        rank.dismiss()


def _starts_from(idle: list[_IdleRank]) -> Callable[..., _IdleRank]:
    """What the launcher calls in the place of `subprocess.Popen`."""

    def started(
        command: Sequence[str], *, env: dict[str, str], stdin: int | None, stdout: int | None, **_: Any
    ) -> _IdleRank:
        # In front of the rank's own command stands one that lets it die with the launcher.
        own = command[command.index("-m") - 1 :]
        assert list(own[:3]) == [sys.executable, "-m", "shardwise.cli"]
        rank = idle.pop(0)
        if stdout is None:
            rank.start(own[3:], env, (0, 1, 2))
            return rank
        read, write = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        rank.start(own[3:], env, (nothing, write, write))
        os.close(write)
        os.close(nothing)
        rank.stdout = open(read, errors="replace")  # noqa: SIM115, the launcher closes it
        return rank

    return started


def _forked_for(listener: socket.socket) -> Order:
    """Fork for every request, until nobody is left who may ask; returns in processes that have one to carry out."""
    askers: list[socket.socket] = []
    num_keepers = 0
    while True:
        for ready in select.select([listener, *askers], [], [])[0]:
            if ready is listener:
                askers.append(listener.accept()[0])
                with contextlib.suppress(ConnectionError):
                    askers[-1].send(READY)
            elif (received := Order.received(ready)) is None:
                askers.remove(ready)
                ready.close()
            else:
                order, (*standard, end) = received
                if not os.fork():
                    for each in (listener, *askers):
                        each.close()
                    return _kept(order, standard, end)
                num_keepers += 1
                for descriptor in (*standard, end):
                    os.close(descriptor)
        while num_keepers and os.waitpid(-1, os.WNOHANG)[0]:
            num_keepers -= 1
        if not askers:
            break
    listener.close()
    for _ in range(num_keepers):
        os.wait()
    os._exit(0)


def _kept(order: Order, standard: Sequence[int], end: int) -> Order:
    """Returns in the process of the command; this one notes its id and its end."""
    child = os.fork()
    if not child:
        os.close(end)
        os.setsid()
        order.take_up(standard)
        return order
    for descriptor in standard:
        os.close(descriptor)
    os.write(end, f"{child} ".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(end, str(code).encode())
    os._exit(0)


def main(listener: socket.socket) -> None:
    gc.disable()  # all that is imported stays
    importlib.import_module("tests.forks.preloaded")
    gc.enable()
    order = _forked_for(listener)
    if order.arguments[0] == "-c":
        _, text, *arguments = order.arguments
        sys.argv = ["-c", *arguments]
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        return
    if "--nproc" in order.arguments:
        _fork_ranks(int(order.arguments[order.arguments.index("--nproc") + 1]))
    from shardwise.cli import main as shardwise

    shardwise(prog_name="shardwise")


def _fork_ranks(num_ranks: int) -> None:
    """Returns in every process: those that are ranks have their order then."""
    idle: list[_IdleRank] = []
    for _ in range(num_ranks):
        rank = _IdleRank(idle)
        if not rank.pid:
            return
        idle.append(rank)
    launch: Any = importlib.import_module("shardwise.launchers.local")
    popen = SimpleNamespace(PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    launch.subprocess = SimpleNamespace(**vars(popen), Popen=_starts_from(idle))
    atexit.register(_dismiss, idle)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell of the tests ignores it
    main(socket.socket(fileno=int(sys.argv[1])))
