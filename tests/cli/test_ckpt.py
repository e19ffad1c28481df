"""`shardwise ckpt`: what is in a checkpoint, and whether it is whole."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwise import checkpoint
from shardwise.cli import main
from shardwise.comm import alone, simulate
from shardwise.space import Piece
from tests.cli.processes import on_a_terminal
from tests.forks.programs import started

LONG = "a.parameter.with.a." + ".".join(f"very_long_name_{number}" for number in range(12))


def ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def rows_of(text: str) -> list[list[str]]:
    """The cells of every line; columns are two spaces or more apart."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Two saves, by two ranks and by one, and a torn one."""
    folder = tmp_path / "saves"
    whole = torch.arange(600_000, dtype=torch.float32).view(300_000, 2)

    def save(channel: Any) -> None:
        start = channel.rank * 150_000
        piece = Piece(name="w", dtype="float32", global_shape=(300_000, 2), offset=(start, 0), shape=(150_000, 2))
        bias = Piece(name="b", dtype="bfloat16", global_shape=(3,))
        state = {piece: whole[start : start + 150_000], bias: torch.ones(3, dtype=torch.bfloat16)}
        checkpoint.save(folder, state, extra={"step": 10, "note": "two"}, channel=channel)

    simulate(2, save)
    one = {LONG: whole[:2], "scalar": torch.tensor(3.0), "tied": whole[:2]}
    checkpoint.save(folder, one, step=20, layout="whole", channel=alone())
    torn = folder / "save-00000003"
    torn.mkdir()
    (torn / "5e1f09ab-rank00000.safetensors").write_bytes(b"half a file")
    return folder


def test_ls_lists_saves_and_the_tensors_of_the_newest(saves: Path) -> None:
    result = ckpt("ls", saves)
    assert (result.exit_code, result.stderr) == (0, "")
    top, header, first, second, _, about, columns, *tensors = rows_of(result.stdout)
    assert top[0].startswith(f"{saves}: 2 saves; torn and not loadable: save-00000003 (1 files)")
    assert header == ["save", "step", "written (UTC)", "size", "tensors", "layout", "files", "ranks"]
    assert [*first[:2], *first[3:]] == ["1", "10", "2.4 MB", "2", "2 ranks", "pieces", "2"]
    assert [*second[:2], *second[3:]] == ["2", "20", "20 B", "2", "1 rank", "whole", "1"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", first[2])
    assert about == [f"{saves}/save-00000002, step 20: 2 tensors, 20 B in 1 file"]
    assert columns == ["name", "dtype", "shape", "pieces", "bytes", "files"]
    assert tensors[0] == [LONG, "float32", "[2, 2]", "1", "16 B", "1"]
    assert tensors[1] == ["scalar", "float32", "[]", "1", "4 B", "1"]
    assert tensors[2] == [f"tied is {LONG}"]


def test_ls_shows_the_save_of_a_step_or_of_a_folder(saves: Path) -> None:
    expected = ["w", "float32", "[300000, 2]", "2", "2.4 MB", "2"]
    assert expected in rows_of(ckpt("ls", saves, "--step", 10).stdout)
    alone_in_its_folder = ckpt("ls", saves / "save-00000001").stdout
    assert expected in rows_of(alone_in_its_folder)
    assert alone_in_its_folder.startswith(f"{saves / 'save-00000001'}: 1 save\n")


def test_ls_json_says_all_of_it(saves: Path) -> None:
    result = ckpt("ls", saves, "--step", 10, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(each["save"], each["step"], each["ranks"]) for each in found["saves"]] == [
        ("save-00000001", 10, 2),
        ("save-00000002", 20, 1),
    ]
    assert found["torn"] == [{"save": "save-00000003", "files": 1}]
    shown = found["shown"]
    assert (shown["step"], shown["bytes"], shown["extra"]) == (10, 2_400_006, {"step": 10, "note": "two"})
    weight = next(each for each in shown["tensors"] if each["name"] == "w")
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [300_000, 2], 2_400_000)
    assert [(piece["offset"], piece["shape"], piece["run"]) for piece in weight["pieces"]] == [
        ([0, 0], [150_000, 2], None),
        ([150_000, 0], [150_000, 2], None),
    ]
    for piece in weight["pieces"]:
        data = (saves / piece["file"]).read_bytes()[piece["start"] : piece["start"] + piece["bytes"]]
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
        assert values[0] == piece["offset"][0] * 2
        assert shown["files"][piece["file"]] == (saves / piece["file"]).stat().st_size


