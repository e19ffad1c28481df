"""The compiled half of the fake device: built once per user, source and version of torch, into the user's cache.

Loads no torch: a process that hands out tests may have it built while its workers collect them.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwise" / "fake_device"

_COMPILE_SECONDS = 600


def compiler() -> str | None:
    """The C++ compiler of this machine, None where it has none."""
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def library() -> Path:
    """The shared library; compiled where it is not there yet. Workers that come at the same time wait for the first.

    Raises RuntimeError where there is no compiler, or where it fails.
    """
    found = compiler()
    if found is None:
        raise RuntimeError(
            "the fake device is compiled at its first use, and no C++ compiler is here: install g++, or set CXX"
        )
    command = [found, *_flags()]
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    text = "".join([*command, version("torch"), *(each.read_text(encoding="utf-8") for each in files)])
    made = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not made.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with (FOLDER / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(command, [str(each) for each in files if each.suffix == ".cpp"], made)
    return made


def _flags() -> list[str]:
    # Not optimised: that takes twice as long, and the kernels are torch's own.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    include, libraries = (Path(torch.origin).parent / name for name in ("include", "lib"))
    return [
        *("-std=c++20", "-O0", "-w", "-shared", "-fPIC"),
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu"),
    ]


def _compile(command: list[str], sources: list[str], made: Path) -> None:
    # Into a name of its own first: who sees the library sees all of it.
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        part = Path(folder) / "part.so"
        # The sources come before the libraries that they need: some linkers look in this order.
        done = subprocess.run(
            [command[0], *sources, *command[1:], "-o", str(part)],
            capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the fake device does not compile:\n{done.stderr}")
        os.replace(part, made)
