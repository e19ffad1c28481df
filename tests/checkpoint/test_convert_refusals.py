"""Conversions that fail, are stopped, or are asked for in vain: what is said, and that nothing is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import certificates, convert, export_hf, import_hf, preview
from shardwise.checkpoint.renamed_settings import names_state
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.small_states import same


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "a", {"a": torch.arange(4.0)}, layout="whole")
    return tmp_path / "a"


@pytest.mark.parametrize("rewrite", ["a -> b", 5, ["a -> b"]])
def test_what_is_no_rewrite_is_refused_by_every_call_alike(source: Path, tmp_path: Path, rewrite: Any) -> None:
    convert(source, tmp_path / "hf", to="hf")
    calls: list[Callable[[], object]] = [
        lambda: convert(source, tmp_path / "b", rewrite=rewrite),
        lambda: preview(source, rewrite=rewrite),
        lambda: import_hf(tmp_path / "hf", tmp_path / "b", rewrite),
        lambda: export_hf(source, tmp_path / "b", rewrite),
        lambda: checkpoint.save(tmp_path / "b", {"a": torch.ones(4)}, rewrite=rewrite),
        lambda: checkpoint.load(source, {"a": torch.ones(4)}, rewrite=rewrite),
        lambda: list(checkpoint.full({"a": torch.ones(4)}, rewrite=rewrite)),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=rf"rewrite is a {type(rewrite).__name__}; give sw\.Rewrite\(text\)"):
            call()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_shard_bytes": "x"}, "max_shard_bytes is 'x', a str; give a whole number"),
        ({"max_shard_bytes": None}, "max_shard_bytes is None, a NoneType; give a whole number"),
        ({"max_shard_bytes": 1.5}, "max_shard_bytes is 1.5, a float; give a whole number"),
        ({"max_shard_bytes": True}, "max_shard_bytes is True, a bool; give a whole number"),
        ({"max_shard_bytes": 0}, "files of 0 bytes were asked for"),
        ({"certify": "yes"}, "certify is 'yes'; give True or False"),
        ({"step": True}, "step is True, a bool; give a whole number or None"),
    ],
)
def test_arguments_of_other_kinds_are_refused(
    source: Path, tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    for call in (convert, export_hf):
        with pytest.raises(CheckpointError) as caught:
            call(source, tmp_path / "b", **arguments)
        assert words in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_what_is_no_configuration_and_no_form_is_refused(source: Path, tmp_path: Path) -> None:
    given: Any = 5
    with pytest.raises(CheckpointError, match="config is a int; give the path of a folder or a file, or None"):
        export_hf(source, tmp_path / "b", config=given)
    for given in ("HF", None, 5):
        with pytest.raises(CheckpointError, match=r"was asked for; it goes to pieces, whole, hf"):
            preview(source, rewrite=Rewrite("a -> b"), to=given)
    given = None
    with pytest.raises(CheckpointError, match="nothing to preview without one"):
        preview(source, rewrite=given)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a -> t, u, axis=0; t -> _", "a part is dropped"),
        ("a -> b, dtype='bfloat16'; b -> c, d, axis=0; c -> _", "a part is dropped, cast from float32 to bfloat16"),
        ("a -> b; a -> t, u, axis=0; b -> _; t -> _", "a part is dropped"),
        ("a -> t, u, axis=0; a -> v; t -> _", ""),
        (
            "a, z -> t, axis=0; t -> u, v, axis=0, sizes='[4,2]'; v -> _",
            "a part of the tensor that it is joined with is dropped",
        ),
    ],
)
def test_the_certificate_says_that_a_part_was_dropped(tmp_path: Path, text: str, why: str) -> None:
    checkpoint.save(tmp_path / "a", {"a": torch.randn(4), "z": torch.randn(2)})
    report = convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True)
    assert report.certificate is not None
    row = report.certificate.tensors[0]
    assert (row.name, row.verdict, row.why) == ("a", "lossy" if why else "equal", why)
    assert (row.returned_sha256 == row.sha256) == (not why)


@pytest.mark.parametrize("stops", [KeyboardInterrupt, MemoryError])
def test_a_save_whose_certifying_is_stopped_is_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: type[BaseException]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise stops

    monkeypatch.setattr(certificates, "_digests", stopped)
    for destination in (tmp_path / "new/b", source):
        with pytest.raises(stops):
            convert(source, destination, rewrite=Rewrite("a -> b"), certify=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert [each.name for each in source.iterdir()] == ["save-00000001"]
    assert same(tensors_of(source), {"a": torch.arange(4.0)})


def test_a_conversion_that_is_stopped_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    for destination in (tmp_path / "b", source):
        with pytest.raises(KeyboardInterrupt):
            convert(source, destination, rewrite=Rewrite("a -> b"), progress=stopped)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert [each.name for each in source.iterdir()] == ["save-00000001"]


def test_folders_that_were_made_for_nothing_go_again_and_others_stay(source: Path, tmp_path: Path) -> None:
    (file,) = (source / "save-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (tmp_path / "there").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("x")
    for name in ("b", "there", "mine", "deep/er/b"):
        with pytest.raises(CheckpointError, match="is damaged"):
            convert(source, tmp_path / name, rewrite=Rewrite("a -> b"))
    left = sorted(each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*") if source not in each.parents)
    assert left == ["a", "mine", "mine/notes", "there"]


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


def test_a_record_of_stages_of_which_some_undo_leads_back(tmp_path: Path) -> None:
    before = {"b": torch.randn(3).bfloat16().float(), "x": torch.randn(2), "y": torch.randn(3)}
    checkpoint.save(tmp_path / "0", before)
    stages = Rewrite("c -> b, src_dtype='bfloat16', dst_dtype='float32'").inverse() >> Rewrite(
        "x, y -> xy, axis=0, sizes='[2,3]'"
    )
    convert(tmp_path / "0", tmp_path / "1", rewrite=stages)
    assert checkpoint.recorded_rewrite(tmp_path / "1") == stages
    convert(tmp_path / "1", tmp_path / "2", rewrite=checkpoint.recorded_rewrite(tmp_path / "1").inverse())
    assert same(tensors_of(tmp_path / "2"), before)


def test_a_preview_looks_at_the_destination(source: Path, tmp_path: Path) -> None:
    rewrite = Rewrite("a -> b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a folder that holds something"):
        preview(source, tmp_path / "full", to="hf", rewrite=rewrite)
    with pytest.raises(CheckpointError, match="is a file; name a folder to save to"):
        preview(source, tmp_path / "file", rewrite=rewrite)
    with pytest.raises(CheckpointError, match="is the folder of one save"):
        preview(source, source / "save-00000001", rewrite=rewrite)
    for to in ("whole", "pieces", "hf"):
        assert "b" in preview(source, tmp_path / "new", to=to, rewrite=rewrite)
    assert preview(source, tmp_path / "full", rewrite=rewrite) == preview(source, rewrite=rewrite)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"optimizer/w/exp_avg" -> _', True),
        ('a -> "optimizer/w/exp_avg"', True),
        ('"optimizer/layers.$L.w/exp_avg" -> _', True),
        ('"my optimizer/w" -> b', False),
        ('"module.optimizer/w" -> "b.optimizer/w"', False),
        ("a -> b", False),
    ],
)
def test_only_names_of_state_are_names_of_state(text: str, expected: bool) -> None:
    assert names_state(Rewrite(text)) is expected


def test_parameters_that_nobody_gave_are_asked_for_when_only_the_model_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriteError, match=r"the rewrite needs heads, and .* has no config\.json"):
        convert(source, tmp_path / "b", to="hf", rewrite=Rewrite("a -> b, reshape='[{heads},-1]'"))
