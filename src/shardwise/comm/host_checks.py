"""What will work on this host and what will not: versions, devices, memory, files, sockets, and two ranks that try.

Each check is a function that gives findings; none raises, and only the trial starts processes. Run as a program, this
module is a rank of the trial.
"""

import os
import platform
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import torch

from shardwise.comm.device.kinds import backend_of
from shardwise.comm.process.world import processes
from shardwise.errors import PlanError, ShardwiseError, in_words
from shardwise.launchers.environment import place_of
from shardwise.launchers.local import launch

_REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)(?:;.*extra == ['\"](\w+))?")

_FILES_PER_RANK = 64
"""Open files that a rank needs in addition to its connections."""

_ANSWER_SECONDS = 3.0
"""How long the host of rank 0 may take to answer."""

_USES = {
    "transformers": "models by class name in configurations",
    "tokenizers": "tokenizers in configurations",
    "matplotlib": "loss curves and timelines as pictures",
    "tensorboard": "metrics for TensorBoard",
    "obstore": "checkpoints at addresses such as s3://, gs:// and az://",
    "fsspec": "checkpoints at all other addresses",
}
"""What the packages of our extras are for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    verdict: Literal["ok", "note", "wrong"]
    """ok: works. note: works with a limit, or is not there. wrong: something will fail."""
    subject: str
    text: str
    """What holds, and for a note or a fault what to do."""


def examine(environment: Mapping[str, str], *, folder: Path | None = None, trial: bool = True) -> Iterator[Finding]:
    """Look at this host; findings come one by one.

    folder: where saves are to go; None: the working directory. trial: start two ranks that exchange 64 MiB.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _versions),
        ("launcher", lambda: _launcher(environment)),
        ("devices", _devices),
        ("cores", lambda: _cores(environment)),
        ("memory", _memory),
        ("open files", _open_files),
        ("shared memory", _shared_memory),
        ("network", _network),
        ("rank 0", lambda: _rank_0(environment)),
        ("saves", lambda: _saves(folder or Path())),
    ]
    if trial:
        checks.append(("two ranks", _two_ranks))
    for subject, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that fails is itself a finding, and the others go on
            yield Finding("wrong", subject, f"could not be looked at: {in_words(error)}")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    yield Finding("ok", "shardwise", metadata.version("shardwise"))
    # The metadata of the package has what pyproject.toml asks for: "torch<2.14,>=2.11", "fsspec>=2024.9; extra == ...".
    for requirement in metadata.requires("shardwise") or ():
        name, bounds, extra = _REQUIREMENT.match(requirement).groups()  # type: ignore[union-attr]
        if name == "torch":
            fits = _fits(torch.__version__, bounds)
            yield Finding(
                "ok" if fits else "wrong", name, torch.__version__ + ("" if fits else f"; needed is {bounds}")
            )
        elif extra in ("train", "tensorboard", "object"):
            if find_spec(name) is None:
                use = _USES.get(name, "an extra")
                yield Finding("note", name, f"not installed; it is for {use}: pip install 'shardwise[{extra}]'")
            else:
                yield Finding("ok", name, _version_of(name))


def _fits(version: str, bounds: str) -> bool:
    """Whether the first two numbers of a version are within `>=` and `<`."""
    have = _numbers(version)
    least, beyond = (re.search(rf"{sign}([0-9.]+)", bounds) for sign in (">=", "<"))
    return (least is None or have >= _numbers(least[1])) and (beyond is None or have < _numbers(beyond[1]))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"


def _launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        place = place_of(environment)
    except ShardwiseError as error:
        yield Finding("wrong", "launcher", str(error))
        return
    if place is None:
        yield Finding("ok", "launcher", "none: a program runs as one process; --nproc N or torchrun starts several")
    else:
        yield Finding("ok", "launcher", f"this is rank {place[0]} of {place[1]}")


def _devices() -> Iterator[Finding]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        yield Finding("note", "devices", "torch sees no accelerator: ranks compute on CPUs")
        return
    module = torch.get_device_module(accelerator)
    name_of = getattr(module, "get_device_name", None)
    for number in range(torch.accelerator.device_count()):
        name = "" if name_of is None else f", {name_of(number)}"
        yield Finding("ok", "devices", f"{accelerator.type}:{number}{name}")
    try:
        backend = backend_of(accelerator)
    except PlanError as error:
        yield Finding("wrong", "devices", str(error))
    else:
        yield Finding("ok", "devices", f"tensors travel between devices of type {accelerator.type} over {backend}")
    yield Finding("note", "devices", f"shardwise has not been run on {accelerator.type}")


def _cores(environment: Mapping[str, str]) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    yield Finding("ok", "cores", f"{usable} usable, {threads} threads of torch per process")
    if threads > 1 and "OMP_NUM_THREADS" not in environment:
        yield Finding(
            "note", "cores", f"each of n ranks starts {threads} threads; set OMP_NUM_THREADS to cores / ranks of a host"
        )


