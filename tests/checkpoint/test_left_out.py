"""What cannot be read is named: tensors that are no plain ones, parts that never came, files that a model needs."""

import json
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.errors import CheckpointError
from tests.checkpoint.stored_values import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::UserWarning")


class Kept(torch.Tensor):
    """A tensor of another class."""


class Holder:
    """An object with a tensor in it."""

    def __init__(self) -> None:
        self.tensor = torch.ones(2)


def odd_values() -> dict[str, Any]:
    complexes = torch.ones(2, dtype=torch.cfloat).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "coo": torch.eye(4).to_sparse(),
            "csr": torch.eye(4).to_sparse_csr(),
            "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
            "conjugated": complexes,
            "negated": complexes.imag,
            "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "per_channel": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
            "meta": torch.ones(2, device="meta"),
            "parameter": torch.nn.Parameter(torch.ones(2, device="meta")),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "subclass": torch.ones(2).as_subclass(Kept),
            "module": torch.nn.Linear(2, 2),
            "object": Holder(),
            "storage": torch.ones(2).untyped_storage(),
        }


def places(value: Any) -> dict[str, tuple[Any, str]]:
    """Files in which a value is, and how its place is called."""
    dense = {"w": torch.ones(2, 2)}
    state = {0: {"exp_avg": torch.ones(2, 2), "step": torch.tensor(1.0)}}
    groups: list[dict[str, Any]] = [{"lr": 1.0, "params": [0]}]
    return {
        "flat": ({**dense, "odd": value}, "odd"),
        "inside": ({"state_dict": {**dense, "odd": value}}, "state_dict.odd"),
        "list": ({"state_dict": dense, "more": [torch.ones(2), value]}, "more.1"),
        "beside": ({"state_dict": dense, "odd": value}, "odd"),
        "state": (
            {"model": dense, "optimizer": {"state": {0: {**state[0], "odd": value}}, "param_groups": groups}},
            "0.odd",
        ),
        "setting": (
            {"model": dense, "optimizer": {"state": state, "param_groups": [{**groups[0], "odd": value}]}},
            "odd",
        ),
    }


