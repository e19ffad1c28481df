"""Registry: which formats there are, which of them a checkpoint is, and what it holds.

    manifest.json, save-00000007/manifest.json    a save of ours
    common.pt, iter_*, mp_rank_*/model_optim_rng.pt   `megatron`: what its dist_checkpointing wrote, and its older one
    .metadata                                     `dcp`: what torch.distributed.checkpoint wrote
    pytorch_model_fsdp_0/, optimizer_0/           `dcp`: the same, as accelerate and the trainer of transformers have it
    latest, *mp_rank_*_states.pt                  `deepspeed`: what its save_checkpoint wrote, all stages of ZeRO
    *.safetensors, *.safetensors.index.json       `huggingface`: with or without an index
    pytorch_model*.bin, *.bin.index.json          `torch_save`: the same, as torch.save wrote it
    one file *.pt, *.pth, *.ckpt, *.bin           `torch_save`: whatever torch.save wrote
    one file *.gguf                               `gguf`: a model of llama.cpp, without quantised tensors
    anything else                                 refused, in words that name the program that made it: see `unread`

Names of files alone tell the format: listing is cheap on every store, and nothing unknown is opened. Another package
adds a format by an entry point of the group `shardwise.formats`, which names a `Format`. Entry points are read when a
checkpoint is none of ours.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.formats.format import Format, Planner
from shardwise.checkpoint.stores import OneFile, Store
from shardwise.errors import CheckpointError

__all__ = [
    "CLAIM",
    "DATA",
    "GROUP",
    "folder_planners",
    "format_of",
    "formats",
    "is_unfinished",
    "read_foreign",
    "recognise",
]

GROUP = "shardwise.formats"
"""Of entry points."""

# The order decides where files of several formats are together. `.metadata` comes before safetensors, in which
# torch.distributed.checkpoint can write its data too. DeepSpeed's come before models of Hugging Face: its trainer puts
# both into one folder, and the former have the optimizer too.
_OWN = ("megatron", "dcp", "deepspeed", "huggingface", "torch_save", "gguf")
"""Modules beside this one. Without any of them, and what stands on it, the others work."""

_OURS = "shardwise"
_OF_SAVE = re.compile(r"save-([0-9]{8}|[1-9][0-9]{8,199})")
_MANIFEST = re.compile(rf"({_OF_SAVE.pattern}/)?manifest\.json")
DATA = re.compile(r"[0-9a-f]{8}-rank[0-9]+\.safetensors")
"""Data of a save of ours, which is nothing without its manifest."""

CLAIM = ".shardwise.new"
"""In the folder of a store that is being written, or was when its writer died. One of several writers creates it."""
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.new|\.checkpoint-\d+\.new", re.DOTALL)
"""Names of folders in which a conversion, or a trainer, writes until all is there."""


def is_unfinished(path: str) -> bool:
    """Whether a path leads into a folder that is being written, or was when its writer died."""
    return any(_UNFINISHED.fullmatch(part) for part in path.split("/"))


@cache
def formats() -> tuple[Format, ...]:
    """All formats, in the order in which they are asked: those of other packages know best what is theirs."""
    own: dict[str, Format] = {}
    for name in _OWN:
        try:
            made: Format = EntryPoint(name, f"{__package__}.{name}:FORMAT", GROUP).load()
        except ModuleNotFoundError as error:  # taken away, or what it stands on
            if not (error.name or "").startswith(f"{__package__}."):
                raise
        else:
            own[made.name] = made
    others: dict[str, Format] = {}
    for point in entry_points(group=GROUP):
        try:
            found = point.load()
            if not isinstance(found, Format) or found.name in {_OURS, *own, *others}:
                raise TypeError("it is no Format, or has the name of another one")
            known = {"pieces", "whole"}.union(*(each.targets for each in (*own.values(), *others.values())))
            if taken := sorted(known & found.targets.keys()):
                raise TypeError(f"a target is called {taken[0]}, as one of another format is")
            others[found.name] = found
        except Exception as error:  # whatever the other package does when it is imported
            of = "" if point.dist is None else f" of {point.dist.name}"
            warnings.warn(f"the format {point.name}{of} is left out: {error}; mend or remove it", stacklevel=2)
    return (*others.values(), *own.values())


def recognise(store: Store) -> str | None:
    """Return the format of the checkpoint in a store; None when it is none that we know."""
    if not isinstance(store, OneFile):
        return format_of(list(store.names()))
    is_of_save = DATA.fullmatch(store.name) and _OF_SAVE.fullmatch(os.path.basename(store.location))
    if is_of_save and not os.path.exists(f"{store.location}/manifest.json"):
        return None  # begun with its size and its header: until the save is committed its tensors may be zeros
    return next((each.name for each in formats() if each.recognises_file(store.name)), None)


def format_of(names: Sequence[str]) -> str | None:
    """Return the format of the checkpoint whose files have these names; None when it is none that we know."""
    # First: a folder of saves stays one, whatever a user puts there.
    if any(_MANIFEST.fullmatch(name) for name in names):
        return _OURS
    if CLAIM in names:
        return None
    others = [name for name in names if not DATA.fullmatch(name)]
    return next((each.name for each in formats() if each.recognises(others)), None)


def read_foreign(store: Store) -> Contents:
    """Return what a checkpoint of another format holds; raises `CheckpointError`, with all findings."""
    kind = recognise(store)
    found = next((each for each in formats() if each.name == kind), None)
    if found is None:
        raise CheckpointError(f"{store.location} holds no checkpoint of another format")
    contents = found.read(store)
    for each in formats():
        contents = each.completes(contents, store)
    return contents


def folder_planners() -> Mapping[str, Planner]:
    """For each target of conversions that is a folder of another format, who plans it."""
    return {target: planner for each in formats() for target, planner in each.targets.items()}
