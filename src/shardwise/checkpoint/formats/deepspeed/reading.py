"""Folders of DeepSpeed: weights, float32 masters and moments of all stages of ZeRO, without DeepSpeed.

    latest                                                        "global_step3": the folder of the newest save
    global_step3/mp_rank_00_model_states.pt                       weights (stages 0 to 2), order of what is flat
    global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt        the same of stage 3, of each rank, without weights
    global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt   parts of flat vectors: masters, moments
    global_step3/layer_01-model_00-model_states.pt                weights of a layer of a pipeline
    global_step3/zero/NAME/fp32.pt, exp_avg.pt                    a universal checkpoint: see `universal`

Each is a file of `torch.save` and read as such: byte ranges, and nothing of it is run. `flat` says which
elements of the vectors are whose. The formats: runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py there.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.formats.deepspeed.flat import FlatRun, Shapes, runs_of_each, runs_of_vectors
from shardwise.checkpoint.formats.deepspeed.universal import (
    add_universal,
    is_universal,
    loss_scale_of,
    shapes_of,
    vectors_of,
)
from shardwise.checkpoint.formats.found_tensors import FoundTensors, newest_save, number_at
from shardwise.checkpoint.formats.optimizer_states import NumberedOptimizer, Parameters, is_optimizer, named_parameters
from shardwise.checkpoint.formats.state_dicts import placed, plain_values
from shardwise.checkpoint.formats.strided import TensorPlace, stored_tensor
from shardwise.checkpoint.formats.torch_files.saved_values import UnknownObject, ints, read_dict
from shardwise.checkpoint.manifest import packed
from shardwise.checkpoint.stores import Findings, OpenFile, Store, about
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import MASTER, state_name
from shardwise.space import Piece

_FILE = re.compile(r"(?:(?:bf16|fp16)_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*", re.DOTALL)
_TIED = re.compile(r"(tied_modules\.[^.]+\.).*", re.DOTALL)
_LATEST = ("latest", "latest_universal")
_STRUCTURE = frozenset(
    {
        *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes"),
        *("frozen_param_fragments", "universal_checkpoint_info", "checkpoint_parallel_dimensions"),
    }
)
"""Keys of a file of the model that say how it is stored; all others are values."""


def is_deepspeed(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names is one of DeepSpeed: of saves, with `latest`, or of one save."""
    if any(_FILE.fullmatch(name) for name in names):
        return True
    return any(each in names for each in _LATEST) and any(_FILE.fullmatch(name.partition("/")[2]) for name in names)


def read_contents(store: Store) -> Contents:
    """Return what the newest save of DeepSpeed in a store holds.

    Parameters have their names in the state dict of the model. Raises `CheckpointError`, with all findings, when a file
    is missing or damaged, when files are not of one save, and for what is not understood.
    """
    folder = _folder_of(store)
    location = f"{store.location}/{folder}".rstrip("/")
    files = _read_files(store, folder)
    with about(location):
        found = FoundTensors()
        num_cuts = 0 if is_universal(store, folder) else files.tp
        if not num_cuts:
            models = files.model[min(files.model)]
            file, model = models[min(models)]
            if _is_of_stage3(file):
                _add_weights(found, file, model, skipped=_cut_names(model))
                _add_frozen(found, models)
            else:
                shapes = shapes_of(model.get("param_shapes") or [])
                _add_weights(found, file, model, skipped={name for each in shapes for name in each})
            files.sizes |= add_universal(found, store, folder, model)
        for cut in range(num_cuts):
            shard = FoundTensors()
            _add_layers(shard, files, cut)
            for rank in sorted(files.model)[cut::num_cuts]:
                _add_rank(shard, files, rank)
            found.take(shard, f"tp{cut}." if num_cuts > 1 else "")
        if num_cuts > 1:
            found.notes.append(
                f"the {num_cuts} tensor-parallel ranks have their own names (tp0.*, tp1.*), because the files do not "
                "say along which dim each parameter is cut. A rewrite joins them: tp0.W, tp1.W -> W, axis=0"
            )
        values = plain_values({key: each for key, each in files.first.items() if key not in _STRUCTURE}, found.notes)
        step = values.get("global_steps")
        return Contents(
            format="deepspeed",
            location=location,
            tensors=found.tensors,
            file_sizes={**files.sizes, **found.value_sizes},
            aliases=found.ties(),
            settings=found.settings(files.config),
            extra={"objects": packed({key: each for key, each in values.items() if each is not None}, "its values")},
            step=step if type(step) is int else None,
            layout=files.layout,
            notes=tuple(found.notes),
            left_state=found.left_state,
        )


