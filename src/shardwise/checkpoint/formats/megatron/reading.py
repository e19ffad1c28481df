"""Checkpoints of megatron-core: what its `dist_checkpointing` wrote as `torch_dist`, with the optimizer.

    latest_checkpointed_iteration.txt    "10": the folder of the newest save
    iter_0000010/.metadata               as torch.distributed.checkpoint has it: see `dcp`, and `names`
    iter_0000010/__0_0.distcp            weights, masters, moments
    iter_0000010/common.pt               arguments, iteration, groups of the optimizer: what all ranks had alike
    iter_0000010/metadata.json           which format it is
    iter_0000010/mp_rank_00/...          the older format: see `legacy`

Source: megatron/core/dist_checkpointing and megatron/core/optimizer of Megatron-LM.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.formats.dcp import reading as dcp
from shardwise.checkpoint.formats.found_tensors import FoundTensors, newest_save
from shardwise.checkpoint.formats.megatron import legacy
from shardwise.checkpoint.formats.megatron.names import in_shape, is_flat_bucket, model_tensors
from shardwise.checkpoint.formats.megatron.optimizer import MegatronOptimizer, arguments_of
from shardwise.checkpoint.formats.state_dicts import plain_values
from shardwise.checkpoint.formats.torch_files.saved_values import read_dict
from shardwise.checkpoint.manifest import packed
from shardwise.checkpoint.stores import OpenFile, Store, about, read_json
from shardwise.errors import CheckpointError
from shardwise.plan.names import MASTER, split_state_name, state_name

_LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_BACKEND = "metadata.json"
_SAVE = re.compile(r"(?:iter_\d{7,}|release)/(.*)", re.DOTALL)
_EXTRA_STATE = re.compile(r".*\._extra_state/shard_.*", re.DOTALL)


def is_megatron(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names is one of Megatron: of saves, or of one save."""
    if _LATEST in names:
        names = [match[1] for match in map(_SAVE.fullmatch, names) if match] or names
    return {_COMMON, _BACKEND} <= set(names) or any(map(legacy.is_file, names))


def check_common(contents: Contents, store: Store) -> Contents:
    """Raise CheckpointError for a save of Megatron without `common.pt`, which looks like one of torch alone."""
    if contents.format != "dcp":
        return contents
    try:
        _check_backend(store, "")
    except CheckpointError:  # another program's
        return contents
    raise CheckpointError(f"{store.location}/{_COMMON} is missing, which Megatron writes; copy all of the save")


def read_contents(store: Store) -> Contents:
    """Return what the newest save of Megatron in a store holds.

    Parameters have their names in the state dict of the whole model. Raises `CheckpointError`, with all findings, when
    a file is missing or damaged, and for what is not understood.
    """
    folder = _folder_of(store)
    names = [name.removeprefix(folder) for name in store.names(folder.rstrip("/"))]
    location = f"{store.location}/{folder}".rstrip("/")
    if any(map(legacy.is_file, names)):
        return legacy.read_contents(store, folder)
    _check_backend(store, folder)
    metadata = dcp.read_metadata(store, folder)
    in_buckets = any(map(is_flat_bucket, [*metadata.tensors, *metadata.objects]))
    states = [name for name in metadata.objects if _EXTRA_STATE.fullmatch(name)]
    # Not even looked at: state of no parameter that has a name, and state of kernels.
    held = dcp.as_saved(
        replace(
            metadata,
            tensors={name: each for name, each in metadata.tensors.items() if not is_flat_bucket(name)},
            objects=tuple(name for name in metadata.objects if name not in states and not is_flat_bucket(name)),
        ),
        store,
        folder,
    )
    values, optimizer, common_bytes = _common(store, folder)
    with about(location):
        found = FoundTensors()
        again = dcp.aliases_of(metadata, held.tensors)  # masters that are the weights
        found.tensors = model_tensors(
            in_shape(each, metadata.flat[name]) if name in metadata.flat else each
            for name, each in held.tensors.items()
            if name not in again
        )
        if in_buckets:
            found.leave_state(
                "it is in flat buckets that do not name their parameters (dp_reshardable). "
                "Load the save with Megatron, and save it with --dist-ckpt-optim-fully-reshardable"
            )
        # Where weights are trained in their own dtype, files may have them a second time.
        for name, tensor in list(found.tensors.items()):
            master = found.tensors.get(state_name(name, MASTER))
            if master is not None and master.dtype == tensor.dtype:
                del found.tensors[state_name(name, MASTER)]
        settings = {} if in_buckets else _add_optimizer(found, optimizer)
        if states:
            found.notes.append(
                f"{len(states)} objects {states[0]} and so on are left out: scales of FP8 in Transformer Engine"
            )
        plain = plain_values({key: each for key, each in values.items() if key != "optimizer"}, found.notes)
        iteration = values.get("iteration")
        return replace(
            held,
            format="megatron",
            location=location,
            tensors=found.tensors,
            file_sizes={**held.file_sizes, folder + _COMMON: common_bytes, **found.value_sizes},
            settings=settings,
            extra={**held.extra, "objects": {**packed(plain, "its values"), **held.extra.get("objects", {})}},
            step=iteration if type(iteration) is int else None,
            layout=_layout(optimizer.arguments),
            notes=tuple(found.notes),
            left_state=found.left_state,
        )


def _folder_of(store: Store) -> str:
    """Where the files of the save are in the store: "" or "iter_0000010/"."""
    names = list(store.names())
    if _LATEST not in names or _COMMON in names:
        return ""
    return newest_save(store, names, _LATEST, _folder_named)


def _folder_named(said: str) -> str:
    return f"iter_{int(said):07d}" if said.isascii() and said.isdigit() else said


def _check_backend(store: Store, folder: str) -> None:
    """Refuse what is not in the format of torch.distributed.checkpoint."""
    said = read_json(store, folder + _BACKEND)
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(
            f"{store.location}/{folder}{_BACKEND} says that tensors are in the format {backend!r:.100}, and "
            "torch_dist is read. Load the save with a Megatron that knows it, and save it with --ckpt-format torch_dist"
        )


def _common(store: Store, folder: str) -> tuple[dict[Any, Any], MegatronOptimizer, int]:
    """The values that all ranks shared, their settings of the optimizer, and the bytes of the file."""
    with OpenFile(store, folder + _COMMON) as opened, about(opened.place):
        values = read_dict(opened, "which Megatron writes")
        return values, MegatronOptimizer.of(values, arguments_of(values), opened), opened.size


def _add_optimizer(found: FoundTensors, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Add how often each parameter was updated; returns the settings of the optimizer."""
    trained: dict[str, tuple[int, ...]] = {}
    for name, tensor in found.tensors.items():
        if (split := split_state_name(name)) is None:
            continue
        weight = found.tensors.get(split[0])
        if weight is None or weight.shape != tensor.shape:
            held = "no such parameter" if weight is None else f"a parameter of shape {list(weight.shape)}"
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, and the model has {held}")
        trained[split[0]] = weight.shape
    if optimizer.step is not None:
        for name in trained:
            found.add_step(name, optimizer.step)
    settings = optimizer.settings(trained, found.notes)
    return {} if settings is None else {"ties": {}, "optimizers": [settings], **optimizer.scale}


def _layout(arguments: Mapping[str, Any]) -> str:
    """The layout that wrote it, in words."""
    kinds = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    sizes = {short: arguments.get(name) for short, name in kinds.items()}
    return " ".join(f"{short}={size}" for short, size in sizes.items() if type(size) is int)
