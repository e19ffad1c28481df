"""The words of messages and docstrings: flags and settings in the place of calls, plain English, short sentences."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

import shardwise
from shardwise.cli import main
from shardwise.hf import PlanArguments
from shardwise.hf.arguments import known_fields
from shardwise.train.config import CheckpointTable, ModelTable, TrainTable
from shardwise.train.data_settings import DataTable
from shardwise.train.strict_tables import Table

SOURCE = Path(shardwise.__file__).parent
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

CALL = re.compile(
    r"\bsw\.(?!ShardwiseError)\w+|\b(?:cast|config|dtype|keep|layout|loss|lossy|optimizer|parameters|rewrite|sample|shared"
    r"|step|strict|verify)=(?!=)|parallelize\(|TorchState|AsyncSaver|\bconvert to\b|\buse convert\b"
)
"""What only a program can do, in a message."""

TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "data": DataTable,
    "train": TrainTable,
    "checkpoint": CheckpointTable,
}
LAYOUT = "mesh|sharding|precision|pipeline|tensor|merge|average|activations"

SETTINGS = re.compile(
    rf"--[a-z]|shardwise (?:ckpt|train|verify)|\b(?:{LAYOUT})\.[a-z]\w*|"
    + "|".join(rf"\b{name}\.(?:{'|'.join(table.model_fields)})\b" for name, table in TABLES.items())
)
"""A flag, a command, or a setting of a configuration."""

OF_PROGRAMS = {
    "checkpoint/numbered_state.py": "states that other programs number, loaded into a program's optimizer",
    "moving/nested_exchange.py": "values that a program gives",
    "moving/replica_samples.py": "states that ranks of a program give",
    "checkpoint/states.py": "arguments of a call have no wrong type on the command line",
    "checkpoint/conversion.py": "preview without a rewrite, which the command refuses first",
    "checkpoint/full_tensors.py": "sw.full",
    "checkpoint/saving.py": "a save of a program's own state by `keep_every`: runs save engines, which have steps",
    "checkpoint/state_pieces.py": "a module given as a state",
    "engine/adapters.py": "sw.save_adapters, sw.load_adapters and sw.save_merged",
    "engine/engine.py": "sw.relayout",
    "engine/zero/unshard.py": "calls of the model past its engine",
    "engine/loss_parameters.py": "a loss with trained parameters, which no configuration has",
    "engine/master_states.py": "states of an optimizer, asked for by a program",
    "engine/pipeline/flows.py": "a loss with trained parameters, which no configuration has",
    "engine/state.py": "an optimizer with a load_state_dict of its own",
    "engine/zero/masters.py": "parameters of an optimizer, read by a program",
    "engine/plain_calls.py": "calls of the model and the optimizer past their engine",
    "engine/relayout.py": "sw.relayout",
    "engine/step_exchange.py": "writes to parameters past their engine",
    "plan/reshard.py": "sw.reshard",
    "plan/saved_settings.py": "groups that a program has split",
    "train/verification/program.py": "sw.verify",
    "train/merged_folders.py": "sw.save_merged",
    "train/preemption.py": "sw.Preemption",
    "rewrite/sections.py": "statements",
    "rewrite/statement_arguments.py": "statements",
    "rewrite/rewrites.py": "rewrites that are composed",
    "engine/inventory.py": "a second plan for one model",
}
"""Files whose messages no command can print, and why."""


@cache
def messages(path: Path) -> list[tuple[int, str]]:
    """The strings of a file that may be shown: with their lines, without docstrings, holes as {}."""
    return list(_messages(ast.parse(path.read_text(encoding="utf-8"))))


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        if id(node) in inner or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        inner.update(map(id, ast.walk(node)))
        yield getattr(node, "lineno", 0), text_of(node)


def text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(each) if isinstance(each, ast.Constant) else "{}" for each in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return ""


def test_a_message_that_names_a_call_names_a_flag_or_a_setting() -> None:
    silent, used = [], set()
    for room in ("checkpoint", "engine", "moving", "plan", "rewrite", "train", "cli"):
        for path in sorted((SOURCE / room).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            for line, text in messages(path):
                is_sentence = len(re.findall(r"[a-z]{2,}", text)) > 4
                if is_sentence and CALL.search(text) and not SETTINGS.search(text):
                    used.add(name)
                    if name not in OF_PROGRAMS:
                        silent.append(f"{name}:{line}: {text}")
    assert not silent, "\n".join(silent)
    assert used == OF_PROGRAMS.keys()  # what is listed has a reason still


def test_every_flag_that_a_message_names_is_one() -> None:
    flags = {"--nproc-per-node"}  # of torchrun
    flags |= {
        "--ckpt-format",
        "--dist-ckpt-optim-fully-reshardable",
        "--saver",
        "--local-dir",
        "--merge",
    }  # Megatron-LM, hf, llama.cpp
    flags |= {f"--{each.name}" for each in (*known_fields(), *fields(PlanArguments))}
    commands = [main]
    while commands:
        command = commands.pop()
        flags |= {word for each in command.params for word in each.opts}
        commands += getattr(command, "commands", {}).values()
    unknown = [
        f"{path.relative_to(SOURCE)}:{line}: {flag}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in messages(path)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text)
        if flag not in flags
    ]
    assert not unknown, unknown


STUMBLES = re.compile(
    r"\b(?:of which|(?:is|are) to be|lies?|beside|told|mends?|whither|thereof|whoever|whichever|nobody|parted"
    r"|(?:by|of) (?:itself|themselves)|of (?:its|their) own(?! [a-z]))\b",
    re.IGNORECASE,
)
"""Words that made readers stumble."""

FILES = sorted(SOURCE.rglob("*.py"))

MOST_WORDS = 25
"""Of a sentence in a message."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings that stand alone: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])[)\"'`]*\s+|\n", text)


