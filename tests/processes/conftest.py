"""One pool of worker processes for the whole session, and what simulated ranks need to have its bits."""

from collections.abc import Iterator

import pytest
import torch

from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the processes have: the same kernels, the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/processes" in item.path.as_posix():
            item.add_marker(pytest.mark.processes)
