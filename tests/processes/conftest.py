"""One pool of worker processes for the whole session."""

from collections.abc import Iterator

import pytest

from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/processes" in item.path.as_posix():
            item.add_marker(pytest.mark.processes)