RESOLVED = ("conjugated", "negated")
"""Of these the values are read."""


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", odd_values())
def test_what_is_no_plain_tensor_is_named_wherever_it_is(tmp_path: Path, kind: str, legacy: bool) -> None:
    value = odd_values()[kind]
    for where, (held, place) in places(value).items():
        torch.save(held, tmp_path / f"{where}.pt", _use_new_zipfile_serialization=not legacy)
        contents = checkpoint.open(tmp_path / f"{where}.pt").contents
        assert "w" in contents.tensors
        if kind in RESOLVED and where not in ("state", "setting"):
            (name,) = (each for each in contents.tensors if each.endswith(("odd", "1")))
            assert torch.equal(checkpoint.open(tmp_path / f"{where}.pt").read(name), value)
            continue
        assert any(place in note for note in contents.notes), (where, contents.notes)
    if kind in RESOLVED:
        return
    torch.save(value, tmp_path / "whole.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"whole\.pt: it "):
        checkpoint.open(tmp_path / "whole.pt")


def _conjugates(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    values = torch.complex(torch.randn(shape), torch.randn(shape)).conj()
    values.view(-1)[:1] = torch.tensor(complex("nan+nanj"))
    turned = values.movedim(0, -1)
    both = torch.complex(torch.randn(shape), torch.randn(shape)).conj().imag
    return {"plain": torch.ones(2), "a": values, "b": turned, "d": both, "e": values[1:], "f": values}


@pytest.mark.parametrize("source", ["pt", "legacy", "dcp", "bin"])
@pytest.mark.parametrize("shape", [(2,), (3, 4), (5, 1, 3), (0, 3)])
def test_conjugated_and_negated_tensors_have_their_values(tmp_path: Path, source: str, shape: tuple[int, ...]) -> None:
    held = _conjugates(shape)
    if source == "dcp":
        save_dcp(tmp_path / "from", held)
        path = tmp_path / "from"
    else:
        path = tmp_path / ("pytorch_model.bin" if source == "bin" else "model.pt")
        torch.save(held, path, _use_new_zipfile_serialization=source != "legacy")
    checkpoint.convert(path, tmp_path / "save")
    checkpoint.average([path, path], tmp_path / "mean")
    assert checkpoint.diff(path, tmp_path / "mean").equal == checkpoint.diff(path, tmp_path / "save").equal is True
    for name, tensor in held.items():
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        target = torch.empty_like(plain)
        sw.load(path, {name: target}, strict=False)
        for found in (target, checkpoint.open(tmp_path / "save").read(name)):
            assert torch.equal(found.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("way", ["convert", "hf", "average", "diff"])
def test_nothing_is_made_where_no_tensor_can_be_read(tmp_path: Path, way: str) -> None:
    path = tmp_path / "object.pt"
    torch.save({"model": torch.nn.Linear(2, 2), "epoch": 3}, path)
    ways: dict[str, Callable[[], object]] = {
        "convert": lambda: checkpoint.convert(path, tmp_path / "made"),
        "hf": lambda: checkpoint.convert(path, tmp_path / "made", to="hf"),
        "average": lambda: checkpoint.average([path, path], tmp_path / "made"),
        "diff": lambda: checkpoint.diff(path, path),
    }
    with pytest.raises(CheckpointError, match=r"has no tensor (?s:.*)model is left out: it is a torch\.nn\.modules"):
        ways[way]()
    assert not (tmp_path / "made").exists()


def test_a_file_of_nothing_but_odd_tensors_says_what_they_are(tmp_path: Path) -> None:
    torch.save({"odd": torch.eye(4).to_sparse()}, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match=r"that can be read(?s:.*)odd is left out: it is a sparse tensor"):
        checkpoint.open(tmp_path / "odd.pt")


def test_whole_numbers_that_no_tensor_holds_are_named_in_the_state_of_an_optimizer(tmp_path: Path) -> None:
    state = {0: {"exp_avg": torch.ones(2, 2), "seed": 2**70, "step": -(2**63) + 1}}
    optimizer = {"state": state, "param_groups": [{"lr": 1.0, "params": [0]}]}
    torch.save({"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer}, tmp_path / "odd.pt")
    contents = checkpoint.open(tmp_path / "odd.pt").contents
    assert "its seed of parameter 0 is neither a tensor nor a number of 64 bits" in contents.left_state
    assert contents.tensors["optimizer/0/step"].dtype == "int64"


def test_a_save_of_values_alone_is_copied(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {}, extra={"epoch": 3})
    checkpoint.convert(tmp_path / "a", tmp_path / "b")
    assert checkpoint.open(tmp_path / "b").extra == {"epoch": 3}


def write_gguf(path: Path, part: int, count: int, name: str) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + text("split.no") + struct.pack("<IH", 2, part - 1)
    head += text("split.count") + struct.pack("<IH", 2, count) + text(name) + struct.pack("<IQIQ", 1, 2, 0, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + struct.pack("<2f", part, part))


def write_part(kind: str, folder: Path, part: int, count: int) -> Path:
    """One of `count` parts of a model."""
    tensors = {f"layers.{part}.w": torch.full((2,), float(part))}
    path = (
        folder
        / {
            "safetensors": f"model-{part:05d}-of-{count:05d}.safetensors",
            "from 0": f"model-{part - 1:05d}-of-{count:05d}.safetensors",
            "bin": f"pytorch_model-{part:05d}-of-{count:05d}.bin",
            "gguf": f"m-{part:05d}-of-{count:05d}.gguf",
            "ranks": f"shard-{part:05d}-model-00001-of-00001.safetensors",
            "files of ranks": f"shard-00001-model-{part:05d}-of-{count:05d}.safetensors",
            "no zeros": f"model-{part}-of-{count}.safetensors",
            "underscores": f"model_{part:05d}_of_{count:05d}.safetensors",
        }[kind]
    )
    if kind == "gguf":
        write_gguf(path, part, count, *tensors)
    elif kind == "bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", ["safetensors", "from 0", "bin", "gguf", "ranks", "files of ranks", "no zeros", "underscores"]
)
def test_a_numbered_set_with_a_part_missing_is_incomplete(tmp_path: Path, kind: str, missing: int) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    parts = {part: write_part(kind, folder, part, 3) for part in (1, 2, 3)}
    whole = parts[missing % 3 + 1] if kind == "gguf" else folder
    assert set(checkpoint.open(whole).tensors) == {f"layers.{part}.w" for part in parts}
    assert checkpoint.verify(whole).good
    assert torch.equal(checkpoint.open(whole).read("layers.2.w"), torch.full((2,), 2.0))
    parts[missing].unlink()
    if (kind, missing) == ("ranks", 3):
        return  # no name says that there was one more: see below
    said = parts[missing].name.removeprefix("shard-00001-") if kind != "ranks" else f"shard-{missing:05d}"
    if (kind, missing) == ("from 0", 1):
        said = "is incomplete"  # no name says from where they count
    ways: list[Callable[[], object]] = [
        lambda: checkpoint.open(whole),
        lambda: checkpoint.verify(whole),
        lambda: checkpoint.convert(whole, tmp_path / "made"),
        lambda: sw.load(whole, {"layers.2.w": torch.zeros(2)}, strict=False),
    ]
    for way in ways:
        with pytest.raises(CheckpointError, match=said):
            way()


def test_one_part_alone_says_that_it_is_one(tmp_path: Path) -> None:
    for kind in ("safetensors", "bin"):
        part = write_part(kind, tmp_path, 2, 3)
        assert "is part 2 of 3: name its folder" in checkpoint.open(part).contents.notes[0]


@pytest.mark.parametrize(("num_ranks", "got"), [(1, [0]), (2, [0, 1]), (2, [0]), (2, [1])])
def test_a_part_of_a_model_of_meta_says_that_it_is_one(tmp_path: Path, num_ranks: int, got: list[int]) -> None:
    for rank in got:
        state = {"layers.0.attention.wo.weight": torch.ones(4, 4 // num_ranks), "norm.weight": torch.ones(4)}
        torch.save(state, tmp_path / f"consolidated.0{rank}.pth")
    for rank in got:
        notes = checkpoint.open(tmp_path / f"consolidated.0{rank}.pth").contents.notes
        assert any("has the part of one rank of each tensor" in note for note in notes) == (num_ranks > 1)
    with pytest.raises(CheckpointError, match=r"convert_llama_weights_to_hf\.py of transformers, or name the file"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_files_that_an_index_leaves_out_are_named(tmp_path: Path, kind: str) -> None:
    parts = [write_part(kind, tmp_path, part, 2).name for part in (1, 2)]
    index = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[kind]
    (tmp_path / index).write_text(json.dumps({"weight_map": {"layers.1.w": parts[0]}}))
    for _ in ("not named", "not there either"):
        contents = checkpoint.open(tmp_path).contents
        assert list(contents.tensors) == ["layers.1.w"]
        assert contents.notes == (f"{parts[1]}: left out, as the index names no tensor there",)
        (tmp_path / parts[1]).unlink(missing_ok=True)


def test_boxes_of_ranks_say_that_nobody_counts_them(tmp_path: Path) -> None:
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}})}
    save_file({"w": torch.ones(2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata=info)
    assert "if the file of the last rank never came" in checkpoint.open(tmp_path).contents.notes[0]


def test_objects_that_are_skipped_in_folders_of_dcp_are_named(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp", {"w": torch.ones(2), "odd": {1, 2}})
    assert any("odd" in note for note in checkpoint.open(tmp_path / "dcp").contents.notes)


NEEDED = {
    "modeling_tiny.py": "from .layers_tiny import Layer",
    "layers_tiny.py": "class Layer: ...",
    "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_tiny.Tiny", None]}}),
    "tokenization_tiny.py": "class Tiny: ...",
    "video_preprocessor_config.json": "{}",
    "audio_tokenizer_config.json": "{}",
    "tekken.json": "{}",
    "source.spm": "x",
    "qwen.tiktoken": "x",
    "chat_templates/tool.jinja": "x",
    "additional_chat_templates/rag.jinja": "x",
    "custom_generate/generate.py": "x",
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
    "config_sentence_transformers.json": "{}",
    "sentence_bert_config.json": "{}",
    "1_Pooling/config.json": "{}",
    "2_Dense/model.safetensors": "x",
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    others = {"README.md": "x", "training_args.bin": "x", "runs/events.1": "x"}
    auto = {"AutoModel": "modeling_tiny.Tiny", "AutoConfig": "org/other--configuration_other.Config"}
    for name, text in {**NEEDED, **others, "config.json": json.dumps({"auto_map": auto})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    save_file({"f.weight": torch.ones(2, 2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def found_in(folder: Path) -> Iterator[str]:
    yield from (str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize("way", ["plain", "like", "config", "save"])
def test_all_that_from_pretrained_needs_goes_along(tmp_path: Path, hub: Path, way: str) -> None:
    source, options = hub, dict[str, Any]()
    if way == "save":
        source = tmp_path / "save"
        checkpoint.convert(hub, source)
    elif way != "plain":
        source = tmp_path / "alone"
        sw.save(source, {"f.weight": torch.ones(2, 2)})
        options = {way: hub}
    report = checkpoint.convert(source, tmp_path / "made", to="hf", **options)
    assert set(found_in(tmp_path / "made")) == {*NEEDED, "config.json", "model.safetensors"}
    assert report.missing == ()


def test_code_that_is_not_there_is_named(tmp_path: Path, hub: Path) -> None:
    (hub / "modeling_tiny.py").unlink()
    assert checkpoint.convert(hub, tmp_path / "made", to="hf").missing == ("modeling_tiny.py",)


def test_without_own_code_no_program_is_copied(tmp_path: Path, hub: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (hub / name).write_text("{}", encoding="utf-8")
    checkpoint.convert(hub, tmp_path / "made", to="hf")
    assert not any(name.endswith(".py") and "/" not in name for name in found_in(tmp_path / "made"))


def test_a_load_that_misses_what_was_left_out_says_so(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2), "odd": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"odd: missing(?s:.*)note: odd is left out: it is a sparse tensor"):
        sw.load(tmp_path / "a.pt", {"w": torch.zeros(2, 2), "odd": torch.zeros(3, 3)})
