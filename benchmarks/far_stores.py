"""Stores that are far: how long calls take, and how many requests they make, where each request takes 20 ms.

    python -m benchmarks.far_stores --write far-stores

The store is obstore's, in memory; every call of it waits first. What is local: how long a save of 1,024 files takes to
remove, against removing such files without any care.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from obstore.store import MemoryStore
from safetensors.torch import save as as_file

import shardwise as sw
from benchmarks.markdown import Row, markdown, write_page
from shardwise import checkpoint

RESULTS = Path(__file__).parent / "results"
SECONDS, ROUNDS, NUM_FILES = 0.02, 5, 1024
ELEMENTS = (64 << 20) // 4
ASKED_S = {"load, one tensor": 0.15, "load, 64 tensors": 0.48}
"""A sixth of what they took before requests went side by side."""
ASKED_REMOVAL_S = 0.1
HEADER: Row = ("what", "s", "range", "requests", "most under way", "asked, s", "verdict")


class Delayed:
    """A client whose calls wait; it counts them, and how many are under way at a time."""

    def __init__(self) -> None:
        self.client, self._lock = MemoryStore(), threading.Lock()
        self.begin()

    def begin(self) -> None:
        self.num_requests = self.num_under_way = self.most_under_way = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.client, name)

        def waiting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.num_requests += 1
                self.num_under_way += 1
                self.most_under_way = max(self.most_under_way, self.num_under_way)
            time.sleep(SECONDS)
            try:
                return call(*args, **kwargs)
            finally:
                with self._lock:
                    self.num_under_way -= 1

        return waiting


def services(number: int) -> tuple[dict[str, torch.Tensor], Delayed, Delayed]:
    """64 MiB in so many tensors: a service with a save of ours, and one with a file of Hugging Face."""
    state = {f"layers.{at}.w": torch.randn(ELEMENTS // number) for at in range(number)}
    ours, theirs = Delayed(), Delayed()
    sw.save(far(ours.client), state)  # what uploads in parts is no method of a client
    far(theirs.client).create("model.safetensors", as_file(state))
    return state, ours, theirs


def far(client: Any) -> checkpoint.ObjectStore:
    """What a program that begins gets: nothing is known of the service."""
    return checkpoint.ObjectStore("memory://service", client=client)


def load(client: Delayed, target: dict[str, torch.Tensor]) -> None:
    sw.load(far(client), target)


def convert(client: Delayed, folder: Path) -> None:
    checkpoint.convert(far(client), folder / f"{len(list(folder.iterdir()))}")


def verify(client: Delayed) -> None:
    assert checkpoint.verify(far(client)).good


def measured(what: str, client: Delayed, act: Callable[[], object]) -> Row:
    """The middle of some rounds; requests of the last one."""
    took = []
    for _ in range(ROUNDS):
        client.begin()
        start = time.perf_counter()
        act()
        took.append(time.perf_counter() - start)
    middle, asked = statistics.median(took), ASKED_S.get(what)
    verdict = "" if asked is None else "met" if middle <= asked else "MISSED"
    return (
        what,
        f"{middle:.3f}",
        f"{min(took):.3f} - {max(took):.3f}",
        str(client.num_requests),
        str(client.most_under_way),
        "" if asked is None else f"{asked:g}",
        verdict,
    )


def removed(remove: Callable[[Path, list[str]], None]) -> list[float]:
    """Seconds to remove many small files of a folder on a disk."""
    took = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            names = [f"save-00000001/{at:04d}.safetensors" for at in range(NUM_FILES)]
            os.mkdir(f"{name}/save-00000001")
            for each in names:
                Path(name, each).write_bytes(b"x")
            os.sync()
            start = time.perf_counter()
            remove(Path(name), names)
            took.append(time.perf_counter() - start)
    return took


def by_store(folder: Path, names: list[str]) -> None:
    checkpoint.LocalStore(folder).delete_all(names)


def plainly(folder: Path, names: list[str]) -> None:
    for each in names:
        os.unlink(folder / each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows: list[Row] = []
    for number, words in ((1, "one tensor"), (64, "64 tensors")):
        state, ours, theirs = services(number)
        target = {name: torch.zeros_like(each) for name, each in state.items()}
        rows += [
            measured(f"load, {words}", ours, partial(load, ours, target)),
            measured(f"load of Hugging Face, {words}", theirs, partial(load, theirs, target)),
            measured(f"verify, {words}", ours, partial(verify, ours)),
        ]
        assert all(torch.equal(target[name], each) for name, each in state.items())
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(f"convert to a local save, {words}", ours, partial(convert, ours, Path(folder))))
    ways = {f"remove {NUM_FILES} local files of a save": by_store, f"unlink {NUM_FILES} local files": plainly}
    for what, way in ways.items():
        took = removed(way)
        asked = ASKED_REMOVAL_S if way is not plainly else None
        verdict = "" if asked is None else "met" if statistics.median(took) <= asked else "MISSED"
        span = f"{min(took):.3f} - {max(took):.3f}"
        rows.append(
            (what, f"{statistics.median(took):.3f}", span, "", "", "" if asked is None else f"{asked:g}", verdict)
        )
    text = markdown(HEADER, rows)
    print(text)
    if arguments.write:
        reading = f"64 MiB; each request takes {SECONDS * 1000:g} ms and no more. Middle of {ROUNDS} rounds."
        write_page(
            RESULTS / f"{arguments.write}.md",
            "benchmarks.far_stores",
            "Stores that are far",
            reading,
            text,
            load_before=load_before,
        )


if __name__ == "__main__":
    main()
