"""`convert`: with all that a save says, whole or not at all, in bounded memory; and what it refuses."""

import gc
import json
import re
from collections import ChainMap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors
import safetensors.torch
import torch

from shardwise import checkpoint
from shardwise.checkpoint import convert, diff, export_hf, import_hf, outputs, preview, windows
from shardwise.errors import CheckpointError
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import Cut, cut, save_pieces, save_sharded, tensors_of
from tests.checkpoint.memory_peaks import peaks_of
from tests.checkpoint.small_states import contents, same, whole_state
from tests.checkpoint.stored_values import save_dcp
from tests.costs import calls_in
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

To = Literal["pieces", "whole", "hf", "dcp"]


@pytest.mark.parametrize("size", [16, 100])
def test_small_windows_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (windows, outputs):
        monkeypatch.setattr(module, "WINDOW_BYTES", size)
    state = whole_state(1)
    source = save_sharded(tmp_path / "pieces", state)
    to: Any
    for to in ("whole", "pieces", "hf", "dcp"):
        convert(source, tmp_path / to, to=to)
        assert diff(source, tmp_path / to, model_only=True).equal
        assert same(tensors_of(tmp_path / to), state)
    convert(tmp_path / "dcp", tmp_path / "back", to="pieces")
    assert same(tensors_of(tmp_path / "back"), state)


def pieces_of(path: Path) -> dict[str, list[str]]:
    found = checkpoint.open(path).tensors
    return {name: sorted(str(each.piece) for each in tensor.pieces) for name, tensor in found.items()}


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


def test_a_chain_through_all_forms_ends_where_it_began(tmp_path: Path) -> None:
    odd = "\u00e9 'a'/\"b\" ../x[0:2] run 3:4\n" + "long" * 500
    state = {**whole_state(2), odd: torch.arange(3), "": torch.tensor(1)}
    state["tied"] = state["rows"]
    checkpoint.save(tmp_path / "0", state)
    forms: list[To] = ["pieces", "whole", "hf", "hf", "pieces", "whole"]
    for number, to in enumerate(forms):
        convert(tmp_path / str(number), tmp_path / str(number + 1), to=to)
        assert checkpoint.open(tmp_path / str(number + 1)).contents.aliases == {"tied": "rows"}
    assert diff(tmp_path / "0", tmp_path / str(len(forms)), model_only=True).equal


