"""Folders of safetensors files: indices, numbered sets, boxes of ranks, and what does not go together."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.errors import CheckpointError
from tests.checkpoint.numbered_parts import KINDS, write_part
from tests.contracts.format_cases import check_tensors
from tests.refusals import Refusals

SHARDS: dict[str, dict[str, torch.Tensor]] = {
    "model-1.safetensors": {"a": torch.arange(6.0).view(2, 3), "s": torch.tensor(2)},
    "model-2.safetensors": {"b": torch.ones(4, dtype=torch.bfloat16), "e": torch.zeros(0, 2)},
}
FIRST, SECOND = SHARDS
TENSORS = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
INDEX = "model.safetensors.index.json"


def put(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], index: Any = None, **metadata: str) -> None:
    for name, tensors in files.items():
        write: Any = torch.save if name.endswith("bin") else save_file
        write(dict(tensors), folder / name, **({"metadata": {"name": name, **metadata}} if write is save_file else {}))
    if index is not None:
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))


def test_a_file_says_its_metadata_and_is_read_alone_by_its_name(tmp_path: Path) -> None:
    put(tmp_path, SHARDS, {name: file for file, tensors in SHARDS.items() for name in tensors}, format="pt")
    (tmp_path / "other.safetensors").write_bytes(b"not in the index")
    check_tensors(tmp_path, TENSORS)
    assert checkpoint.open(tmp_path).extra == {
        "metadata": {"format": "pt"} | {f"name ({name})": name for name in SHARDS}
    }
    check_tensors(tmp_path / FIRST, SHARDS[FIRST])
    assert checkpoint.open(tmp_path / FIRST).location == str(tmp_path / FIRST)
    assert checkpoint.open(tmp_path / FIRST).extra == {"metadata": {"format": "pt", "name": FIRST}}


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_numbered_set_with_a_part_missing_is_incomplete(tmp_path: Path, kind: str, missing: int) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    parts = {part: write_part(kind, folder, part, 3) for part in (1, 2, 3)}
    whole = parts[missing % 3 + 1] if kind == "gguf" else folder
    check_tensors(whole, {f"layers.{part}.w": torch.full((2,), float(part)) for part in parts})
    parts[missing].unlink()
    if (kind, missing) == ("ranks", 3):
        return  # no name says that there was one more: the next test
    said = parts[missing].name.removeprefix("shard-00001-") if kind != "ranks" else f"shard-{missing:05d}"
    if (kind, missing) == ("from 0", 1):
        said = "is incomplete"  # no name says from where they count
    ways: list[Callable[[], object]] = [
        lambda: checkpoint.verify(whole),
        lambda: checkpoint.convert(whole, tmp_path / "made"),
        lambda: sw.load(whole, {"layers.2.w": torch.zeros(2)}, strict=False),
    ]
    for way in ways:
        with pytest.raises(CheckpointError, match=said):
            way()


def test_what_cannot_be_known_of_a_set_is_noted(tmp_path: Path) -> None:
    for kind in ("safetensors", "bin"):
        part = write_part(kind, tmp_path, 2, 3)
        assert "is part 2 of 3: name its folder" in checkpoint.open(part).contents.notes[0]
    (tmp_path / "any").mkdir()
    put(tmp_path / "any", {"draft.safetensors": {"w": torch.ones(2)}, "target.safetensors": {"v": torch.ones(2)}})
    assert ["read as one model" in note for note in checkpoint.open(tmp_path / "any").contents.notes] == [True]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_files_that_an_index_leaves_out_are_named(tmp_path: Path, kind: str) -> None:
    parts = [write_part(kind, tmp_path, part, 2).name for part in (1, 2)]
    index = {"safetensors": INDEX, "bin": "pytorch_model.bin.index.json"}[kind]
    (tmp_path / index).write_text(json.dumps({"weight_map": {"layers.1.w": parts[0]}}))
    for _ in ("not named", "not there either"):
        contents = checkpoint.open(tmp_path).contents
        assert list(contents.tensors) == ["layers.1.w"]
        assert contents.notes == (f"{parts[1]}: left out, as the index names no tensor there",)
        (tmp_path / parts[1]).unlink(missing_ok=True)


def opened(files: Mapping[str, Mapping[str, torch.Tensor]], index: Any = None, **metadata: str) -> Any:
    def call(folder: Path) -> object:
        put(folder, files, index, **metadata)
        return checkpoint.open(folder)

    return call


def boxes(*rows: tuple[int, int]) -> Any:
    """Files of ranks, each with some rows of a tensor."""

    def call(folder: Path) -> object:
        for number, (first, stop) in enumerate(rows):
            info = json.dumps({"w": {"saved_offsets": [first, 0]}})
            put(folder, {f"{number}.safetensors": {"w": torch.ones(stop - first, 3)}}, DCP_SHARDING_INFO=info)
        return checkpoint.open(folder)

    return call


def two_indices(folder: Path) -> object:
    (folder / "other.safetensors.index.json").write_text("{}")
    return opened({}, {})(folder)


W = {"w": torch.ones(2)}
REFUSED = Refusals(
    "checkpoint.huggingface",
    {
        "every difference between index and shards": opened(
            SHARDS, {"a": SECOND, "b": SECOND, "c": "gone.safetensors", "e": FIRST}
        ),
        "tensors in two shards": opened({"1.safetensors": TENSORS, "2.safetensors": TENSORS}),
        **{f"an index {text[:30]!r}": opened(SHARDS, text) for text in ("{", '{"weight_map": {"a": 1}}')},
        "an index that is nested deeply": opened(SHARDS, "[" * 100_000),
        "two indices": two_indices,
        "a box that is missing between": boxes((0, 2), (3, 5)),
        "boxes that overlap": boxes((0, 3), (2, 5)),
        **{
            f"words about boxes {text!r}": opened({"1.safetensors": W}, DCP_SHARDING_INFO=text)
            for text in ("{", '{"w": {"saved_offsets": [-1]}}')
        },
        "two models": opened({"model.safetensors": W, "model_1.safetensors": W}),
        "two models of torch": opened({f"pytorch_model{at}-00001-of-00001.bin": W for at in ("", "_1")}),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(case: str) -> None:
    REFUSED.check(case)
