"""`convert`: from every form to every other, by the byte, whole or not at all, in bounded memory."""

import gc
import json
from collections import ChainMap
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from shardwise import checkpoint
from shardwise.checkpoint import convert, diff, windows
from shardwise.errors import CheckpointError
from tests.checkpoint.cut_tensors import Cut, Tensors, cut, save_pieces, save_sharded, tensors_of
from tests.checkpoint.memory_peaks import peaks_of
from tests.checkpoint.small_states import contents, rubbish, same, same_tensor, share_of_state, whole_state
from tests.checkpoint.stored_values import random_state, save_dcp
from tests.costs import calls_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

To = Literal["pieces", "whole", "hf", "dcp"]


def pieces_of(path: Path) -> dict[str, list[str]]:
    found = checkpoint.open(path).tensors
    return {name: sorted(str(each.piece) for each in tensor.pieces) for name, tensor in found.items()}


@pytest.fixture(params=[16, 100, 1 << 24], ids=lambda size: f"windows of {size}")
def _windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", request.param)


def in_every_form(folder: Path, state: Tensors) -> dict[str, Path]:
    """The same tensors in every form that can be read."""
    (folder / "hf").mkdir()
    safetensors.torch.save_file(dict(state), folder / "hf/model.safetensors", metadata={"format": "pt", "by": "me"})
    save_dcp(folder / "dcp", state)
    checkpoint.save(folder / "whole", dict(state), layout="whole", extra={"step": 3})
    return {
        "pieces": save_sharded(folder / "pieces", state, extra={"step": 3}),
        "whole": folder / "whole",
        "hf": folder / "hf",
        "file": folder / "hf/model.safetensors",
        "dcp": folder / "dcp",
    }


@pytest.mark.usefixtures("_windows")
@pytest.mark.parametrize("to", ["pieces", "whole", "hf", "dcp"])
def test_every_form_becomes_every_other_with_the_same_bytes(tmp_path: Path, to: To) -> None:
    state = whole_state(1)
    for name, source in in_every_form(tmp_path, state).items():
        target = tmp_path / f"{name} as {to}"
        report = convert(source, target, to=to)
        assert same(tensors_of(target), state)
        assert diff(source, target, model_only=True).equal
        assert (report.num_tensors, report.num_bytes) == (5, sum(each.nbytes for each in state.values()))
        assert report.verified == (name in ("pieces", "whole"))
        assert report.destination == checkpoint.open(target).location
        if to == "hf":
            assert same(safetensors.torch.load_file(target / "model.safetensors"), state)
        elif to == "dcp":
            loaded = {"model": {key: torch.zeros_like(tensor) for key, tensor in state.items()}}
            load(loaded, checkpoint_id=target, no_dist=True)
            assert same(loaded["model"], state)
        else:
            assert checkpoint.verify(target).good
            assert rubbish(target) == []
            expected = pieces_of(source) if to == "pieces" else {name: [] for name in state if name == "none"}
            assert pieces_of(target) | expected == pieces_of(target)
            if to == "whole":
                assert all(len(each) == (name != "none") for name, each in pieces_of(target).items())


def test_pieces_stay_in_as_many_files_with_boxes_runs_and_checksums(tmp_path: Path) -> None:
    source = save_sharded(tmp_path / "a", whole_state(1))
    convert(source, tmp_path / "b", to="pieces")
    old, new = checkpoint.open(source).contents, checkpoint.open(tmp_path / "b").contents
    assert len(new.file_sizes) == len(old.file_sizes) == 3
    assert list(new.tensors) == list(old.tensors)
    for name, tensor in old.tensors.items():
        again = {each.piece: each.checksums for each in new.tensors[name].pieces}
        assert again == {each.piece: each.checksums for each in tensor.pieces}
    assert {"rows[2:4, 0:5]", "rows[4:7, 0:5]"} < set(pieces_of(source)["rows"])
    assert all("run" in each for each in pieces_of(source)["flat"])
    found = diff(source, tmp_path / "b")
    assert (found.num_equal, found.num_equal_by_checksum) == (5, 4)


def test_a_chain_through_all_forms_ends_where_it_began(tmp_path: Path) -> None:
    state = whole_state(2)
    state["tied"] = state["rows"]
    checkpoint.save(tmp_path / "0", state)
    forms: list[To] = ["pieces", "whole", "hf", "hf", "pieces", "whole"]
    for number, to in enumerate(forms):
        convert(tmp_path / str(number), tmp_path / str(number + 1), to=to)
        assert checkpoint.open(tmp_path / str(number + 1)).contents.aliases == {"tied": "rows"}
    assert diff(tmp_path / "0", tmp_path / str(len(forms)), model_only=True).equal


