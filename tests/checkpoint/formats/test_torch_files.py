"""Files of torch.save: names and values are what torch.load gives; what is no plain tensor is named and left out."""

import argparse
import collections
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.errors import CheckpointError
from tests.contracts.format_cases import check_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf",
    "ignore:Sparse CSR",
    "ignore:.*deprecated",
    "ignore:torch.distributed is disabled",
    "ignore::UserWarning",
)
FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "before 1.6": {"_use_new_zipfile_serialization": False},
    "protocol 4": {"pickle_protocol": 4},
}


@pytest.mark.parametrize("form", FORMS)
def test_nested_tensors_have_dotted_names_and_values_stay_values(tmp_path: Path, form: str) -> None:
    file = tmp_path / "state.pth"
    value: dict[str, Any] = {
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
    rng = {f"extra/rng.{at}": each for at, each in enumerate(value["rng"])}
    tensors = {f"{key}.{name}": each for key in ("net", "average") for name, each in value[key].items()}
    check_tensors(file, tensors | rng)
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


def test_nothing_is_made_where_no_tensor_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    torch.save({"model": torch.nn.Linear(2, 2), "epoch": 3}, path)
    for to in ("whole", "hf"):
        with pytest.raises(CheckpointError, match=r"has no tensor (?s:.*)model is left out: it is a torch\.nn"):
            checkpoint.convert(path, tmp_path / "made", to=to)
        assert not (tmp_path / "made").exists()


def test_a_load_that_misses_what_was_left_out_says_so(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2), "odd": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"odd: missing(?s:.*)note: odd is left out: it is a sparse tensor"):
        sw.load(tmp_path / "a.pt", {"w": torch.zeros(2, 2), "odd": torch.zeros(3, 3)})


def test_whole_numbers_that_no_text_holds_are_named_and_left_out(tmp_path: Path) -> None:
    """Python writes 4,300 digits of a number; a save of ours is text."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["tag"] = 10**5000
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seed": 10**5000, "step": 3}
    torch.save(values, tmp_path / "last.ckpt")
    notes = checkpoint.open(tmp_path / "last.ckpt").contents.notes
    assert any("seed is left out: it is a whole number of more than 4,096 bits" in each for each in notes)
    assert any("'tag' among the settings" in each for each in notes)
    checkpoint.convert(tmp_path / "last.ckpt", tmp_path / "save")
    catalogue = checkpoint.open(tmp_path / "save")
    assert (catalogue.step, "seed" in catalogue.extra["objects"]) == (3, False)
    check_tensors(tmp_path / "save", model.state_dict())


def test_a_name_that_no_save_can_have_is_refused_before_one_is_made_and_can_be_rewritten(tmp_path: Path) -> None:
    torch.save({"w\ud800": torch.ones(2)}, tmp_path / "model.pt")
    for to in ("whole", "pieces", "deepspeed-universal"):
        with pytest.raises(CheckpointError, match=r"ud800' .*(rename it|by a rewrite)"):
            checkpoint.convert(tmp_path / "model.pt", tmp_path / "out", to=to)
        assert not (tmp_path / "out").exists()
    checkpoint.convert(tmp_path / "model.pt", tmp_path / "out", rewrite=sw.Rewrite('"w\ud800" -> w'))
    check_tensors(tmp_path / "out", {"w": torch.ones(2)})
