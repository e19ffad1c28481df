"""What all tests share."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from threading import Thread

# Before torch is loaded, here and in every process that a test starts: models are so small that a second thread only
# waits for the first, ranks are threads of which each would start a team, and other threads could give other bits.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from shardwise.testing.library import compiler, library
from tests.forks import programs
from tests.testing.fixtures import anywhere_fake, delays, fake, load_for, on_fake
from tests.tiers import LONG_SECONDS, function_of, slow_tests

__all__ = ["anywhere_fake", "delays", "fake", "on_fake"]

pytest.register_assert_rewrite(*(f"shardwise.testing.{each}" for each in ("channels", "formats", "stores")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "fake"], default="cpu", help="where simulated ranks compute")


def build_ahead() -> None:
    if compiler() is not None:
        with contextlib.suppress(RuntimeError):  # whoever needs it will say so
            library()


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is None and config.getoption("numprocesses", None):
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            Thread(target=build_ahead).start()  # half a minute, in which the workers collect tests
        return
    # What is imported and collected stays: to look through it for garbage again and again takes a tenth of the time.
    gc.disable()
    if worker is not None:
        programs.runs.append(worker["testrunuid"])


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    """With `--device fake`, ranks of any test compute on the fake device."""
    if request.config.getoption("--device") == "fake":
        request.getfixturevalue("anywhere_fake")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test, or a package that it calls, exports (torchrun's RANK, say) or does at Ctrl-C ends with the test."""
    before, interrupt = dict(os.environ), signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, interrupt)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = slow_tests()
    for item in items:
        if function_of(item.nodeid) in seconds and item.get_closest_marker("quick") is None:
            item.add_marker("slow")
    items.sort(key=lambda item: -each if (each := seconds.get(function_of(item.nodeid), 0.0)) >= LONG_SECONDS else 0.0)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        load_for(session.items, all_of_them=session.config.getoption("--device") == "fake")
        # What all the tests have imported and collected stays: looked through again, it makes a collection of garbage
        # take half a second instead of a twentieth.
        gc.collect()
        gc.freeze()
        # Ranks of tests make garbage without end, of models that are small: a twentieth of the time went to looking.
        gc.set_threshold(7_000, 10, 10)
    gc.enable()
