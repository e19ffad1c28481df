"""Hugging Face files: a folder of safetensors files, with an index where there are several, made in one act.

The format: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoint.addresses import Address
from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.file_writing import DataFile, lay_out
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.safetensors_files import stored_as, unique_keys
from shardwise.checkpoint.saves import reason
from shardwise.checkpoint.stores import Store, Writer
from shardwise.errors import CheckpointError

__all__ = ["ShardFile", "check_folder", "shards_of", "write_folder"]

_INDEX = "model.safetensors.index.json"

Fill = Callable[[DataFile, Writer], object]
"""Writes the bytes of a data file."""

Finish = Callable[[Store], None]
"""Adds files to the folder when its tensors are there, before it gets its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file of the folder."""

    name: str
    tensors: tuple[StoredTensor, ...]
    file: DataFile


def shards_of(
    tensors: Sequence[StoredTensor], *, max_bytes: int, aliases: Mapping[str, str], metadata: Mapping[str, str]
) -> list[ShardFile]:
    """The files of these tensors, in order: each is full when the next tensor would bring it over `max_bytes`.

    A larger tensor has a file of its own. Ties stand in the metadata of the file as safetensors.torch.save_model has
    them: alias -> name. Raises CheckpointError for names and dtypes that such files cannot hold.
    """
    _check_tensors(tensors)
    groups: list[list[StoredTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if groups[-1] and num_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    shards = []
    for number, group in enumerate(groups, 1):
        held = {tensor.name for tensor in group}
        ties = {alias: name for alias, name in aliases.items() if name in held}
        pieces = [tensor.whole for tensor in group]
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        file = lay_out(pieces, metadata={**ties, **metadata}, empty=True)
        shards.append(ShardFile(name=name, tensors=tuple(group), file=file))
    return shards


def check_folder(destination: Address) -> str:
    """The path of a folder that may be made there. Raises CheckpointError for one that holds something, and for others.

    Only local file systems can give a whole folder its name in one act.
    """
    if isinstance(destination, LocalStore):
        destination = destination.location
    if not isinstance(destination, str | os.PathLike) or "://" in os.fspath(destination):
        where = destination if isinstance(destination, str) else getattr(destination, "location", destination)
        raise CheckpointError(
            f"{where} is no local folder; a folder of Hugging Face files can be made there in one act only on a local "
            "file system: convert to one and copy it, or convert to whole (--to whole)"
        )
    if not os.fspath(destination):
        raise CheckpointError("an empty path was given; name the folder to make")
    path = os.path.realpath(destination)
    _check_empty(path)
    return path


def write_folder(path: str, shards: Sequence[ShardFile], fill: Fill, finish: Finish) -> None:
    """Make the folder `path` with these files and what `finish` adds, whole or not at all, and durable.

    They are written to a hidden folder beside, `.<name>.<8 hex digits>.new`, which gets its name at the end. A process
    that is killed leaves the hidden folder. Raises CheckpointError.
    """
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.new")
    store = LocalStore(temporary)
    with _making(path, ""):
        os.makedirs(parent, exist_ok=True)
        os.mkdir(temporary)  # ours from here on: what an error leaves in it is removed with it
    try:
        for shard in shards:
            with _making(path, shard.name), store.write(shard.name, num_bytes=shard.file.num_bytes) as writer:
                fill(shard.file, writer)
        if len(shards) > 1:
            with _making(path, _INDEX):
                store.create(_INDEX, _index(shards))
        with _making(path, ""):
            finish(store)
        with _making(path, ""):
            os.rename(temporary, path)  # takes the place of an empty folder, and of nothing else
            _sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _index(shards: Sequence[ShardFile]) -> bytes:
    tensors = [(tensor, shard.name) for shard in shards for tensor in shard.tensors]
    total = sum(tensor.num_bytes for tensor, _ in tensors)
    fields = {"metadata": {"total_size": total}, "weight_map": {tensor.name: file for tensor, file in tensors}}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _check_tensors(tensors: Sequence[StoredTensor]) -> None:
    names = [tensor.name for tensor in tensors]
    problems = [
        f"{name!r} cannot be the name of a tensor in a safetensors file"
        for name, key in zip(names, unique_keys(names), strict=True)
        if name != key
    ]
    problems += [
        f"{tensor.name} is of dtype {tensor.dtype}, which safetensors files cannot hold; convert to whole "
        "(--to whole), which says in its manifest what the bytes are"
        for tensor in tensors
        if stored_as(tensor.dtype, tensor.shape)[0] == "U8" and tensor.dtype != "uint8"
    ]
    if problems:
        raise CheckpointError(*problems)


def _check_empty(path: str) -> None:
    try:
        if not os.path.lexists(path):
            return
        if os.path.isdir(path):
            if not os.listdir(path):
                return
            what = "a folder that holds something"
        else:
            what = "a file"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at: {reason(error)}") from error
    raise CheckpointError(f"{path} is {what}, which is left as it is; name a new folder, or an empty one")


@contextlib.contextmanager
def _making(path: str, file: str) -> Iterator[None]:
    """Say in our words what the file system refuses."""
    try:
        yield
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not file:
            _check_empty(path)
        where = os.path.join(path, file) if file else path
        raise CheckpointError(f"{where} cannot be written: {reason(error)}; nothing was made there") from error


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # file systems that have nothing to sync there
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
