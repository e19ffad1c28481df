"""Where the tests of devices run: on the accelerators of this host, and on CPU processes as a dry run of the same code.

    place     ranks                                  asked by         what it proves
    device    processes that start anew, one each    make test-gpu    that devices compute, move, save and fail right
    cpu       forked processes, shared memory        make test-all    that the tests themselves run: a case of each
    fake      threads, a fake device each            make test-all    the same, with what is only there on devices

A test that needs more devices than the host has is skipped, with a line that says how many it needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from tests.forks.calls import Start
from tests.processes.pool import Pool, Transport
from tests.testing.fixtures import load_for

Kind = Literal["cpu", "device", "fake"]

PATIENCE_SECONDS = 300.0


def num_devices() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


@dataclass
class Place:
    """Ranks of one kind."""

    kind: Kind
    pools: dict[Start, Pool]

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
        """`Pool.run`."""
        if self.kind == "fake":
            return sw.simulate(size, lambda channel: function(channel, *arguments), device=self.kind)
        if self.kind == "device" and size > num_devices():
            pytest.skip(f"needs {size} accelerators, and this host has {num_devices()}")
        transport = Transport(device="cpu" if self.kind == "cpu" else "own")
        # Interpreters that start anew on devices: what a parent process knows of them is of no use in a fork.
        pool = self.pools["fork" if self.kind == "cpu" else "anew"]
        return pool.run(size, function, *arguments, transport=transport, patience_seconds=PATIENCE_SECONDS, **more)


def runs(*cells: tuple[Any, ...], fake: bool = True) -> list[Any]:
    """Places and further arguments: all cells on devices, the first as a dry run on the CPU, the last on fake ones.

    Dry runs are slow by what they are: whichever test comes first starts the processes.
    """
    dry = [("cpu", *cells[0]), *([("fake", *cells[-1])] if fake else [])]
    return [
        *(pytest.param("device", *each, marks=pytest.mark.gpu) for each in dict.fromkeys(cells)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in dry),
    ]


@pytest.fixture(scope="package")
def pools() -> Iterator[dict[Start, Pool]]:
    made: dict[Start, Pool] = {"fork": Pool("fork"), "anew": Pool("anew")}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def place(request: pytest.FixtureRequest, pools: dict[Start, Pool]) -> Place:
    if request.param == "fake":
        request.getfixturevalue("fake")
    return Place(request.param, pools)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    calls: list[Any] = [getattr(item, "callspec", None) for item in session.items]
    if (
        any(call is not None and call.params.get("place") == "fake" for call in calls)
        and not session.config.option.collectonly
    ):
        load_for([], all_of_them=True)
