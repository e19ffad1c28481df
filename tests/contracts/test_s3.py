"""The contract of `Store` on a real service of S3, and how its requests go: together, repeated, one look per file."""

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import ObjectStore
from shardwise.checkpoint.stores import store_of
from shardwise.errors import CheckpointError
from shardwise.testing.stores import CASES, Case, content, put, read
from tests.contracts.s3_service import BUCKET, S3Service


@pytest.fixture(scope="module")
def running() -> Iterator[S3Service]:
    service = S3Service()
    yield service
    service.close()


@pytest.fixture
def service(running: S3Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Service]:
    for name, value in running.variables.items():
        monkeypatch.setenv(name, value)
    running.forget()
    yield running
    running.seconds, running.num_failures = 0.0, 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_service_of_s3_fulfils_the_contract(case: Case, service: S3Service) -> None:
    address = f"s3://{BUCKET}/contract/{case.name}"
    case(ObjectStore(address), store_of(f"{address}/"))


def test_long_reads_and_writes_have_many_requests_under_way(service: S3Service) -> None:
    store, data = ObjectStore(f"s3://{BUCKET}/long"), content(1 << 20) * 64
    service.seconds = 0.05
    put(store, "file", data, chunk_bytes=1 << 20)
    assert service.requests.count("PUT") == 8
    assert service.most_in_flight >= 6
    service.forget()
    assert read(store, "file") == data
    assert Counter(service.requests) == {"GET": 1 + 8}
    assert service.most_in_flight == 8


def test_what_fails_for_a_while_is_repeated(service: S3Service) -> None:
    store = ObjectStore(f"s3://{BUCKET}/repeated")
    for act in (lambda: put(store, "a", b"12345"), lambda: read(store, "a"), lambda: list(store.names())):
        service.num_failures = 2
        act()
    assert service.requests.count("HEAD") + service.requests.count("PUT") + service.requests.count("GET") > 6
    assert read(store, "a") == b"12345"


def test_a_save_asks_little_of_the_service(service: S3Service) -> None:
    address = f"s3://{BUCKET}/saves"
    state = {"w": torch.arange(6.0), "v": torch.ones(3)}
    with checkpoint.AsyncSaver(address, keep=1) as saver:
        for step in range(3):
            saver.wait()
            service.forget()
            saver.save(state, step=step)
            saver.wait()
    # Lists of the store, of its folders, and twice of the files of this save. The manifest of the old save is read once
    # and ours twice; a look before each of three files is made. The old save goes in two deletions.
    assert Counter(service.requests) == {"GET": 4 + 3, "HEAD": 3, "PUT": 3, "POST": 2}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sw.load(address, target)
    assert torch.equal(target["w"], state["w"])
    assert checkpoint.verify(address).good


def test_two_programs_that_save_at_once_make_one_save_each_number(service: S3Service) -> None:
    address, barrier = f"s3://{BUCKET}/race", threading.Barrier(4)
    outcomes: list[str] = []

    def save(at: int) -> None:
        barrier.wait()
        try:
            sw.save(address, {"w": torch.full((4,), float(at))}, extra={"at": at}, channel=sw.comm.alone())
            outcomes.append("saved")
        except CheckpointError as error:
            outcomes.append("lost" if "committed save-" in str(error) else str(error))

    threads = [threading.Thread(target=save, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"saved", "lost"}
    manifests = [name for name in store_of(address).names() if name.endswith("manifest.json")]
    assert len(manifests) == outcomes.count("saved") >= 1
    found = checkpoint.open(address)
    assert torch.equal(found.read("w"), torch.full((4,), float(found.extra["at"])))


def test_a_bucket_that_is_not_there_is_named(service: S3Service) -> None:
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run .*NoSuchBucket: The specified bucket does not exist"):
        sw.save("s3://nowhere/run", {"w": torch.ones(2)})


def test_what_is_read_is_listed_once(service: S3Service) -> None:
    address = f"s3://{BUCKET}/listed"
    state = {"w": torch.arange(6.0), "v": torch.ones(3)}
    sw.save(address, state)
    checkpoint.convert(address, f"{address}-hf", to="hf")
    checkpoint.convert(address, f"{address}-dcp", to="dcp")
    for place, num_opened in ((address, 3), (f"{address}-hf", 2), (f"{address}-dcp", 4)):
        service.forget()
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        sw.load(place, target)
        assert torch.equal(target["w"], state["w"])
        # A list, and a request for each file that is opened: the metadata, and the data by each who looks into it.
        assert Counter(service.requests) == {"GET": 1 + num_opened}, place
