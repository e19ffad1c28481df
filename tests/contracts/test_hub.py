"""A repository of the hub is read at one commit, by the hub's own client from a double of the hub on this host."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfFileSystem
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import convert
from shardwise.checkpoint.hub import HubStore
from shardwise.errors import CheckpointError
from shardwise.testing.stores import content, read

OLD, NEW = "0" * 40, "1" * 40


class Hub:
    """The requests that reading needs, of one repository with two commits."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.commits: dict[str, dict[str, bytes]] = {OLD: {}, NEW: {}}
        self.revisions = {"main": NEW, "v1": OLD}
        self.ranges: list[str] = []
        self.looks: list[str] = []
        self._server = make_server("127.0.0.1", 0, Request.application(self._answer), threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def store(self, address: str = "hf://owner/name") -> HubStore:
        return HubStore(address, file_system=HfFileSystem(endpoint=self.endpoint, skip_instance_cache=True))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request: Request) -> Response:
        kind, _, rest = request.path.removeprefix("/api/models/owner/name").strip("/").partition("/")
        if kind == "revision" or not kind:
            revision = rest or "main"
            if revision in self.commits or revision in self.revisions:
                return _as_json({"id": "owner/name", "sha": self.revisions.get(revision, revision)})
            return Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        if kind == "tree":
            self.looks.append(rest)
            commit, _, folder = rest.partition("/")
            return _as_json(
                [*self._entries(self.commits[commit], folder, deep=request.args.get("recursive") == "true")]
            )
        if "/resolve/" in request.path:
            commit, _, name = request.path.partition("/resolve/")[2].partition("/")
            asked = request.headers["Range"]
            self.ranges.append(f"{name} {asked}")
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            return Response(self.commits[commit][name][first : last + 1], status=206)
        return Response(status=404, headers={"X-Error-Code": "RepoNotFound"})

    def _entries(self, files: dict[str, bytes], folder: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        top = f"{folder}/" if folder else ""
        folders = set()
        for name, data in files.items():
            if not name.startswith(top):
                continue
            parts = name.removeprefix(top).split("/")
            folders |= {top + "/".join(parts[:depth]) for depth in range(1, len(parts) if deep else min(len(parts), 2))}
            if deep or len(parts) == 1:
                yield {"type": "file", "oid": "a" * 40, "size": len(data), "path": name}
        for each in sorted(folders):
            yield {"type": "directory", "oid": "b" * 40, "size": 0, "path": each}


def _as_json(value: object) -> Response:
    return Response(json.dumps(value), mimetype="application/json")


@pytest.fixture
def hub() -> Iterator[Hub]:
    running = Hub()
    yield running
    running.close()


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> Hub:
    """A model in three files, and in the folder `older` of its commit v1 another one."""
    for commit, folder, factor in ((NEW, "", 1.0), (OLD, "older/", -1.0)):
        sw.save(tmp_path / commit, {f"w{at}": factor * torch.arange(50.0) + at for at in range(3)})
        convert(tmp_path / commit, tmp_path / f"{commit}-hf", to="hf", max_shard_bytes=200)
        for path in (tmp_path / f"{commit}-hf").iterdir():
            hub.commits[commit][folder + path.name] = path.read_bytes()
    return hub


def test_a_model_of_the_hub_is_listed_loaded_and_converted(model: Hub, tmp_path: Path) -> None:
    store = model.store()
    assert list(store.names()) == sorted(model.commits[NEW])
    assert store.location == "hf://owner/name"
    target = {f"w{at}": torch.zeros(50) for at in range(3)}
    report = sw.load(store, target)
    assert report.report.location == "hf://owner/name"
    assert all(torch.equal(target[f"w{at}"], torch.arange(50.0) + at) for at in range(3))
    older = model.store("hf://owner/name@v1/older")
    assert torch.equal(checkpoint.open(older).read("w2"), 2 - torch.arange(50.0))
    convert(older, tmp_path / "saves")
    assert torch.equal(checkpoint.open(tmp_path / "saves").read("w1"), 1 - torch.arange(50.0))


def test_what_is_pushed_meanwhile_is_not_mixed_with_what_was_there(model: Hub) -> None:
    store = model.store()
    model.revisions["main"] = OLD
    assert torch.equal(checkpoint.open(store).read("w0"), torch.arange(50.0))


def test_only_the_wanted_range_is_asked_for_and_files_are_looked_at_together(hub: Hub) -> None:
    hub.commits[NEW] = {"a": content(1 << 20) * 10, "deep/b": b"12345"}
    store = hub.store()
    assert read(store, "a", 10, 20) == hub.commits[NEW]["a"][10:30]
    assert hub.ranges == ["a bytes=10-29"]
    assert read(store, "a", 5) == hub.commits[NEW]["a"][5:]
    assert sorted(hub.ranges[1:]) == ["a bytes=5-8388612", "a bytes=8388613-10485759"]
    for _ in range(3):
        assert read(store, "deep/b") == b"12345"
    assert len(hub.looks) == 2, "once for each folder"
    assert store.sizes("deep") == {"deep/b": 5}
    assert store.folders() == ["deep"]
    with pytest.raises(FileNotFoundError):
        store.open("nothing")
    with pytest.raises(IsADirectoryError):
        store.open("deep")


def test_nothing_is_written_to_the_hub_and_what_is_not_there_is_named(model: Hub, tmp_path: Path) -> None:
    before = {commit: dict(files) for commit, files in model.commits.items()}
    state, said = {"w0": torch.zeros(50)}, "the hub is read here, and not written: .*hf upload OWNER/NAME FOLDER"
    hubs = (model.store(), model.store("hf://owner/name@v1/new"))
    with pytest.raises(CheckpointError, match="holds a safetensors checkpoint"):
        sw.save(hubs[0], state)
    with pytest.raises(CheckpointError, match=said):
        sw.save(hubs[1], state)
    sw.save(tmp_path / "a", state)
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "a", hubs[1], to="hf")
    for store in hubs:
        with pytest.raises(OSError, match=said):
            store.delete("config.json")
    assert model.commits == before
    for address, why in (("hf://owner/name@v9", "v9"), ("hf://nobody/name", "nobody"), ("hf://name", "namespace/name")):
        with pytest.raises(CheckpointError, match=rf"{address} cannot be read: .*{why}.* hf://owner/name\[@revision\]"):
            model.store(address)
