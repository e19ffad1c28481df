"""Model files: what goes with the tensors of a model, as `from_pretrained` has it: configuration, tokenizer, code.

    config.json, tokenizer.json, ...     copied from a folder that is given, or out of what the save keeps

A save keeps the two small files about the model (`config.json`, `generation_config.json`) as JSON in its extra or its
settings. Tokenizers stay where they are: they are large, and about texts.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import Store, parsed_json, read_json, read_whole, reason, refusals
from shardwise.errors import CheckpointError
from shardwise.plan.saved_settings import CONFIG, MODEL_FILES

_KEPT = (CONFIG, "generation_config.json")
"""What a save keeps of a folder, as JSON: small, and about the model rather than about texts."""

_EXTRA = "huggingface"
"""Under this key the extra of a save that was converted has them: file name -> content."""

_DTYPES = ("dtype", "torch_dtype")
"""Under which a configuration says in which dtype tensors are loaded, now and before transformers 4.56."""

_COPIED = re.compile(
    r"config\.json|[\w-]+_config\.json|config_sentence_transformers\.json|modules\.json|normalizer\.json|tekken\.json"
    r"|added_tokens\.json|special_tokens_map\.json|chat_template\.(?:json|jinja)|tokenizer[\w.-]*\.(?:json|model|py)"
    r"|(?:vocab|merges|entity_vocab|dict|bpe)[\w.-]*\.(?:json|txt|model|vocab|codes)|bpe\.codes"
    r"|(?:spiece|sentencepiece[\w.-]*|spm)\.model|[\w-]+\.(?:spm|tiktoken)"
    r"|(?:additional_)?chat_templates/[\w. -]+\.jinja|custom_generate/[\w./-]+"
)
"""What is copied out of a folder: all that transformers and sentence-transformers read besides the tensors."""

_MODULES = "modules.json"
"""The modules of sentence-transformers: each with the folder that it is in."""

_AUTO_MAP = "auto_map"
"""Under which a configuration says which class is in which file of code: {"AutoModel": "modeling_x.Model"}."""

_CODE = re.compile(r"[^/]+\.py")

_NESTED = "text_config"
"""Where the configurations of models for texts and images have that of their part for texts."""

_ALIKE: Mapping[str, str] = MappingProxyType({"num_key_value_heads": "num_attention_heads"})
"""What a configuration leaves out when it is equal to something else."""


ConfigPath = str | os.PathLike[str] | None
"""A folder or a configuration file, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files that go with the tensors of a model that is converted."""

    given: Mapping[str, bytes] = field(default_factory=dict)
    """Those that are copied, by name. They go before what is `kept`."""
    kept: Mapping[str, Any]
    """Those of which the JSON is known, by name."""

    @classmethod
    def of(cls, store: Store, contents: Contents, config: ConfigPath, others: Mapping[str, bytes]) -> Self:
        """Those of a checkpoint, a folder of Hugging Face files or of saves.

        others: files that go before its own. config: a folder or a configuration file; these files go before all.
        Raises CheckpointError for a file that cannot be read, and a configuration that is not JSON.
        """
        kept = model_files(store, contents)
        return cls(given={**_beside(store, kept), **others, **_given_files(config)}, kept=kept)

    @property
    def config(self) -> Any:
        """The configuration, or None. Raises CheckpointError where it is not JSON."""
        return self._own.get(CONFIG) or self.kept.get(CONFIG)

    @property
    def _own(self) -> dict[str, Any]:
        return {CONFIG: parsed_json(self.given[CONFIG], CONFIG)} if CONFIG in self.given else {}

    def changed(self, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Self:
        """The same with what a function makes of the JSON; what it leaves as it is stays so, byte by byte."""
        own, made = self._own, change(self._own)
        given = {name: _as_json(each) for name, each in made.items() if each != own[name]}
        return replace(self, given={**self.given, **given}, kept=change(self.kept))

    def for_save(self) -> dict[str, Any]:
        """What a save keeps. Raises CheckpointError for what is not JSON."""
        return {**self.kept, **{name: parsed_json(self.given[name], name) for name in _KEPT if name in self.given}}

    def for_folder(self, dtype: str | None, *, is_dequantised: bool = False) -> dict[str, bytes]:
        """What a folder has, by name.

        dtype: in which most floats are written: a configuration that says another one has it corrected, so that
        `from_pretrained` casts nothing unasked. is_dequantised: a configuration that says how tensors are quantised no
        longer says it.
        """
        every = {**self.given, **{name: _as_json(each) for name, each in self.kept.items() if name not in self.given}}
        files = {name: data for name, data in every.items() if not (is_dequantised and "quant" in name)}
        if CONFIG in files:
            files[CONFIG] = _with_dtype(files[CONFIG], dtype, is_dequantised=is_dequantised)
        return files


def model_files(store: Store, contents: Contents) -> dict[str, Any]:
    """The files about the model that a checkpoint has in its settings or its extra, or as files: name -> JSON.

    Raises CheckpointError for a file that cannot be read or is not JSON.
    """
    if contents.format not in ("safetensors", "torch"):
        # Settings first: they have the configuration of the live model, extra only what an import found.
        levels = [contents.settings.get(MODEL_FILES), contents.extra.get(_EXTRA)]
        # Neither is checked when it is written, so anything may be there.
        found = next((each for each in levels if isinstance(each, dict)), {})
        return {name: found[name] for name in _KEPT if name in found}
    names = {name for name in store.names() if name in _KEPT}
    return {name: read_json(store, name) for name in _KEPT if name in names}


def missing_files(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """What `from_pretrained` needs, and is not among the files of a folder."""
    return tuple(name for name in [CONFIG, *_code_of(_values(files))] if name not in files)


def _files_in(store: Store, files: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """What is copied out of a folder: files by their names, own code, and folders of modules: name -> bytes."""
    names = list(store.names())
    found = {name: read_whole(store, name) for name in names if _COPIED.fullmatch(name)}
    values = {**(files or {}), **_values(found)}
    # A module of code may import others beside it. Without own code a .py file is none of the model's.
    has_code = bool(_code_of(values))
    modules = values.get(_MODULES)
    paths = [each.get("path") for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    folders = tuple(f"{path.strip('/')}/" for path in paths if isinstance(path, str) and path.strip("/"))
    others = [name for name in names if name.startswith(folders) or (has_code and _CODE.fullmatch(name))]
    return found | {name: read_whole(store, name) for name in others if name not in found}


def _beside(store: Store, kept: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a tokenizer and their like in a folder of Hugging Face files, or of saves: name -> bytes."""
    return {name: data for name, data in _files_in(store, kept).items() if name not in _KEPT}


