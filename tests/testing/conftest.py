"""Processes with fake devices for the tests of the double."""

from tests.processes.conftest import one_thread, pool

__all__ = ["one_thread", "pool"]
