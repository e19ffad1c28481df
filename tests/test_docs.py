"""What the documentation says is true: its programs run, its tables are the code's."""

import re
from pathlib import Path

import pytest

from docs.fill import MACRO, filled, measured
from shardwise.words import GLOSSARY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def test_every_macro_of_the_pages_has_a_value() -> None:
    for page in PAGES:
        assert not MACRO.findall(filled(page.read_text(encoding="utf-8"))), page


def test_the_concepts_page_has_every_word_of_the_glossary() -> None:
    page = filled((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    assert [word for word in GLOSSARY if f"| **{word}** |" not in page] == []


@pytest.mark.parametrize(
    "macro", ['{{ nothing("steps") }}', '{{ measured("steps", "ratio", "no such row") }}', '{{ settings("nothing") }}']
)
def test_a_macro_that_means_nothing_is_an_error(macro: str) -> None:
    with pytest.raises((LookupError, AttributeError)):
        filled(macro)


def test_the_configuration_page_has_every_setting() -> None:
    """The keys that the parsers accept are in tests/golden/config-keys.txt."""
    page = filled((ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8"))
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE))
    lines = (ROOT / "tests" / "golden" / "config-keys.txt").read_text(encoding="utf-8").splitlines()
    keys = {line.partition(":")[0].removeprefix("plan.") for line in lines}
    from_train = {"merge.microbatches", "merge.average", "clip_grad_norm"}  # [train] decides these
    assert rows == keys - from_train


def test_the_ratios_of_the_readme_are_those_of_the_results() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| .* \| ([0-9.]+) \| ([0-9.]+) \|$", page, re.MULTILINE)
    blocks, loads = ("plain blocks", "2", "4"), ("256 MiB, large", "2")
    ours = "forwards and backwards: ours 1f1b / torch 1f1b"
    ratios: list[tuple[str | float, str | float]] = [
        (
            measured("steps", "ratio", "1", "2x128", "ours", "ddp-bf16"),
            measured("steps", "ratio", "4", "2x128", "ours", "ddp-bf16"),
        ),
        (
            measured("hybrid", "ratio", "2", "step", "1", "2x128", "stage3", "fsdp2"),
            measured("hybrid", "ratio", "2", "step", "4", "2x128", "stage3-keep", "fsdp2-keep"),
        ),
        (
            1 / float(measured("checkpoint-warm", "measured", *loads, "load rows as rows: dcp / ours")),
            1 / float(measured("checkpoint-warm", "measured", *loads, "load rows as columns: dcp / ours")),
        ),
        (
            measured("pipeline", "measured", *blocks, ours),
            measured("pipeline-short", "measured", "plain blocks, width 128", *blocks[1:], ours),
        ),
    ]
    assert cells == [tuple(f"{float(ratio):.2f}" for ratio in row) for row in ratios]
