"""Universal checkpoints of DeepSpeed, which it loads under each stage of ZeRO and on any number of data ranks.

Its ds_to_universal makes them of a folder, and a conversion here of any checkpoint:

    latest_universal                                       the name of the folder below
    global_step3_universal/zero/NAME/fp32.pt               {"param": the master of a parameter that is trained}
    global_step3_universal/zero/NAME/exp_avg.pt, step.pt   the same for its state; the count of updates is a tensor
    global_step3_universal/zero/optimizer_state.pt         groups of the optimizer
    global_step3_universal/mp_rank_00_model_states.pt      names and shapes, counters, frozen parameters and buffers
    global_step3_universal/zero_pp_rank_0_mp_rank_00_model_states.pt      the same for stage 3, without tensors

What DeepSpeed needs of them: runtime/engine.py, runtime/base_optimizer.py, runtime/zero/stage3.py, version 0.19.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.contents import can_exist, is_model_name
from shardwise.checkpoint.formats.deepspeed.flat import Shapes
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.formats.found_tensors import FoundTensors, number_at
from shardwise.checkpoint.formats.optimizer_settings import check_owners, counts_of, groups_of_torch, trained_names
from shardwise.checkpoint.formats.optimizer_states import is_optimizer
from shardwise.checkpoint.formats.strided import TensorPlace, stored_tensor
from shardwise.checkpoint.formats.torch_files.archive_writer import (
    Archive,
    ArchiveFile,
    ArchiveFilling,
    ordered,
    saved_tensor,
)
from shardwise.checkpoint.formats.torch_files.pickles import MadeObject, Named
from shardwise.checkpoint.formats.torch_files.saved_values import UnknownObject, read_dict, read_file
from shardwise.checkpoint.local import checked_name
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.stores import Findings, OpenFile, Store, about
from shardwise.errors import CheckpointError
from shardwise.plan.names import split_state_name, state_name
from shardwise.space import Piece
from shardwise.space.boxes import row_major_strides

_ZERO = "zero/"
_STATE = "zero/optimizer_state.pt"
_LATEST = "latest_universal"

_VERSION = "0.19.8"
"""Of DeepSpeed, whose files these are like; it asks for one of at least 0.3.17."""

_STEP = "step"


def shapes_of(groups: object) -> list[Shapes]:
    """Return the `param_shapes` of a file of the model: those of each flat vector. Raises CheckpointError."""
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise CheckpointError("a file of the model does not say the shapes of what is flat (param_shapes)")
    for name, shape in ((name, shape) for each in groups for name, shape in each.items()):
        whole = isinstance(shape, tuple | list) and all(type(size) is int and size >= 0 for size in shape)
        if not (isinstance(name, str) and whole and can_exist(shape, 8)):
            raise CheckpointError(f"param_shapes has no shape for {name!r:.100}")
    return [{name: tuple(shape) for name, shape in each.items()} for each in groups]


def vectors_of(group: Mapping[str, Any], count: int) -> list[int]:
    """Return which of `count` vectors a group of the optimizer updates. Raises CheckpointError."""
    numbers = group.get("params")
    if not isinstance(numbers, list) or not all(type(each) is int and 0 <= each < count for each in numbers):
        raise CheckpointError("a group of the optimizer does not number its vectors")
    return numbers


def loss_scale_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the settings for the dynamic scale of losses; none where the scale is fixed."""
    scaler = optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, UnknownObject) else optimizer
    if not (isinstance(state, Mapping) and (optimizer.get("dynamic_loss_scale") is True)):
        return {}
    scale, window = state.get("cur_scale"), state.get("scale_window")
    at, last = state.get("cur_iter"), state.get("last_overflow_iter")
    if not (isinstance(scale, int | float) and scale > 0 and type(at) is type(last) is type(window) is int):
        return {}
    return {"loss_scale": {"scale": float(scale), "in_a_row": max(0, at - last - 1) % max(1, window)}}


