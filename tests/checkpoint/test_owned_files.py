"""What saving and pruning may remove: files that savers made, of saves that never happened or that retention names."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.small_states import contents
from tests.properties import tried

STATE = {"w": torch.arange(3.0)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one save."""
    folder = tmp_path_factory.mktemp("whole")
    sw.save(folder, STATE, step=1, channel=alone())
    return folder / "save-00000001"


CANONICAL = [f"save-{number:08d}" for number in range(1, 5)] + ["save-100000000"]


OTHER = [
    "save-00000000",
    "save-000000007",
    "save-0000003",
    "Save-00000002",
    "save-\N{FULLWIDTH DIGIT ZERO}" + "0000004",
    "save-\N{ARABIC-INDIC DIGIT ONE}0000000",
    "save-00000002 (copy)",
    "save-00000003\n",
    "save-00000001.old",
    "best",
    "latest\nof all",
]


MANIFESTS = ["manifest.json", "manifest.json", "manifest.json", "Manifest.json", "manifest.json.bak"]


USERS = [
    "notes.txt",
    ".notes.new",
    ".mine.lock",
    "deep/manifest.json",
    "deep/deadbeef-rank00000.safetensors",
    "model.pt",
]


SAVERS = ["deadbeef-rank00000.safetensors", "deadbeef-tensors-00000.json", ".manifest.json.0123456789abcdef.new"]


folders = st.fixed_dictionaries(
    {
        "name": st.sampled_from(CANONICAL + OTHER),
        "whole": st.booleans(),
        "manifest": st.sampled_from(MANIFESTS),
        "files": st.lists(st.sampled_from(USERS + SAVERS), max_size=3),
    }
)


def build(root: Path, plan: list[dict[str, object]], whole: Path) -> None:
    for each in plan:
        folder = root / str(each["name"])
        folder.mkdir()
        if each["whole"]:
            for file in whole.iterdir():
                name = str(each["manifest"]) if file.name == "manifest.json" else file.name
                shutil.copyfile(file, folder / name)
        for name in each["files"]:  # type: ignore[attr-defined]
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"a file")


@tried(30)
@given(
    plan=st.lists(folders, max_size=6, unique_by=lambda each: each["name"]),
    keep=st.integers(1, 3),
)
def test_nothing_with_a_manifest_goes_but_what_retention_names_and_nothing_of_the_users(
    plan: list[dict[str, object]], keep: int, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("saves")
    build(root, plan, whole)
    before = contents(root)
    report = sw.save(root, STATE, step=2, channel=alone())
    new = Path(report.location).name
    removed = checkpoint.prune(root, keep=keep)
    after = contents(root)

    good = sorted(
        (
            str(each["name"])
            for each in plan
            if each["name"] in CANONICAL and each["manifest"] == "manifest.json" and each["whole"]
        ),
        key=lambda name: int(name[5:]),
    )
    assert removed == [*good, new][:-keep]
    assert checkpoint.load(root, {"w": torch.zeros(3)}).report.step == 2
    torn = {str(each["name"]) for each in plan if each["name"] in CANONICAL and not each["whole"]}
    for name, data in before.items():
        folder, _, file = name.partition("/")
        if after.get(name) == data:
            continue
        assert name not in after, "a file was changed"
        assert folder in {*removed, *torn, *good}, f"{name!r} is gone"
        assert file in SAVERS or (folder in removed and (whole / file).exists()), f"{name!r} is gone"


@pytest.mark.parametrize("name", [*OTHER, "save-000000000000000000000000000001"])
def test_a_save_under_another_name_loads_by_its_path_and_outlives_others(
    name: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds no committed save.* holds a manifest under a name that no saver"):
        checkpoint.open(tmp_path)
    for step in (5, 6):
        sw.save(tmp_path, STATE, step=step)
    checkpoint.prune(tmp_path, keep=1)
    assert contents(tmp_path / name) == contents(whole)
    assert checkpoint.load(tmp_path / name, {"w": torch.zeros(3)}).report.step == 1
    assert checkpoint.load(tmp_path, {"w": torch.zeros(3)}).report.step == 6


def test_numbers_go_on_after_saves_that_were_renamed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "save-000000007")
    shutil.copytree(whole, tmp_path / "SAVE-00000009")  # on some file systems this is save-00000009
    assert sw.save(tmp_path, STATE).location.endswith("/save-00000010")


def test_a_save_whose_files_are_gone_does_not_stand_for_older_ones(whole: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copytree(whole, tmp_path / f"save-0000000{number}")
    next((tmp_path / "save-00000002").glob("*.safetensors")).unlink()
    assert checkpoint.prune(tmp_path, keep=1) == []
    sw.save(tmp_path, STATE)
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]


def test_links_and_files_under_the_name_of_a_save_are_passed_by(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "elsewhere")
    (tmp_path / "save-00000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "save-00000002").symlink_to(tmp_path / "gone")
    (tmp_path / "save-00000003").write_text("a file")
    assert sw.save(tmp_path, STATE, step=5).location.endswith("/save-00000004")
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert contents(tmp_path / "elsewhere") == contents(whole)
    assert (tmp_path / "save-00000003").read_text() == "a file"


def test_data_that_a_save_links_to_outlives_it(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "save-00000001")
    [file] = (tmp_path / "save-00000001").glob("*.safetensors")
    moved = file.rename(tmp_path / file.name)
    file.symlink_to(moved)
    assert checkpoint.verify(tmp_path).good
    sw.save(tmp_path, STATE)
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert moved.exists()
