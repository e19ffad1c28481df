"""Foreign: what checkpoints of other formats hold, read from their metadata, so that all of the room works on them.

`huggingface` reads safetensors files with or without an index, `dcp` what `torch.distributed.checkpoint` wrote, and
`unread` says what other folders and files are.
"""

import re
from collections.abc import Sequence
from typing import Literal

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.foreign import dcp, huggingface
from shardwise.checkpoint.foreign.unread import no_checkpoint
from shardwise.checkpoint.stores import OneFile, Store
from shardwise.errors import CheckpointError

__all__ = ["Format", "format_of", "no_checkpoint", "read_foreign", "recognise"]

Format = Literal["shardwise", "safetensors", "dcp"]

_MANIFEST = re.compile(r"(save-([0-9]{8}|[1-9][0-9]{8,199})/)?manifest\.json")


def recognise(store: Store) -> Format | None:
    """Return the format of the checkpoint in a store; None when it is none that we know."""
    if isinstance(store, OneFile) and not store.name.endswith(".safetensors"):
        return None  # of no use without the files beside it
    return format_of(list(store.names()))


def format_of(names: Sequence[str]) -> Format | None:
    """Return the format of the checkpoint whose files have these names; None when it is none that we know."""
    if any(_MANIFEST.fullmatch(name) for name in names):
        return "shardwise"
    if ".metadata" in names:
        return "dcp"
    if any("/" not in name and name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    return None


def read_foreign(store: Store) -> Contents:
    """Return what a checkpoint of another format holds; raises `CheckpointError`, with all findings."""
    kind = recognise(store)
    if kind == "dcp":
        return dcp.read_contents(store)
    if kind == "safetensors":
        return huggingface.read_contents(store, file=store.name if isinstance(store, OneFile) else None)
    raise CheckpointError(no_checkpoint(store, format_of))