@pytest.mark.parametrize("first", range(0, len(FILES), 10))
def test_messages_and_docstrings_are_plain_english(first: int) -> None:
    found = []
    for path in FILES[first : first + 10]:
        shown = [(line, text) for line, text in messages(path) if len(re.findall(r"[a-z]{2,}", text)) > 3]
        found += [
            f"{path}:{line}: {len(sentence.split())} words: {sentence}"
            for line, text in shown
            for sentence in sentences(text)
            if len(sentence.split()) > MOST_WORDS and "<svg" not in sentence
        ]
        if STUMBLES.search(path.read_text(encoding="utf-8")):  # also in names and comments
            found += [
                f"{path}:{line}: {match[0]!r} in {text!r}"
                for line, text in (*shown, *docstrings(path))
                if (match := STUMBLES.search(text))
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_english(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [text[max(0, match.start() - 40) : match.end() + 40] for match in STUMBLES.finditer(text)] == []


def commands(group: click.Group) -> Iterator[click.Command]:
    for each in group.commands.values():
        yield from commands(each) if isinstance(each, click.Group) else [each]


def test_an_option_means_the_same_in_all_commands() -> None:
    """By the names that help shows: what each takes, in which form."""
    forms: dict[str, dict[object, str]] = {}
    for command in commands(main):
        for each in command.params:
            if isinstance(each, click.Option) and not each.hidden:
                form = (type(each.type).__name__, each.metavar, each.is_flag, each.multiple)
                forms.setdefault(each.opts[0], {}).setdefault(form, str(command.name))
    unlike = {name: list(each.values()) for name, each in forms.items() if len(each) > 1}
    assert unlike == {"--out": ["average", "draw"]}, "of these two: where the result is written, a folder or a file"
    # Names of before, which scripts have.
    old = {other for command in commands(main) for each in command.params for other in each.opts[1:]}
    assert old == {"--set", "--weights"}
