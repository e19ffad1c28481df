"""Shard index: the file that says which of several files of a model has which tensor, compared with these."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from shardwise.checkpoint.stores import Store, read_json
from shardwise.errors import CheckpointError


def read_index(store: Store, suffix: str) -> dict[str, str] | None:
    """The file of every tensor, as the index says it; None without an index, whose name ends with `suffix`.

    Raises `CheckpointError` for several, and for a damaged one.
    """
    indices = [name for name in store.names() if "/" not in name and name.endswith(suffix)]
    if not indices:
        return None
    if len(indices) > 1:
        raise CheckpointError(
            f"{store.location} has {len(indices)} indices, {', '.join(indices)}: name the folder of one model only"
        )
    fields = read_json(store, indices[0])
    found = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{store.location}/{indices[0]} has no weight_map from tensors to files")
    return found


def index_problems(
    weight_map: Mapping[str, str], held: Mapping[str, Sequence[str]], files: Collection[str]
) -> Iterator[str]:
    """What the index says otherwise than the files that could be read. held: for each tensor the files that have it."""
    for key, file in weight_map.items():
        # Of a file that could not be read there is a finding already.
        if file in files and file not in held.get(key, ()):
            yield f"the index says that tensor {key} is in {file}, but it is not"
    for key, found in held.items():
        for file in found:
            if weight_map.get(key, "") != file:
                said = f"has it in {weight_map[key]}" if key in weight_map else "does not name it"
                yield f"tensor {key} is in {file}, but the index {said}"
