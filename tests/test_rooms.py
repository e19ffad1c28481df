"""The rooms keep their walls: imports go down only, pure rooms stay pure, and files are named for what they hold."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.edges import EDGES

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
PURE = ("space", "plan", "routes", "rewrite", "words", "errors", "keepers", "launchers", "train/config")
DRAWERS = frozenset({"util", "helper", "common", "base", "misc", "manager", "handler", "wrapper", "context", "impl"})
MAX_LINES = 700
MAX_ARGUMENTS = 8
RECORDS = {"StepReport", "RankTimes"}
"""Users read them field by field."""


def modules_under(source: Path, rooms: tuple[str, ...]) -> list[str]:
    """The dotted name of every module in these rooms: of a folder every file, of a file itself."""
    files = [file for room in rooms for file in (source / "shardwise" / room).rglob("*.py")]
    files += [file for room in rooms if (file := source / "shardwise" / f"{room}.py").exists()]
    return sorted(".".join(file.relative_to(source).with_suffix("").parts) for file in files)


def faults_of_file(file: Path) -> list[str]:
    """What is wrong with one source file: its name, its length, its letters."""
    text = file.read_text(encoding="utf-8")
    name = file.parent.name if file.stem == "__init__" else file.stem
    faults = []
    if DRAWERS & {word.removesuffix("s") for word in name.split("_")}:
        faults.append(f"{file} is named like a drawer; name it for the thing that it holds")
    # A mailbox is what a pipeline has, whatever the standard library has under that name.
    if name in sys.stdlib_module_names - {"mailbox"}:
        faults.append(f"{file} is named like the standard module {name}")
    if not text.isascii():
        lines = [number for number, line in enumerate(text.splitlines(), 1) if not line.isascii()]
        faults.append(f"{file} is not ASCII in lines {lines}")
    if (num_lines := len(text.splitlines())) > MAX_LINES:
        faults.append(f"{file} has {num_lines} lines, more than {MAX_LINES}")
    return faults


def words_of(text: str) -> Iterator[tuple[int, str]]:
    """What a source text imports, names and writes in quotes, with the line of each; no prose."""
    nodes = list(ast.walk(ast.parse(text)))
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{each.name}") for each in names)
            case ast.Attribute() | ast.Name():
                yield node.lineno, ast.unparse(node)
            case ast.keyword(arg=str(word)):
                yield node.lineno, word
            case ast.Constant(value=str(word)) if node not in prose:
                yield node.lineno, repr(word)


def lines_with(files: Iterable[Path], pattern: str) -> list[str]:
    """The lines of files that have it in their code, apart from attributes of tensors in lists of them."""
    listed = ("'is_cuda'", "'__cuda_array_interface__'")
    return [
        f"{file}:{line}"
        for file in files
        if pattern.rpartition(".")[2]
        in (text := file.read_text(encoding="utf-8")).lower()  # to parse all takes seconds
        for line, word in words_of(text)
        if re.search(pattern, word.lower()) and word not in listed
    ]


def test_no_kind_of_device_is_named_outside_of_comm() -> None:
    rooms = ("engine", "train", "cli", "moving", "routes", "plan", "checkpoint")
    files = [file for room in rooms for file in sorted((SOURCE / "shardwise" / room).rglob("*.py"))]
    assert len(files) > 100
    assert lines_with(files, "cuda") == []


def test_no_modules_import_each_other() -> None:
    """In functions and for types neither."""
    graph = grimp.build_graph("shardwise", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "shardwise.routes.reshard_plan" in imports["shardwise.routes.reshard"]
    TopologicalSorter(imports).prepare()  # or raises CycleError, which shows the circle


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds the source tree first."""
    start = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", start + script], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )


def test_the_import_contract_names_every_pure_module() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(each for each in contracts if "torch" in each.get("forbidden_modules", ()))["source_modules"]
    for module in modules_under(SOURCE, PURE):
        assert any(f"{module}.".startswith(f"{source}.") for source in pure), f"{module} is missing in the contract"


def test_every_edge_of_the_engine_is_taken_away_by_the_check_of_the_core() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(each for each in contracts if each.get("containers") == ["shardwise.engine"])["layers"]
    line = next(each for each in floors if "telemetry" in each)
    edges = [*line.split(" | "), "packed", "tensor/auto", "tensor/proof"]
    assert {f"engine/{edge}" for edge in edges} <= {
        path.removesuffix(".py") for paths in EDGES.values() for path in paths
    }


