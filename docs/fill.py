"""Fills pages when the site is built: what code, commands and measurements know is not typed into a page.

A page says `{{ settings("train") }}`, and gets what the function of that name in this file returns for these words.
`make docs` runs it as a hook of MkDocs; tests call `filled` themselves, so that a wrong macro fails there first.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from shardwise.cli import main
from shardwise.plan import Merge, Pipeline, Precision, Sharding, Tensor
from shardwise.plan.specs import toml_text
from shardwise.space import Mesh
from shardwise.train import config as tables
from shardwise.words import GLOSSARY

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPECS = {
    "mesh": Mesh,
    "sharding": Sharding,
    "merge": Merge,
    "precision": Precision,
    "pipeline": Pipeline,
    "tensor": Tensor,
}
MACRO = re.compile(r"\{\{ (\w+)\(([^{}]*)\) \}\}")


def settings(table: str) -> str:
    """Every setting of a table of the configuration, with its default and meaning, from the class that parses it."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, (default, meaning) in _fields(table).items():
        rows.append(f"| `{table}.{name}` | {default} | {' '.join(meaning.split()).replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _fields(table: str) -> dict[str, tuple[str, str]]:
    """The default and the description of each setting."""
    if table in SPECS:
        spec = SPECS[table]
        meanings = _attribute_docstrings(spec)
        return {
            field.name: ("left out" if field.default is None else f"`{toml_text(field.default)}`", meanings[field.name])
            for field in dataclasses.fields(spec)
        }
    model: type[tables.Table] = getattr(tables, f"{table.capitalize()}Table")
    return {
        name: (
            "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`",
            field.description or "",
        )
        for name, field in model.model_fields.items()
    }


def _attribute_docstrings(spec: type) -> dict[str, str]:
    """The string under each attribute of a class."""
    [definition] = ast.parse(inspect.getsource(spec)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in itertools.pairwise(definition.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def glossary() -> str:
    """The words with a meaning of their own."""
    return "\n".join(
        ["| word | meaning |", "|---|---|", *(f"| **{word}** | {text} |" for word, text in GLOSSARY.items())]
    )


def commands() -> str:
    """What `--help` says, of each command."""
    return "\n\n".join(_help_of(main, "shardwise", None))


def _help_of(command: click.Command, name: str, parent: click.Context | None) -> list[str]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)
    if not isinstance(command, click.Group):
        return [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"]
    return [text for word in command.list_commands(context) for text in _help_of(command.commands[word], word, context)]


@cache
def _cells(results: str) -> list[list[str]]:
    """The rows of the tables of a page of benchmarks/results."""
    lines = (RESULTS / f"{results}.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def measured(results: str, column: str, *words: str) -> str:
    """One cell of benchmarks/results: the row whose first cells are `words`, in the table that has this column.

    Raises LookupError unless there is one such cell.
    """
    found, at = [], None
    for row in _cells(results):
        if column in row:
            at = row.index(column)
        elif at is not None and tuple(row[: len(words)]) == words:
            found.append(row[at])
    if len(found) != 1:
        raise LookupError(f"{results}.md has {len(found)} rows {words} with a column {column!r}")
    return found[0]


def results(name: str) -> str:
    """A page of benchmarks/results without its title: its lists of what was asked, measured, and how."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    return re.sub(r"\A# .*\n", "", text)


def drawing(source: str, *words: str, processes: int = 1) -> str:
    """The picture that `shardwise draw SOURCE --nproc PROCESSES` with these settings draws, as a part of the page."""
    from shardwise.train.drawing import draw

    svg = draw(str(ROOT / source), overrides=words, num_processes=processes)
    return f"<figure markdown='0'>{svg.replace(chr(10), '')}</figure>"


LANGUAGES = {".py": "python", ".toml": "toml"}


def include(file: str) -> str:
    """A file of this repository, as a block of code."""
    return f"```{LANGUAGES[Path(file).suffix]}\n{(ROOT / file).read_text(encoding='utf-8')}```"


def diff(before: str, after: str) -> str:
    """What changes from one file to another, as a block of code."""
    old, new = ((ROOT / file).read_text(encoding="utf-8").splitlines() for file in (before, after))
    return "\n".join(["```diff", *difflib.unified_diff(old, new, before, after, n=1, lineterm=""), "```"])


def about(program: str) -> str:
    """The first paragraph of a program's docstring, in a line."""
    text = ast.get_docstring(ast.parse((ROOT / program).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


MACROS: dict[str, Callable[..., str]] = {
    macro.__name__: macro for macro in (settings, glossary, commands, measured, results, drawing, include, diff, about)
}


def filled(page: str) -> str:
    """The text of a page with all its macros replaced; raises LookupError for a macro or a cell that is not there."""
    return MACRO.sub(_value, page)


def _value(match: re.Match[str]) -> str:
    call = ast.parse(f"f({match[2]})", mode="eval").body
    assert isinstance(call, ast.Call)
    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
    return MACROS[match[1]](*map(ast.literal_eval, call.args), **named)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs for each page."""
    return filled(markdown)
