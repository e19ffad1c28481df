"""A plain, DDP or FSDP2 model and its torch optimizers as one state, with optimizer state under parameters' names.

    torch                                        name in the save
    model.module.layers.0.weight (DDP)           layers.0.weight
    optimizer.state[parameter]["exp_avg"]        optimizer/layers.0.weight/exp_avg
    optimizer.param_groups[0]["lr"]              settings: optimizers[0].groups[0], with the names of its parameters

torch numbers the parameters of an optimizer in the order of its groups. Names say the same under every wrapper, in any
order of groups, and in an engine. Which parameter has which name is found by its place in memory.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.state_pieces import place_of
from shardwise.comm.local_tensors import dtype_name, is_dtensor, local_pieces, local_tensor, torch_dtype
from shardwise.errors import CheckpointError, OptimizerError
from shardwise.plan.names import named_by_wrappers, state_name
from shardwise.plan.optimizer_entries import (
    LiveParameter,
    NumberedParameter,
    OptimizerEntry,
    flat_once,
    has_own_form,
    has_updated,
    named_optimizer,
    names_without_elements,
    plan_optimizers,
    python_type,
    values_of,
)
from shardwise.plan.saved_settings import (
    PYTHON_DTYPES,
    NamedOptimizer,
    take_over,
    take_over_shared,
)
from shardwise.space import Piece


class TorchState:
    """A model and its optimizers, to be saved and loaded by name: `save(path, TorchState(model, optimizer))`.

    model: any module. Prefixes of DistributedDataParallel and torch.compile are left out, so that a wrapped model and a
    plain one have the same names. optimizers: over parameters of the model; none: the model alone. Parameters may be
    DTensors (FSDP2). State of parameters that are frozen now is left out. Raises OptimizerError for optimizers of
    parameters that the model does not have.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        from shardwise.plan.model_records import ModelRecord  # an edge: engines do without

        self._model = model
        self._optimizers = optimizers
        self._record = ModelRecord()
        # For its errors: an optimizer of another model is refused where it is given, not at the first save.
        _trained(_Tensors.of(model), optimizers)

    def state(self) -> dict[Piece, torch.Tensor]:
        """What this rank holds, as views: the tensors of `model.state_dict()` and `optimizer/<parameter>/<key>`.

        Raises CheckpointError for entries of the state dict that are no parameters or buffers. Raises OptimizerError
        for optimizer state that is no tensor and no number.
        """
        tensors = _Tensors.of(self._model)
        state = tensors.pieces()
        for each in _trained(tensors, self._optimizers):
            for name, key, value in each.values():
                if isinstance(value, torch.Tensor):
                    state.update(_pieces(state_name(name, key), value))
                elif value is not None:
                    dtype = torch_dtype(PYTHON_DTYPES[python_type(name, key, value)])
                    # A Python number is stored as a tensor; `plain` in the settings says which type to give back.
                    state.update(_pieces(state_name(name, key), torch.tensor(value, dtype=dtype)))
        return state

    def settings(self) -> dict[str, Any]:
        """Ties, the optimizers' groups and settings, and the configuration of a model that has one, as JSON values."""
        tensors = _Tensors.of(self._model)
        optimizers = [each.named(each.values()).to_json() for each in _trained(tensors, self._optimizers)]
        return {"ties": tensors.ties, "optimizers": optimizers, **self._record.settings(_bare(self._model))}

    def differing(self) -> set[str]:
        """Names of what data ranks may hold with different values: buffers, such as running statistics under DDP."""
        held = _Tensors.of(self._model).by_name
        return {name for name, tensor in held.items() if not isinstance(tensor, nn.Parameter)}

    def names(self) -> list[str]:
        """Names of the model's parameters and buffers in its own order, ties under each of their names."""
        return list(_Tensors.of(self._model).names)

    def numbering(self) -> list[list[list[NumberedParameter]]]:
        """For each optimizer and each of its groups: all its parameters in the order in which torch counts them."""
        return [
            [
                [
                    NumberedParameter(name=each.name_of[held], shape=tuple(held.shape), trained=held.requires_grad)
                    for held in dict.fromkeys(group["params"])
                ]
                for group in each.optimizer.param_groups
            ]
            for each in _trained(_Tensors.of(self._model), self._optimizers)
        ]

    def restore(self, stored: Mapping[str, Piece], settings: Mapping[str, object]) -> "TorchRestoration":
        """Prepare to take over a checkpoint, without changing anything; `load` calls it and does the rest.

        stored: every tensor of the checkpoint as one piece. settings: as `settings` gave them, or an engine's; {} for
        plain weights. Raises CheckpointError for settings that are not understood.
        """
        tensors = _Tensors.of(self._model)
        take_note = self._record.after(settings)
        return TorchRestoration(tensors, _trained(tensors, self._optimizers), stored, settings, take_note)


