"""Foreign: what checkpoints of other formats hold, read from their metadata, so that all of the room works on them.

    manifest.json, save-00000007/manifest.json    a save of ours
    .metadata                                     `dcp`: what torch.distributed.checkpoint wrote
    pytorch_model_fsdp_0/, optimizer_0/           `dcp`: the same, as accelerate and the trainer of transformers have it
    common.pt, iter_*, mp_rank_*/model_optim_rng.pt   `megatron`: what its dist_checkpointing wrote, and its older one
    latest, *mp_rank_*_states.pt                  `deepspeed`: what its save_checkpoint wrote, all stages of ZeRO
    *.safetensors, *.safetensors.index.json       `huggingface`: with or without an index
    pytorch_model*.bin, *.bin.index.json          `torch_folders`: the same, as torch.save wrote it
    one file *.pt, *.pth, *.ckpt, *.bin           `torch_folders`: whatever torch.save wrote
    one file *.gguf                               `gguf`: a model of llama.cpp, without quantised tensors
    anything else                                 refused, in words that name the program that made it and the way on

Formats are known by names of files alone: listing is cheap on every store, and nothing unknown is opened.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from shardwise.checkpoint.contents import Contents, printable
from shardwise.checkpoint.foreign import dcp, deepspeed, gguf, huggingface, megatron, torch_folders
from shardwise.checkpoint.foreign.numbered_files import is_numbered
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import OneFile, Store
from shardwise.checkpoint.whole_folders import is_unfinished
from shardwise.errors import CheckpointError, few_of

__all__ = ["Format", "format_of", "no_checkpoint", "read_foreign", "recognise"]

Format = Literal["shardwise", "safetensors", "dcp", "deepspeed", "megatron", "torch", "gguf"]

_OF_SAVE = re.compile(r"save-([0-9]{8}|[1-9][0-9]{8,199})")
_MANIFEST = re.compile(rf"({_OF_SAVE.pattern}/)?manifest\.json")
_DATA = re.compile(r"[0-9a-f]{8}-rank[0-9]+\.safetensors")
"""Data of a save of ours, which is nothing without its manifest."""


def recognise(store: Store) -> Format | None:
    """Return the format of the checkpoint in a store; None when it is none that we know."""
    if isinstance(store, OneFile):
        if _DATA.fullmatch(store.name) and _OF_SAVE.fullmatch(os.path.basename(store.location)):
            # Begun with its size and its header: until the save is committed its tensors may be zeros.
            return "safetensors" if os.path.exists(f"{store.location}/manifest.json") else None
        if torch_folders.is_torch_file(store.name):
            return "torch"
        if store.name.endswith(".gguf"):
            return "gguf"
        if not store.name.endswith(".safetensors"):
            return None  # of no use without the other files
        return "safetensors"
    return format_of(list(store.names()))


def format_of(names: Sequence[str]) -> Format | None:
    """Return the format of the checkpoint whose files have these names; None when it is none that we know."""
    # The order decides where files of several formats are together. A folder of saves stays one, whatever a user puts
    # there; and .metadata comes before safetensors, in which torch.distributed.checkpoint can write its data too.
    if any(_MANIFEST.fullmatch(name) for name in names):
        return "shardwise"
    if megatron.is_megatron(names):
        return "megatron"
    if dcp.parts_of(names):
        return "dcp"
    # Before models of Hugging Face: its trainer puts both into one folder, and these have the optimizer too.
    if deepspeed.is_deepspeed(names):
        return "deepspeed"
    # Not below: a folder that holds models in folders is no model.
    if any(
        "/" not in name and name.endswith((".safetensors", ".safetensors.index.json")) and not _DATA.fullmatch(name)
        for name in names
    ):
        return "safetensors"
    if any(torch_folders.is_torch_model(name) for name in names):
        return "torch"
    return None


def read_foreign(store: Store) -> Contents:
    """Return what a checkpoint of another format holds; raises `CheckpointError`, with all findings."""
    kind = recognise(store)
    if kind == "dcp":
        megatron.check_common(store)
        contents = dcp.read_contents(store)
        return torch_folders.with_optimizer(contents, store) if torch_folders.has_values(store) else contents
    if kind == "megatron":
        return megatron.read_contents(store)
    if kind == "deepspeed":
        return deepspeed.read_contents(store)
    if kind == "safetensors":
        contents = huggingface.read_contents(store, file=store.name if isinstance(store, OneFile) else None)
        with_others = torch_folders.with_optimizer(contents, store) if torch_folders.has_optimizer(store) else contents
        return _as_one_of(store, with_others)
    if kind == "gguf" and isinstance(store, OneFile):
        return gguf.read_contents(store)
    if kind == "torch":
        return _as_one_of(store, torch_folders.read_contents(store))
    raise CheckpointError(no_checkpoint(store))


_OF_META = re.compile(r"consolidated\.(\d\d)\.pth")
"""A model as Meta publishes it: a file for each rank, which has a part of each tensor."""
_SQUARE = "layers.0.attention.wo.weight"
"""A matrix of such a model that is square where it is whole."""
_JOIN_THEM = "join all files with convert_llama_weights_to_hf.py of transformers"


def _as_one_of(store: Store, contents: Contents) -> Contents:
    """The contents of one file, which say so where others belong to it."""
    if not isinstance(store, OneFile):
        return contents
    if part := is_numbered(store.name):
        all_of_them = "name its folder to have all of them"
        note = f"{store.name} is part {int(part['number'])} of {int(part['count'])}: {all_of_them}"
    elif rank := _OF_META.fullmatch(store.name):
        square = contents.tensors.get(_SQUARE)
        others = os.path.exists(f"{store.location}/consolidated.01.pth")
        if not (others or int(rank[1]) or (square and len(set(square.shape)) > 1)):
            return contents
        note = f"{store.name} has the part of one rank of each tensor: {_JOIN_THEM}"
    else:
        return contents
    return replace(contents, notes=(*contents.notes, note))


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
        _DATA.pattern,
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
        _OF_META.pattern,
        "a folder of a model as Meta publishes it, a file for each rank",
        f"{_JOIN_THEM}, or name the file of one rank",
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
            f"it does not exist. If {relative} is on the Hugging Face hub, run `hf download {relative} --local-dir "
            "FOLDER` first, and name that folder"
        )
    return "it does not exist"


def _folder_in_words(names: Sequence[str]) -> str:
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
