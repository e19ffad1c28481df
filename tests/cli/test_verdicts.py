"""Which of the ranks' words are told."""

from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from shardwise.cli.exit_verdicts import ExitVerdict, deciding_verdict, print_verdict
from shardwise.errors import ConfigError, DataError, MismatchError, PeerError, ShardwiseError


def test_the_words_of_a_rank_that_failed_go_before_those_of_its_peers(tmp_path: Path) -> None:
    assert deciding_verdict(tmp_path) is None
    ExitVerdict.of(PeerError("rank 2 stopped: ValueError", rank=2), rank=0, debug=False).leave(tmp_path, 0)
    assert deciding_verdict(tmp_path) == ExitVerdict(
        paragraph="Error: rank 2 stopped: ValueError", exit_code=1, is_about_peer=True
    )
    for rank in (10, 2):
        ExitVerdict.of(ValueError("seven"), rank=rank, debug=False).leave(tmp_path, rank)
    assert deciding_verdict(tmp_path) == ExitVerdict(
        paragraph="Error: rank 2: ValueError: seven", exit_code=1, is_about_peer=False
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 2),
        (MismatchError("x"), 1),
        (PeerError("x"), 1),
        (ShardwiseError("x"), 1),
        (OSError("disk full"), 1),
    ],
)
def test_what_the_user_asked_for_wrongly_has_exit_code_2_and_the_rest_1(error: Exception, code: int) -> None:
    assert ExitVerdict.of(error, rank=None, debug=False).exit_code == code


def test_notes_of_an_error_are_told_too() -> None:
    error = ValueError("seven")
    error.add_note("in microbatch 3 of 4")
    assert ExitVerdict.of(error, rank=None, debug=False).paragraph == "Error: ValueError: seven\nin microbatch 3 of 4"


@pytest.mark.parametrize("kind", [OSError, KeyError, DataError])
def test_an_error_of_a_loader_s_worker_is_said_without_its_traceback(kind: type[Exception]) -> None:
    try:
        try:
            raise ValueError("an earlier one")
        except ValueError as cause:
            raise kind("file 17\n  is damaged") from cause
    except kind:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as caught:
        wrapped.reraise()
    paragraph = ExitVerdict.of(caught.value, rank=2, debug=False).paragraph
    assert "Traceback" not in paragraph
    assert "earlier" not in paragraph
    assert "file 17" in paragraph
    assert "is damaged" in paragraph
    assert paragraph.endswith(" (in DataLoader worker process 0)")


def test_the_traceback_that_is_told_is_that_of_the_rank_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, raised in enumerate([PeerError("rank 1 stopped", rank=1), ValueError("seven")]):
        try:
            raise raised
        except Exception as error:
            ExitVerdict.of(error, rank=rank, debug=True).leave(tmp_path, rank)
    chosen = deciding_verdict(tmp_path)
    assert chosen is not None
    print_verdict(chosen)
    told = capsys.readouterr().err
    assert (told.count("Traceback"), told.count("PeerError")) == (1, 0)
    assert told.endswith("ValueError: seven\n\nError: rank 1: ValueError: seven\n")
