"""What the documentation says is true: its programs run, its tables are the code's."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shardwise as sw
from docs.fill import MACRO, _cells, committed, filled
from shardwise.words import GLOSSARY
from tests.forks.programs import started

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_every_program_of_the_page_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.stem}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.processes
def test_the_program_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(python_blocks(PAGES[0])[0] + "\nprint('learnt' if min(alone[-3:]) < alone[0] else 'not learnt')\n")
    agent = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    with started(["-c", agent, "--standalone", "--nproc-per-node", "2", str(file)]) as torchrun:
        out, err = torchrun.communicate(timeout=100)
        assert torchrun.wait(timeout=0) == 0, err
    assert (out.count("learnt"), out.count("not")) == (2, 0)  # ranks may write into one line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_macro_of_the_pages_has_its_value() -> None:
    """`python -m docs.fill` writes the values of the committed pages anew."""
    num_macros = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        num_macros += len(MACRO.findall(text))
        assert committed(page) == text, page
        assert "<!--" not in filled(text), page
    assert num_macros > 20


def test_the_concepts_page_has_every_word_of_the_glossary() -> None:
    page = filled((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"))
    assert [word for word in GLOSSARY if f"| **{word}** |" not in page] == []


def test_the_python_page_has_every_public_name() -> None:
    page = filled((ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8"))
    listed = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    shown = [getattr(import_module(place.rpartition(".")[0]), place.rpartition(".")[2]) for place in listed]
    of_modules = [each for module in shown if isinstance(module, ModuleType) for each in vars(module).values()]
    values = {f"{room.__name__}.{name}": getattr(room, name) for room in (sw, sw.checkpoint) for name in room.__all__}
    lacking = [name for name, value in values.items() if not any(value is each for each in shown + of_modules)]
    assert lacking == ["shardwise.__version__", "shardwise.checkpoint"]


def test_the_configuration_page_has_every_setting() -> None:
    """The keys that the parsers accept are in tests/golden/config-keys.txt."""
    page = filled((ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8"))
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE))
    lines = (ROOT / "tests" / "golden" / "config-keys.txt").read_text(encoding="utf-8").splitlines()
    keys = {line.partition(":")[0].removeprefix("plan.") for line in lines}
    from_train = {"merge.microbatches", "merge.average", "clip_grad_norm", "clip_grad_value"}  # [train] decides these
    assert rows == keys - from_train


def ratios_in(pages: str, column: str, *words: str) -> list[float]:
    """The cells of a column, in the rows that have each of these words in some cell."""
    found = []
    for page in pages.split():
        at = None
        for row in _cells(page):
            if column in row:
                at = row.index(column)
            elif at is not None and len(row) > at and all(any(re.search(word, each) for each in row) for word in words):
                found.append(float(row[at]))
    return found


def test_the_ratios_of_the_readme_are_the_least_and_the_most_of_the_results() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| .* \| ([0-9.]+) \| ([0-9.]+) \| [^|]* \|$", page, re.MULTILINE)
    checkpoints = "checkpoint checkpoint-warm checkpoint-large"
    loads = [1 / each for each in ratios_in(checkpoints, "measured", "^load .*dcp / ours-default$")]
    rows = [
        ratios_in("steps", "ratio", "^ours$", "^ddp-bf16$"),
        [
            *ratios_in("hybrid", "ratio", "^step$", "^stage3$", "^fsdp2$"),
            *ratios_in("hybrid", "ratio", "^step$", "^stage3-keep$", "^fsdp2-keep$"),
        ],
        loads,
        ratios_in("pipeline", "measured", "ours 1f1b / torch 1f1b"),
        ratios_in("transport", "ours / best", "Gbit/s"),
    ]
    assert cells == [(f"{min(row):.2f}", f"{max(row):.2f}") for row in rows]


def test_the_figures_have_every_page_of_the_results() -> None:
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r'<!-- results\("([\w-]+)"\) -->', page)) == sorted(
        each.stem for each in (ROOT / "benchmarks" / "results").glob("*.md")
    )