@pytest.mark.parametrize("to", ["pieces", "whole"])
def test_a_save_keeps_all_that_it_says_beside_its_tensors(tmp_path: Path, to: To) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = checkpoint.TorchState(model, optimizer)
    checkpoint.save(tmp_path / "a", state, step=7, extra={"tokens": [1, {"x": None}]})
    checkpoint.save(tmp_path / "a", state, step=8)
    convert(tmp_path / "a", tmp_path / "b", to=to, step=7)
    old, new = checkpoint.open(tmp_path / "a", step=7).contents, checkpoint.open(tmp_path / "b").contents
    for field in ("step", "extra", "settings", "aliases", "layout", "block_bytes"):
        assert getattr(new, field) == getattr(old, field), field
    again = torch.nn.Linear(3, 2)
    taken = torch.optim.AdamW(again.parameters(), lr=0.1)
    checkpoint.load(tmp_path / "b", checkpoint.TorchState(again, taken))
    assert same(again.state_dict(), model.state_dict())
    assert taken.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("to", ["pieces", "whole"])
def test_what_other_formats_say_beside_their_tensors_is_extra(tmp_path: Path, to: To) -> None:
    forms = in_every_form(tmp_path, whole_state(1))
    convert(forms["hf"], tmp_path / "a", to=to)
    assert checkpoint.open(tmp_path / "a").extra == {"metadata": {"format": "pt", "by": "me"}}
    save_dcp(tmp_path / "dcp2", {"w": torch.ones(2), "step": 5})
    convert(tmp_path / "dcp2", tmp_path / "b", to=to)
    assert checkpoint.open(tmp_path / "b").extra == {"objects": {"step": 5}}
    assert checkpoint.open(tmp_path / "b").contents.layout == "converted from dcp"


def test_a_conversion_joins_the_saves_of_its_folder(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", whole_state(1), step=1)
    checkpoint.save(tmp_path / "b", whole_state(2), step=2)
    before = contents(tmp_path / "a/save-00000001")
    report = convert(tmp_path / "b", tmp_path / "a")
    assert report.destination == str(tmp_path / "a/save-00000002")
    assert contents(tmp_path / "a/save-00000001") == before
    assert same(tensors_of(tmp_path / "a"), whole_state(2))
    convert(tmp_path / "a", tmp_path / "a", to="pieces", step=1)
    assert same(tensors_of(tmp_path / "a"), whole_state(1))


def test_every_dtype_scalars_nothing_and_odd_names_survive(tmp_path: Path) -> None:
    odd = "\u00e9 'a'/\"b\" ../x[0:2] run 3:4\n" + "long" * 500
    state = {**random_state(), odd: torch.arange(3), "": torch.tensor(1), "__metadata__": torch.ones(2)}
    checkpoint.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b", to="whole")
    convert(tmp_path / "b", tmp_path / "c", to="pieces")
    assert same(tensors_of(tmp_path / "c"), {name: tensor.contiguous() for name, tensor in state.items()})
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert caught.value.problems == (
        "'__metadata__' cannot be the name of a tensor in a safetensors file",
        "torch.complex128 is of dtype complex128, which safetensors files cannot hold; convert to whole "
        "(--to whole), which names the dtype in its manifest",
    )
    del state["__metadata__"], state["torch.complex128"]
    checkpoint.save(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert same(safetensors.torch.load_file(tmp_path / "hf/model.safetensors"), state)


def test_nothing_at_all_becomes_a_save_of_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"none": torch.zeros(0)}, extra={"x": 1})
    to: To
    for to in ("pieces", "whole"):
        convert(tmp_path / "a", tmp_path / to, to=to)
        assert diff(tmp_path / "a", tmp_path / to).equal
    convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert diff(tmp_path / "a", tmp_path / "hf").equal
    checkpoint.save(tmp_path / "b", {}, extra={"x": 1})
    convert(tmp_path / "b", tmp_path / "c")
    assert diff(tmp_path / "b", tmp_path / "c").equal
    with pytest.raises(CheckpointError, match="has no tensor of a model"):
        convert(tmp_path / "b", tmp_path / "hf2", to="hf")


