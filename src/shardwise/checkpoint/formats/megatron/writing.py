"""Folders of Megatron: a `torch_dist` checkpoint, which `dist_checkpointing.load` of megatron-core loads on any ranks.

    latest_checkpointed_iteration.txt    "10", or "release" where no step is known
    iter_0000010/.metadata               as of torch.distributed.checkpoint, with a chunk for each layer of a stack
    iter_0000010/__0_0.distcp            weights and moments. Masters are the weights, under other names
    iter_0000010/common.pt               iteration, groups of the optimizer, updates
    iter_0000010/metadata.json           which format it is

The optimizer is there for each of Megatron's: the distributed one looks for `optimizer.state.param`, that in 16 bits
for `fp32_param`, and in `common.pt` each finds the groups at its own place.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.checkpoint.contents import StoredTensor, is_model_name
from shardwise.checkpoint.formats.dcp.writing import DcpObject, DcpTensor, plan_dcp
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.formats.megatron.names import StackedTensors, is_megatron_name, linear_of, stacked
from shardwise.checkpoint.formats.megatron.optimizer import group_of_megatron, is_decayed
from shardwise.checkpoint.formats.optimizer_settings import counts_of, groups_of_torch
from shardwise.checkpoint.formats.torch_files.archive_writer import Archive, ArchiveFile, ArchiveFilling, saved_tensor
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.reading import DataFiles
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.names import split_state_name
from shardwise.space import Piece

_STEP = "step"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def plan_folder(outputs: Outputs, request: FolderRequest) -> FolderPlan:
    """The folder with the outputs.

    Raises CheckpointError for names that Megatron does not have, and for optimizers that are none of its.
    """
    names = [name for name in outputs.tensors if is_model_name(name, outputs.contents.format)]
    if not any(map(is_megatron_name, names)):
        raise CheckpointError(
            f"{few_of(names)} are no names of Megatron (decoder.layers.0. ...); give the rewrite that leads to them, "
            "such as --rewrite megatron-llama --inverse"
        )
    step = outputs.contents.step
    folder = "release/" if step is None else f"iter_{step:07d}/"
    stacks = stacked({name: outputs.tensors[name] for name in names})
    plan = plan_dcp(list(_tensors(outputs, stacks)), list(_objects(stacks)), max_file_bytes=request.max_file_bytes)
    common = ArchiveFile((_common(outputs, request.source, step),))
    last = {
        **{folder + name: data for name, data in plan.last.items()},
        f"{folder}metadata.json": json.dumps(_BACKEND).encode(),
        "latest_checkpointed_iteration.txt": str("release" if step is None else step).encode(),
    }
    files = {**{folder + name: file for name, file in plan.files.items()}, f"{folder}common.pt": common}
    return FolderPlan(files=files, filling=ArchiveFilling, last=last)


def _tensors(outputs: Outputs, stacks: Mapping[str, StackedTensors]) -> Iterator[DcpTensor]:
    """What is written, with the state of each parameter stacked as it is."""
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in outputs.tensors.items():
        if (split := split_state_name(name)) is not None and split[1] != _STEP:
            states.setdefault(split[1], {})[split[0]] = tensor
    trained = {parameter for held in states.values() for parameter in held}
    for name, stack in stacks.items():
        held = [member in trained for member in stack.names]
        called = [name]
        if all(held):
            called += [f"optimizer.state.{key}.{name}" for key in ("param", "fp32_param")]
        elif any(held):
            raise CheckpointError(f"layers of {name} are trained in part, which Megatron does not know")
        yield _tensor(called, stack, [outputs.tensors[member] for member in stack.names])
        for key, of in states.items() if all(held) else ():
            if lacking := [member for member in stack.names if member not in of]:
                raise CheckpointError(f"the optimizer has no {key} of {few_of(lacking)}, and of others it has one")
            yield _tensor([f"optimizer.state.{key}.{name}"], stack, [of[member] for member in stack.names])
    if lost := trained - {member for stack in stacks.values() for member in stack.names}:
        raise CheckpointError(f"the optimizer has state of {few_of(sorted(lost))}, which is not written")


def _tensor(names: Sequence[str], stack: StackedTensors, members: Sequence[StoredTensor]) -> DcpTensor:
    first = members[0]
    if other := next((each for each in members if (each.dtype, each.shape) != (first.dtype, first.shape)), None):
        raise CheckpointError(f"{first.name} and {other.name} differ in shape or dtype, and are one tensor in Megatron")
    whole = Piece(name=names[0], dtype=first.dtype, global_shape=(*stack.counts, *first.shape))
    paths = tuple((name,) for name in names)
    return DcpTensor(whole, paths, tuple(each.whole for each in members))


def _objects(stacks: Mapping[str, StackedTensors]) -> Iterator[DcpObject]:
    """What Megatron asks for of each linear layer: Transformer Engine keeps scales there, and has none without FP8."""
    for name, stack in stacks.items():
        if (linear := linear_of(name)) is not None:
            for index in stack.indices():
                at, counts = ".".join(map(str, index or (0,))), ".".join(map(str, stack.counts or (1,)))
                yield DcpObject([None], (f"{linear}._extra_state/shard_{at}_{counts}",))


def _common(outputs: Outputs, store: Store | None, step: int | None) -> Archive:
    """The file `common.pt`."""
    value: dict[str, Any] = {"checkpoint_version": 3.0}
    if step is not None:
        value["iteration"] = step
    objects = outputs.contents.extra.get("objects", {})
    if isinstance(objects, dict) and isinstance(schedule := objects.get("opt_param_scheduler"), dict):
        value["opt_param_scheduler"] = schedule
    counts = counts_of(outputs)
    updates = _updates(outputs, store, counts)
    if not (groups := _groups(outputs)):
        return Archive(value)
    listed = [group if updates is None else {**group, "step": updates} for group in groups]
    held = counts[:1]
    state = {"common_step": saved_tensor(0, held[0])} if held else {}
    optimizer = {"param_groups": listed, "state": state}
    value["optimizer"] = {**optimizer, "optimizer": optimizer, "param_state_sharding_type": "fully_reshardable"}
    value["content_metadata"] = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    return Archive(value, held)


def _updates(outputs: Outputs, store: Store | None, counts: Sequence[Piece]) -> int | None:
    """How often the parameters were updated: Megatron has one number for all. Raises CheckpointError for several."""
    if store is None or not counts:
        return None
    read = {float(each) for part in outputs.reader(DataFiles(store))(counts) for each in part}
    if len(read) > 1 or not all(each.is_integer() for each in read):
        raise CheckpointError(
            f"parameters were updated {' and '.join(f'{each:g}' for each in sorted(read))} times, and Megatron has one "
            "whole number for all"
        )
    return int(read.pop())


def _groups(outputs: Outputs) -> list[dict[str, Any]]:
    """The groups that Megatron makes: of what decays, and of what does not. Raises CheckpointError for others."""
    if not any(map(split_state_name, outputs.tensors)):
        return []  # it was never updated
    stored = groups_of_torch(outputs.contents.settings)
    if not stored:
        raise CheckpointError(
            "it has state of an optimizer, and no settings of one, which Megatron needs. Save it with its optimizer, "
            "or write the weights alone (--to hf) and convert those"
        )
    found: dict[bool, dict[str, Any]] = {}
    for names, settings in stored:
        for name in names:
            if name not in outputs.tensors:
                continue
            decayed = is_decayed(name, outputs.tensors[name].shape)
            if found.setdefault(decayed, settings) != settings:
                kind = "parameters of several dims" if decayed else "biases and parameters of one dim"
                raise CheckpointError(
                    f"the optimizer has {kind} in groups with different settings, and Megatron has them in one. Make "
                    "their groups alike, or write the weights alone (--to hf) and convert those"
                )
    return [group_of_megatron(found[each], decayed=each) for each in (True, False) if each in found]
