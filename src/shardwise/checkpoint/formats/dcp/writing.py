"""Folders of `torch.distributed.checkpoint`, as its loaders read them: archives of chunks, and a `.metadata`.

    model.w (5, 4)       chunks w[0:3], w[3:5]: an archive of torch.save each, one behind the other in __0_0.distcp
    optim...lr 0.01      an archive without tensors; equal values are there once
    .metadata            a pickle: each name with its shape, each (name, offset) with its place in a file

A large tensor is cut along its first dim, so that a rank that needs a part of it reads little more. The classes of the
metadata are named in its pickle and never imported; those are: torch/distributed/checkpoint/metadata.py

The training state in it is what another program goes on from: weights, moments, groups of the optimizer.

    here                              in a state dict of torch, as torch.distributed.checkpoint.state_dict has it
    w, optimizer/w/master             model.w                     the master, where there is one
    optimizer/w/exp_avg               optim.state.w.exp_avg
    settings: groups                  optim.param_groups.0.lr     and optim.param_groups.w.lr, for both of its forms
    step, extra                       step, extra

The second form is that of flatten_optimizer_state_dict=True. torchtitan has it alone, and the weights without a prefix:
w, optimizer.state.w.exp_avg, optimizer.param_groups.w.lr.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.formats.dcp.training_names import KeyPath
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.formats.optimizer_settings import check_owners, groups_of_torch, trained_names
from shardwise.checkpoint.formats.torch_files.archive_writer import Archive, ArchiveFile, ArchiveFilling, pickled_tensor
from shardwise.checkpoint.formats.torch_files.pickles import MadeObject, Named, Repeated, pickled
from shardwise.checkpoint.outputs import Outputs
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import split_state_name
from shardwise.space import Piece

_METADATA = ".metadata"

_MAX_CHUNK_BYTES = 64 << 20
"""A rank that needs a row of a chunk reads all of it into memory."""

_VERSION = "1.0.0"
"""Of the metadata, as torch 2.6 to 2.13 write it."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor that is written."""

    whole: Piece
    paths: tuple[KeyPath, ...]
    """Its places in the state dict: one, or those of ties, which share the bytes."""
    stack: tuple[Piece, ...] = ()
    """The tensors that it is a stack of, in order; its first dims count them. (): it is a tensor itself."""


@dataclass(frozen=True, slots=True)
class DcpObject:
    """Anything else: see `pickled`."""

    value: Any
    path: KeyPath


def plan_dcp(tensors: Sequence[DcpTensor], objects: Sequence[DcpObject], *, max_file_bytes: int) -> FolderPlan:
    """The folder with these tensors and values; a file is full when the next chunk would bring it over a size.

    Raises CheckpointError where two of them would have one name.
    """
    counts = Counter(_name(path) for each in tensors for path in each.paths) + Counter(_name(e.path) for e in objects)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise CheckpointError(
            f"the folder would have {few_of(twice)} twice: as a tensor of the model, and as what other programs keep "
            "under this name. Give the tensor another name by a rewrite"
        )
    entries: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    # Archives in the order of the files, each with what it holds: (name, offset), under which places are asked for.
    archives: list[tuple[Archive, list[tuple[str, tuple[int, ...] | None]]]] = []
    at: dict[bytes, int] = {}
    for each in objects:
        name = _name(each.path)
        entries[name] = MadeObject(of=_metadata("BytesStorageMetadata"), args=())
        paths[name] = each.path
        key = pickled(each.value)
        if key not in at:
            at[key] = len(archives)
            archives.append((Archive(each.value), []))
        archives[at[key]][1].append((name, None))
    for tensor in tensors:
        pairs = list(_chunk_pairs(tensor))
        chunks = [chunk for chunk, _ in pairs]
        names = [_name(path) for path in tensor.paths]
        for name, path in zip(names, tensor.paths, strict=True):
            entries[name] = _tensor_entry(
                tensor.whole.dtype, tensor.whole.global_shape, tuple((each.offset, each.shape) for each in chunks)
            )
            paths[name] = path
        archives += (
            (Archive(pickled_tensor(chunk), [source]), [(name, chunk.offset) for name in names])
            for chunk, source in pairs
        )
    files: list[list[Archive]] = [[]]
    places: list[tuple[int, int]] = []
    size = 0
    for archive, _ in archives:
        if files[-1] and size + archive.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        places.append((len(files) - 1, len(files[-1])))
        files[-1].append(archive)
        size += archive.num_bytes
    made = {f"__0_{number}.distcp": ArchiveFile(tuple(each)) for number, each in enumerate(files)}
    starts = [each.starts for each in made.values()]
    names_of_files = list(made)
    storage = [
        (_index(name, offset), _info(names_of_files[file], starts[file][number], archive.num_bytes))
        for (archive, held), (file, number) in zip(archives, places, strict=True)
        for name, offset in held
    ]
    return FolderPlan(files=made, filling=ArchiveFilling, last={_METADATA: _packed(entries, paths, storage)})