def test_every_format_of_checkpoints_is_taken_away_by_the_check_of_the_core() -> None:
    formats = SOURCE / "shardwise" / "checkpoint" / "formats"
    files = [file for file in formats.rglob("*.py") if "\nFORMAT = Format(" in file.read_text(encoding="utf-8")]
    homes = {f"checkpoint/formats/{file.parent.name if file.stem == '__init__' else file.name}" for file in files}
    assert len(homes) > 3
    assert homes == {path for paths in EDGES.values() for path in paths if path.startswith("checkpoint/formats/")}


def test_torch_distributed_is_used_by_the_comm_room_and_the_double_of_nccl_only() -> None:
    users = [SOURCE / "shardwise" / room for room in ("comm", "testing")]
    others = [file for file in sorted(SOURCE.rglob("*.py")) if not any(map(file.is_relative_to, users))]
    assert lines_with(others, "^torch.distributed") == []


def private_names_in(text: str) -> set[str]:
    """The names with one `_` in front that a source text imports, writes in quotes, or asks of others than `self`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found |= {part for each in names for part in each.name.split(".")}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {*module.split("."), *(each.name for each in names)}
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
    return {each for each in found if re.fullmatch(r"_[A-Za-z]\w*", each)}


def own_names_in(text: str) -> set[str]:
    """The names that a source text defines, or gives to attributes of its objects."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                found.add(name)
    return found


STAYING = re.compile(
    r"_(parameters|modules|buffers|foreach_\w+|scaled_dot_product_\w+|getframe|current_frames|replace)"
)
"""Of torch: see torch_private.py. Of Python: frames and named tuples."""
OF_OTHERS = {"adapters.py", "metrics.py"}
"""They read private names of peft, and of torchmetrics."""


@pytest.mark.parametrize(
    ("room", "some"),
    [
        ("engine", {"_C", "_cdata", "_forward_hooks"}),
        ("comm", {"_get_default_store", "_allgather_base", "_split_tensor", "_current_level"}),
    ],
)
def test_private_names_of_torch_stand_in_one_file_of_a_room(room: str, some: set[str]) -> None:
    files = sorted((SOURCE / "shardwise" / room).rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    of_torch = private_names_in(texts.pop(SOURCE / "shardwise" / room / "torch_private.py"))
    assert some <= of_torch
    own = set().union(*map(own_names_in, texts.values()))
    asked = {file: private_names_in(text) for file, text in texts.items() if file.name not in OF_OTHERS}
    # What is in quotes and known to neither is of a library of the user's, or an operator's name.
    attributes = {
        file: {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        for file, text in texts.items()
    }
    faults = {
        file: found
        for file, names in asked.items()
        if (
            found := {
                each
                for each in names
                if not STAYING.fullmatch(each) and (each in of_torch or (each in attributes[file] and each not in own))
            }
        )
    }
    assert faults == {}


def heavy_modules_after(script: str) -> str:
    """Which of torch and numpy are loaded once a fresh interpreter has run the script."""
    result = run_python(f"{script}\nprint(*sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_pure_rooms_load_neither_torch_nor_numpy() -> None:
    modules = modules_under(SOURCE, PURE)
    assert {"shardwise.space.boxes", "shardwise.words", "shardwise.errors"} <= set(modules)
    assert heavy_modules_after("import " + ", ".join(modules)) == ""
    assert heavy_modules_after("import numpy") == "numpy"


def test_no_two_classes_of_a_room_have_one_name() -> None:
    found: dict[tuple[Path, str], list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^ *class _?(\w+)[(:]", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault((path.parent, name), []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def arguments_of(class_: ast.ClassDef) -> list[str]:
    """The arguments of a class's constructor, which a dataclass has from its fields."""
    for node in class_.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            return [each.arg for each in (*given.posonlyargs, *given.args[1:], *given.kwonlyargs)]
    if not any("dataclass" in ast.unparse(each) for each in class_.decorator_list):
        return []
    fields = [node for node in class_.body if isinstance(node, ast.AnnAssign)]
    return [ast.unparse(each.target) for each in fields if "init=False" not in ast.unparse(each)]


def test_no_constructor_of_the_engine_takes_many_arguments() -> None:
    """A few values that mean something do."""
    files = sorted((SOURCE / "shardwise" / "engine").rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    counts = {node.name: len(arguments_of(node)) for node in nodes if isinstance(node, ast.ClassDef)}
    assert counts["RankParts"] > 4
    assert {name for name, count in counts.items() if count > MAX_ARGUMENTS} == RECORDS


def test_source_files_keep_the_rules_of_the_house() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert [fault for file in files for fault in faults_of_file(file)] == []
