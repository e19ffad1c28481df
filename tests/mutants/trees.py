"""A copy of the checkout, in which files may be changed and pytest runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.listed import ROOT

_SECONDS_PER_TEST = 40
"""The time limit of one test: quick ones take less than a second, slow ones some more."""


class Tree:
    """A copy of the checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in listed.stdout.splitlines():
            # A file that was deleted and not yet committed is still listed.
            if name != ".venv" and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def write(self, file: Path, text: str) -> None:
        """Give a file another text, before anything is compiled."""
        (self._folder / file).write_text(text, encoding="utf-8")

    def pytest(
        self, arguments: Sequence[str], output: Path, *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start pytest with these arguments."""
        variables = {
            **os.environ,
            # Before the checkout, which is installed: for all processes that tests start, too.
            "PYTHONPATH": f"{self._folder / 'src'}:{self._folder}",
            **environment,
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider"]
        # The tests of the mutants read the lines themselves: they would notice a changed line, whatever it does.
        command += [f"--timeout={_SECONDS_PER_TEST}", "--ignore=tests/test_mutants.py", *arguments]
        with output.open("wb") as file:
            return subprocess.Popen(
                command, cwd=self._folder, env=variables, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, pass_fds=pass_fds,
            )  # fmt: skip
