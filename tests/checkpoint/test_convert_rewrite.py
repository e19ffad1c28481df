"""`convert` with a rewrite: its outputs are written, by the bit, out of every form into every other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch

from shardwise import checkpoint
from shardwise.checkpoint import convert, diff, outputs, windows
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import Cut, Tensors, cut, save_pieces, tensors_of
from tests.checkpoint.memory_peaks import peaks_of
from tests.checkpoint.small_states import contents, rubbish, same
from tests.checkpoint.stored_values import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

To = Literal["pieces", "whole", "hf"]

TEXT = """
a.$L.q, a.$L.k, a.$L.v -> a.$L.qkv, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0
a.$L.up^T -> a.$L.up
e.*.w -> e, stack=1, gaps=1
wide -> left, right, axis=1
half -> half, dtype='float32'
cube -> cube, permute='[2,0,1]'
gone -> _
old -> new
"""

HOWS: dict[str, Cut] = {
    "a.0.q": "columns",
    "a.0.k": "runs",
    "a.0.v": "runs",
    "wide": "columns",
    "old": "runs",
    "cube": "runs",
}


def state() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    layers = {
        f"a.{layer}.{name}": some(size, 6)
        for layer in range(2)
        for name, size in (("q", 8), ("k", 4), ("v", 4), ("up", 9))
    }
    return {
        **layers,
        **{f"e.{number}.w": some(3, 5).bfloat16() for number in (0, 1, 2, 10)},
        "wide": some(5, 8),
        "half": some(7).half(),
        "cube": some(3, 4, 6),
        "gone": some(4),
        "old": some(6, 3).double(),
        "kept": some(9, 2),
        "scalar": some().double(),
        "none": torch.zeros(0, 3),
    }


def by_hand(state: Tensors) -> dict[str, torch.Tensor]:
    """What `TEXT` makes of the state, by torch."""
    made = {name: state[name] for name in ("kept", "scalar", "none")}
    for layer in range(2):
        q, k, v = (state[f"a.{layer}.{name}"] for name in "qkv")
        made[f"a.{layer}.qkv"] = torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
        made[f"a.{layer}.up"] = state[f"a.{layer}.up"].t()
    made["e"] = torch.stack([state[f"e.{number}.w"] for number in (0, 1, 2, 10)], 1)
    made["left"], made["right"] = state["wide"][:, :4], state["wide"][:, 4:]
    made["half"] = state["half"].float()
    made["cube"] = state["cube"].permute(2, 0, 1)
    made["new"] = state["old"]
    return made


def save_cut(path: Path, state: Tensors, **arguments: Any) -> Path:
    """By three ranks, tensors in rows unless `HOWS` says otherwise."""
    cuts = [cut(name, tensor, HOWS.get(name, "rows") if tensor.dim() else "runs", 3) for name, tensor in state.items()]
    save_pieces(
        path, [{piece: part for each in cuts for piece, part in each[rank].items()} for rank in range(3)], **arguments
    )
    return path


def in_every_form(folder: Path, state: Tensors) -> dict[str, Path]:
    (folder / "hf").mkdir()
    safetensors.torch.save_file(dict(state), folder / "hf/model.safetensors", metadata={"format": "pt"})
    save_dcp(folder / "dcp", state)
    checkpoint.save(folder / "whole", dict(state), layout="whole")
    return {
        "pieces": save_cut(folder / "pieces", state),
        "whole": folder / "whole",
        "hf": folder / "hf",
        "file": folder / "hf/model.safetensors",
        "dcp": folder / "dcp",
    }


@pytest.fixture(params=[(16, 48), (100, 100), (1 << 23, 40 << 20)], ids=lambda sizes: f"windows of {sizes[0]}")
def _windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = request.param
    monkeypatch.setattr(windows, "WINDOW_BYTES", small)
    monkeypatch.setattr(outputs, "WINDOW_BYTES", small)
    monkeypatch.setattr(outputs, "LARGE_WINDOW_BYTES", large)


@pytest.mark.usefixtures("_windows")
@pytest.mark.parametrize("to", ["pieces", "whole", "hf"])
def test_every_form_is_rewritten_into_every_other(tmp_path: Path, to: To) -> None:
    before = state()
    for name, source in in_every_form(tmp_path, before).items():
        target = tmp_path / f"{name} as {to}"
        report = convert(source, target, to=to, rewrite=Rewrite(TEXT))
        assert same(tensors_of(target), by_hand(before)), name
        assert report.dropped == ("gone",)
        assert report.num_tensors == len(by_hand(before))
        assert report.num_bytes == sum(each.nbytes for each in by_hand(before).values())
        if to == "hf":
            assert same(safetensors.torch.load_file(target / "model.safetensors"), by_hand(before))
        else:
            assert checkpoint.verify(target).good
            assert rubbish(target) == []
            files = checkpoint.open(target).contents.file_sizes
            assert len(files) == (3 if name == "pieces" and to == "pieces" else 1)


def test_what_is_only_renamed_or_cast_keeps_its_pieces_and_files(tmp_path: Path) -> None:
    source = save_cut(tmp_path / "a", state())
    convert(source, tmp_path / "b", to="pieces", rewrite=Rewrite(TEXT))
    old, new = checkpoint.open(source).tensors, checkpoint.open(tmp_path / "b").tensors

    def places(tensors: Any, name: str) -> list[tuple[str, str]]:
        return sorted((each.file[-20:], str(each.piece).partition("[")[2]) for each in tensors[name].pieces)

    for one, other in (("old", "new"), ("kept", "kept"), ("half", "half")):
        assert len(places(new, other)) == 3
        assert places(new, other) == places(old, one)
    assert all(each.piece.run is not None for each in new["new"].pieces)
    put_together = [new[name].pieces for name in ("a.0.qkv", "a.1.qkv", "e", "cube", "left")]
    assert all(len(pieces) == 1 and pieces[0].piece.whole for pieces in put_together)
    assert len({pieces[0].file for pieces in put_together}) == 3


def test_the_inverse_finds_in_the_save_what_its_text_does_not_say(tmp_path: Path) -> None:
    text = (
        "x, y -> xy, axis=0; half -> half, dtype='float32'; e.*.w -> e, stack=0, gaps=1; flat -> flat, reshape='[2,-1]'"
    )
    before = {
        "x": torch.randn(3, 2),
        "y": torch.randn(4, 2),
        "half": torch.randn(3).half(),
        "flat": torch.randn(3, 4),
        **{f"e.{number}.w": torch.randn(2) for number in (0, 3)},
    }
    checkpoint.save(tmp_path / "a", before)
    convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text))
    to: To
    for to in ("pieces", "whole", "hf"):
        convert(tmp_path / "b", tmp_path / to, to=to, rewrite=Rewrite(text).inverse())
        assert same(tensors_of(tmp_path / to), before)
    again = checkpoint.recorded_rewrite(tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", rewrite=again.inverse())
    assert same(tensors_of(tmp_path / "c"), before)
    with pytest.raises(CheckpointError, match="does not say which rewrite made it"):
        checkpoint.recorded_rewrite(tmp_path / "a")


def test_without_the_record_the_inverse_says_what_is_not_known(tmp_path: Path) -> None:
    text = "x, y -> xy, axis=0"
    checkpoint.save(tmp_path / "a", {"xy": torch.ones(7, 2)})
    with pytest.raises(RewriteError) as caught:
        convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text).inverse())
    assert "sizes" in str(caught.value)
    checkpoint.save(tmp_path / "c", {"xy": torch.arange(14.0).view(7, 2)})
    convert(tmp_path / "c", tmp_path / "d", rewrite=Rewrite("xy -> x, y, axis=0, sizes='[3,4]'"))
    assert tensors_of(tmp_path / "d")["y"].shape == (4, 2)


def test_the_save_says_by_which_rewrite_it_was_made_and_of_what(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3, 2), "y": torch.ones(4, 2, dtype=torch.float16)})
    rewrite = Rewrite("x -> z")
    convert(tmp_path / "a", tmp_path / "b", rewrite=rewrite)
    record = checkpoint.open(tmp_path / "b").contents.settings["rewrite"]
    assert record == {"text": str(rewrite), "sources": {"x": [[3, 2], "float32"], "y": [[4, 2], "float16"]}}


def trained(seed: int, *, apart: bool = False) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(seed)
    parameters = {name: torch.nn.Parameter(torch.randn(4, 3)) for name in ("x", "y", "b")}
    groups = [
        {"params": [parameters["x"]] if apart else [parameters["x"], parameters["y"]], "lr": 0.5},
        {"params": [parameters["y"], parameters["b"]] if apart else [parameters["b"]], "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups)
    sum(each.square().sum() for each in parameters.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return parameters, optimizer


class Model(torch.nn.Module):
    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


def test_the_state_of_optimizers_and_their_groups_go_along(tmp_path: Path) -> None:
    parameters, optimizer = trained(0)
    checkpoint.save(tmp_path / "a", checkpoint.TorchState(Model(parameters), optimizer), step=4)
    convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("x, y -> xy, axis=1; b^T -> b"))
    joined = {"xy": torch.nn.Parameter(torch.zeros(4, 6)), "b": torch.nn.Parameter(torch.zeros(3, 4))}
    again = torch.optim.AdamW([{"params": [joined["xy"]]}, {"params": [joined["b"]]}], lr=9.0)
    checkpoint.load(tmp_path / "b", checkpoint.TorchState(Model(joined), again))
    assert torch.equal(joined["xy"], torch.cat([parameters["x"], parameters["y"]], 1))
    for key in ("exp_avg", "exp_avg_sq"):
        moments = [optimizer.state[parameters[name]][key] for name in "xy"]
        assert torch.equal(again.state[joined["xy"]][key], torch.cat(moments, 1))
        assert torch.equal(again.state[joined["b"]][key], optimizer.state[parameters["b"]][key].t())
    assert again.state[joined["xy"]]["step"] == 1
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.25]
    assert checkpoint.open(tmp_path / "b").step == 4


def test_tensors_that_are_trained_apart_are_not_joined(tmp_path: Path) -> None:
    parameters, optimizer = trained(0, apart=True)
    checkpoint.save(tmp_path / "a", checkpoint.TorchState(Model(parameters), optimizer))
    rewrite = Rewrite("x, y -> xy, axis=1")
    with pytest.raises(CheckpointError, match=r"xy is made of x, which group 0 of AdamW trains, and y"):
        convert(tmp_path / "a", tmp_path / "b", rewrite=rewrite)
    convert(tmp_path / "a", tmp_path / "hf", to="hf", rewrite=rewrite)  # has no optimizer
    assert tensors_of(tmp_path / "hf")["xy"].shape == (4, 6)


def test_numbers_of_which_one_is_made_have_to_be_equal(tmp_path: Path) -> None:
    parameters, optimizer = trained(0)
    optimizer.state[parameters["y"]]["step"] += 1
    checkpoint.save(tmp_path / "a", checkpoint.TorchState(Model(parameters), optimizer))
    with pytest.raises(CheckpointError, match=r"optimizer/x/step is 1\.0 and optimizer/y/step is 2\.0"):
        convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("x, y -> xy, axis=1"))
    assert not (tmp_path / "b").exists()


def test_ties_stay_ties(tmp_path: Path) -> None:
    embed = torch.randn(4, 3)
    checkpoint.save(tmp_path / "a", {"embed": embed, "head": embed, "w": torch.ones(2)})
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("embed -> tokens; head -> out"))
    assert report.aliases == {"out": "tokens"}
    assert checkpoint.open(tmp_path / "b").contents.aliases == {"out": "tokens"}
    convert(tmp_path / "b", tmp_path / "c", rewrite=checkpoint.recorded_rewrite(tmp_path / "b").inverse(), certify=True)
    assert diff(tmp_path / "a", tmp_path / "c").equal
    convert(tmp_path / "a", tmp_path / "d", rewrite=Rewrite("head^T -> head"))  # no longer the same tensor
    assert same(tensors_of(tmp_path / "d"), {"embed": embed, "head": embed.t(), "w": torch.ones(2)})


def test_casts_in_a_chain_round_as_often_as_they_say(tmp_path: Path) -> None:
    x = torch.randn(50, 40) * 3
    checkpoint.save(tmp_path / "a", {"x": x})
    chain = "x -> y, dtype='float16'; y^T -> z, dtype='bfloat16'; z -> w, dtype='float32'"
    convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(chain))
    assert torch.equal(tensors_of(tmp_path / "b")["w"], x.t().half().bfloat16().float())


def test_what_has_no_value_in_files_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"the rewrite adds z, which keep the values .* leave these statements"):
        convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("_ -> z"))


def test_every_finding_comes_before_a_byte_is_read(tmp_path: Path) -> None:
    source = save_cut(tmp_path / "a", state())
    for file in (source / "save-00000001").glob("*.safetensors"):
        file.unlink()
    text = checkpoint.preview(source, rewrite=Rewrite(TEXT))
    assert "a.0.qkv" in text
    with pytest.raises(RewriteError) as caught:
        convert(source, tmp_path / "b", rewrite=Rewrite("typo -> x; wide -> l, r, axis=7"))
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["pieces", "whole", "hf"])
def test_damaged_and_incomplete_sources_are_refused_and_leave_nothing(tmp_path: Path, to: To) -> None:
    source = save_cut(tmp_path / "a", state())
    file = sorted((source / "save-00000001").glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: bytes"):
        convert(source, tmp_path / "b", to=to, rewrite=Rewrite(TEXT))
    file.unlink()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        convert(source, tmp_path / "b", to=to, rewrite=Rewrite(TEXT))
    assert contents(tmp_path) == before
    assert all(name.startswith("a/") for name in before)


def test_damage_in_what_is_dropped_does_no_harm(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(1000), "bad": torch.ones(1000)}, layout="whole")
    (file,) = (tmp_path / "a/save-00000001").glob("*.safetensors")
    place = checkpoint.open(tmp_path / "a").tensors["bad"].pieces[0].start
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite("bad -> _"))
    assert report.read_bytes == 4000
    assert same(tensors_of(tmp_path / "b"), {"x": torch.ones(1000)})


def test_each_block_is_read_once_where_outputs_that_share_it_fit_into_a_window(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.randn(600, 700) for number in range(3)}
    tensors |= {f"wide{number}": torch.randn(600, 900) for number in range(2)}
    checkpoint.save(tmp_path / "a", tensors)
    total = sum(each.nbytes for each in tensors.values())
    text = "w0^T -> t; w1, w2 -> c, axis=1; wide$N -> l$N, r$N, axis=1; r$N^T -> r$N"
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text))
    assert report.read_bytes == total


def test_each_block_is_read_once_where_order_stays_however_small_the_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "LARGE_WINDOW_BYTES", 1 << 18)
    for module in (windows, outputs):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1 << 18)
    tensors = {name: torch.randn(1024, 512) for name in "qkv"}
    checkpoint.save(tmp_path / "a", tensors)
    text = "q, k, v -> x, fused_qkv, num_heads=4, num_key_value_groups=4, axis=0; x -> a, b, axis=0"
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text))
    assert report.read_bytes == sum(each.nbytes for each in tensors.values())
    report = convert(tmp_path / "a", tmp_path / "c", rewrite=Rewrite("q^T -> q"))
    assert report.read_bytes == (8 + 2) * tensors["q"].nbytes  # each of the 8 windows has elements of every block


def test_a_conversion_with_a_rewrite_joins_the_saves_of_its_folder(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2, 3)}, step=1)
    report = convert(tmp_path / "a", tmp_path / "a", rewrite=Rewrite("x^T -> y"))
    assert report.destination == str(tmp_path / "a/save-00000002")
    assert same(tensors_of(tmp_path / "a"), {"y": torch.ones(3, 2)})


LARGE = "q, k -> qk, axis=1; qk^T -> qk; big^T -> big; wide -> l, r, axis=1; half -> half, dtype='float32'"


def conversions(source: Path, folder: Path) -> Iterator[str]:
    checkpoint.save(folder / "small", {"w": torch.ones(10, 10)})
    convert(folder / "small", folder / "again", rewrite=Rewrite("w^T -> w"), certify=True)
    yield "what is loaded once"
    to: To
    for to in ("pieces", "hf"):
        convert(source, folder / to, to=to, rewrite=Rewrite(LARGE))
        yield to
    convert(folder / "pieces", folder / "back", rewrite=Rewrite(LARGE).inverse(), certify=True)
    yield "back"


@pytest.mark.parametrize(("part", "limit_mib"), [(4, 44), pytest.param(1, 128, marks=pytest.mark.stress)])
def test_memory_stays_below_a_limit_however_large_the_tensors(part: int, limit_mib: int, tmp_path: Path) -> None:
    """400 MB, with one tensor of 200 MB, transposed, joined and split across rows; the certificate as well.

    Or a fourth of it, in windows of a fourth: then the largest tensor has 48 MiB.
    """
    tensors = {
        "big": torch.randn(10_000 // part, 5_000),
        "wide": torch.randn(2_000 // part, 10_000),
        "q": torch.randn(5_000 // part, 1_000),
        "k": torch.randn(5_000 // part, 2_000),
        "half": torch.randn(5_000 // part, 2_000).half(),
    }
    checkpoint.save(tmp_path / "a", tensors)
    peaks = peaks_of(conversions, tmp_path / "a", tmp_path, window_part=part)
    assert same(tensors_of(tmp_path / "back"), tensors)
    assert 16 / part < max(peaks.values()) < limit_mib, peaks