def _values(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Configurations and lists of modules, as far as they are JSON."""
    values = {}
    for name in (each for each in files if each.endswith(("config.json", _MODULES))):
        with contextlib.suppress(ValueError, RecursionError):
            values[name] = json.loads(files[name])
    return values


def _code_of(values: Mapping[str, Any]) -> list[str]:
    """The files of code that configurations name, each once; not those of other models on the hub."""
    maps = [each[_AUTO_MAP] for each in values.values() if isinstance(each, dict) and _AUTO_MAP in each]
    named = [said for each in maps if isinstance(each, dict) for said in each.values()]
    # A tokenizer names two classes, of which one may be null.
    flat = [each for said in named for each in (said if isinstance(said, list) else [said])]
    own = [each for each in flat if isinstance(each, str) and "--" not in each and "." in each]
    return list(dict.fromkeys(f"{each.partition('.')[0]}.py" for each in own))


def folder_files(store: Store, contents: Contents) -> dict[str, bytes]:
    """All files that go with the tensors of a checkpoint, as they are; of a save what it keeps: name -> bytes.

    Raises CheckpointError for a file that cannot be read.
    """
    if contents.format in ("safetensors", "torch"):
        return _files_in(store)
    kept = model_files(store, contents)
    return {**_beside(store, kept), **{name: _as_json(each) for name, each in kept.items()}}


def as_extra(files: Mapping[str, Any]) -> dict[str, Any]:
    """The extra of a save that keeps these configuration files."""
    return {_EXTRA: dict(files)} if files else {}


def _given_files(config: ConfigPath) -> dict[str, bytes]:
    """The files of a folder that go with the tensors of a model, or one configuration file: name -> bytes.

    Raises CheckpointError for a file that cannot be read, a configuration that is not JSON, and where there is none.
    """
    if config is None:
        return {}
    path = os.fspath(config)
    if not os.path.isdir(path):
        return {CONFIG: _read_config(path)}
    with refusals(f"{path} cannot be listed"):
        found = _files_in(LocalStore(path))
    if not found:
        raise CheckpointError(
            f"{path} holds neither {CONFIG} nor files of a tokenizer; config (--config) names a folder that does, or a "
            "configuration file"
        )
    if CONFIG in found:
        parsed_json(found[CONFIG], f"{path}/{CONFIG}")
    return found


def _as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _with_dtype(data: bytes, dtype: str | None, *, is_dequantised: bool) -> bytes:
    """A configuration that says no other dtype of its tensors than they have."""
    config = parsed_json(data, CONFIG)
    if is_dequantised and isinstance(config, dict) and config.pop("quantization_config", None) is not None:
        data = _as_json(config)
    said = [key for key in _DTYPES if isinstance(config, dict) and isinstance(config.get(key), str)]
    # A configuration that says no dtype, or the right one, stays as it is, byte by byte.
    if dtype is None or all(config[key] == dtype for key in said):
        return data
    return _as_json({**config, **dict.fromkeys(said, dtype)})


def _read_config(place: str) -> bytes:
    try:
        with open(place, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(
            f"{place} does not exist; config (--config) names a folder with {CONFIG}, or such a file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {reason(error)}") from error
    parsed_json(data, place)  # here the file is known by its own name
    return data


def parameters_of(config: Any, wanted: Iterable[str]) -> dict[str, int | str]:
    """What a configuration says of the parameters of a rewrite, by name. Those that it does not know are left out."""
    nested = config.get(_NESTED) if isinstance(config, dict) else None
    # The outer level first: what a model says of itself goes before what it says of its part for texts.
    levels = [each for each in (config, nested) if isinstance(each, dict)]
    found: dict[str, int | str] = {}
    for name in wanted:
        # A model without grouped attention says num_attention_heads only; rewrites ask for both.
        for key in (name, _ALIKE.get(name, name)):
            values = [level[key] for level in levels if type(level.get(key)) in (int, str)]
            if values:
                found[name] = values[0]
                break
    return found
