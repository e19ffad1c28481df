"""Checkpoints of `torch.save`: one file, or the shards of a model, with what was saved next to them.

    last.ckpt, model.pt, model.pth, model.bin          everything in one file, see `state_dicts`
    pytorch_model.bin.index.json                       weight_map: w -> pytorch_model-00001-of-00002.bin, ...
    optimizer.bin, scheduler.bin, random_states_0.pkl  next to a model, as accelerate has them
    optimizer.pt, scheduler.pt, rng_state.pth          and as the trainer of transformers has them

What is next to a model is read where there is an optimizer. Its tensors have the names of the model's parameters, and
all that is no tensor is a value under the name of its file.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.formats.format import Format
from shardwise.checkpoint.formats.model_shards import (
    as_one_of,
    check_numbers,
    index_problems,
    read_index,
    unnamed_notes,
)
from shardwise.checkpoint.formats.optimizer_states import Parameters
from shardwise.checkpoint.formats.state_dicts import FoundState, find_state, plain_values
from shardwise.checkpoint.formats.strided import stand_ins
from shardwise.checkpoint.formats.torch_files.saved_values import read_file
from shardwise.checkpoint.manifest import packed
from shardwise.checkpoint.stores import Findings, OneFile, OpenFile, Store, about, read_json
from shardwise.errors import CheckpointError, few_of

_FILE = re.compile(r".*\.(?:pt|pth|ckpt|bin)", re.DOTALL)
_MODEL = re.compile(r"(?:pytorch_model(?:_fsdp)?(?:_\d+)?|adapter_model|diffusion_pytorch_model)(?:-\d+-of-\d+)?\.bin")
_INDEX_SUFFIX = ".bin.index.json"
_OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.(?:bin|pt)")
_BESIDE = re.compile(
    r"(?:scheduler|sampler|dl_state_dict|scaler)(?:_\d+)?\.(?:bin|pt)|random_states_\d+\.pkl|rng_state(?:_\d+)?\.pth"
    r"|custom_checkpoint_\d+\.pkl"
)
_TRAINER = "trainer_state.json"
_STEPS = ("global_step", "step")
"""Under which key a file has the step at which it was saved."""


def _is_file(name: str) -> bool:
    """Whether a file is one that `torch.save` writes, by its name."""
    return _FILE.fullmatch(name) is not None


def _is_model(name: str) -> bool:
    """Whether a file is that of a model, a shard of it or its index, by its name."""
    return _MODEL.fullmatch(name) is not None or name.endswith(_INDEX_SUFFIX)


def _has_optimizer(store: Store) -> bool:
    """Whether an optimizer was saved next to the model of a folder."""
    return not isinstance(store, OneFile) and any(_OPTIMIZER.fullmatch(name) for name in store.names())


def _has_values(store: Store) -> bool:
    """Whether schedulers, random states or the record of a trainer were saved next to the folders of FSDP."""
    names = list(store.names())
    return ".metadata" not in names and any(_BESIDE.fullmatch(name) or name == _TRAINER for name in names)


def read_contents(store: Store) -> Contents:
    """Return what the files of a store hold: a single one, or a model and what is next to it.

    Raises `CheckpointError`, with all findings, when a file is missing, damaged or not understood.
    """
    if isinstance(store, OneFile):
        return as_one_of(store, _contents(_read(store, [store.name]), f"{store.location}/{store.name}"))
    weight_map = read_index(store, _INDEX_SUFFIX)
    files = _shards(store) if weight_map is None else sorted(set(weight_map.values()))
    found = _read(store, files)
    # What is no model is next to it: the value of a shard is a state dict.
    held = {name: [file] for name, (file, _) in found.tensors.items()}
    held |= {alias: held[name] for alias, name in found.aliases.items()}
    if weight_map is not None and (problems := list(index_problems(weight_map, held, files))):
        raise CheckpointError(*problems, about=store.location)
    if weight_map is not None:
        found.notes += unnamed_notes(filter(_MODEL.fullmatch, store.names()), files)
    parameters = Parameters.of({name: place for name, (_, place) in found.tensors.items()}, ordered=True)
    beside = list(_beside(store)) if _has_optimizer(store) else []
    _read(store, beside, found, values_by_file=True)
    if beside:
        _read_trainer(store, found)
    return _contents(found, store.location, parameters)


def completed(contents: Contents, store: Store) -> Contents:
    """Contents of a folder, with the optimizer and the values that were saved next to them."""
    beside_model = contents.format == "safetensors" and _has_optimizer(store)
    if not beside_model and not (contents.format == "dcp" and _has_values(store)):
        return contents
    found = FoundState()
    _read(store, list(_beside(store)), found, values_by_file=True)
    _read_trainer(store, found)
    added = _contents(found, store.location, Parameters.of(stand_ins(contents.tensors), ordered=False))
    settings = {**added.settings, "ties": dict(contents.aliases)} if added.settings else {}
    return contents.joined(replace(added, settings=settings), where="in the model and next to it")


def _contents(found: FoundState, location: str, parameters: Parameters | None = None) -> Contents:
    with about(location):
        found.name_optimizers(parameters)
        tensors = found.stored()
        if not tensors and not found.values:
            what = "it holds neither tensors nor values"
            raise CheckpointError(f"{what} that can be read: {'; '.join(found.notes)}" if found.notes else what)
        # As saves of ours keep it: keys that are numbers, and all that JSON has no words for.
        extra = {"objects": packed(found.values, "its values")} if found.values else {}
    steps = (found.values.get(key) for key in _STEPS)
    trained = found.values.get("trainer_state", {})
    step = next((each for each in (*steps, trained.get("global_step")) if type(each) is int), None)
    return Contents(
        format="torch",
        location=location,
        tensors=tensors,
        file_sizes={**found.file_sizes, **found.value_sizes},
        aliases=found.aliases,
        settings={**found.settings(), **_loss_scale(found.values.get("scaler"))},
        extra=extra,
        step=step,
        notes=tuple(found.notes),
        left_state=found.left_state(),
    )


def _loss_scale(scaler: Any) -> dict[str, Any]:
    """The entry of the settings for the scale of losses, of what torch's GradScaler saves next to a model."""
    match [scaler.get(key) for key in ("scale", "_growth_tracker")] if isinstance(scaler, dict) else []:
        case [float(scale), int(in_a_row)]:
            return {"loss_scale": {"scale": scale, "in_a_row": in_a_row}}
    return {}


