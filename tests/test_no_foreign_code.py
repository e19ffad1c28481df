"""Nothing that comes from a peer or a file is run: the source calls nothing that could."""

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "shardwise"

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
}
"""Modules that make code or objects out of bytes."""
NAMES = {"eval", "exec", "compile", "__import__"}
"""Built-in functions that run what they are given."""
ATTRIBUTES = {
    "exec_module",
    "load_module",
    "import_module",
    "spec_from_file_location",
    "get_type_hints",  # evaluates annotations
    "broadcast_object_list",  # of torch.distributed: pickles of peers
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "recv_object_list",
    "send_object_list",
    "hub",
}
LOADERS = {"torch.load", "np.load", "numpy.load", "torch.package", "yaml.load", "yaml.unsafe_load", "torch.jit.load"}

ALLOWED = {
    # "package.module:name" and "file.py:name" in a configuration are the user's own program.
    "train/references.py": {"exec_module", "import_module", "spec_from_file_location"},
    # Modules of the library itself, by names that are written there.
    "__init__.py": {"import_module"},
    "train/__init__.py": {"import_module"},
    # Packages whose names are written there.
    "hf/packages.py": {"import_module"},
    # The name that accelerate has for it; values travel by `exchange`, without pickle.
    "trainers/rank_calls.py": {"gather_object"},
    # Files of the plain Trainer, read with `weights_only=True`.
    "hf/trainer_checkpoints.py": {"torch.load"},
    # Notes that a verification leaves for itself, read with `weights_only=True`: tensors and containers alone.
    "train/verification/layout_run.py": {"torch.load"},
}


def findings(tree: ast.Module) -> set[str]:
    """What a file imports or calls that could run foreign code."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names if each.name.split(".")[0] in MODULES}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module for _ in names if module.split(".")[0] in MODULES}
                found |= {each.name for each in names if each.name in ATTRIBUTES or f"{module}.{each.name}" in LOADERS}
            case ast.Name(id=name) if name in NAMES:
                found.add(name)
            case ast.Attribute(attr=name) if name in ATTRIBUTES or ast.unparse(node) in LOADERS:
                found.add(name if name in ATTRIBUTES else ast.unparse(node))
            case _:
                pass
    return found


def test_no_file_of_the_library_could_run_what_a_peer_or_a_file_says() -> None:
    seen = {}
    words = re.compile("|".join(sorted(MODULES | NAMES | ATTRIBUTES | {each.rpartition(".")[2] for each in LOADERS})))
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        # Only files that have one of the words: to parse them all takes seconds.
        if words.search(text) and (found := findings(ast.parse(text))):
            seen[file.relative_to(SOURCES).as_posix()] = found
    assert seen == ALLOWED
    loads = [
        ast.unparse(node)
        for file in ALLOWED
        for node in ast.walk(ast.parse((SOURCES / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads
    assert all("weights_only=True" in each for each in loads)