class TorchRestoration:
    """A load into a TorchState that is about to happen. Nothing has changed yet."""

    def __init__(
        self,
        tensors: "_Tensors",
        trained: Sequence["_Trained"],
        stored: Mapping[str, Piece],
        settings: Mapping[str, Any],
        take_note: Callable[[], None],
    ) -> None:
        """`take_note`: called once it is done."""
        self._trained = trained
        self._take_note = take_note
        own = {name: tensors.ties.get(name, name) for name in tensors.names}
        self.aliases: Mapping[str, str] = {**named_by_wrappers(stored, own), **tensors.ties}
        """Other names of wanted tensors, of ties and of modules with other wrappers: alias -> name."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.by_name.items()}
        self.accounted: Collection[str] = names_without_elements(shapes, self.aliases, stored=stored, settings=settings)
        """Names that are not read: tensors without elements."""
        self.wanted: dict[Piece, torch.Tensor] = {
            piece: part for piece, part in tensors.pieces().items() if piece.name not in self.accounted
        }
        """What to read, and the tensors that take it: those of the model, in place, and optimizer state."""
        live = [parameter for each in trained for parameter in each.live()]
        named = [each.named() for each in trained]
        self._plan = plan_optimizers(named, live, self.aliases, stored=stored, settings=settings)
        self.findings: Sequence[str] = self._plan.findings
        """What of the stored settings does not fit."""
        self.notes: Sequence[str] = ()
        self._taken: dict[str, dict[str, torch.Tensor]] = {}
        given: set[int] = set()
        for each in trained:
            for name, (parameter, _) in each.parameters.items():
                self._taken[name] = {}
                held = flat_once(each.optimizer.state.get(parameter, {}), given)
                for entry in self._plan.entries.get(name, ()):
                    tensor = each.room_for(name, entry, held.get(entry.key))
                    self.wanted.update(_pieces(entry.whole.name, tensor))
                    self._taken[name][entry.key] = tensor

    @torch.no_grad()
    def finish(self) -> None:
        """Give the optimizers the state and the settings that were read."""
        self._take_note()
        over = self._plan.over
        for each, taken, shared in zip(self._trained, over.settings, over.shared, strict=True):
            for group, settings in zip(each.optimizer.param_groups, taken, strict=True):
                take_over(group, settings)
            take_over_shared(each.optimizer.state, shared)
            for name, (parameter, _) in each.parameters.items():
                if not self._plan.replaces_state_of(name):
                    continue
                # Entries that the checkpoint does not have go too: old and new state of one parameter do not fit.
                each.optimizer.state.pop(parameter, None)
                if state := self._plan.state_of(name, self._taken[name]):
                    each.optimizer.state[parameter] = state
            if self._plan.is_of_a_file:
                _take_in(each.optimizer)


def _take_in(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make what it keeps of the state in it, which is as in a file; `load_state_dict` does so."""
    if not has_own_form(optimizer):
        # torch before 1.12 had `step` as a number, which today's Adam refuses in its step.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        return
    groups = optimizer.param_groups
    number_of = {each: number for number, each in enumerate(each for group in groups for each in group["params"])}
    state = {number_of[each]: held for each, held in optimizer.state.items() if each in number_of}
    numbered = [{**group, "params": [number_of[each] for each in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": state, "param_groups": numbered})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensors:
    """The parameters and persistent buffers of a model, each once."""

    by_name: dict[str, torch.Tensor]
    ties: dict[str, str]
    names: tuple[str, ...]
    """All names, ties included, in the order of the model."""
    name_of: dict[tuple[object, ...], str]
    """By their places in memory."""

    @classmethod
    def of(cls, model: nn.Module) -> "_Tensors":
        _refuse_parts(model)
        # What a load writes to has to be the model's own memory: a
        # tensor that a hook makes for the state dict is gone after it.
        registered = {_place(each) for each in [*model.parameters(), *model.buffers()]}
        prefixes = _prefixes(model)
        by_name: dict[str, torch.Tensor] = {}
        ties: dict[str, str] = {}
        name_of: dict[tuple[object, ...], str] = {}
        names: list[str] = []
        # keep_vars: tensors without elements have no place in memory, and are known by the object itself.
        for full_name, tensor in model.state_dict(keep_vars=True).items():
            path, _, attribute = full_name.rpartition(".")
            name = _prefix(path, prefixes) + attribute
            if not isinstance(tensor, torch.Tensor) or _place(tensor) not in registered:
                raise CheckpointError(
                    f"{name!r} in model.state_dict() is no parameter and no buffer of the model. A hook or "
                    "get_extra_state() makes it, so a load cannot write to it. Save the rest by name, and such "
                    "values in extra"
                )
            names.append(name)
            # The first name is the stored one; later names of the same memory are ties.
            first = name_of.setdefault(_place(tensor), name)
            if first == name:
                by_name[name] = tensor
            else:
                ties[name] = first
        return cls(by_name=by_name, ties=ties, names=tuple(names), name_of=name_of)

    def pieces(self) -> dict[Piece, torch.Tensor]:
        """All of them that this rank has, as views."""
        return {piece: part for name, tensor in self.by_name.items() for piece, part in _pieces(name, tensor)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """An optimizer and the names of its parameters."""

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[str, ...], ...]
    """Names of trainable parameters."""
    parameters: dict[str, tuple[torch.Tensor, dict[str, Any]]]
    """Trainable parameters by name, with their groups."""
    name_of: dict[torch.Tensor, str]
    """Names of all parameters."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[tuple[object, ...], str]) -> "_Trained":
        held = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        name_of = {parameter: names[place] for parameter, _ in held if (place := _place(parameter)) in names}
        if foreign := [parameter for parameter, _ in held if parameter not in name_of]:
            raise OptimizerError(
                f"{len(foreign)} parameters of {type(optimizer).__name__} are not the model's, the first of shape "
                f"{list(foreign[0].shape)}; give the model that has them"
            )
        return cls(
            optimizer=optimizer,
            groups=tuple(
                tuple(name_of[each] for each in group["params"] if each.requires_grad)
                for group in optimizer.param_groups
            ),
            parameters={name_of[each]: (each, group) for each, group in held if each.requires_grad},
            name_of=name_of,
        )

    def named(self, values: Iterable[tuple[str, str, Any]] = ()) -> NamedOptimizer:
        """Its kind, its groups and their settings. values: see `named_optimizer`."""
        return named_optimizer(self.optimizer, self.groups, values=values)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """The state of its trainable parameters: (name of the parameter, key, value)."""
        for name, key, value in values_of(type(self.optimizer).__name__, self.optimizer.state, self.name_of):
            if name in self.parameters:
                yield name, key, value

    def live(self) -> Iterator[LiveParameter]:
        """Its trainable parameters."""
        for name, (parameter, _) in self.parameters.items():
            has_state = has_updated(self.optimizer.state.get(parameter, {}))
            dtype = dtype_name(parameter.dtype)
            yield LiveParameter(name=name, shape=tuple(parameter.shape), dtype=dtype, has_state=has_state)

    def room_for(self, name: str, entry: OptimizerEntry, live: Any) -> torch.Tensor:
        """The live tensor where it can take the entry, else a fresh one, cut like the parameter."""
        parameter, group = self.parameters[name]
        dtype, shape = torch_dtype(entry.whole.dtype), entry.whole.global_shape
        # Into the live tensor where that can be: a second copy of the state may be more memory than there is.
        if isinstance(live, torch.Tensor) and (live.dtype, tuple(live.shape)) == (dtype, shape) and _is_dense(live):
            return live
        if entry.along:
            # zeros_like keeps the placements of a DTensor, so every rank reads its own part only.
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        local = local_tensor(parameter) if is_dtensor(parameter) else parameter
        # torch keeps `step` on the host, where reading it costs no
        # synchronisation, unless a fused or captured step reads it.
        return torch.zeros(shape, dtype=dtype, device="cpu" if entry.on_host(group) else local.device)


def _trained(tensors: _Tensors, optimizers: Sequence[torch.optim.Optimizer]) -> list[_Trained]:
    """The optimizers with the names of their parameters. Raises OptimizerError."""
    trained = [_Trained.of(optimizer, tensors.name_of) for optimizer in optimizers]
    names = [name for each in trained for group in each.groups for name in group]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise OptimizerError(
            f"{min(twice)!r} is trained twice, by several optimizers or as several parameters of one storage; a "
            "checkpoint has one state per parameter"
        )
    return trained


def _refuse_parts(model: nn.Module) -> None:
    """Let the modules of an engine's model say which of their parameters are parts, with a ModelError."""
    for module in model.modules():
        for hook in list(module._state_dict_pre_hooks.values()):
            if getattr(hook, "refuses_parts", False):
                hook(module, "", False)


def _prefixes(model: nn.Module) -> dict[str, str]:
    """What to put before the tensors of each module: its path without the wrappers in it."""
    prefixes: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        parent, _, attribute = path.rpartition(".")
        if not path:
            prefixes[path] = ""
        elif _wrapped(modules[parent]) is module:
            prefixes[path] = prefixes[parent]
        else:
            prefixes[path] = f"{prefixes[parent]}{attribute}."
    return prefixes


def _prefix(path: str, prefixes: Mapping[str, str]) -> str:
    """What to put before tensors at `path`, whose last parts may be names that a hook made up, and no modules."""
    if path in prefixes:
        return prefixes[path]
    parent, _, attribute = path.rpartition(".")
    return f"{_prefix(parent, prefixes)}{attribute}."


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside of one that DistributedDataParallel, DataParallel or torch.compile made."""
    # Wrappers that put a name of their own before those of the model; FSDP2 changes classes in place and adds none.
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner: nn.Module = module.module
        return inner
    # Nobody can have compiled one before the module was imported, which takes long.
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return module.get_submodule("_orig_mod") if compiled is not None and isinstance(module, compiled) else None


def _bare(module: nn.Module) -> nn.Module:
    """The module inside of all such."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same elements in memory; what holds no memory is equal to itself only."""
    return place_of(str(id(tensor)), tensor, local_tensor(tensor) if is_dtensor(tensor) else tensor)


def _pieces(name: str, tensor: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    """What this rank has of a tensor, as views."""
    if is_dtensor(tensor):
        return local_pieces(name, tensor)
    whole = Piece(name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(tensor.shape))
    return [(whole, tensor.detach())]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has its own place in memory."""
    local = local_tensor(tensor) if is_dtensor(tensor) else tensor
    # An expanded tensor has one place for many elements, and a load would write them over each other.
    return local.is_contiguous()
