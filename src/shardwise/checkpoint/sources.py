"""Sources: what a path holds, in whatever format, found out once and known to every rank."""

import json

import xxhash

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.foreign import read_foreign, recognise
from shardwise.checkpoint.manifest import pack_tables, unpack_tables
from shardwise.checkpoint.saves import load_contents, metadata_files, select
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.comm.agreement import agree
from shardwise.errors import CheckpointError, ShardwiseError

__all__ = ["agree_on_contents", "read_contents"]


def read_contents(store: Store, *, step: int | None = None) -> Contents:
    """What the checkpoint in `store` holds: the newest save of ours or the one of `step`, or another format's.

    Raises CheckpointError when there is none, or its metadata is damaged.
    """
    try:
        kind = recognise(store)
        if kind in (None, "shardwise"):
            number = select(store, step=step)
            return load_contents(metadata_files(store, number), number, location=store.location)
    except OSError as error:
        raise CheckpointError(f"{store.location} cannot be listed: {error.strerror or error}") from error
    if step is not None:
        raise CheckpointError(
            f"{store.location} is a {kind} checkpoint, which has no steps to choose from; leave out step"
        )
    return read_foreign(store)


def agree_on_contents(
    channel: Channel, store: Store, *, step: int | None, shared: bool
) -> tuple[Contents, frozenset[int]]:
    """What the checkpoint holds, the same on all ranks, and the ranks that read it.

    shared: rank 0 reads the metadata for all, and every rank sees the files. Otherwise every rank looks; those that
    find the checkpoint are its readers. Raises the same CheckpointError on all ranks when none does.
    """
    contents: Contents | None = None
    refusal: ShardwiseError | None = None
    if shared is False or channel.rank == 0:
        try:
            contents = read_contents(store, step=step)
        except ShardwiseError as error:
            refusal = error
    if channel.size == 1 or shared:
        text = b"" if contents is None or channel.size == 1 else _pack(contents)
        answers = agree(channel, refusal, purpose="contents of the checkpoint", value=text)
        return contents if contents is not None else _unpack(answers[0]), frozenset(range(channel.size))
    packed = b"" if contents is None else _pack(contents)
    seen = channel.exchange(packed and xxhash.xxh3_128_digest(packed), purpose="which ranks see the checkpoint")
    readers = [rank for rank, each in enumerate(seen) if each]
    if not readers:
        agree(channel, refusal, purpose="verdict on the checkpoint")
    different = [rank for rank in readers if seen[rank] != seen[readers[0]]]
    if different:
        raise CheckpointError(
            f"rank {readers[0]} and rank {different[0]} see different checkpoints at {store.location}; choose one that "
            "they have in common (step=...), or remove what is newer on some"
        )
    texts = channel.exchange(packed if channel.rank == readers[0] else b"", purpose="contents of the checkpoint")
    return contents if contents is not None else _unpack(texts[readers[0]]), frozenset(readers)


def _pack(contents: Contents) -> bytes:
    """Contents as bytes, for ranks that do not read them themselves."""
    files = list(contents.file_sizes)
    tables = pack_tables(list(contents.tensors.values()), files)
    head = {
        "format": contents.format,
        "location": contents.location,
        "file_sizes": dict(contents.file_sizes),
        "file_heads": {name: (size, sums.hex()) for name, (size, sums) in contents.file_heads.items()},
        "block_bytes": contents.block_bytes,
        "aliases": dict(contents.aliases),
        "settings": dict(contents.settings),
        "extra": dict(contents.extra),
        "step": contents.step,
        "layout": contents.layout,
        "tables": [table.decode() for table in tables],
    }
    return json.dumps(head).encode()


def _unpack(data: bytes) -> Contents:
    head = json.loads(data)
    files = list(head["file_sizes"])
    tables = [table.encode() for table in head.pop("tables")]
    head["file_heads"] = {name: (size, bytes.fromhex(sums)) for name, (size, sums) in head["file_heads"].items()}
    return Contents(**head, tensors=unpack_tables(tables, files, block_bytes=head["block_bytes"]))