def _folder_of(store: Store) -> str:
    """Where the files of the save are in the store: "" or "global_step3/"."""
    names = list(store.names())
    if any(_FILE.fullmatch(name) for name in names):
        return ""
    return newest_save(store, names, next(each for each in _LATEST if each in names))


@dataclass(slots=True, kw_only=True)
class _SavedFiles:
    """The files of a save, and what each says."""

    model: dict[int, dict[int, tuple[str, dict[Any, Any]]]] = field(default_factory=dict)
    """By model-parallel rank (of pipeline stages and tensor-parallel ranks), and in it by data rank: file and value."""
    optim: dict[int, dict[int, tuple[str, dict[Any, Any]]]] = field(default_factory=dict)
    layers: dict[tuple[int, int], tuple[str, dict[Any, Any]]] = field(default_factory=dict)
    """The layers of a pipeline, by tensor-parallel rank and number."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    steps: dict[tuple[str, int], float] = field(default_factory=dict)
    """Numbers that tensors of one element have, by file and first byte."""

    @property
    def first(self) -> dict[Any, Any]:
        """What the first file of the model says."""
        of_rank = self.model[min(self.model)]
        return of_rank[min(of_rank)][1]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of DeepSpeed."""
        config = self.first.get("ds_config")
        return config if isinstance(config, dict) else {}

    @property
    def tp(self) -> int:
        """How many tensor-parallel ranks wrote it."""
        dims = self.first.get("checkpoint_parallel_dimensions")
        said = dims.get("tp_degree") if isinstance(dims, dict) else None
        # Before DeepSpeed 0.19: a pipeline has a file for each layer, and those of a tensor-parallel rank have its
        # number.
        cuts = 1 + max(cut for cut, _ in self.layers) if self.layers else len(self.model)
        return said if type(said) is int and said > 0 and len(self.model) % said == 0 else cuts

    @property
    def layout(self) -> str:
        """The layout that wrote it, in words."""
        zero = self.config.get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
        ranks = max((len(each) for each in self.optim.values()), default=1)
        return f"ZeRO-{stage} on {ranks} x {len(self.model)} ranks"


def _read_files(store: Store, folder: str) -> _SavedFiles:
    """Read all files of a save."""
    files = _SavedFiles()
    problems = Findings()
    names = [name.removeprefix(folder) for name in store.names(folder.rstrip("/"))]
    if experts := [name for name in names if _EXPERT.fullmatch(name)]:
        raise CheckpointError(
            f"{store.location}/{folder}{experts[0]} has experts of DeepSpeed-MoE, which are not read yet. Convert the "
            "save with DeepSpeed's ds_to_universal, or gather the experts into the model before saving"
        )
    if any(name.startswith("offloaded_tensors/") for name in names):
        raise CheckpointError(
            f"{store.location}/{folder}offloaded_tensors has optimizer state as NVMe swap files, which say neither "
            "names nor shapes. Save with the optimizer on the host (offload_optimizer.device=cpu)"
        )
    for name in names:
        match = _FILE.fullmatch(name) or _LAYER.fullmatch(name)
        if match is None:
            continue
        with problems.collecting(), OpenFile(store, folder + name) as opened, about(opened.place):
            value = read_dict(opened, "which files of DeepSpeed are")
            files.sizes[folder + name] = opened.size
            for place in _counts_in(value):
                if (count := number_at(opened, place)) is not None:
                    files.steps[folder + name, place.start] = count
            if match.re is _LAYER:
                files.layers[int(match[2] or 0), int(match[1])] = folder + name, value
                continue
            data, model, kind = match.groups()
            of_kind = files.model if kind == "model" else files.optim
            # A universal checkpoint for all stages has a second file, without tensors.
            of_kind.setdefault(int(model), {}).setdefault(int(data or 0), (folder + name, value))
    if not files.model and not problems:
        problems.append(f"{store.location}/{folder} has no file of a model (*_model_states.pt); copy all of the save")
    problems += [
        f"{store.location}/{folder} has parts of the optimizer of mp_rank_{rank:02d}, and no file of its model"
        for rank in files.optim.keys() - files.model.keys()
    ]
    problems.check()
    return files


