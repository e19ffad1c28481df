"""Model configuration: the `config.json` that comes with Hugging Face files, where it is kept, and what it says."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.saves import read_file, reason
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

__all__ = ["CONFIG", "as_extra", "config_at", "files_of", "model_files", "parameters_of"]

CONFIG = "config.json"

_KEPT = (CONFIG, "generation_config.json")
"""What a save keeps of a folder, as JSON: small, and about the model rather than about texts."""

_EXTRA = "huggingface"
"""Under this key the extra of a save has them: file name -> content."""

_COPIED = (
    *_KEPT,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What is copied out of a folder: all that transformers reads beside the tensors."""

_NESTED = "text_config"
"""Where the configurations of models for texts and images have that of their part for texts."""

_ALIKE: Mapping[str, str] = MappingProxyType({"num_key_value_heads": "num_attention_heads"})
"""What a configuration leaves out when it is equal to something else."""


def model_files(store: Store, contents: Contents) -> dict[str, Any]:
    """The files on the model that a checkpoint has, beside its tensors or in its extra: name -> JSON.

    Raises CheckpointError for a file that cannot be read or is not JSON.
    """
    if contents.format != "safetensors":
        found = contents.extra.get(_EXTRA)
        return {name: found[name] for name in _KEPT if name in found} if isinstance(found, dict) else {}
    names = {name for name in store.names() if name in _KEPT}
    return {name: _parsed(read_file(store, name), f"{store.location}/{name}") for name in _KEPT if name in names}


def as_extra(files: Mapping[str, Any]) -> dict[str, Any]:
    """The extra of a save that keeps these configuration files."""
    return {_EXTRA: dict(files)} if files else {}


def files_of(config: str | os.PathLike[str] | None, kept: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """What belongs beside the tensors of an exported model: file name and bytes, one after the other.

    config: a folder, of which the configuration and the files of the tokenizer are taken, or a configuration file. None
    takes what is `kept`, as JSON.
    Raises CheckpointError for a file that cannot be read, and where there is no configuration.
    """
    if config is None:
        for name, value in kept.items():
            yield name, (json.dumps(value, indent=2) + "\n").encode()
        return
    path = os.fspath(config)
    places = {name: os.path.join(path, name) for name in _COPIED} if os.path.isdir(path) else {CONFIG: path}
    for name, place in places.items():
        if name == CONFIG or os.path.isfile(place):
            yield name, _read(place)


def config_at(config: str | os.PathLike[str]) -> Any:
    """The configuration in a folder or a file. Raises CheckpointError where there is none, and where it is not JSON."""
    path = os.fspath(config)
    place = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    return _parsed(_read(place), place)


def _read(place: str) -> bytes:
    try:
        with open(place, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{place} does not exist; config names a folder with {CONFIG}, or such a file") from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {reason(error)}") from error


def parameters_of(config: Any, wanted: Iterable[str]) -> dict[str, int | str]:
    """What a configuration says of the parameters of a rewrite, by name; those that it does not know are left out."""
    nested = config.get(_NESTED) if isinstance(config, dict) else None
    levels = [each for each in (config, nested) if isinstance(each, dict)]
    found: dict[str, int | str] = {}
    for name in wanted:
        for key in (name, _ALIKE.get(name, name)):
            values = [level[key] for level in levels if type(level.get(key)) in (int, str)]
            if values:
                found[name] = values[0]
                break
    return found


def _parsed(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not JSON: {error}") from None
