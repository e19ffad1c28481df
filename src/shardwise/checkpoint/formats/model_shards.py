"""Shards of a model: the index that says which file has which tensor, and numbers in the names of files.

    model.safetensors.index.json         w is in model-00001-of-00003.safetensors: compared with the files
    model-00001-of-00003.safetensors     two more belong to it

Without an index nothing but the names tells that a file never came, and a model without some of its layers looks whole.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.stores import OneFile, Store, read_json
from shardwise.errors import CheckpointError, few_of

_PART = re.compile(
    r"(?P<stem>.*?[-_.])(?P<number>[0-9]{1,9})(?P<of>[-_.]of[-_.])(?P<count>[0-9]{1,9})(?P<end>\.\w+)", re.DOTALL
)
_SHARD = re.compile(r"shard-(?P<number>[0-9]{5})-(?P<rest>.*)", re.DOTALL)
"""What a rank of torch.distributed.checkpoint wrote: numbers of ranks from 1 on, and the same names behind them."""

_MAX_PARTS = 100_000
"""Of one set; names of files may say anything."""


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


def is_numbered(name: str) -> re.Match[str] | None:
    """Whether a file is one part of several, by its name."""
    found = _PART.fullmatch(name)
    return found if found is not None and int(found["count"]) > 1 else None


def parts_of_set(name: str, count: int, *, first: int = 1) -> list[str]:
    """The names of all parts of the set to which a numbered file belongs."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    width = len(found["number"])
    numbers = range(first, first + min(count, _MAX_PARTS))
    return [f"{found['stem']}{number:0{width}d}{found['of']}{found['count']}{found['end']}" for number in numbers]


def check_numbers(names: Iterable[str], location: str) -> None:
    """Raise CheckpointError, which names every part that is missing, unless each numbered set is whole."""
    missing = list(_missing(list(names)))
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise CheckpointError(
            f"{location} is incomplete: {few_of(missing, quotes=False)} {verb} missing, as the numbers of the other "
            "files say. Get all parts; to read some of them alone, name one file"
        )


def unnamed_notes(candidates: Iterable[str], named: Iterable[str]) -> list[str]:
    """What to know of files that an index does not name, and of the parts that its numbers lack.

    They may be those of another variant of the model, or of an index that was cut short. Programs differ in what they
    take where one whole file is there too.
    """
    known = set(named)
    left = sorted({*candidates, *_missing(sorted(known))} - known)
    return [f"{few_of(left, quotes=False)}: left out, as the index names no tensor there"] if left else []


def _missing(names: list[str]) -> Iterator[str]:
    # Ranks write the parts for which they have something: of a set each number has to be there once, from any rank.
    ranks = [int(found["number"]) for name in names if (found := _SHARD.fullmatch(name))]
    yield from (f"shard-{number:05d}-..." for number in range(1, max(ranks, default=0)) if number not in ranks)
    plain = {found["rest"] if (found := _SHARD.fullmatch(name)) else name: name for name in names}
    seen: set[str] = set()
    for name in plain:
        found = _PART.fullmatch(name)
        if found is None or name in seen:
            continue
        # Some writers count from 0.
        has_zero = any(each in plain for each in parts_of_set(name, 1, first=0))
        parts = parts_of_set(name, int(found["count"]), first=0 if has_zero else 1)
        seen.update(parts)
        yield from (each for each in parts if each not in plain)


OF_META = re.compile(r"consolidated\.(\d\d)\.pth")
"""A model as Meta publishes it: a file for each rank, which has a part of each tensor."""
_SQUARE = "layers.0.attention.wo.weight"
"""A matrix of such a model that is square where it is whole."""
JOIN_META = "join all files with convert_llama_weights_to_hf.py of transformers"


def as_one_of(store: Store, contents: Contents) -> Contents:
    """The contents of one file, which say so where others belong to it."""
    if not isinstance(store, OneFile):
        return contents
    if part := is_numbered(store.name):
        all_of_them = "name its folder to have all of them"
        note = f"{store.name} is part {int(part['number'])} of {int(part['count'])}: {all_of_them}"
    elif rank := OF_META.fullmatch(store.name):
        square = contents.tensors.get(_SQUARE)
        others = os.path.exists(f"{store.location}/consolidated.01.pth")
        if not (others or int(rank[1]) or (square and len(set(square.shape)) > 1)):
            return contents
        note = f"{store.name} has the part of one rank of each tensor: {JOIN_META}"
    else:
        return contents
    return replace(contents, notes=(*contents.notes, note))