def _counts_in(value: object) -> Iterable[TensorPlace]:
    """The tensors of one number in the state of optimizers: the counts of updates."""
    left, seen = [value], set()
    while left:
        each = left.pop()
        # Each once: a pickle may name one list very often.
        if not isinstance(each, dict | list | tuple) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            if isinstance(step := each.get("step"), TensorPlace):
                yield step
            left += [inner for key, inner in each.items() if key not in ("module", "ds_config")]
        else:
            left += each


def _add_rank(found: FoundTensors, files: _SavedFiles, rank: int) -> None:
    """Add what one model-parallel rank has."""
    models, parts = files.model[rank], files.optim.get(rank, {})
    file, model = models[min(models)]
    if not parts and _is_of_stage3(file):
        raise CheckpointError(
            f"stage 3 has the weights of mp_rank_{rank:02d} in files of the optimizer (*_optim_states.pt), and none is "
            "there; copy all of the save"
        )
    stage3 = any("fp32_flat_groups" in _inner(each) for _, each in parts.values())
    _add_weights(found, *models[min(models)], skipped=_cut_names(model) if stage3 else ())
    if stage3:
        _add_frozen(found, models)
    if parts:
        _add_vectors(found, files, rank, stage3=stage3)
    elif model.get("optimizer") is not None:
        _add_whole_optimizer(found, files, *models[min(models)])


def _is_of_stage3(file: str) -> bool:
    """Whether a file of the model is one of stage 3, which has a file for each data rank, without weights."""
    return "zero_pp_rank_" in file


def _inner(part: Mapping[Any, Any]) -> Mapping[Any, Any]:
    inner = part.get("optimizer_state_dict")
    if not isinstance(inner, dict):
        raise CheckpointError("a file of the optimizer has no optimizer_state_dict; DeepSpeed did not write it")
    return inner


def _cut_names(model: Mapping[Any, Any]) -> set[str]:
    """Parameters of stage 3, which are in the state dict of the model without elements."""
    return _module(model).keys() - set(_buffers(model))


def _add_weights(found: FoundTensors, file: str, model: Mapping[Any, Any], *, skipped: Collection[str]) -> None:
    """Add what the state dict of the model has, apart from some names."""
    ties: dict[TensorPlace, str] = {}
    for name, place in _module(model).items():
        if isinstance(place, UnknownObject) and place.hint:
            found.notes.append(f"{name} is left out: {place.hint}")
        if not isinstance(place, TensorPlace):
            continue
        # What is skipped here is elsewhere, and so is what it is tied to.
        first = ties.setdefault(place, name) if 0 not in place.shape else name
        if first != name:
            found.aliases[name] = first
        elif name not in skipped:
            found.add(stored_tensor(name, file, place))
    shared = model.get("shared_params")
    if isinstance(shared, dict):
        found.aliases |= shared


