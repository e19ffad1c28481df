"""What an engine takes over from a checkpoint of the plain Trainer: each rank reads what it owns, and no more.

optimizer.pt   state: number 3: exp_avg      groups: numbers 0 to 3, numbers 4 to 9
engine         groups: q, k, v, o ...        so number 3 is o, as in load_state_dict
->             optimizer/o/exp_avg
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.foreign.optimizer_states import NumberedOptimizer, is_optimizer
from shardwise.checkpoint.foreign.strided import TensorPlace
from shardwise.checkpoint.foreign.torch_files import read_file
from shardwise.checkpoint.loading import load_seen
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import OpenFile, about
from shardwise.comm.agreement import agreed
from shardwise.engine import Engine
from shardwise.errors import CheckpointError
from shardwise.hf.checkpoint_folders import OPTIMIZER, SAVE, SCALER
from shardwise.hf.weight_places import placed, weight_places
from shardwise.plan.names import holds_weights, is_state_name, split_state_name, state_name

_MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def has_weights(folder: Path) -> bool:
    """Whether a checkpoint has the weights of a whole model, and not of adapters alone."""
    return (folder / SAVE).is_dir() or any((folder / name).is_file() for name in _MODELS)


def load_weights(engine: Engine[nn.Module], folder: Path) -> None:
    """Take over the weights of a checkpoint that `has_weights`; the state of optimizers stays.

    All ranks call this together. Raises CheckpointError for a model that does not fit.
    """
    is_save = (folder / SAVE).is_dir()
    places = {} if is_save else weight_places(engine, folder)

    def weights_alone(contents: Contents) -> Contents:
        kept = {name: each for name, each in contents.tensors.items() if not is_state_name(name) or holds_weights(name)}
        return placed(replace(contents, tensors=kept, settings={}), places)

    source = folder / SAVE if is_save else folder
    load_seen(weights_alone, source, engine, strict=_is_whole(engine), weights_alone=True)


def _is_whole(engine: Engine[nn.Module]) -> bool:
    """Whether files have all of the model; some models name what `save_pretrained` leaves out."""
    return not getattr(engine.model, "_keys_to_ignore_on_save", None)


def load_plain(engine: Engine[nn.Module], folder: Path) -> bool:
    """Take over weights, optimizer state and the scale of losses of a checkpoint of the plain Trainer.

    Returns False, and does nothing, where the file has state that is no tensor. All ranks call this together. Raises
    CheckpointError for what does not fit.
    """
    optimizers = engine.hand_over(doing="resuming").optimizers
    given = [names for known in optimizers for names in known.given]
    trained = {name for known in optimizers for names in known.parameters for name in names}
    with agreed(engine.channel, purpose="names in optimizer.pt") as agreement:
        if engine.channel.rank == 0:
            found = _NamedState.read(folder, given, trained)
            agreement.value = json.dumps(None if found is None else [found.names, found.settings]).encode()
    said = json.loads(agreement.values[0])
    if said is None:
        return False
    state = _NamedState(dict(said[0]), said[1])
    places = weight_places(engine, folder)
    load_seen(lambda found: placed(state.in_contents(found), places), folder, engine, strict=_is_whole(engine))
    return True


@dataclass(frozen=True, slots=True)
class _NamedState:
    """What optimizer.pt has for which parameter, by the order of the groups."""

    names: dict[str, str]
    """Numbers, as texts, and names."""
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, given: Sequence[Sequence[str]], trained: Collection[str]) -> "_NamedState | None":
        value = _value_of(folder, OPTIMIZER)
        if not is_optimizer(value):
            raise CheckpointError(f"{folder / OPTIMIZER} has no state of an optimizer; resume from another checkpoint")
        optimizer = NumberedOptimizer.of(value)
        states = [each for state in optimizer.state.values() for each in state.values()]
        settings = [each for group in optimizer.groups for each in group.values()]
        if not all(isinstance(each, TensorPlace | None) for each in states) or any(
            isinstance(each, TensorPlace) for each in settings
        ):
            return None
        if [len(numbers) for numbers in optimizer.numbers()] != [len(names) for names in given]:
            raise CheckpointError(
                f"{folder / OPTIMIZER} has groups of {[len(each) for each in optimizer.numbers()]} parameters, and the "
                f"optimizer of this run {[len(each) for each in given]}; train the same parameters in the same groups"
            )
        for numbers, names in zip(optimizer.numbers(), given, strict=True):
            optimizer.names |= dict(zip(numbers, names, strict=True))
        of_optimizer = optimizer.settings()
        for group, numbers in zip(of_optimizer["groups"], optimizer.numbers(), strict=True):
            # A parameter without state is no frozen one: it had no gradient yet.
            group["parameters"] = [
                optimizer.names[each] for each in numbers if each in optimizer.state or optimizer.names[each] in trained
            ]
        found: dict[str, Any] = {"optimizers": [of_optimizer]}
        scaler = _value_of(folder, SCALER) if (folder / SCALER).is_file() else {}
        match [scaler.get(key) for key in ("scale", "_growth_tracker")] if isinstance(scaler, dict) else []:
            case [float(scale), int(in_a_row)]:
                found["loss_scale"] = {"scale": scale, "in_a_row": in_a_row}
        return cls({str(number): name for number, name in optimizer.names.items()}, found)

    def in_contents(self, contents: Contents) -> Contents:
        """The contents with names for numbers."""
        tensors = {}
        for name, tensor in contents.tensors.items():
            number, key = split_state_name(name) or ("", "")
            new = state_name(self.names[number], key) if number in self.names else name
            pieces = tuple(replace(each, piece=replace(each.piece, name=new)) for each in tensor.pieces)
            tensors[new] = replace(tensor, name=new, pieces=pieces)
        return replace(contents, tensors=tensors, settings={"ties": dict(contents.aliases), **self.settings})


def _value_of(folder: Path, name: str) -> Any:
    with OpenFile(LocalStore(folder), name) as opened, about(opened.place):
        return read_file(opened.read, opened.size)
