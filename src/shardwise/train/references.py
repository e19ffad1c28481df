"""Callables that a configuration names: "package.module:name" or "file.py:name".

Apart from what builds the model, which needs torch: a command that names something wrong ends before torch is loaded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, in_words
from shardwise.train.config import RunConfig


def check_references(config: RunConfig) -> None:
    """Import all that `config` names. Raises `ConfigError` with every name that cannot be imported."""
    problems: list[str] = []
    wanted = {
        "model.factory": config.model.factory,
        "model.loss": config.model.loss,
        "train.optimizer": config.train.optimizer,
        "data.dataset": config.data.dataset,
        "data.held_out_dataset": config.data.held_out_dataset,
        "data.collate": config.data.collate,
        **{f"train.callbacks.{at}.factory": each.factory for at, each in enumerate(config.train.callbacks)},
    }
    for key, reference in wanted.items():
        if reference is not None:
            try:
                resolve(reference, folder=config.folder, key=key)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(*problems)


def resolve(reference: str, *, folder: Path, key: str) -> Callable[..., Any]:
    """The callable that `reference`, the value of `key`, names; files are below `folder`. Raises `ConfigError`."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f'{key}: {reference!r} is not of the form "package.module:name" or "file.py:name"')
    try:
        module = _load_file(folder / source) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: no file {folder / source}") from error
    except Exception as error:  # a foreign module may raise anything while it is imported
        is_left_out = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        hint = '; pip install "shardwise[train]" brings it' if is_left_out else ""
        raise ConfigError(f"{key}: {source} cannot be imported: {in_words(error)}{hint}") from error
    try:
        found = getattr(module, name)
    except AttributeError as error:
        raise ConfigError(f"{key}: {source} has no {name}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {reference} is a {type(found).__name__}, not something that can be called")
    return found  # type: ignore[no-any-return]  # a callable of unknown signature


def _load_file(path: Path) -> ModuleType:
    """The module in a file, executed once however many of its names are asked for."""
    # Made of the whole path: two files of one name in different folders are two modules.
    name = f"shardwise_config_file_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Else the second attempt would find a module that was executed halfway.
        del sys.modules[name]
        raise
    return module
