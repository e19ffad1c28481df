"""Universal checkpoints of DeepSpeed, which it loads under each stage of ZeRO and on any number of data ranks.

    latest_universal                                       the name of the folder below
    global_step3_universal/zero/NAME/fp32.pt               {"param": the master of a parameter that is trained}
    global_step3_universal/zero/NAME/exp_avg.pt, step.pt   the same for its state; the count of updates is a tensor
    global_step3_universal/zero/optimizer_state.pt         groups of the optimizer
    global_step3_universal/mp_rank_00_model_states.pt      names and shapes, counters, frozen parameters and buffers
    global_step3_universal/zero_pp_rank_0_mp_rank_00_model_states.pt      the same for stage 3, without tensors

What DeepSpeed needs of them: runtime/engine.py, runtime/base_optimizer.py, runtime/zero/stage3.py, version 0.19.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.foreign.pickles import MadeObject, Named
from shardwise.checkpoint.local import checked_name
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.torch_archives import Archive, ArchiveFile, ordered, saved_tensor
from shardwise.checkpoint.training_state import check_owners, groups_of_torch
from shardwise.errors import CheckpointError
from shardwise.plan.names import split_state_name
from shardwise.space import Piece

LATEST = "latest_universal"

_VERSION = "0.19.8"
"""Of DeepSpeed, whose files these are like; it asks for one of at least 0.3.17."""

_STEP = "step"


def universal_files(outputs: Outputs) -> tuple[str, dict[str, ArchiveFile]]:
    """The name of the folder, and its files by name. Raises CheckpointError."""
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
    files["zero/optimizer_state.pt"] = _optimizer_state(outputs, groups, trained)
    model = _model_state(outputs, groups, others, step)
    files["mp_rank_00_model_states.pt"] = Archive(model, others)
    files["zero_pp_rank_0_mp_rank_00_model_states.pt"] = Archive({**model, "module": ordered()})
    return folder, {f"{folder}/{name}": ArchiveFile((each,)) for name, each in files.items()}


def _check_names(parameters: Iterable[str]) -> None:
    """Raise CheckpointError for names that no folder can have."""
    problems = []
    for name in parameters:
        try:
            checked_name(f"zero/{name}/fp32.pt")
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
        for names, settings in groups_of_torch(outputs.settings)
    ]
    if groups:
        return groups
    split = filter(None, map(split_state_name, outputs.tensors))
    names = list(dict.fromkeys(parameter for parameter, _ in split)) or list(_floats(outputs))
    return [(names, {})]


def _floats(outputs: Outputs) -> Iterator[str]:
    for name, each in outputs.tensors.items():
        if is_model_name(name, outputs.contents.format) and each.dtype.startswith(("float", "bfloat")):
            yield name


def _optimizer_state(outputs: Outputs, groups: Groups, trained: Collection[str]) -> Archive:
    numbered = [{**settings, "params": [number]} for number, (_, settings) in enumerate(groups)]
    counts = [each for name, each in outputs.tensors.items() if (split_state_name(name) or ("", ""))[1] == _STEP]
    steps: list[Piece] = [each.whole for each in counts[:1]]
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
