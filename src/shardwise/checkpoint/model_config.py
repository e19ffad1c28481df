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
from shardwise.plan.saved_settings import CONFIG, MODEL_FILES

__all__ = [
    "CONFIG",
    "ConfigPath",
    "as_extra",
    "files_beside",
    "files_of",
    "given_files",
    "kept_files",
    "model_files",
    "parameters_of",
    "parsed_config",
]

_KEPT = (CONFIG, "generation_config.json")
"""What a save keeps of a folder, as JSON: small, and about the model rather than about texts."""

_EXTRA = "huggingface"
"""Under this key the extra of a save that was converted has them: file name -> content."""

_DTYPES = ("dtype", "torch_dtype")
"""Under which a configuration says in which dtype tensors are loaded, now and before transformers 4.56."""

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


ConfigPath = str | os.PathLike[str] | None
"""A folder or a configuration file, or nothing."""


def model_files(store: Store, contents: Contents) -> dict[str, Any]:
    """The files on the model that a checkpoint has, beside its tensors, in its settings or its extra: name -> JSON.

    Raises CheckpointError for a file that cannot be read or is not JSON.
    """
    if contents.format != "safetensors":
        levels = [contents.settings.get(MODEL_FILES), contents.extra.get(_EXTRA)]
        found = next((each for each in levels if isinstance(each, dict)), {})
        return {name: found[name] for name in _KEPT if name in found}
    names = {name for name in store.names() if name in _KEPT}
    return {name: _parsed(read_file(store, name), f"{store.location}/{name}") for name in _KEPT if name in names}


def files_beside(store: Store) -> dict[str, bytes]:
    """The files of a tokenizer and their like in a folder of Hugging Face files, or beside saves: name -> bytes."""
    names = [name for name in store.names() if name in _COPIED and name not in _KEPT]
    return {name: read_file(store, name) for name in names}


def as_extra(files: Mapping[str, Any]) -> dict[str, Any]:
    """The extra of a save that keeps these configuration files."""
    return {_EXTRA: dict(files)} if files else {}


def kept_files(given: Mapping[str, bytes], files: Mapping[str, Any]) -> dict[str, Any]:
    """What a save keeps: files that were given go before others. Raises CheckpointError for what is not JSON."""
    return {**files, **{name: _parsed(given[name], name) for name in _KEPT if name in given}}


def given_files(config: ConfigPath) -> dict[str, bytes]:
    """What a folder has that belongs beside the tensors of a model, or a configuration file: name -> bytes.

    Raises CheckpointError for a file that cannot be read, a configuration that is not JSON, and where there is none.
    """
    if config is None:
        return {}
    path = os.fspath(config)
    if not os.path.isdir(path):
        return {CONFIG: _read(path, CONFIG)}
    found = {name: place for name in _COPIED if os.path.isfile(place := os.path.join(path, name))}
    if not found:
        raise CheckpointError(
            f"{path} holds neither {CONFIG} nor files of a tokenizer; config (--config) names a folder that does, or a "
            "configuration file"
        )
    return {name: _read(place, name) for name, place in found.items()}


def files_of(given: Mapping[str, bytes], kept: Mapping[str, Any], dtype: str | None) -> Iterator[tuple[str, bytes]]:
    """What belongs beside the tensors of an exported model: file name and bytes, one after the other.

    given: see `given_files`; they go before what is `kept`, as JSON. dtype: in which most floats are written: a
    configuration that says another one has it corrected, so that `from_pretrained` casts nothing unasked.
    """
    for name in (*given, *(each for each in kept if each not in given)):
        data = given[name] if name in given else (json.dumps(kept[name], indent=2) + "\n").encode()
        yield name, _with_dtype(data, dtype) if name == CONFIG else data


def _with_dtype(data: bytes, dtype: str | None) -> bytes:
    """A configuration that says no other dtype of its tensors than they have."""
    config = _parsed(data, CONFIG)
    said = [key for key in _DTYPES if isinstance(config, dict) and isinstance(config.get(key), str)]
    if dtype is None or all(config[key] == dtype for key in said):
        return data
    return (json.dumps({**config, **dict.fromkeys(said, dtype)}, indent=2) + "\n").encode()


def _read(place: str, name: str) -> bytes:
    try:
        with open(place, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(
            f"{place} does not exist; config (--config) names a folder with {CONFIG}, or such a file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {reason(error)}") from error
    if name == CONFIG:
        _parsed(data, place)  # here the file is known by its own name
    return data


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


def parsed_config(given: Mapping[str, bytes]) -> Any:
    """The configuration among given files, or None. Raises CheckpointError where it is not JSON."""
    return _parsed(given[CONFIG], CONFIG) if CONFIG in given else None


def _parsed(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not JSON: {error}") from None
