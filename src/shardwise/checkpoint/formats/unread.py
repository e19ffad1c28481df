"""Unread: what is in a store that holds no checkpoint, in words that name the program that made it and the way on."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.checkpoint.contents import printable
from shardwise.checkpoint.formats.model_shards import JOIN_META, OF_META
from shardwise.checkpoint.formats.registry import CLAIM, DATA, format_of, is_unfinished
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import OneFile, Store
from shardwise.errors import few_of


class _ForeignFiles(NamedTuple):
    """Files that other programs make."""

    files: re.Pattern[str]
    """Names of files by which it is known, at any depth."""
    what: str
    advice: str


def _kind(files: str, what: str, advice: str) -> _ForeignFiles:
    return _ForeignFiles(re.compile(rf"(?:.*/)?(?:{files})", re.DOTALL), what, advice)


_AS_SAFETENSORS = "write its tensors as safetensors with the library that made it"


# The first that fits is named, so special kinds come before general ones: DeepSpeed writes .pt
# files too.
_KINDS = (
    _kind(
        DATA.pattern,
        "data of a save without its manifest.json, which is written last",
        "the save was interrupted or copied in part: name another save, or copy all of it",
    ),
    _kind(
        r"zero_to_fp32\.py|(?:bf16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+\w*_(?:model|optim)_states\.pt",
        "a folder with files of DeepSpeed, but neither a save nor a folder of saves with the file `latest`",
        "name the folder of one save (global_step100)",
    ),
    _kind(
        r"latest_checkpointed_iteration\.txt|(?:.*/)?common\.pt",
        "a part of a checkpoint of Megatron",
        "name the folder of saves with all its files, or the folder of an iteration (iter_0000010)",
    ),
    _kind(
        r"__\d+_\d+\.distcp",
        "data of torch.distributed.checkpoint without the .metadata, which is written last",
        "the save was interrupted or copied in part: name another save, or copy all of it",
    ),
    _kind(r".*\.gguf", "a folder of models of llama.cpp (GGUF)", "name the file of one"),
    _kind(
        r"saved_model\.pb|tf_model\.h5|.*\.ckpt\.index|.*\.data-\d+-of-\d+",
        "a model of TensorFlow, which is not read yet",
        _AS_SAFETENSORS,
    ),
    _kind(r".*\.(?:h5|keras)", "a model of Keras, which is not read yet", _AS_SAFETENSORS),
    _kind(
        r".*\.msgpack|_CHECKPOINT_METADATA|manifest\.ocdbt|\.zarray",
        "a checkpoint of Flax or Orbax, which is not read yet",
        _AS_SAFETENSORS,
    ),
    _kind(r".*\.onnx", "a model of ONNX, which is not read yet", _AS_SAFETENSORS),
    _kind(r".*\.np[yz]", "arrays of numpy, which are not read yet", "write them as safetensors (safetensors.numpy)"),
    _kind(
        OF_META.pattern,
        "a folder of a model as Meta publishes it, a file for each rank",
        f"{JOIN_META}, or name the file of one rank",
    ),
    _kind(
        r".*\.(?:pt|pth|ckpt|bin)", "a folder of files that torch.save may have written", "name the file of the model"
    ),
    _kind(
        r".*\.(?:pkl|pickle)",
        "a pickle, and no pickle is run here",
        "load it with the program that made it, and write its tensors with torch.save or as safetensors",
    ),
)


_PART_OF = re.compile(r"manifest\.json|\.metadata|.*\.index\.json|.*\.distcp|.*-tensors-\d+\.json", re.DOTALL)
"""Files that are of no use without others."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def no_checkpoint(store: Store) -> str:
    """Say that a store holds no checkpoint, what it holds instead, and what to do."""
    if is_unfinished(store.location):
        return (
            f"{store.location} is what a conversion or a trainer writes until all is there, or has left when it was "
            "killed: it is no checkpoint. Write it again; the next one to the same place removes this"
        )
    names = list(store.names())
    if isinstance(store, OneFile):
        return f"{store.location}/{names[0]} is no checkpoint that is read: {_file_in_words(names[0])}"
    if not names:
        return f"{store.location} holds no checkpoint: {_nothing_in_words(store)}"
    return f"{store.location} holds no checkpoint that is read: {_folder_in_words(names)}"


def _file_in_words(name: str) -> str:
    if _PART_OF.fullmatch(name):
        return "it is one file of several; name the folder that holds it"
    found = _known([name])
    return found or "it is a file; name the folder of a checkpoint, or a .safetensors file"


def _nothing_in_words(store: Store) -> str:
    # Object stores have no folders: nothing tells one that is empty from one that is missing.
    if not isinstance(store, LocalStore):
        return "it is empty or does not exist, or is a single file; name a folder"
    if os.path.isdir(store.location):
        return "it is empty"
    relative = os.path.relpath(store.location)
    # A name such as org/model is most often meant for the hub, but not where the folder org is there.
    if _HUB_NAME.fullmatch(relative) and not os.path.lexists(relative.split("/")[0]):
        return (
            f"it does not exist. If {relative} is on the Hugging Face hub, name hf://{relative}, or run `hf download "
            f"{relative} --local-dir FOLDER` first and name that folder"
        )
    return "it does not exist"


def _folder_in_words(names: Sequence[str]) -> str:
    if CLAIM in names:
        return "a conversion writes it, or has left it when it was killed; write it again to another folder"
    # Two deep: in the hub's cache a model has snapshots/HASH.
    for depth in (1, 2):
        inner: dict[str, list[str]] = {}
        for name in names:
            *folders, rest = name.split("/", depth)
            if len(folders) == depth and not is_unfinished("/".join(folders)):
                inner.setdefault("/".join(folders), []).append(rest)
        if holders := [printable(folder) for folder, files in inner.items() if format_of(files) is not None]:
            verb = "holds one: name it" if len(holders) == 1 else "hold one each: name one of them"
            return f"but {few_of(holders, quotes=False)} in it {verb}"
    shown = few_of([printable(name) for name in names], quotes=False)
    return _known(names) or f"it has {shown}; name the folder or the file of a checkpoint"


def _known(names: Sequence[str]) -> str:
    for kind in _KINDS:
        if found := next((name for name in names if kind.files.fullmatch(name)), None):
            return f"it is {kind.what} ({printable(found)}); {kind.advice}"
    return ""
