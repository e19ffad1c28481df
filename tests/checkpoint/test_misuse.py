"""What users do by mistake: it is refused in words, by all ranks alike, and nothing of theirs is lost."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.errors import CheckpointError, MismatchError, ShardwiseError
from tests.forks.programs import started

STATE = {"w": torch.arange(6.0).view(2, 3)}


def refusal_of(call: Any, kind: type[ShardwiseError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("option", [{"step": 2}, {"verify": "first"}, {"strict": False}, {"cast": True}])
def test_ranks_that_load_with_other_options_all_hear_of_it(tmp_path: Path, option: dict[str, Any]) -> None:
    for step in (1, 2):
        sw.save(tmp_path, STATE, step=step)

    def load(channel: sw.Channel) -> str:
        options = {"step": 1, **(option if channel.rank == 1 else {})}
        target = {"w": torch.zeros(2, 3)}
        words = refusal_of(lambda: sw.load(tmp_path, target, channel=channel, **options), MismatchError)
        assert not target["w"].any()
        return words

    words, *others = sw.simulate(3, load)
    assert words.startswith("rank 1 loads with ")
    assert others == [words] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"verify": "First"}, "verify is 'First'; give True, False or \"first\""),
        ({"strict": "no"}, "strict is 'no'; give True or False"),
        ({"step": "3"}, "step is '3', a str; give a whole number or None"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    sw.save(tmp_path, STATE)
    assert refusal_of(lambda: sw.load(tmp_path, dict(STATE), **options)) == expected


@pytest.mark.parametrize("step", ["a", 2.5, True])
def test_a_step_that_is_no_whole_number_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    def save(channel: sw.Channel) -> str:
        return refusal_of(lambda: sw.save(tmp_path / "saves", STATE, step=step, channel=channel))

    words = set(sw.simulate(2, save))
    assert len(words) == 1
    assert "give a whole number (int) or None" in words.pop()
    assert not (tmp_path / "saves").exists()


@pytest.mark.parametrize("extra", [[1], "abc", 5, {"deep": None}])
def test_extra_that_json_cannot_hold_is_refused(tmp_path: Path, extra: Any) -> None:
    if isinstance(extra, dict):
        extra["deep"] = extra
    assert refusal_of(lambda: sw.save(tmp_path, STATE, extra=extra)).startswith("extra ")


@pytest.mark.parametrize("path", [None, 5, b"bytes", "", "a\0b"])
def test_what_is_no_path_is_refused_by_save_and_load(path: Any) -> None:
    for call in (sw.save, sw.load):
        refusal_of(lambda call=call: call(path, dict(STATE)))


def test_targets_that_share_memory_are_refused_untouched(tmp_path: Path) -> None:
    sw.save(tmp_path, {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4, 4)})
    base = torch.zeros(16)
    target = {"a": base[:4], "b": base[2:6], "c": base.as_strided((4, 4), (1, 1))}
    words = refusal_of(lambda: sw.load(tmp_path, target))
    assert "a[0:4] and b[0:4] would be read into memory that they share" in words
    assert "c[0:4, 0:4] would be read into a tensor" in words
    assert not base.any()
    columns = torch.zeros(4, 4)
    sw.load(tmp_path, {"a": columns[:, 0], "b": columns[:, 1]}, strict=False)  # they interleave and share nothing
    assert columns.sum() == 8


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.int32), (torch.float32, torch.bool), (torch.complex64, torch.float32)]
)
def test_no_cast_makes_other_numbers_of_values(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    sw.save(tmp_path, {"w": torch.ones(3, dtype=stored)})
    words = refusal_of(lambda: sw.load(tmp_path, {"w": torch.zeros(3, dtype=wanted)}, cast=True))
    assert "a cast would change its values by more than rounding" in words


def test_files_that_users_put_beside_a_save_stay(tmp_path: Path) -> None:
    sw.save(tmp_path, STATE)
    notes = tmp_path / "save-00000001" / "my_notes.txt"
    notes.write_text("good run")
    stray = notes.with_name("5e1f09ab-rank00000.safetensors")
    stray.write_bytes(b"left by an attempt that was killed")
    sw.save(tmp_path, STATE)
    assert not stray.exists()
    sw.save(tmp_path, STATE)
    assert sw.checkpoint.prune(tmp_path, keep=1) == ["save-00000001", "save-00000002"]
    assert notes.read_text() == "good run"
    assert sw.checkpoint.verify(tmp_path).notes == ()


def test_a_save_that_cannot_be_read_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    for _ in range(3):
        sw.save(tmp_path, STATE)
    (tmp_path / "save-00000003" / "manifest.json").write_bytes(b"")
    assert sw.checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert torch.equal(sw.checkpoint.open(tmp_path / "save-00000002").read("w"), STATE["w"])


def test_a_folder_of_another_format_is_not_saved_into(tmp_path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    assert "holds a safetensors checkpoint" in refusal_of(lambda: sw.save(tmp_path, STATE))
    assert torch.equal(sw.checkpoint.open(tmp_path).read("w"), STATE["w"])


def test_a_pipe_in_the_place_of_a_data_file_is_an_error_and_no_wait(tmp_path: Path) -> None:
    sw.save(tmp_path, STATE)
    (data,) = tmp_path.glob("*/*.safetensors")
    data.unlink()
    os.mkfifo(data)
    assert "it is no regular file" in refusal_of(lambda: sw.load(tmp_path, dict(STATE)))


def test_a_background_save_that_failed_unasked_is_told_at_the_end_of_the_program(tmp_path: Path) -> None:
    program = """
import resource, signal, sys, torch, shardwise as sw
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
saver = sw.checkpoint.AsyncSaver(sys.argv[1])
saver.save({"w": torch.zeros(1000)})
"""
    with started(["-c", program, str(tmp_path)]) as ended:
        _, err = ended.communicate(timeout=60)
    assert "shardwise: a save in the background was not made: " in err
    assert "File too large" in err


def test_a_state_in_the_place_of_the_path_is_not_printed(tmp_path: Path) -> None:
    state = {f"w{at}": torch.randn(64, 64) for at in range(200)}
    for call in (
        lambda: sw.save(state, tmp_path / "a"),  # type: ignore[arg-type]
        lambda: sw.load(state, tmp_path / "a"),  # type: ignore[arg-type]
        lambda: checkpoint.open(state),  # type: ignore[arg-type]
        lambda: sw.load(tmp_path, {}, verify=state),  # type: ignore[arg-type]
        lambda: sw.save(tmp_path, {}, step=state),  # type: ignore[arg-type]
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert len(str(caught.value)) < 5000
    with pytest.raises(CheckpointError, match=r"the path is a dict\. .* save\(path, state\)"):
        sw.save(state, tmp_path / "a")  # type: ignore[arg-type]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"link is a link to .*nowhere, which does not exist; make that folder"):
        sw.save(tmp_path / "link", {"w": torch.ones(2)})


def test_a_big_endian_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "be.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match=r"big-endian GGUF file.*gguf_convert_endian\.py"):
        checkpoint.open(tmp_path / "be.gguf")
