"""What the documentation says is true: its programs run, its tables are the code's."""

import json
import re
from pathlib import Path

import pytest

from shardwise.train.config import CheckpointTable, DataTable, ModelTable, Table, TrainTable
from shardwise.words import GLOSSARY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_every_program_of_the_page_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_glossary_page_is_the_glossary() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert dict(rows) == dict(GLOSSARY)


def settings_rows(table: str, model: type[Table]) -> list[str]:
    """A row of docs/training.md for each setting of a table."""
    rows = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{table}.{name}` | {default} | {meaning} |")
    return rows


@pytest.mark.parametrize(
    ("table", "model"),
    [("model", ModelTable), ("data", DataTable), ("train", TrainTable), ("checkpoint", CheckpointTable)],
)
def test_the_training_page_lists_every_setting_with_its_default(table: str, model: type[Table]) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in page if row.startswith(f"| `{table}.")] == settings_rows(table, model)