def _name(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _chunk_pairs(tensor: DcpTensor) -> Iterator[tuple[Piece, Piece]]:
    """The chunks of a tensor, and the pieces that have their elements."""
    if not tensor.stack:
        yield from ((chunk, chunk) for chunk in _chunks(tensor.whole))
        return
    shape = tensor.whole.global_shape
    counts = shape[: len(shape) - len(tensor.stack[0].global_shape)]
    for index, each in zip(product(*map(range, counts)), tensor.stack, strict=True):
        for part in _chunks(each):
            offset, box = (*index, *part.offset), (*[1] * len(index), *part.shape)
            yield replace(tensor.whole, offset=offset, shape=box), part


def _chunks(whole: Piece) -> Iterator[Piece]:
    """A tensor, cut along its first dim into parts of about equal size."""
    shape = whole.global_shape
    num_bytes = whole.num_elements * itemsize_bytes(whole.dtype)
    count = min(shape[0], math.ceil(num_bytes / _MAX_CHUNK_BYTES)) if shape else 1
    if count <= 1:
        yield whole
        return
    step = math.ceil(shape[0] / count)
    for first in range(0, shape[0], step):
        box = (min(step, shape[0] - first), *shape[1:])
        offset = (first, *[0] * (len(shape) - 1))
        yield Piece(name=whole.name, dtype=whole.dtype, global_shape=shape, offset=offset, shape=box)


def _metadata(kind: str) -> Named:
    return Named("torch.distributed.checkpoint.metadata", kind)


def _made(of: Named, **fields: Any) -> MadeObject:
    """An object as pickle makes it: its fields are set, and nothing is called."""
    return MadeObject(of=of, args=(), state=fields)


# Models have few kinds of tensors, and many of each.
@lru_cache(maxsize=4096)
def _size(sizes: tuple[int, ...]) -> Repeated:
    return Repeated(MadeObject(of=Named("torch", "Size"), args=(sizes,)))


@lru_cache(maxsize=4096)
def _tensor_entry(dtype: str, shape: tuple[int, ...], chunks: tuple[tuple[tuple[int, ...], ...], ...]) -> Repeated:
    layout = MadeObject(of=Named("torch.serialization", "_get_layout"), args=("torch.strided",))
    contiguous = MadeObject(of=_metadata("_MEM_FORMAT_ENCODING"), args=(0,))
    properties = MadeObject(
        of=_metadata("TensorProperties"),
        args=(),
        state=(Named("torch", dtype), layout, False, contiguous, False),
    )
    boxes = [
        _made(_metadata("ChunkStorageMetadata"), offsets=_size(offset), sizes=_size(size)) for offset, size in chunks
    ]
    return Repeated(_made(_metadata("TensorStorageMetadata"), properties=properties, size=_size(shape), chunks=boxes))


def _index(name: str, offset: tuple[int, ...] | None) -> MadeObject:
    return _made(_metadata("MetadataIndex"), fqn=name, offset=None if offset is None else _size(offset), index=None)


def _info(file: str, start: int, num_bytes: int) -> MadeObject:
    kind = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return _made(kind, relative_path=file, offset=start, length=num_bytes)


def _packed(
    entries: Mapping[str, Any], paths: Mapping[str, KeyPath], storage: Sequence[tuple[MadeObject, MadeObject]]
) -> bytes:
    return pickled(
        _made(
            _metadata("Metadata"),
            state_dict_metadata=dict(entries),
            planner_data=dict(paths),
            # Objects are equal to themselves alone here: no two are of one place.
            storage_data=dict(storage),
            storage_meta=None,
            version=_VERSION,
        )
    )


# Training state


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictNames:
    """Where a program has the model and the optimizer in what it saves."""

    model: KeyPath
    optimizer: str
    nested: bool
    """Whether it has the optimizer as torch's state dicts are, besides the flattened form."""


TORCH_NAMES = StateDictNames(model=("model",), optimizer="optim", nested=True)
TITAN_NAMES = StateDictNames(model=(), optimizer="optimizer", nested=False)


def plan_folder(outputs: Outputs, request: FolderRequest, *, names: StateDictNames) -> FolderPlan:
    """The folder of `torch.distributed.checkpoint` with what is written of a checkpoint. Raises CheckpointError."""
    check_owners(outputs)
    ties: dict[str, list[str]] = {}
    for alias, name in outputs.aliases.items():
        ties.setdefault(name, []).append(alias)
    tensors = []
    for name, each in outputs.tensors.items():
        if (split := split_state_name(name)) is not None:
            paths: list[KeyPath] = [(names.optimizer, "state", *split)]
            if not names.nested:
                paths = [(names.optimizer, ".".join(("state", *split)))]
        elif is_model_name(name, outputs.contents.format):
            paths = [(*names.model, called) for called in (name, *ties.get(name, ()))]
        else:
            paths = [(name,)]
        tensors.append(DcpTensor(each.whole, tuple(paths)))
    return plan_dcp(tensors, list(_objects(outputs, names)), max_file_bytes=request.max_file_bytes)


def _objects(outputs: Outputs, names: StateDictNames) -> Iterator[DcpObject]:
    contents = outputs.contents
    groups = groups_of_torch(outputs.contents.settings, idle=True)
    if not groups:
        # State that no settings belong to: a group of its names makes it an optimizer for readers.
        trained = trained_names(outputs)
        groups = [(tuple(trained), {})] if trained else []
    taken = set()
    for number, (parameters, settings) in enumerate(groups if names.nested else ()):
        for key, value in {**settings, "params": list(parameters)}.items():
            taken.add(f"{number}.{key}")
            yield DcpObject(value, (names.optimizer, "param_groups", number, key))
    for parameters, settings in groups:
        for name in parameters:
            for key, value in settings.items():
                # A parameter may be called "0".
                if f"{name}.{key}" not in taken:
                    yield DcpObject(value, (names.optimizer, f"param_groups.{name}.{key}"))
    if contents.step is not None:
        yield DcpObject(contents.step, ("step",))
    if contents.extra:
        yield DcpObject(dict(contents.extra), ("extra",))
