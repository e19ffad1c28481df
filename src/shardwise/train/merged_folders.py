"""A model with adapters, written as the plain model that they make of it: a folder for `from_pretrained`.

Every rank takes part: the tensors come to rank 0 some at a time, peft merges them there, and they go to the file.
"""

import os
from collections import deque

import torch
from torch import nn

from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.destinations import Folder, check_folder, write_folder
from shardwise.checkpoint.formats.huggingface.writing import index_of, shards_of
from shardwise.checkpoint.model_files import ModelFiles
from shardwise.checkpoint.safetensors_files import DataFile, JoinedWrites
from shardwise.checkpoint.stores import Writer
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.adapters import MergedModel
from shardwise.engine.engine import Engine
from shardwise.plan.model_records import settings_of_model
from shardwise.plan.saved_settings import CONFIG, MODEL_FILES

_WINDOW_BYTES = 256 << 20
"""Of the tensors that are on rank 0 at once; twice that while peft merges them."""


def save_merged(engine: Engine[nn.Module], folder: str | os.PathLike[str], *, max_shard_bytes: int = 5 << 30) -> None:
    """Write the model that `merge_and_unload` of peft makes of the engine's, as a new folder for `from_pretrained`.

    The engine's model keeps its adapters. What is active is merged, as peft does. max_shard_bytes: of a file.

    All ranks call it together. Rank 0 writes, and holds some 512 MiB at once, or the largest module with an adapter.
    The folder is there with all files or not at all. Raises ModelError for a model without adapters and for a prompt,
    which cannot be merged, and CheckpointError for a folder that holds something or cannot be written.
    """
    channel = engine.channel
    with aborting(channel, "sw.save_merged"):
        path: Folder = ""
        names = engine.hand_over(doing="sw.save_merged", needs_weights=False).rank.names
        with agreed(channel, purpose="verdict on sw.save_merged"):
            merged = MergedModel(engine, names)
            if channel.rank == 0:
                path = check_folder(folder)
        stored = [
            StoredTensor(name=each.name, dtype=dtype_name(each.dtype), shape=each.shape, pieces=())
            for each in merged.tensors
        ]
        # No ties in the header: `save_pretrained` has none there either.
        shards = shards_of(stored, max_bytes=max_shard_bytes, places={}, aliases={}, metadata={"format": "pt"})
        values = merged.values(
            [piece.name for shard in shards for piece in shard.file.pieces], window_bytes=_WINDOW_BYTES
        )
        if channel.rank != 0:
            deque(values, maxlen=0)
            return

        def fill(file: DataFile, writer: Writer) -> None:
            writes = JoinedWrites(writer)
            writes.write(memoryview(file.header))
            for piece in file.pieces:
                name, tensor = next(values)
                assert name == piece.name
                assert tensor is not None
                writes.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            writes.flush()

        kept = settings_of_model(merged.base).get(MODEL_FILES, {})
        if CONFIG in kept and merged.is_untied():
            kept[CONFIG]["tie_word_embeddings"] = False
        small = {**ModelFiles(kept=kept).for_folder(None), **index_of(shards)}
        write_folder(path, {shard.name: shard.file for shard in shards}, fill, small)
