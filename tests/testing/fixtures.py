"""Fixtures of tests that run on the fake device. tests/conftest.py has them for all tests.

A worker loads the device before its first test, when one of its tests needs it: after a first backward it is too late.
Where there is no C++ compiler, these tests are skipped, and pytest says so in one line.
"""

from collections.abc import Iterator
from functools import partial

import pytest

FIXTURES = ("fake", "anywhere_fake", "on_fake", "delays")


def load_for(items: list[pytest.Item], *, all_of_them: bool = False) -> None:
    """Load the device if one of these tests needs it, or all do."""
    if all_of_them or any(name in FIXTURES for item in items for name in getattr(item, "fixturenames", ())):
        from shardwise.testing.library import compiler

        if compiler() is not None:
            from shardwise.testing.accelerator import load

            load()


@pytest.fixture
def fake() -> Iterator[str]:
    """The kind of the fake devices, "fake": torch.accelerator finds eight of them."""
    from shardwise.testing.library import compiler

    if compiler() is None:
        pytest.skip("no C++ compiler: nothing runs on the fake device; install g++, or set CXX")
    from shardwise.testing.accelerator import NAME, present

    with present():
        yield NAME


@pytest.fixture
def anywhere_fake(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks have a fake device each, wherever a test does not say otherwise."""
    import shardwise as sw  # the process that hands out tests loads no torch
    from shardwise import comm
    from shardwise.verification import verifier

    for module in (sw, comm, verifier):
        monkeypatch.setattr(module, "simulate", partial(comm.simulate, device=fake))


@pytest.fixture
def on_fake(anywhere_fake: None) -> Iterator[None]:
    """The same, for a test whose ranks are known to compute."""
    from shardwise.testing.accelerator import counted

    with counted() as counts:
        yield
    assert sum(each.launches for each in counts) > 0, "nothing ran on the fake device"


@pytest.fixture
def delays(on_fake: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """The streams of the devices run behind the host; the parameter of the fixture is the seed of their delays."""
    from shardwise.testing.accelerator import behind, num_late

    before = num_late()
    with behind(request.param):
        yield
    assert num_late() > before, "nothing ran behind the host"