def is_universal(store: Store, folder: str) -> bool:
    """Whether the save in a folder ("" or "global_step3/") is a universal checkpoint."""
    return any(name.endswith("/fp32.pt") for name in store.names(f"{folder}zero"))


def add_universal(found: FoundTensors, store: Store, folder: str, model: Mapping[Any, Any]) -> dict[str, int]:
    """Add the tensors of a universal checkpoint; returns the bytes of its files. Raises CheckpointError."""
    sizes: dict[str, int] = {}
    problems = Findings()
    steps: dict[str, float] = {}
    groups = shapes_of(model.get("param_shapes") or [])
    shapes = {name: shape for each in groups for name, shape in each.items()}
    keys: dict[str, set[str]] = {}
    for file in store.names(f"{folder}zero"):
        name, _, last = file.removeprefix(folder + _ZERO).rpartition("/")
        key = last.removesuffix(".pt")
        if not name or name in found.aliases or key == last:
            continue
        keys.setdefault(name, set()).add(key)
        with problems.collecting(), OpenFile(store, file) as opened, about(opened.place):
            value = read_file(opened)
            if key == "step":
                if (step := number_at(opened, value)) is not None:
                    steps[name] = step
                continue
            place = value.get("param") if isinstance(value, dict) else value
            if not isinstance(place, TensorPlace):
                raise CheckpointError("it has no tensor, as ds_to_universal writes it")
            place = _shaped(place, shapes.get(name))
            found.add(stored_tensor(name if key == "fp32" else state_name(name, key), file, place))
            sizes[file] = opened.size
    for group in groups:
        states = set().union(*(keys.get(name, ()) for name in group))
        for name in (each for each in group if each not in found.aliases):
            has = keys.get(name, set())
            # One that was never updated has no state, and one that has some has what all of its group have.
            asked = {"fp32"} | (states if has - {"fp32"} else set())
            problems += [f"{_ZERO}{name}/{key}.pt is missing; copy all of the save" for key in sorted(asked - has)]
    problems.check()
    _add_groups(found, store, folder, model, steps)
    return sizes


def _shaped(place: TensorPlace, shape: tuple[int, ...] | None) -> TensorPlace:
    """A tensor in its shape: from stage 3 it comes flat."""
    is_flat = shape is not None and place.shape == (math.prod(shape),) and place.strides == (1,)
    if shape is None or not is_flat:
        return place
    return replace(place, shape=shape, strides=row_major_strides(shape))


def _add_groups(
    found: FoundTensors, store: Store, folder: str, model: Mapping[Any, Any], steps: dict[str, float]
) -> None:
    """Add the groups of the optimizer, and how often each parameter was updated."""
    shapes = shapes_of(model.get("param_shapes") or [])
    trained = [name for each in shapes for name in each]
    with OpenFile(store, folder + _STATE) as opened, about(opened.place):
        state = read_dict(opened, "as ds_to_universal writes it")
        base = state.get("optimizer_state_dict")
        if isinstance(base, dict) and is_optimizer(base):  # under stage 3
            counts = [number_at(opened, each.get("step")) for each in base["state"].values()]
            steps = {name: count for name in trained for count in counts[:1] if count is not None} | steps
            state = {**state, "param_groups": base["param_groups"]}
    for name in trained:
        if name in steps:
            found.add_step(name, steps[name])
    groups = state.get("param_groups")
    if isinstance(groups, list) and all(isinstance(each, dict) for each in groups):
        numbers = [vectors_of(each, len(shapes)) for each in groups]
        found.add_groups(groups, [[name for each in held for name in shapes[each]] for held in numbers])
    found.loss_scale = loss_scale_of(state)


