"""The scripts of docs/clusters.md: a shell and YAML can read them, and what they call exists."""

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from shardwise.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
SETTINGS = re.findall(
    r"^([\w.]+):", (ROOT / "tests" / "golden" / "config-keys.txt").read_text(encoding="utf-8"), re.MULTILINE
)
STARTS = re.compile(r"(?:-m shardwise\.cli|(?<![\w.-])shardwise)((?: [^\n&;`\"]+)?)")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_a_shell_can_read_every_script() -> None:
    for script in blocks("bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)


def manifests() -> list[dict[str, Any]]:
    [text] = blocks("yaml")
    return list(import_module("yaml").safe_load_all(text))


def test_the_manifest_announces_what_the_pods_read() -> None:
    service, job = manifests()
    pods = job["spec"]["template"]["spec"]
    variables = {each["name"]: each["value"] for each in pods["containers"][0]["env"]}
    assert variables["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    claimed = {each["name"] for each in pods["volumes"]}
    assert {each["name"] for each in pods["containers"][0]["volumeMounts"]} == claimed


def commands() -> Iterator[list[str]]:
    """The words behind `shardwise`, wherever the page starts it."""
    whole_lines = PAGE.replace("\\\n", " ")
    code = [*re.findall(r"```bash\n(.*?)```", whole_lines, re.DOTALL), *re.findall(r"`(shardwise [^`]+)`", whole_lines)]
    for text in code:
        yield from (shlex.split(re.sub(r"#.*", "", found[1])) for found in STARTS.finditer(text))
    for manifest in manifests():
        for container in manifest["spec"].get("template", {}).get("spec", {}).get("containers", []):
            yield container["command"][1:]


def test_every_command_and_option_exists() -> None:
    found = list(commands())
    assert len(found) > 8
    for words in found:
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, words
        changed = [after.partition("=")[0] for word, after in itertools.pairwise(words) if word == "--set"]
        assert set(changed) <= set(SETTINGS), words
