"""`shardwise doctor` names what will not work, and goes on to the next check."""

import importlib.util
import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import shardwise.comm.host_checks
from shardwise.cli import main
from shardwise.comm.host_checks import Finding, examine


def findings(folder: Path, environment: dict[str, str] | None = None) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for each in examine(environment or {}, folder=folder, trial=False):
        found.setdefault(each.subject, []).append(each)
    return found


def test_this_host_has_nothing_wrong(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert [each for group in found.values() for each in group if each.verdict == "wrong"] == []
    assert found["torch"][0].text == torch.__version__
    assert list(tmp_path.iterdir()) == []


def no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")


def no_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        shardwise.comm.host_checks, "find_spec", lambda name: None if name == "tokenizers" else find(name)
    )


def no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> str:
        raise OSError("no such host")

    monkeypatch.setattr(socket, "gethostbyname", fail)


def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))


def torch_of(version: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(torch, "__version__", version)


def unlike_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("change", "subject", "verdict", "words"),
    [
        (torch_of("2.10.1"), "torch", "wrong", "2.10.1"),
        (torch_of("2.11.0"), "torch", "ok", "2.11.0"),
        (torch_of("2.13.1+cu130"), "torch", "ok", "2.13.1"),
        (torch_of("2.14.0a0"), "torch", "wrong", "2.14.0a0"),
        (no_memfd, "shared memory", "note", "over TCP"),
        (no_tokenizers, "tokenizers", "note", "pip install 'shardwise[train]'"),
        (no_name, "network", "note", "give MASTER_ADDR"),
        (few_files, "open files", "note", "ulimit -n 4096"),
        (unlike_launcher, "launcher", "wrong", "ranks are 0 to 1"),
        (lambda monkeypatch: None, "saves", "wrong", "is not there"),
    ],
)
def test_what_is_limited_or_wrong_is_said_with_what_to_do_and_the_others_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    subject: str,
    verdict: str,
    words: str,
) -> None:
    change(monkeypatch)
    found = findings(tmp_path / "is not there" if subject == "saves" else tmp_path, dict(os.environ))
    said = [each.text for each in found[subject] if each.verdict == verdict]
    assert any(words in text for text in said), found[subject]
    assert {"torch", "network", "saves"} <= found.keys()


def test_each_device_that_torch_sees_is_named_with_what_moves_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [each.text for each in findings(tmp_path)["devices"]] == ["torch sees no accelerator: ranks compute on CPUs"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda number: f"a card with number {number}")
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "xccl")
    found = findings(tmp_path)["devices"]
    assert [(each.verdict, each.text) for each in found] == [
        ("ok", "xpu:0, a card with number 0"),
        ("ok", "xpu:1, a card with number 1"),
        ("ok", "tensors travel between devices of type xpu over xccl"),
        ("note", "shardwise has not been run on xpu"),
    ]
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: False)
    assert [each.verdict for each in findings(tmp_path)["devices"]] == ["ok", "ok", "wrong", "note"]


@pytest.mark.parametrize(
    ("host", "verdict", "words"),
    [
        ("127.0.0.1", "ok", "accepts connections"),
        ("127.0.0.1 closed", "note", "no program listens"),
        ("no such host.invalid", "wrong", "cannot be reached"),
    ],
)
def test_the_address_of_rank_0_is_tried(tmp_path: Path, host: str, verdict: str, words: str) -> None:
    with socket.socket() as listener, socket.socket() as closed:
        for each in (listener, closed):
            each.bind(("127.0.0.1", 0))
        listener.listen()
        port = (closed if "closed" in host else listener).getsockname()[1]
        environment = {"MASTER_ADDR": host.removesuffix(" closed"), "MASTER_PORT": str(port)}
        [found] = findings(tmp_path, environment)["rank 0"]
    assert found.verdict == verdict
    assert words in found.text
    assert str(port) in found.text


@pytest.mark.processes
def test_the_command_lets_two_ranks_try(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.output.splitlines()[-1])
    assert last["subject"] == "two ranks"
    assert "2 processes met and summed 64 MiB over shared memory" in last["text"]


def test_the_command_fails_when_something_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0")
    result = CliRunner().invoke(main, ["doctor", str(tmp_path), "--no-trial"])
    assert result.exit_code == 1
    assert "WRONG  torch" in result.output


@pytest.mark.parametrize(("code", "expected"), [(130, 130), (143, 143), (1, 1)])
def test_a_trial_that_is_stopped_says_nothing_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    monkeypatch.setattr("shardwise.comm.host_checks.launch", lambda *_, **__: code)
    result = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert result.exit_code == expected
    assert ("WRONG" in result.output) == (code == 1)