def plan_folder(outputs: Outputs, request: FolderRequest) -> FolderPlan:
    """The folder with the outputs: a folder of saves, with one. Raises CheckpointError."""
    check_owners(outputs)
    groups = _groups(outputs)
    trained = dict.fromkeys(name for names, _ in groups for name in names)
    _check_names(trained)
    step = outputs.contents.step or 0
    folder = f"global_step{step}_universal"
    files: dict[str, Archive] = {}
    others = []
    for name, tensor in outputs.tensors.items():
        parameter, key = split_state_name(name) or (name, "fp32")
        if parameter in trained:
            stored = saved_tensor(0, tensor.whole)
            files[f"zero/{parameter}/{key}.pt"] = Archive(stored if key == _STEP else {"param": stored}, [tensor.whole])
        else:
            others.append(tensor.whole)
    files[_STATE] = _optimizer_state(outputs, groups, trained)
    model = _model_state(outputs, groups, others, step)
    files["mp_rank_00_model_states.pt"] = Archive(model, others)
    files["zero_pp_rank_0_mp_rank_00_model_states.pt"] = Archive({**model, "module": ordered()})
    made = {f"{folder}/{name}": ArchiveFile((each,)) for name, each in files.items()}
    return FolderPlan(files=made, filling=ArchiveFilling, last={_LATEST: folder.encode()})


def _check_names(parameters: Iterable[str]) -> None:
    """Raise CheckpointError for names that no folder can have."""
    problems = []
    for name in parameters:
        try:
            checked_name(f"zero/{name}/fp32.pt").encode()
        except ValueError:
            problems.append(
                f"{name!r:.100} cannot name a folder, and a universal checkpoint has one for each parameter; give it "
                "another name by a rewrite"
            )
    if problems:
        raise CheckpointError(*problems)


Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]
"""Parameters and settings of each group of the optimizer."""


def _groups(outputs: Outputs) -> Groups:
    """The groups of the optimizer. Without any, all with state are one group, and without state all floats are."""
    groups = [
        ([name for name in names if name in outputs.tensors], settings)
        for names, settings in groups_of_torch(outputs.contents.settings)
    ]
    if groups:
        return groups
    return [(trained_names(outputs) or list(_floats(outputs)), {})]


def _floats(outputs: Outputs) -> Iterator[str]:
    for name, each in outputs.tensors.items():
        if is_model_name(name, outputs.contents.format) and each.dtype.startswith(("float", "bfloat")):
            yield name


def _optimizer_state(outputs: Outputs, groups: Groups, trained: Collection[str]) -> Archive:
    numbered = [{**settings, "params": [number]} for number, (_, settings) in enumerate(groups)]
    steps = counts_of(outputs)[:1]
    state = {0: {_STEP: saved_tensor(0, steps[0])}} if steps else {}
    # Stages 1 and 2 take the groups here, stage 3 those of the inner dict, and the count of the first state.
    inner = {"state": state, "param_groups": numbered}
    return Archive({"ds_version": _VERSION, "param_groups": numbered, "optimizer_state_dict": inner}, steps)


def _model_state(outputs: Outputs, groups: Groups, others: Sequence[Piece], step: int) -> dict[str, Any]:
    shapes = {name: _size(each.shape) for name, each in outputs.tensors.items()}
    module = [(each.name, saved_tensor(number, each)) for number, each in enumerate(others)]
    extra = outputs.contents.extra
    # Of a folder of DeepSpeed all values are here; those of the program come back to it as its client state.
    values = extra.get("objects", {}) if outputs.contents.format == "deepspeed" else {"extra": dict(extra)}
    return {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        **values,
        "module": ordered(module),
        "buffer_names": [each.name for each in others],
        "optimizer": None,
        "param_shapes": [ordered([(name, shapes[name]) for name in names]) for names, _ in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(outputs.aliases),
        "global_steps": step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": _VERSION,
    }


def _size(shape: Sequence[int]) -> MadeObject:
    return MadeObject(of=Named("torch", "Size"), args=(tuple(shape),))
