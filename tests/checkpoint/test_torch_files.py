"""Files of torch.save: every tensor and every value is what torch.load gives, and nothing of them is run."""

import argparse
import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from tests.checkpoint.stored_values import same_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "before 1.6": {"_use_new_zipfile_serialization": False},
    "protocol 4": {"pickle_protocol": 4},
}


def every_tensor() -> dict[str, Any]:
    """Tensors of all dtypes, in all the ways in which they can be in memory."""
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    shared = torch.arange(20.0)
    state: dict[str, Any] = {
        "row-major": whole,
        "transposed": torch.randn(3, 5).T,
        "permuted": torch.randn(2, 3, 4).permute(1, 2, 0),
        "columns": whole[:, 2:5],
        "every other": whole[::2, ::3],
        "repeated": torch.randn(1, 3).expand(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "of one": torch.randn(1, 1, 7, 1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.randn(4)),
        "frozen": nn.Parameter(torch.randn(4), requires_grad=False),
        "first half": shared[:10],
        "overlapping": shared[5:15],
    }
    for name in ITEMSIZE_BYTES:
        dtype = getattr(torch, name)
        # As bytes: some dtypes have no random numbers of their own.
        state[name] = torch.randint(0, 2, (24, ITEMSIZE_BYTES[name]), dtype=torch.uint8).view(dtype).view(4, 6)
    state["note"] = nn.Parameter(torch.randn(2))
    state["note"].words = "an attribute of its own"
    return state


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path.removeprefix("."), value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from leaves(each, f"{path}.{at}")


def check_as_loaded(file: Path, catalogue: checkpoint.Catalogue, named: Callable[[str], str] = str) -> None:
    """Every tensor that torch.load gives is there, with the same bytes; and no other."""
    expected = dict(leaves(torch.load(file, weights_only=False)))
    aliases = catalogue.contents.aliases
    assert {*catalogue.tensors, *aliases} == {named(path) for path in expected}
    for path, tensor in expected.items():
        assert same_bytes(catalogue.read(named(path)), tensor.detach()), path


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_all_kinds_have_the_bytes_that_torch_loads(tmp_path: Path, form: str) -> None:
    state = every_tensor()
    if form == "before 1.6":  # which has no storages without a dtype
        plain = [name for name in state if name not in ITEMSIZE_BYTES or hasattr(torch, f"{name}Storage")]
        state = {name: state[name] for name in plain if not name.startswith(("float8", "float4", "uint", "complex32"))}
    file = tmp_path / "state.pt"
    torch.save(state, file, **FORMS[form])
    check_as_loaded(file, checkpoint.open(file))


@pytest.mark.parametrize("form", FORMS)
def test_nested_tensors_have_dotted_names_and_values_stay_values(tmp_path: Path, form: str) -> None:
    file = tmp_path / "state.pth"
    value = {
        "net": {"w": torch.randn(2, 3), "b": torch.randn(3)},
        "average": collections.OrderedDict(w=torch.randn(2, 3)),
        "rng": [torch.arange(3, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)],
        "step": 7,
        "rates": [0.1, float("inf")],
        "arguments": argparse.Namespace(name="x", shape=torch.Size([2])),
        "raw": b"abc",
        "by number": {1: "one", 2: {"x": None}},
        "large": 10**30,
        "kinds": {torch.float32, 3} & {3},
        "counts": collections.Counter("aab"),
        "dtype": torch.bfloat16,
    }
    torch.save(value, file, **FORMS[form])
    catalogue = checkpoint.open(file)
    rename = lambda path: f"extra/{path}" if path.startswith("rng") else path  # noqa: E731
    check_as_loaded(file, catalogue, rename)
    objects = catalogue.extra["objects"]
    assert objects.pop("arguments") == {"class": "argparse.Namespace", "state": {"name": "x", "shape": [2]}}
    assert objects == {
        "step": 7,
        "rates": [0.1, float("inf")],
        "raw": {"bytes": "616263"},
        "by number": {"1": "one", "2": {"x": None}},
        "large": {"int": hex(10**30)},
        "kinds": [3],
        "counts": {"a": 2, "b": 1},
        "dtype": {"class": "torch.bfloat16"},
    }
    assert catalogue.step == 7
    assert catalogue.contents.notes == ("it has several dicts of tensors (net, average), so names begin with theirs",)


def test_one_view_of_one_storage_is_a_tie(tmp_path: Path) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    catalogue = checkpoint.open(tmp_path / "tied.pt")
    assert dict(catalogue.contents.aliases) == {"head.weight": "embed.weight"}
    assert list(catalogue.tensors) == ["embed.weight"]
    assert catalogue.contents.num_bytes == 5 * 4 * 4


def test_a_tensor_and_a_list_at_the_top_have_names(tmp_path: Path) -> None:
    for value, names in ((torch.ones(3), ["tensor"]), ([torch.ones(2), torch.zeros(2)], ["0", "1"])):
        torch.save(value, tmp_path / "x.pt")
        assert list(checkpoint.open(tmp_path / "x.pt").tensors) == names


def test_tensors_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(2, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    torch.save(state, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    assert list(catalogue.tensors) == ["w"]
    notes = dict(note.split(" is left out: ") for note in catalogue.contents.notes)
    assert notes.keys() == state.keys() - {"w"}
    assert notes["sparse"] == "it is a sparse tensor; save it with to_dense()"


class Holder:
    """An object with a tensor in it."""

    def __init__(self) -> None:
        self.tensor, self.name = torch.ones(3), "x"


def test_objects_that_hold_tensors_are_named_and_not_made(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "holder": Holder(), "list": [1, Holder()]}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    assert list(catalogue.tensors) == ["w"]
    assert [note.split(":")[0] for note in catalogue.contents.notes] == ["holder is left out", "list.1 is left out"]
    assert catalogue.extra["objects"]["holder"]["state"] == {"name": "x"}
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"it holds a torch.nn.modules.linear.Linear as a whole.* state_dict\(\)"):
        checkpoint.open(tmp_path / "x.pt")


def test_a_part_of_a_tensor_reads_its_bytes_alone(tmp_path: Path) -> None:
    file = tmp_path / "large.pt"
    torch.save({"w": torch.arange(1 << 20)}, file)
    target = {
        sw.Piece(name="w", dtype="int64", global_shape=(1 << 20,), offset=(99,), shape=(3,)): torch.zeros(
            3, dtype=torch.int64
        )
    }
    loaded = sw.load(file, target, channel=alone())
    [values] = target.values()
    assert values.tolist() == [99, 100, 101]
    assert loaded.report.read_bytes == 24


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.pt", lambda file: torch.jit.script(nn.Linear(2, 2)).save(file), "a program of TorchScript"),
        ("model.bin", lambda file: Path(file).write_text("version https://git-lfs.github.com/spec/v1\n"), "git LFS"),
        ("model.pkl", lambda file: Path(file).write_bytes(b"\x80\x02N."), "no pickle is run here"),
    ],
)
def test_what_cannot_be_read_says_what_it_is(
    tmp_path: Path, name: str, value: Callable[[str], object], words: str
) -> None:
    value(str(tmp_path / name))
    with pytest.raises(CheckpointError, match=words):
        checkpoint.open(tmp_path / name)