def test_ls_reads_formats_of_others(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4, 2), "b": torch.zeros(3)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="in a single process"):
        save_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path, kind in ((tmp_path / "model.safetensors", "safetensors"), (tmp_path / "dcp", "dcp")):
        result = ckpt("ls", path)
        assert (result.exit_code, result.stderr) == (0, "")
        assert f", {kind}: 2 tensors, 44 B in 1 file" in result.stdout
        assert ["w", "float32", "[4, 2]", "1", "32 B", "1"] in rows_of(result.stdout)
        assert json.loads(ckpt("ls", path, "--json").stdout)["format"] == kind
        verified = ckpt("verify", path)
        said = (
            "as it was written: 2 tensors" if kind == "dcp" else "is complete: 2 tensors, 44 B in 1 file. 44 B have no"
        )
        assert (verified.exit_code, said in verified.stdout) == (0, True)


def test_a_damaged_manifest_is_named_and_the_other_saves_are_listed(saves: Path) -> None:
    (saves / "save-00000001" / "manifest.json").write_text("{}")
    result = ckpt("ls", saves)
    assert result.exit_code == 0
    assert ["1", "damaged"] in rows_of(result.stdout)
    assert f"{saves}/save-00000001/manifest.json is damaged" in result.stdout
    assert json.loads(ckpt("ls", saves, "--json").stdout)["saves"][0].keys() == {"save", "damaged"}
    (saves / "save-00000002" / "manifest.json").write_text("{}")
    result = ckpt("ls", saves)
    assert result.exit_code == 1
    assert "2 saves" in result.stdout
    assert result.stderr.startswith("Error: the manifest of ")


def test_verify_of_a_whole_save_is_one_line(saves: Path) -> None:
    result = ckpt("verify", saves, "--step", 10)
    assert result.exit_code == 0
    assert result.stdout == f"{saves}/save-00000001 is as it was written: 2 tensors, 2.4 MB in 2 files\n"
    assert result.stderr == "note: save-00000003 is torn: 1 files of a save that was never committed\n"


def test_verify_of_a_damaged_save_names_every_file_and_piece(saves: Path) -> None:
    first, second = sorted((saves / "save-00000001").glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[700_000] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    result = ckpt("verify", saves, "--step", 10)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Error: {saves}/save-00000001 is not as it was written: 2 findings:\n" in result.stderr
    assert str(first) in result.stderr
    assert "w[0:150000, 0:2]" in result.stderr
    assert str(second) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_a_reader_that_goes_away_ends_the_list_without_a_word(tmp_path: Path) -> None:
    save_file({f"tensor.number.{number}": torch.zeros(1) for number in range(4_000)}, tmp_path / "m.safetensors")
    for more in ([], ["--json"]):
        with started(["ckpt", "ls", str(tmp_path), *more]) as process:
            process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(timeout=60) in (0, 1)


@pytest.mark.processes
def test_verify_shows_how_far_it_is_on_a_terminal_and_leaves_one_line(saves: Path) -> None:
    arguments = ("ckpt", "verify", str(saves / "save-00000001"))
    code, out, shown = on_a_terminal(*arguments, output_too=False)
    assert code == 0
    assert out.endswith("is as it was written: 2 tensors, 2.4 MB in 2 files\n")
    assert "2.4/2.4 MB" in shown