def _module(model: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict of the model; empty for a pipeline, which has it in files of layers."""
    module = model.get("module")
    return {name: value for name, value in module.items() if isinstance(name, str)} if isinstance(module, dict) else {}


def _buffers(model: Mapping[Any, Any]) -> list[Any]:
    names = model.get("buffer_names")
    return names if isinstance(names, list) else []


def _add_layers(found: FoundTensors, files: _SavedFiles, cut: int) -> None:
    """Add the weights of a pipeline, which has a file for each layer; parameters are named by the number of theirs.

    cut: the tensor-parallel rank.
    """
    models = [model for of_rank in files.model.values() for _, model in of_rank.values()]
    said = [model.get(key) for model in models for key in ("param_shapes", "frozen_param_shapes")]
    known = {
        name: shape
        for each in said
        if each
        for shapes in shapes_of(each if isinstance(each, list) else [each])
        for name, shape in shapes.items()
    }
    for (owner, number), (file, layer) in sorted(files.layers.items()):
        if owner != cut:
            continue
        places = {name: place for name, place in layer.items() if isinstance(place, TensorPlace)}
        prefix = _tied_prefix(places, known) if known.keys().isdisjoint(f"{number}.{each}" for each in places) else ""
        for name, place in places.items():
            found.add(stored_tensor(f"{prefix or f'{number}.'}{name}", file, place))
    numbers = {number for owner, number in files.layers if owner == cut}
    if gaps := [str(each) for each in range(max(numbers, default=0)) if each not in numbers]:
        found.notes.append(
            f"no file is of layer {few_of(gaps, quotes=False)}: functions have none, but if it has weights "
            "that are not trained, they are missing"
        )
    lacking = [name for name in known if name not in found.tensors]
    if lacking and not any(map(_module, models)):
        raise CheckpointError(
            f"no file of a layer (layer_*-model_states.pt) has {few_of(lacking)} of the model; copy all of the save"
        )


def _tied_prefix(places: Mapping[str, TensorPlace], known: Mapping[str, tuple[int, ...]]) -> str:
    """What DeepSpeed puts before names of a layer that others are tied to; "" for a layer that is not tied."""
    fitting = {
        match[1]
        for name in known
        if (match := _TIED.fullmatch(name))
        and all(known.get(f"{match[1]}{each}") == place.shape for each, place in places.items())
    }
    return fitting.pop() if len(fitting) == 1 and places else ""


def _add_frozen(found: FoundTensors, models: Mapping[int, tuple[str, Mapping[Any, Any]]]) -> None:
    """Add what is not trained: under stage 3 every rank has a run of each such parameter."""
    shapes = models[min(models)][1].get("frozen_param_shapes") or {}
    shapes = shapes_of([shapes])[0]
    if not shapes:
        return
    ranks = [models[rank] for rank in sorted(models)]
    fragments = [(file, [_part(model, "frozen_param_fragments", name) for name in shapes]) for file, model in ranks]
    lengths = [[math.prod(place.shape) for place in places] for _, places in fragments]
    vectors = [{name: shape} for name, shape in shapes.items()]
    for name, mine in _by_name(vectors, runs_of_each(vectors, lengths)).items():
        pieces = [_piece(name, shapes[name], each, *_located(fragments, each)) for each in mine]
        _add_pieces(found, name, shapes[name], pieces)


def _by_name(vectors: Sequence[Shapes], runs: Iterable[FlatRun]) -> dict[str, list[FlatRun]]:
    """The runs of each parameter."""
    by_name: dict[str, list[FlatRun]] = {name: [] for each in vectors for name in each}
    for run in runs:
        by_name[run.name].append(run)
    return by_name


def _part(model: Mapping[Any, Any], key: str, name: str) -> TensorPlace:
    held = model.get(key)
    place = held.get(name) if isinstance(held, dict) else None
    if not isinstance(place, TensorPlace):
        raise CheckpointError(f"{key} of a rank has no tensor {name}")
    return place


def _located(ranks: Sequence[tuple[str, Sequence[TensorPlace]]], run: FlatRun) -> tuple[str, TensorPlace]:
    file, places = ranks[run.rank]
    return file, places[run.vector]


def _piece(name: str, shape: tuple[int, ...], run: FlatRun, file: str, place: TensorPlace) -> StoredPiece:
    """The elements of a run, in a vector of a file."""
    if place.strides != (1,) and math.prod(place.shape) > 1:
        raise CheckpointError(f"{name} is in a vector of shape {place.shape} and strides {place.strides}")
    first, last = run.run
    whole = (first, last) == (0, math.prod(shape))
    piece = Piece(name=name, dtype=place.dtype, global_shape=shape, run=None if whole else (first, last))
    start = place.start + run.start * itemsize_bytes(place.dtype)
    return StoredPiece(piece=piece, file=file, start=start, checksums=None)


@dataclass(frozen=True, slots=True)
class _RankPart:
    """What a data rank has saved of the flat vectors."""

    file: str
    masters: list[TensorPlace]
    states: list[Mapping[Any, Any]]
    """The state of each vector."""
    groups: list[Mapping[str, Any]]


def _add_vectors(found: FoundTensors, files: _SavedFiles, rank: int, *, stage3: bool) -> None:
    """Add masters and moments of one model-parallel rank."""
    parts, (_, model) = files.optim[rank], files.model[rank][min(files.model[rank])]
    inners = [_inner(parts[each][1]) for each in sorted(parts)]
    _check_ranks(parts, inners, rank)
    key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
    held = [_rank_part(parts[each][0], inner, key) for each, inner in zip(sorted(parts), inners, strict=True)]
    shapes = shapes_of(model.get("param_shapes"))
    if any(len(each.masters) != len(shapes) for each in held):
        raise CheckpointError(f"the optimizer of mp_rank_{rank:02d} has another number of groups than the model")
    lengths = [[math.prod(place.shape) for place in each.masters] for each in held]
    gaps = _gaps(inners[0], len(shapes))
    runs = runs_of_each(shapes, lengths) if stage3 else runs_of_vectors(shapes, lengths, gaps)
    vector_of = {name: number for number, each in enumerate(shapes) for name in each}
    steps = [_step(files, held, number) for number in range(len(shapes))]
    moments = [_moments(found, held, number) for number in range(len(shapes))]
    masters = [(each.file, each.masters) for each in held]
    for name, mine in _by_name(shapes, runs).items():
        number = vector_of[name]
        shape = shapes[number][name]
        _add_master(found, name, shape, [_piece(name, shape, each, *_located(masters, each)) for each in mine])
        for entry in moments[number]:
            pieces = [
                _piece(name, shape, each, held[each.rank].file, _moment(held[each.rank], each, entry)) for each in mine
            ]
            _add_pieces(found, state_name(name, entry), shape, pieces)
        if (step := steps[number]) is not None:
            found.add_step(name, step)
    groups = held[0].groups
    if groups:
        trained = [[name for number in vectors_of(each, len(shapes)) for name in shapes[number]] for each in groups]
        found.add_groups(groups, trained)
    found.loss_scale = loss_scale_of(inners[0])


def _gaps(inner: Mapping[Any, Any], count: int) -> list[list[int]] | None:
    """The padding behind each parameter of each vector; None where there is none."""
    gaps = inner.get("param_alignment_paddings")
    if gaps is None:
        return None
    if not isinstance(gaps, list) or len(gaps) != count or not all(isinstance(each, list) for each in gaps):
        raise CheckpointError("its padding behind parameters (param_alignment_paddings) is not understood")
    return [list(ints(each)) for each in gaps]


def _check_ranks(parts: Mapping[int, Any], inners: Sequence[Mapping[Any, Any]], rank: int) -> None:
    """Refuse a save whose ranks are not all there, or that was cut in another way."""
    counts = {count for inner in inners for count in _counts(inner.get("partition_count"))}
    if len(counts) > 1:
        raise CheckpointError(
            "its groups are cut over different numbers of ranks, as DeepSpeed-MoE does it, which is not read yet; "
            "convert it with DeepSpeed's ds_to_universal"
        )
    if any("ds_zero_partition_groups" in inner for inner in inners):
        raise CheckpointError("it has experts cut by AutoEP, which are not read yet; use DeepSpeed's ds_to_universal")
    (count,) = counts or {len(parts)}
    if sorted(parts) != list(range(count)):
        lacking = [f"rank {each}" for each in range(count) if each not in parts]
        what = f"the files of {few_of(lacking, quotes=False)} are missing" if lacking else f"it has {len(parts)}"
        raise CheckpointError(f"{count} data ranks wrote the optimizer of mp_rank_{rank:02d}, but {what}")


def _counts(value: object) -> list[int]:
    counts = value if isinstance(value, list) else [value]
    return [each for each in counts if type(each) is int]


def _rank_part(file: str, inner: Mapping[Any, Any], key: str) -> _RankPart:
    masters = inner.get(key)
    if not isinstance(masters, list) or not all(isinstance(each, TensorPlace) for each in masters):
        raise CheckpointError(f"{file} has no vectors under {key}, as ZeRO of DeepSpeed 0.4 to 0.19 writes them")
    base = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    groups: list[Mapping[str, Any]] = []
    if is_optimizer(base):
        states, groups = [base["state"].get(number, {}) for number in range(len(masters))], base["param_groups"]
    elif isinstance(base, list) and all(isinstance(each, dict) for each in base):
        states = base  # saved with elastic_checkpoint, which leaves the groups out
    else:
        states = []
    return _RankPart(file, masters, states or [{} for _ in masters], groups)


def _moments(found: FoundTensors, held: Sequence[_RankPart], number: int) -> list[str]:
    """Keys of the state of a vector that has a number for each element."""
    keys = [
        key
        for key, value in held[0].states[number].items()
        if isinstance(value, TensorPlace) and len(value.shape) == 1 and isinstance(key, str)
    ]
    others = [key for key in held[0].states[number] if key not in (*keys, "step")]
    if others:
        found.notes.append(
            f"state {few_of([str(each) for each in others])} of the optimizer is no moment, and is left out"
        )
    return keys


def _moment(part: _RankPart, run: FlatRun, key: str) -> TensorPlace:
    place = part.states[run.vector].get(key)
    if not isinstance(place, TensorPlace) or math.prod(place.shape) < math.prod(part.masters[run.vector].shape):
        raise CheckpointError(f"{part.file} has no {key}, or a shorter one than its masters")
    return place


def _step(files: _SavedFiles, held: Sequence[_RankPart], number: int) -> float | None:
    """How often a vector was updated; None where its optimizer does not count."""
    counted: dict[float, str] = {}
    for part in held:
        value = part.states[number].get("step")
        if isinstance(value, TensorPlace):
            value = files.steps.get((part.file, value.start))
        if isinstance(value, int | float):
            counted.setdefault(float(value), part.file)
    if len(counted) > 1:
        said = " and ".join(f"{file} after {step:g} updates" for step, file in counted.items())
        raise CheckpointError(f"its parts are of different saves: {said}. Name another save")
    return next(iter(counted), None)


def _add_master(found: FoundTensors, name: str, shape: tuple[int, ...], pieces: list[StoredPiece]) -> None:
    weight = found.tensors.get(name)
    dtype = pieces[0].piece.dtype if pieces else "float32"
    # Where weights are trained in their own dtype, the vectors have them a second time.
    if weight is None:
        _add_pieces(found, name, shape, pieces)
    elif weight.shape != shape:
        raise CheckpointError(f"{name} has shape {list(weight.shape)}, and {list(shape)} in param_shapes")
    elif weight.dtype != dtype:
        _add_pieces(found, state_name(name, MASTER), shape, pieces)


def _add_pieces(found: FoundTensors, name: str, shape: tuple[int, ...], pieces: list[StoredPiece]) -> None:
    dtypes = {each.piece.dtype for each in pieces} or {"float32"}
    if len(dtypes) > 1:
        raise CheckpointError(f"{name} is {' and '.join(sorted(dtypes))} on different ranks")
    held = tuple(replace(each, piece=replace(each.piece, name=name)) for each in pieces)
    found.add(StoredTensor(name=name, dtype=dtypes.pop(), shape=shape, pieces=held))


def _add_whole_optimizer(found: FoundTensors, files: _SavedFiles, file: str, model: Mapping[Any, Any]) -> None:
    """Add the optimizer of a run without ZeRO, whose state is whole, under numbers."""
    saved = model["optimizer"]
    masters: list[object] = []
    if isinstance(saved, dict) and not is_optimizer(saved):
        groups = saved.get("fp32_groups")
        masters = [each for group in groups for each in group] if isinstance(groups, list) else []
        found.loss_scale = loss_scale_of(saved)
        saved = saved.get("optimizer_state_dict") if masters else None
    if not is_optimizer(saved):
        found.leave_state("its state is flat, and no file says in which order")
        return
    buffers = _buffers(model)
    weights = {
        name: place for name, place in _module(model).items() if isinstance(place, TensorPlace) and name not in buffers
    }
    optimizer = NumberedOptimizer.of(saved)
    named_parameters([optimizer], Parameters.of(weights, ordered=True))
    if not optimizer.names:
        found.leave_state(optimizer.reason)
        return
    for number, name in optimizer.names.items():
        if isinstance(number, int) and number < len(masters) and isinstance(place := masters[number], TensorPlace):
            found.add(stored_tensor(state_name(name, MASTER), file, place))
    for number, key, value in optimizer.entries():
        found.add(stored_tensor(state_name(optimizer.names[number], key), *placed(value, file, found.value_sizes)))
    if optimizer.reason:
        found.notes.append(optimizer.note(""))
        found.numbered.append(optimizer.record(""))
    found.add_groups(optimizer.groups, [[optimizer.names[each] for each in held] for held in optimizer.numbers()])
