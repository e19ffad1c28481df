"""Fills pages with facts from code, commands and measurements, so that a page repeats none of them by hand.

A macro is a call of a function of this file between comments, with its text up to the next comment::

    <!-- settings("train") -->
    | setting | default | meaning |         written by `python -m docs.fill`, and kept equal by a test,
    <!-- end -->                            because GitHub shows the page as it is

`make docs` runs this file as a hook of MkDocs. The site gets the full value of a macro. The committed page gets less
where the full value is long or a picture: a link to the file, or the command that draws the picture.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import click
from pydantic.fields import FieldInfo

from shardwise.cli import main
from shardwise.plan import Activations, Average, Merge, Pipeline, Precision, Sharding, Tensor
from shardwise.plan.specs import toml_text
from shardwise.space import Mesh
from shardwise.train import config as tables
from shardwise.train.strict_tables import Table, table_at
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
    "average": Average,
    "activations": Activations,
}
MACRO = re.compile(r"<!-- (\w+)\(([^<>]*)\) -->(.*?)<!-- end -->", re.DOTALL)
ARGUMENTS = re.compile(r"<p>[a-z_]+(?:, [a-z_]+)*: .*?</p>", re.DOTALL)
EXAMPLE = re.compile(r"(?:<blockquote>\s*){3}<p>(.*?)</p>\s*(?:</blockquote>\s*){3}", re.DOTALL)
ARGUMENT = re.compile(r"^(<p>)?([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)


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
        [definition] = ast.parse(inspect.getsource(spec)).body
        assert isinstance(definition, ast.ClassDef)
        meanings = _docstrings(definition.body)
        return {
            field.name: ("left out" if field.default is None else f"`{toml_text(field.default)}`", meanings[field.name])
            for field in dataclasses.fields(spec)
        }
    outer, *inner = table.split(".")
    model: type[Table] = table_at(getattr(tables, f"{outer.capitalize()}Table"), inner)
    return {name: (_default(field), field.description or "") for name, field in model.model_fields.items()}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "see below" if isinstance(default, Table) else f"`{json.dumps(default)}`"


def training_arguments() -> str:
    """Every field of the TrainingArguments of transformers, and what a trainer under a plan does with it."""
    from shardwise.hf.arguments import ARGUMENTS, known_fields

    rows: dict[tuple[str, str, str], list[str]] = {}
    for field in known_fields():
        for each in ARGUMENTS[field.name]:
            rows.setdefault((each.kind, each.text, each.values), []).append(f"`{field.name}`")
    return "\n".join(
        [
            "| fields | | under a plan |",
            "|---|---|---|",
            *(
                f"| {', '.join(names)}{values and f' = {values}'} | {kind} | {text} |"
                for (kind, text, values), names in rows.items()
            ),
        ]
    )


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


def drawing(source: str, *words: str, processes: int | None = None) -> str:
    """The picture that `shardwise draw SOURCE` with these settings draws, as a part of the page."""
    from shardwise.pictures.drawing import draw

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


def reference(dotted: str, options: str = "") -> str:
    """The docstrings of a module, a class or a function: mkdocstrings expands these lines, with its options."""
    return f"::: {dotted}" + (f"\n    options: {{{options}}}" if options else "")


MACROS: dict[str, Callable[..., str]] = {
    macro.__name__: macro
    for macro in (
        settings,
        training_arguments,
        glossary,
        commands,
        measured,
        results,
        drawing,
        include,
        diff,
        about,
        reference,
    )
}


def _short_commands(_: Path) -> str:
    rows = ["| command | what it does |", "|---|---|"]
    found: list[tuple[str, click.Command]] = [("shardwise", main)]
    while found:
        name, command = found.pop()
        if isinstance(command, click.Group):
            found += [(f"{name} {word}", each) for word, each in sorted(command.commands.items(), reverse=True)]
        else:
            rows.append(f"| `{name} --help` | {command.get_short_help_str(limit=200)} |")
    return "\n".join(rows)


def _short_drawing(_: Path, source: str, *words: str, processes: int | None = None) -> str:
    of_processes = "" if processes is None else f" --nproc {processes}"
    changed = "".join(f" --set {word}" for word in words)
    return f"```console\nshardwise draw {source}{of_processes}{changed}    # draws this picture\n```"


def _short_reference(page: Path, dotted: str, _: str = "") -> str:
    module, _, name = dotted.rpartition(".")
    file = Path("src", *dotted.split(".")).with_suffix(".py")
    if (ROOT / file).exists():
        text = ast.get_docstring(_parsed(file)) or ""
    else:
        file = Path("src", *module.split(".")).with_suffix(".py")
        text = _docstrings(_parsed(file).body)[name]
    first = text.partition("\n\n")[0]
    return f"- {_link(page, file, f'`{name}`')}: {' '.join(first.split())}"


def _docstrings(body: list[ast.stmt]) -> dict[str, str]:
    """Of functions (after their overloads), classes, and names with a string after them."""
    found = {}
    for each, after in itertools.zip_longest(body, body[1:]):
        match each, after:
            case ((ast.FunctionDef() | ast.ClassDef()), _):
                found[each.name] = ast.get_docstring(each) or ""
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def _link(page: Path, file: str | Path, words: str = "") -> str:
    return f"[{words or file}]({os.path.relpath(ROOT / file, page.parent)})"


SHORT: dict[str, Callable[..., str]] = {
    "commands": _short_commands,
    "drawing": _short_drawing,
    "include": _link,
    "reference": _short_reference,
    "results": lambda page, name: _link(page, f"benchmarks/results/{name}.md"),
}
"""The values in committed pages, where they differ from those on the site. Each takes the page, then the words."""


def filled(text: str) -> str:
    """The text of a page for the site; raises LookupError for a macro or a cell that is not there."""
    return MACRO.sub(lambda match: _value(MACROS[match[1]], match[2]), text)


def committed(page: Path) -> str:
    """The text of a page for GitHub: as it is, with the texts of its macros written anew."""

    def written(match: re.Match[str]) -> str:
        value = _value(partial(SHORT[match[1]], page) if match[1] in SHORT else MACROS[match[1]], match[2])
        # A comment at the start of a line is a block of its own in Markdown: its text needs empty lines around it.
        is_block = match.start() == 0 or match.string[match.start() - 1] == "\n"
        return f"<!-- {match[1]}({match[2]}) -->" + (f"\n\n{value}\n\n" if is_block else value) + "<!-- end -->"

    return MACRO.sub(written, page.read_text(encoding="utf-8"))


def _value(macro: Callable[..., str], words: str) -> str:
    call = ast.parse(f"f({words})", mode="eval").body
    assert isinstance(call, ast.Call)
    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
    return macro(*map(ast.literal_eval, call.args), **named)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs for each page."""
    return filled(markdown)


def on_page_content(html: str, **_: object) -> str:
    """Called by MkDocs for each page when it is HTML."""
    return laid_out(html) if "doc-contents" in html else html


def laid_out(html: str) -> str:
    """Docstrings, which are no Markdown: `name: meaning` with a line for each name, examples (`>>>`) as code."""
    html = ARGUMENTS.sub(lambda paragraph: ARGUMENT.sub(_on_a_line, paragraph[0]), html)
    # Three signs of a quotation to Markdown, which drops them.
    return EXAMPLE.sub(lambda quoted: f"<pre><code>{re.sub(' *# doctest.*', '', quoted[1])}</code></pre>", html)


def _on_a_line(argument: re.Match[str]) -> str:
    return f"{argument[1] or '<br>'}<code>{argument[2]}</code>: "


if __name__ == "__main__":
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        path.write_text(committed(path), encoding="utf-8")