def test_shards_and_their_index_hold_every_tensor_once(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(10 + number) for number in range(9)}
    state["large"] = torch.randn(500)
    state["tied"] = state["w3"]
    checkpoint.save(tmp_path / "a", state)
    report = convert(tmp_path / "a", tmp_path / "hf", to="hf", max_shard_bytes=150)
    assert report.aliases == {"tied": "w3"}
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    del state["tied"]
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in state.values())}
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    assert set(index["weight_map"].values()) == set(names)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        shard = safetensors.torch.load_file(tmp_path / "hf" / name)
        assert sum(each.nbytes for each in shard.values()) <= 150 or list(shard) == ["large"]
        assert all(index["weight_map"][key] == name for key in shard)
        assert not shard.keys() & found.keys()
        found |= shard
        with safetensors.safe_open(tmp_path / "hf" / name, "pt") as file:
            assert file.metadata() == ({"format": "pt", "tied": "w3"} if "w3" in shard else {"format": "pt"})
    assert same(found, state)


def test_optimizers_are_left_out_of_hugging_face_files_and_counted(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(3).bfloat16(),
        "optimizer/w/master": torch.ones(3),
        "optimizer/w/exp_avg": torch.ones(3),
        "optimizer.bias": torch.ones(2),
    }
    checkpoint.save(tmp_path / "a", state)
    report = convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert (report.left_out, report.num_masters) == (("optimizer/w/master", "optimizer/w/exp_avg"), 1)
    found = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert same(found, {name: state[name] for name in ("w", "optimizer.bias")})
    nested = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {"w": {"exp_avg": torch.zeros(3)}}}}
    save_dcp(tmp_path / "dcp", nested)
    report = convert(tmp_path / "dcp", tmp_path / "hf2", to="hf")
    assert report.left_out == ("optimizer.state.w.exp_avg",)
    assert list(safetensors.torch.load_file(tmp_path / "hf2/model.safetensors")) == ["model.w"]
    convert(tmp_path / "dcp", tmp_path / "ours")
    assert tensors_of(tmp_path / "ours").keys() == {"model.w", "optimizer.state.w.exp_avg"}


def refusal(source: Path, target: Any, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, **arguments)
    return str(caught.value)


