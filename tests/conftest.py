"""What all tests share."""

import gc
import os
from collections.abc import Iterator

# Before torch is loaded, here and in every process that a test starts: models are so small that a second thread only
# waits for the first, ranks are threads of which each would start a team, and other threads could give other bits.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.fake_device.fixtures import anywhere_fake, delays, fake, load_for, on_fake
from tests.tiers import slow_tests, stress_tests

__all__ = ["anywhere_fake", "delays", "fake", "on_fake"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "fake"], default="cpu", help="where simulated ranks compute")


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    """With `--device fake`, ranks of any test compute on the fake device."""
    if request.config.getoption("--device") == "fake":
        request.getfixturevalue("anywhere_fake")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test, or a package that it calls, exports (torchrun's RANK, say) is no part of the next test's world."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow, stress = slow_tests(), stress_tests()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
        if item.nodeid in stress:
            item.add_marker("stress")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        load_for(session.items, all_of_them=session.config.getoption("--device") == "fake")
        # What all the tests have imported and collected stays: looked through again, it makes a collection of garbage
        # take half a second instead of a twentieth.
        gc.collect()
        gc.freeze()
