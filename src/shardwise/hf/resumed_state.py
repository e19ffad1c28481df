"""What an engine takes over from a checkpoint of the plain Trainer: each rank reads what it owns, and no more.

optimizer.pt   state: number 3: exp_avg      groups: numbers 0 to 3, numbers 4 to 9
engine         groups: q, k, v, o ...        so number 3 is o, as in load_state_dict
->             optimizer/o/exp_avg
"""

from dataclasses import replace
from pathlib import Path

from torch import nn

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.formats.optimizer_states import is_optimizer
from shardwise.checkpoint.formats.strided import TensorPlace
from shardwise.checkpoint.formats.torch_files.saved_values import read_file
from shardwise.checkpoint.loading import load_seen
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.numbered_state import as_numbered
from shardwise.checkpoint.stores import OpenFile, about
from shardwise.comm.agreement import agreed
from shardwise.engine import Engine
from shardwise.errors import CheckpointError
from shardwise.hf.checkpoint_folders import OPTIMIZER, SAVE
from shardwise.hf.weight_places import placed, weight_places
from shardwise.plan.names import holds_weights, is_state_name
from shardwise.plan.optimizer_entries import has_own_form

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

    Returns False, and does nothing, where only the optimizer itself can read its file. All ranks call this together.
    Raises CheckpointError for what does not fit.
    """
    with agreed(engine.channel, purpose="form of optimizer.pt", only=0) as agreement:
        if engine.channel.rank == 0 and not any(map(has_own_form, engine.optimizers)) and _is_plain(folder):
            agreement.value = b"1"
    if not agreement.values[0]:
        return False
    places = weight_places(engine, folder)

    def in_order(found: Contents) -> Contents:
        ordered = as_numbered(found, engine.numbering())
        if ordered.findings:  # on all ranks; also where `strict` lets weights be missing
            raise CheckpointError(*ordered.findings, about=f"{folder / OPTIMIZER} does not fit the optimizer")
        return placed(ordered.contents, places)

    load_seen(in_order, folder, engine, strict=_is_whole(engine))
    return True


def _is_plain(folder: Path) -> bool:
    """Whether optimizer.pt has tensors and numbers in its state, and no tensors in its groups."""
    name = OPTIMIZER
    with OpenFile(LocalStore(folder), name) as opened, about(opened.place):
        value = read_file(opened)
    if not is_optimizer(value):
        raise CheckpointError(f"{folder / name} has no state of an optimizer; resume from another checkpoint")
    held = [each for state in value["state"].values() for each in state.values()]
    settings = [each for group in value["param_groups"] for each in group.values()]
    return all(isinstance(each, TensorPlace | int | float | None) for each in held) and not any(
        isinstance(each, TensorPlace) for each in settings
    )