def test_destinations_that_hold_something_are_left_alone(tmp_path: Path) -> None:
    source = save_sharded(tmp_path / "a", whole_state(1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("precious")
    before = contents(tmp_path)
    assert "is a folder that holds something" in refusal(source, tmp_path / "full", to="hf")
    assert "is a file, which is left as it is" in refusal(source, tmp_path / "full/x", to="hf")
    assert "x is a file; name a folder to save to" in refusal(source, tmp_path / "full/x")
    assert "is no local folder" in refusal(source, "memory://bucket/x", to="hf")
    assert "an empty path was given" in refusal(source, "", to="hf")
    assert "is the folder of one save" in refusal(source, tmp_path / "a/save-00000001")
    assert "goes to pieces, whole, hf" in refusal(source, tmp_path / "b", to="gguf")
    assert "give at least 1" in refusal(source, tmp_path / "b", max_shard_bytes=0)
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    convert(source, tmp_path / "link", to="hf")
    assert same(tensors_of(tmp_path / "empty"), whole_state(1))
    before = contents(tmp_path)
    assert "holds a safetensors checkpoint, and a save in it would make it unreadable as one" in refusal(
        source, tmp_path / "empty"
    )
    assert contents(tmp_path) == before


def test_a_folder_that_is_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    source = save_sharded(tmp_path / "a", whole_state(1))
    target = tmp_path / "hf"

    def filled_by_another(done: int, total: int) -> None:
        target.mkdir()
        (target / "x").write_text("precious")

    assert "is a folder that holds something" in refusal(source, target, to="hf", progress=filled_by_another)
    assert contents(target) == {"x": b"precious"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "hf"]


@pytest.mark.parametrize("to", ["pieces", "whole", "hf"])
def test_damaged_and_incomplete_sources_are_refused_and_leave_nothing(tmp_path: Path, to: To) -> None:
    source = save_sharded(tmp_path / "a", whole_state(1))
    file = sorted((source / "save-00000001").glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert f"{file} is damaged: bytes" in refusal(source, tmp_path / "b", to=to)
    file.unlink()
    assert f"{file} cannot be read: No such file" in refusal(source, tmp_path / "b", to=to)
    assert sorted(contents(tmp_path)) == sorted(f"a/{name}" for name in contents(source))
    assert not list(tmp_path.glob(".b.*"))


def test_tensors_that_are_not_whole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.arrangement.check_cover", lambda pieces: [])
    share = share_of_state(whole_state(1), 0, 3)
    checkpoint.save(tmp_path / "a", share)
    text = refusal(tmp_path / "a", tmp_path / "b")
    assert "is incomplete: 2 problems" in text
    assert "rows: 25 of 35 elements are held by no piece, first (2, 0)" in text
    assert "flat: 22 of 33 elements are held by no piece" in text
    with pytest.raises(CheckpointError, match="is incomplete"):
        diff(tmp_path / "a", tmp_path / "a")


def test_progress_comes_to_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 64)
    checkpoint.save(tmp_path / "a", {"w": torch.ones(40), "optimizer/w/m": torch.ones(2)})
    to: To
    for to, total in (("whole", 168), ("hf", 160)):
        seen: list[tuple[int, int]] = []

        def note(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        convert(tmp_path / "a", tmp_path / to, to=to, progress=note)
        assert seen == [(min(done, total), total) for done in range(64, total + 64, 64)]


def conversions(source: Path, folder: Path) -> Iterator[str]:
    checkpoint.save(folder / "small", {"w": torch.ones(1000)})
    convert(folder / "small", folder / "again")
    diff(folder / "small", folder / "again")
    yield "what is loaded once"
    to: To
    for to in ("pieces", "whole", "hf"):
        convert(source, folder / to, to=to)
        yield to
    for one, other in (("pieces", "whole"), ("whole", "hf")):
        assert diff(folder / one, folder / other, model_only=True).num_equal == 11
        yield f"{one} and {other}"


def test_memory_stays_below_64_mib_however_large_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of 160 MB, one tensor of which is of 80 MB, cut into rows, runs and columns by three ranks."""
    tensors = {"rows": torch.randn(4_000_000, 5), "flat": torch.randn(1_000_000, 3).bfloat16()}
    tensors |= {f"w{number}": torch.full((100, 20_000), float(number)) for number in range(9)}
    hows: dict[str, Cut] = {"rows": "rows", "flat": "runs"}
    cuts = [cut(name, tensor, hows.get(name, "columns"), 3) for name, tensor in tensors.items()]
    save_pieces(tmp_path / "a", [{**dict(ChainMap(*shares))} for shares in zip(*cuts, strict=True)])
    del tensors, cuts
    peaks = peaks_of(conversions, tmp_path / "a", tmp_path, window_part=1)
    assert 4 < max(peaks.values()) < 64, peaks


def test_a_causal_model_with_a_tie_is_loaded_by_transformers(tmp_path: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    small: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
    llama = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **small
    )
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **small)
    auto: Any = transformers.AutoModelForCausalLM
    for config, max_shard_bytes in product((llama, gpt2), (5 << 30, 4000)):
        torch.manual_seed(0)
        model = auto.from_config(config)
        path = tmp_path / f"{config.model_type} {max_shard_bytes}"
        checkpoint.save(path / "a", checkpoint.TorchState(model))
        report = convert(path / "a", path / "hf", to="hf", max_shard_bytes=max_shard_bytes)
        assert report.aliases == ({"lm_head.weight": "transformer.wte.weight"} if config is gpt2 else {})
        config.save_pretrained(path / "hf")
        again, found = auto.from_pretrained(path / "hf", output_loading_info=True)
        assert not found["missing_keys"]
        assert not found["unexpected_keys"]
        state = model.state_dict()
        assert all(same_tensor(tensor, state[name]) for name, tensor in again.state_dict().items())
        if config is gpt2:
            assert again.lm_head.weight is again.transformer.wte.weight
        again.save_pretrained(path / "theirs")
        assert diff(path / "a", path / "theirs", model_only=True).equal
        convert(path / "theirs", path / "back")
        assert diff(path / "a", path / "back", model_only=True).equal


@pytest.mark.parametrize(("to", "most"), [("whole", 800), ("dcp", 1200)])
def test_very_many_tensors_cost_few_calls_each_and_no_looks_at_all_objects(
    tmp_path: Path, to: Literal["whole", "dcp"], most: int
) -> None:
    counts = []
    for number in (200, 600):
        torch.save({f"layers.{each}.w": torch.full((4,), float(each)) for each in range(number)}, tmp_path / "from.pt")
        convert(tmp_path / "from.pt", tmp_path / f"warm {number}", to=to)
        counts.append(calls_in(partial(convert, tmp_path / "from.pt", tmp_path / f"{number}", to=to)))
    assert (counts[1] - counts[0]) / 400 <= most
    looks = gc.get_stats()[2]["collections"]
    convert(tmp_path / "from.pt", tmp_path / "once more", to=to)
    assert gc.get_stats()[2]["collections"] == looks
    assert gc.get_threshold()[2] < 1000
