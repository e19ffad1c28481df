"""The rooms keep their walls: imports go down only, pure rooms stay pure, and files are named for what they hold."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"
PURE = ("space", "plan", "rewrite", "words", "errors", "keepers", "launchers", "train/config")
DRAWERS = frozenset({"util", "helper", "common", "base", "misc", "manager", "handler", "wrapper", "context", "impl"})
MAX_LINES = 700


def modules_under(source: Path, rooms: tuple[str, ...]) -> list[str]:
    """The dotted name of every module in these rooms: of a folder every file, of a file itself."""
    files = [file for room in rooms for file in (source / "shardwise" / room).rglob("*.py")]
    files += [file for room in rooms if (file := source / "shardwise" / f"{room}.py").exists()]
    return sorted(".".join(file.relative_to(source).with_suffix("").parts) for file in files)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """Every node of the tree of a source text, parsed once for all rules."""
    return list(ast.walk(ast.parse(text)))


@pytest.fixture(scope="module", autouse=True)
def _trees_go_with_their_tests() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def faults_of_file(file: Path) -> list[str]:
    """What is wrong with one source file: its name, its length, its letters, its `global` statements."""
    text = file.read_text(encoding="utf-8")
    name = file.parent.name if file.stem == "__init__" else file.stem
    faults = []
    if DRAWERS & {word.removesuffix("s") for word in name.split("_")}:
        faults.append(f"{file} is named like a drawer; name it for the thing that it holds")
    if name in sys.stdlib_module_names:
        faults.append(f"{file} is named like the standard module {name}")
    if not text.isascii():
        lines = [number for number, line in enumerate(text.splitlines(), 1) if not line.isascii()]
        faults.append(f"{file} is not ASCII in lines {lines}")
    if (num_lines := len(text.splitlines())) > MAX_LINES:
        faults.append(f"{file} has {num_lines} lines, more than {MAX_LINES}")
    statements = [node.lineno for node in nodes_of(text) if isinstance(node, ast.Global)]
    return faults + [f"{file}:{line} has a global statement" for line in statements]


def uses_of_torch_distributed(text: str) -> list[int]:
    """The lines of a source text that import torch.distributed or reach it through torch."""
    lines = []
    for node in nodes_of(text):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                modules = [f"torch.{attribute}"]
            case _:
                continue
        if any(f"{module}.".startswith("torch.distributed.") for module in modules):
            lines.append(node.lineno)
    return lines


def names_of_cuda(text: str) -> list[int]:
    """The lines of a source text that name CUDA, apart from prose and from attributes of tensors in lists of them."""
    lines = []
    prose = {node.value for node in nodes_of(text) if isinstance(node, ast.Expr)}
    for node in nodes_of(text):
        match node:
            case ast.Constant(value=str(word)) if node not in prose and word not in (
                "is_cuda",
                "__cuda_array_interface__",
            ):
                words = word
            case ast.Attribute(attr=words) | ast.Name(id=words) | ast.alias(name=words) | ast.keyword(arg=str(words)):
                pass
            case _:
                continue
        if "cuda" in words.lower():
            lines.append(node.lineno)
    return lines


def module_graph(source: Path) -> dict[str, set[str]]:
    """What every module names in an import, those of functions and of `if TYPE_CHECKING` too.

    `from shardwise.space import Box` counts as an import of the package, which loads what it gives. That a package is
    loaded before each module in it does not count: then every package that names its own modules would be a circle.
    """
    modules: dict[str, Path] = {}
    for file in source.rglob("*.py"):
        *folders, name = file.relative_to(source).with_suffix("").parts
        modules[".".join(folders if name == "__init__" else [*folders, name])] = file
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        named: set[str] = set()
        for node in nodes_of(file.read_text()):
            match node:
                case ast.Import(names=names):
                    named |= {alias.name for alias in names}
                case ast.ImportFrom(level=level, module=package, names=names):
                    folder = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
                    above = folder[: len(folder) + 1 - level] if level else []
                    origin = ".".join([*above, *filter(None, [package])])
                    inner = {f"{origin}.{alias.name}" for alias in names}
                    named |= inner if inner <= modules.keys() else {origin, *inner}
        graph[module] = (named & modules.keys()) - {module}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, over others too: the strongly connected parts of more than one (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    circles = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            part = path[path.index(module) :]
            del path[path.index(module) :]
            if len(part) > 1:
                circles.append(sorted(part))

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return circles


@pytest.mark.parametrize("room", ["engine", "train", "cli", "moving", "plan", "checkpoint"])
def test_no_kind_of_device_is_named_outside_of_comm(room: str) -> None:
    files = sorted((SOURCE / "shardwise" / room).rglob("*.py"))
    assert files
    assert [f"{file}:{line}" for file in files for line in names_of_cuda(file.read_text())] == []


def test_no_modules_import_each_other() -> None:
    graph = module_graph(SOURCE)
    assert "shardwise.plan.routes" in graph["shardwise.plan.reshard"]
    assert import_circles(graph) == []


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds the source tree first."""
    start = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", start + script], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )


def test_the_import_contract_holds() -> None:
    result = run_python(
        "from importlinter.cli import lint_imports\nsys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_import_contract_names_every_pure_module() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(each for each in contracts if "torch" in each.get("forbidden_modules", ()))["source_modules"]
    for module in modules_under(SOURCE, PURE):
        assert any(f"{module}.".startswith(f"{source}.") for source in pure), f"{module} is missing in the contract"


def test_torch_distributed_is_used_by_the_comm_room_and_the_double_of_nccl_only() -> None:
    users = [SOURCE / "shardwise" / room for room in ("comm", "testing")]
    others = [file for file in sorted(SOURCE.rglob("*.py")) if not any(map(file.is_relative_to, users))]
    assert [(str(file), lines) for file in others if (lines := uses_of_torch_distributed(file.read_text()))] == []


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


def test_a_program_does_not_load_what_tests_use() -> None:
    used = "import sys, shardwise as sw; sw.Engine, sw.processes, sw.verify, sw.save"
    assert (
        run_python(
            f"{used}; print([each for each in sys.modules if '.testing' in each and 'shardwise' in each])"
        ).stdout
        == "[]\n"
    )


def test_no_two_files_and_no_two_classes_of_a_room_have_one_name() -> None:
    found: dict[tuple[str, str], list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        if path.name not in ("__init__.py", "__main__.py"):
            found.setdefault((room, path.name), []).append(path)
        for node in nodes_of(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                found.setdefault((room, node.name.lstrip("_")), []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_source_files_keep_the_rules_of_the_house() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert [fault for file in files for fault in faults_of_file(file)] == []
