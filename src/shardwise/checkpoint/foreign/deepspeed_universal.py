"""Universal checkpoints of DeepSpeed: what its ds_to_universal makes of a folder, a file for each tensor.

zero/w/fp32.pt        {"param": w in float32}      zero/w/exp_avg.pt, exp_avg_sq.pt, step.pt
zero/optimizer_state.pt                            groups of the optimizer, by number; under stage 3 also the step
mp_rank_00_model_states.pt                         as before the conversion: the names of each group, buffers
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.foreign.deepspeed_found import FoundTensors, shapes_of, vectors_of
from shardwise.checkpoint.foreign.deepspeed_settings import loss_scale_of
from shardwise.checkpoint.foreign.optimizer_states import is_optimizer
from shardwise.checkpoint.foreign.state_dicts import stored_tensor
from shardwise.checkpoint.foreign.strided import TensorPlace
from shardwise.checkpoint.foreign.torch_files import number_of, read_file
from shardwise.checkpoint.stores import Findings, OpenFile, Store, about
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import state_name
from shardwise.space.boxes import row_major_strides

_ZERO = "zero/"
_STATE = "zero/optimizer_state.pt"
_MAX_COUNT = 1 << 53
"""Floats count so far."""


def is_universal(store: Store, folder: str) -> bool:
    """Whether the save in a folder ("" or "global_step3/") is a universal checkpoint."""
    return any(name.endswith("/fp32.pt") for name in store.names(f"{folder}zero"))


def number_at(opened: OpenFile, value: object) -> float | None:
    """A count of updates that a file has, as a tensor or as a number; None for all else."""
    if isinstance(value, TensorPlace) and not value.shape:
        value = number_of(opened.read(value.start, itemsize_bytes(value.dtype)), value.dtype)
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_COUNT else None


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
            value = read_file(opened.read, opened.size)
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
        state = read_file(opened.read, opened.size)
        if not isinstance(state, dict):
            raise CheckpointError("it is no dict, as ds_to_universal writes it")
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