def test_what_other_formats_say_beside_their_tensors_is_extra(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt", "by": "me"})
    save_dcp(tmp_path / "dcp", {"w": torch.ones(2), "step": 5})
    for source, extra in (
        ("x.safetensors", {"metadata": {"format": "pt", "by": "me"}}),
        ("dcp", {"objects": {"step": 5}}),
    ):
        convert(tmp_path / source, tmp_path / f"{source} save")
        assert checkpoint.open(tmp_path / f"{source} save").extra == extra
    assert checkpoint.open(tmp_path / "dcp save").contents.layout == "converted from dcp"


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


def flip_last(source: Path) -> Path:
    file = sorted((source / "save-00000001").glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def before(
    state: dict[str, torch.Tensor], place: str = "b", *, damage: bool = False, filled: bool = False, **arguments: Any
) -> Any:
    """A conversion of a state to a place beside some that hold something; which stay as they are."""

    def call(folder: Path) -> object:
        checkpoint.save(folder / "a", state, step=3)
        (folder / "full").mkdir()
        (folder / "full/x").write_text("precious")
        (folder / "hf").mkdir()
        safetensors.torch.save_file({"w": torch.ones(1)}, folder / "hf/model.safetensors")
        if damage:
            flip_last(folder / "a")
        kept = contents(folder)
        if filled:
            kept |= {f"{place}/y": b""}

            def fill(done: int, total: int) -> None:
                (folder / place).mkdir(exist_ok=True)
                (folder / place / "y").touch()

            arguments["progress"] = fill
        try:
            return convert(folder / "a", place if "://" in place or not place else folder / place, **arguments)
        except CheckpointError as error:  # names of files are drawn
            raise CheckpointError(re.sub(r"[0-9a-f]{8}-rank", "ID-rank", str(error))) from error
        finally:
            assert contents(folder) == kept

    return call


W = {"w": torch.ones(4)}
A_TO_B = Rewrite("w -> b")
FOREIGN = ("hf", "dcp", "torchtitan", "deepspeed-universal")


def calls_with(rewrite: Any) -> dict[str, Any]:
    """All calls that take a rewrite."""
    return {
        "convert": lambda folder: convert(folder, folder / "b", rewrite=rewrite),
        "preview": lambda folder: preview(folder, rewrite=rewrite),
        "import_hf": lambda folder: import_hf(folder, folder / "b", rewrite),
        "export_hf": lambda folder: export_hf(folder, folder / "b", rewrite),
        "save": lambda folder: checkpoint.save(folder / "b", W, rewrite=rewrite),
        "load": lambda folder: checkpoint.load(folder, dict(W), rewrite=rewrite),
        "full": lambda folder: list(checkpoint.full(dict(W), rewrite=rewrite)),
    }


def previewed(place: str, **arguments: Any) -> Any:
    def call(folder: Path) -> object:
        checkpoint.save(folder / "a", W)
        (folder / "full").mkdir()
        (folder / "full/x").write_text("precious")
        return preview(folder / "a", folder / place, **{"rewrite": A_TO_B, **arguments})

    return call


REFUSED = Refusals(
    "checkpoint.conversion",
    {
        **{f"{to}: a folder that holds something": before(W, "full", to=to) for to in FOREIGN},
        **{f"{to}: no local folder": before(W, "memory://bucket/x", to=to) for to in FOREIGN},
        **{f"{to}: damage": before(W, to=to, damage=True) for to in (*FOREIGN, "whole", "pieces")},
        **{f"{to}: nothing of a model": before({"optimizer/w/exp_avg": torch.ones(3)}, to=to) for to in FOREIGN},
        **{
            f"{to}: state of no parameter": before({**W, "optimizer/0/exp_avg": torch.ones(2)}, to=to)
            for to in FOREIGN[1:]
        },
        "a file": before(W, "full/x", to="hf"),
        "a file in the place of saves": before(W, "full/x"),
        "an empty path": before(W, "", to="hf"),
        "the folder of one save": before(W, "a/save-00000001"),
        "a folder of another format": before(W, "hf"),
        "an unknown form": before(W, to="gguf"),
        "a folder that is filled meanwhile": before(W, "new", to="hf", filled=True),
        "names and dtypes that files of Hugging Face do not have": before(
            {"__metadata__": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, to="hf"
        ),
        **{
            f"{name!r}, which no folder can have": before({name: torch.ones(2), **W}, to="deepspeed-universal")
            for name in ("../../x", "a//b", "/abs", "nul\0")
        },
        "two that would have one name": before(
            {name: torch.ones(2) for name in ("w", "optimizer/w/exp_avg", "step", "optimizer.state.w.exp_avg")},
            to="torchtitan",
        ),
        "a dtype of a save": before(W, dtype="bfloat16"),
        "a dtype that is no float": before(W, to="hf", dtype="int8"),
        "weights of no kind": before(W, weights="mean"),
        "no averages": before(W, weights="average"),
        "a parameter that nobody gave": before(W, to="hf", rewrite=Rewrite("w -> b, reshape='[{heads},-1]'")),
        **{f"max_shard_bytes={size!r}": before(W, max_shard_bytes=size) for size in ("x", None, 1.5, True, 0)},
        "certify as text": before(W, certify="yes"),
        "a step that is a flag": before(W, step=True),
        "an original without a certificate": before(W, original="x"),
        "an original that is not there": before(W, certify=True, original="/nothing/there"),
        "a configuration that is a number": lambda folder: export_hf(folder, folder / "b", config=5),  # type: ignore[arg-type]
        **{
            f"{type(rewrite).__name__} as the rewrite of {name}": call
            for rewrite in ("a -> b", 5, ["a -> b"])
            for name, call in calls_with(rewrite).items()
        },
        **{f"a preview to {to!r}": previewed("b", to=to) for to in ("HF", None, 5)},
        "a preview without a rewrite": previewed("b", rewrite=None),
        "a preview to a folder that holds something": previewed("full", to="hf"),
        "a preview to a file": previewed("full/x"),
        "a preview to the folder of one save": previewed("a/save-00000001"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_leaves_all_as_it_was(case: str) -> None:
    REFUSED.check(case)


def test_folders_that_were_made_for_nothing_go_again_and_others_stay(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", W)
    flip_last(tmp_path / "a")
    (tmp_path / "there").mkdir()
    for name in ("b", "there", "deep/er/b"):
        with pytest.raises(CheckpointError, match="is damaged"):
            convert(tmp_path / "a", tmp_path / name, rewrite=A_TO_B)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "there"]


@pytest.mark.parametrize("stops", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("certify", [False, True])
def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path: Path, stops: type[BaseException], certify: bool) -> None:
    """At its first window, or at the last of the certificate."""
    checkpoint.save(tmp_path / "a", W)

    def stopped(done: int, total: int) -> None:
        if done == total or not certify:
            raise stops

    for destination in (tmp_path / "new/b", tmp_path / "a"):
        with pytest.raises(stops):
            convert(tmp_path / "a", destination, rewrite=A_TO_B, certify=certify, progress=stopped)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["save-00000001"]


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


def test_every_generation_of_inverses_can_be_undone(tmp_path: Path) -> None:
    before = {"a": torch.randn(3).bfloat16(), "x": torch.randn(2), "y": torch.randn(3), "z": torch.randn(2, 3)}
    checkpoint.save(tmp_path / "0", before)
    text = "a -> b, dtype='float32'; x, y -> xy, axis=0; z -> z, reshape='[-1]'"
    convert(tmp_path / "0", tmp_path / "1", rewrite=Rewrite(text))
    for number in range(1, 6):
        again = checkpoint.recorded_rewrite(tmp_path / str(number))
        convert(tmp_path / str(number), tmp_path / str(number + 1), rewrite=again.inverse(), certify=True)
    assert same(tensors_of(tmp_path / "6"), before)
    assert same(tensors_of(tmp_path / "5"), tensors_of(tmp_path / "1"))
    assert tensors_of(tmp_path / "5")["b"].dtype == torch.float32