def _memory() -> Iterator[Finding]:
    if not Path("/proc/meminfo").exists():
        yield Finding("note", "memory", "this system does not say how much is free (/proc/meminfo)")
        return
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(known["MemAvailable"].split()[0]) << 10
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    bound = "" if text == "max" else f"; the container may use {int(text) / 2**30:.1f} GiB"
    yield Finding("ok", "memory", f"{free / 2**30:.1f} GiB available{bound}")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = soft - _FILES_PER_RANK
    verdict: Literal["ok", "note"] = "ok" if ranks >= 1024 else "note"
    way_out = "" if verdict == "ok" else f"; ulimit -n {hard} allows more"
    if verdict == "note" and soft == hard:
        way_out = "; only an administrator can raise this limit"
    yield Finding(verdict, "open files", f"{soft} per process: enough to connect to {max(0, ranks)} ranks{way_out}")


def _shared_memory() -> Iterator[Finding]:
    if not hasattr(os, "memfd_create"):
        yield Finding("note", "shared memory", "this system has no memfd: ranks of one host exchange over TCP")
        return
    descriptor = os.memfd_create("shardwise-doctor")
    try:
        os.truncate(descriptor, 1 << 20)
        namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")}
    except FileNotFoundError:
        yield Finding("note", "shared memory", "without /proc ranks do not know each other's host, and use TCP")
        return
    finally:
        os.close(descriptor)
    yield Finding(
        "ok",
        "shared memory",
        f"anonymous files work. Ranks share memory when they share these namespaces: {', '.join(namespaces.values())}. "
        "Containers of one host that do not are connected by TCP",
    )


def _network() -> Iterator[Finding]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
    yield Finding("ok", "network", "a port on 127.0.0.1 can be opened")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding(
            "note",
            "network",
            f"the host name {name!r} does not resolve ({error}): give MASTER_ADDR as a number",
        )
        return
    if address.startswith("127."):
        yield Finding(
            "note",
            "network",
            f"other hosts cannot reach {address}, the address of {name}: give MASTER_ADDR as a number",
        )
    else:
        yield Finding("ok", "network", f"{name} is {address}")


def _rank_0(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether this host reaches the address that the environment gives for rank 0."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or not port:
        return
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
            answers.put(None)
        except (OSError, ValueError, OverflowError) as error:
            answers.put(error)

    # In a thread, because no timeout bounds the search for a host's name.
    threading.Thread(target=connect, daemon=True).start()
    try:
        error = answers.get(timeout=_ANSWER_SECONDS)
    except Empty:
        error = TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s")
    where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    if error is None:
        yield Finding("ok", "rank 0", f"{where} accepts connections")
    elif isinstance(error, ConnectionRefusedError):
        yield Finding("note", "rank 0", f"{where}: the host answers, but no program listens; rank 0 has to start there")
    else:
        yield Finding(
            "wrong", "rank 0", f"{where} cannot be reached: {error}; check the address, the route and the firewall"
        )


def _saves(folder: Path) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".shardwise-doctor-") as name:
        path = Path(name) / "part"
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        os.rename(path, Path(name) / "whole")
    free = shutil.disk_usage(folder).free
    yield Finding("ok", "saves", f"{folder.resolve()} takes files and renames; {free / 2**30:.1f} GiB are free")


def _two_ranks() -> Iterator[Finding]:
    """Two processes of this host meet, exchange and compare."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as name:
        code = launch("shardwise.comm.host_checks", [name], num_processes=2, grace_seconds=5)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code > 128 and code - 128 in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            sys.exit(code)  # somebody stopped this command: that says nothing of the host
        said = Path(name) / "0"
        if code == 0 and said.exists():
            yield Finding("ok", "two ranks", said.read_text(encoding="utf-8"))
        else:
            yield Finding("wrong", "two ranks", f"two processes of this host did not work together: exit code {code}")


def _be_a_rank(folder: Path) -> None:
    channel = processes(timeout_seconds=30.0, device=torch.device("cpu"))
    given = channel.allocate(64 << 20).view(torch.float32).fill_(channel.rank + 1)
    total = torch.empty(given.numel() // channel.size)
    elapsed = []
    for _ in range(3):  # the first one brings pages in
        start = time.perf_counter()
        channel.reduce_scatter(total, given, purpose="doctor").wait()
        elapsed.append(time.perf_counter() - start)
    # 1 + 2: each rank filled its own with its number plus one.
    if not bool((total == sum(range(1, channel.size + 1))).all()):
        raise ShardwiseError("a sum over two ranks is wrong")
    way = "shared memory" if channel.share(1 << 10) is not None else "TCP"  # all ranks ask
    if channel.rank == 0:
        text = f"{channel.size} processes met and summed 64 MiB over {way} in {min(elapsed) * 1e3:.0f} ms"
        (folder / "0").write_text(text, encoding="utf-8")
    channel.close()


if __name__ == "__main__":
    try:
        _be_a_rank(Path(sys.argv[1]))
    except ShardwiseError as failure:
        sys.exit(str(failure))
