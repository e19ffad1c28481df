"""What a wheel carries, and what a release says of itself."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import shardwise

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_of_the_package_that_is_no_program_is_packed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["shardwise"]
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert "configs/demo.toml" in data
    assert [name for name in data if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []


def test_every_folder_of_programs_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_changelog_has_the_version_under_its_date() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == shardwise.__version__
    assert all(date for _, date in headings[1:])


def test_the_version_is_said_without_torch() -> None:
    program = (
        "import sys\nfrom shardwise.cli import main\n"
        "try: main(['--version'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, f"shardwise, version {shardwise.__version__}\n"), said.stderr