def _read(
    store: Store, files: list[str], into: FoundState | None = None, *, values_by_file: bool = False
) -> FoundState:
    """What files hold together; values_by_file: their values are under their names."""
    together = FoundState() if into is None else into
    problems = Findings()
    for name in files:
        with problems.collecting(), OpenFile(store, name) as opened, about(opened.place):
            found = find_state(read_file(opened), name, next_to_model=values_by_file)
            together.file_sizes[name] = opened.size
            _merge(together, found, name.rpartition(".")[0] if values_by_file else "")
    problems.check()
    return together


def _merge(together: FoundState, found: FoundState, key: str) -> None:
    for name, (file, place) in found.tensors.items():
        together.add(name, file, place)
    together.aliases |= found.aliases
    together.value_sizes |= found.value_sizes
    together.optimizers += found.optimizers
    together.notes += found.notes
    if found.values:
        together.values |= {key: found.values} if key else found.values


def _shards(store: Store) -> list[str]:
    """The files of the one model in a folder without an index."""
    files = [name for name in store.names() if _MODEL.fullmatch(name)]
    kinds = {re.sub(r"-\d+-of-\d+", "", name) for name in files}
    if len(kinds) > 1:
        raise CheckpointError(f"{store.location} has {few_of(sorted(kinds))}: name one file")
    check_numbers(files, store.location)
    return files


def _beside(store: Store) -> Iterator[str]:
    names = list(store.names())
    optimizers = [name for name in names if _OPTIMIZER.fullmatch(name)]
    if len(optimizers) > 1:
        raise CheckpointError(
            f"{store.location} has {len(optimizers)} optimizers, {few_of(optimizers)}, and does not say which trains "
            "what; name a file of the model to have it alone"
        )
    yield from optimizers
    yield from (name for name in names if _BESIDE.fullmatch(name))


def _read_trainer(store: Store, found: FoundState) -> None:
    """The record of the trainer of transformers: its step, its losses."""
    if _TRAINER not in store.names():
        return
    state = read_json(store, _TRAINER)
    if isinstance(state, dict):
        found.values["trainer_state"] = plain_values(state, found.notes)


FORMAT = Format(
    name="torch",
    recognises=lambda names: any(map(_is_model, names)),
    recognises_file=_is_file,
    read=read_contents,
    completes=completed,
)
