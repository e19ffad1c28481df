"""The model and its optimizers whole on a rank, for a while: what the plain program would have.

[1] gather     parameters (their masters, in the dtype in which the model came), buffers, optimizer state; rank to rank
[2] put in     whole tensors take the places of parts; the wrappers of the plan and the refusals come off
[3] the body   state_dict(), save_pretrained(), deepcopy(), torch.save(), load_state_dict()
[4] put back   the parts; where the body wrote, the values of rank 0 go to the ranks that hold them

A rank that takes no part keeps its parts, and waits in [4].
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm.agreement import a_table, aborting, agreed, understood
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import named_places, with_values
from shardwise.engine.optimizers import KnownOptimizer
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.plain_calls import PlainCalls
from shardwise.engine.state import HandOver, whole
from shardwise.engine.state_of_all import (
    Pieces,
    described,
    sources_of,
    stored_of_all,
    targets_of,
    whole_pieces,
)
from shardwise.engine.wrapping import unwrap
from shardwise.errors import CheckpointError, ModelError
from shardwise.moving import reshard
from shardwise.plan.names import is_state_name, split_state_name, state_name
from shardwise.plan.saved_settings import PYTHON_DTYPES, merge_settings

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_PURPOSE = "the whole model"


@contextmanager
def whole_inside(
    engine: "Engine", plain_calls: PlainCalls, *, optimizer: bool, rank0_only: bool, offload: bool
) -> Iterator[None]:
    """See `Engine.whole`."""
    handed = engine.hand_over(doing="engine.whole()")
    channel = handed.channel
    taking_part = range(1) if rank0_only else range(channel.size)
    message: dict[str, Any] = {}
    written: Pieces = {}
    failure: Exception | None = None
    with aborting(channel, "engine.whole()"):
        settings, values = _gathered(handed, optimizer=optimizer, offload=offload, taking_part=taking_part)
        with _inside(plain_calls):
            if channel.rank in taking_part:
                model = _WholeModel(handed.model, handed.names.ties, values)
                known = handed.optimizers if optimizer else ()
                with plain_calls.lifted(), model, _WholeOptimizers(known, settings, values, model) as optimizers:
                    before = (model.versions(), optimizers.versions())
                    try:
                        yield
                        if before != (model.versions(), optimizers.versions()):
                            written = model.values() | optimizers.values()
                            message = {"stored": described(written), "settings": optimizers.settings()}
                    except Exception as error:
                        failure = error
                        message = {"failed": f"{type(error).__name__}: {error}"}
            else:
                yield
        # Ranks that take no part wait here, and all learn whether the body failed or wrote somewhere.
        ends = channel.exchange(json.dumps(message).encode(), purpose=f"the end of {_PURPOSE}")
        answers = understood(ends, a_table, purpose=_PURPOSE)
        if failure is None:
            _refuse_one_sided([answers[rank] for rank in taking_part])
            if answers[0]:
                _take_in(engine, answers[0], written if channel.rank == 0 else {}, optimizer=optimizer)
    if failure is not None:
        raise failure


@contextmanager
def _inside(plain_calls: PlainCalls) -> Iterator[None]:
    plain_calls.is_whole = True
    try:
        yield
    finally:
        plain_calls.is_whole = False


def _gathered(
    handed: HandOver, *, optimizer: bool, offload: bool, taking_part: Collection[int]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings that all ranks know together, and the whole tensors by name, on ranks that take part."""
    channel = handed.channel
    mine = channel.exchange(json.dumps(handed.settings).encode(), purpose=f"settings of {_PURPOSE}")
    settings = merge_settings(understood(mine, a_table, purpose=_PURPOSE))
    sources = sources_of(handed)
    if not optimizer:
        sources = {piece: each for piece, each in sources.items() if not is_state_name(piece.name)}
    stored = stored_of_all(channel, sources, purpose=f"tensors of {_PURPOSE}")
    wanted: Pieces = {}
    if channel.rank in taking_part:
        dtypes = {spec.name: spec.dtype for spec in handed.names.specs}
        for name, piece in stored.items():
            split = split_state_name(name)
            # Where torch has the count of updates, whatever the device.
            on_host = offload or (split is not None and split[1] == "step")
            device = torch.device("cpu") if on_host else channel.device
            dtype = torch_dtype(dtypes.get(name, piece.dtype))
            wanted |= whole(name, torch.empty(piece.global_shape, dtype=dtype, device=device))
    return settings, {piece.name: tensor for piece, tensor in reshard(sources, wanted, channel, cast=True).items()}


def full_state_dict(engine: "Engine", *, rank0_only: bool = True, offload: bool = True, optimizer: bool = False) -> Any:
    """What `state_dict()` of the plain model gives, as a dict of whole tensors; with `optimizer`, also of optimizers.

    Values are the masters', in the dtypes in which the model came to parallelize. All ranks call it together.
    rank0_only: the other ranks get {}. offload: tensors on the CPU, else on the engine's device.
    optimizer: give (model, optimizer): also what `state_dict()` of the plain optimizer gives, or a list where the
        engine has several. A plain loop that loads both goes on bit for bit.

    A rank that gets tensors holds the whole of them. Raises the errors of `Engine.whole`.
    """
    model: Mapping[str, Any] = {}
    states: list[Mapping[str, Any]] = []
    with engine.whole(optimizer=optimizer, rank0_only=rank0_only, offload=offload):
        if engine.channel.rank == 0 or not rank0_only:
            model = engine.model.state_dict()
            states = [each.state_dict() for each in engine.optimizers] if optimizer else []
    if not optimizer:
        return model
    return model, states[0] if len(states) == 1 else states or {}


def _state_of(known: KnownOptimizer, settings: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """For each parameter that an optimizer trains its state, by torch's keys."""
    keys: dict[str, dict[str, Any]] = {}
    trained = {name for names in known.parameters for name in names}
    for name, tensor in values.items():
        if (split := split_state_name(name)) is not None and split[0] in trained:
            python = settings["plain"].get(split[1])
            is_python = python is not None and not tensor.dim() and _is_of(tensor, python)
            keys.setdefault(split[0], {})[split[1]] = tensor.item() if is_python else tensor
    for state in keys.values():
        for key in settings["none"]:
            state.setdefault(key, None)
    return keys


def _is_of(tensor: torch.Tensor, python: str) -> bool:
    return tensor.dtype == torch_dtype(PYTHON_DTYPES[python])


class _WholeModel:
    """A model with whole tensors in the places of parts, as long as this is entered."""

    def __init__(self, model: nn.Module, ties: Mapping[str, str], values: Mapping[str, torch.Tensor]) -> None:
        """values: of parameters and buffers, by the names of the engine. Nothing is changed yet."""
        self._model = model
        self._ties = ties
        self.parameters: dict[str, nn.Parameter] = {}
        self._parts = [(module, key, place, held) for module, key, place, held in named_places(model)]
        for _, _, place, held in self._parts:
            name = ties.get(place, place)
            if name not in self.parameters:
                self.parameters[name] = made = with_values(held, values[name])
                for own in ("_unit_place", "_reader"):  # of a parameter at rest, with a hold on the engine
                    vars(made).pop(own, None)
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffers = [
            (module._buffers, key, buffer, values[names[id(buffer)]])
            for module in model.modules()
            for key, buffer in module.named_buffers(recurse=False)
        ]
        self._forwards: list[tuple[nn.Module, Any, Any]] = []

    def __enter__(self) -> "_WholeModel":
        modules = list(self._model.modules())
        self._forwards = [(each, vars(each).get("forward"), each._compiled_call_impl) for each in modules]
        PipelineRunner.take_off(self._model)
        unwrap(self._model)
        for module, key, place, _ in self._parts:
            # Not register_parameter: recurrent modules keep lists of theirs.
            setattr(module, key, self.parameters[self._ties.get(place, place)])
        for buffers, key, _, values in self._buffers:
            buffers[key] = values
        return self

    def __exit__(self, *_: object) -> None:
        for module, key, _, held in self._parts:
            setattr(module, key, held)
        for buffers, key, held, _ in self._buffers:
            buffers[key] = held
        for module, forward, compiled in self._forwards:
            vars(module).pop("forward", None)
            vars(module).update({"_compiled_call_impl": compiled} | ({} if forward is None else {"forward": forward}))

    def values(self) -> Pieces:
        """What is in the places now."""
        found: Pieces = {}
        for module, key, place, _ in self._parts:
            if place not in self._ties:
                found |= whole(place, getattr(module, key).detach())
        for name, buffer in self._model.named_buffers():
            found |= whole(name, buffer.detach())
        return found

    def versions(self) -> list[tuple[int, int]]:
        """Others after every write, and where another tensor was put in."""
        held = [*self._model.parameters(), *self._model.buffers()]
        return [(id(each), each._version) for each in held]


class _WholeOptimizers:
    """Optimizers over whole parameters, as long as this is entered."""

    def __init__(
        self,
        known: Sequence[KnownOptimizer],
        settings: Mapping[str, Any],
        values: Mapping[str, torch.Tensor],
        model: _WholeModel,
    ) -> None:
        """settings, values: of all ranks. Nothing is changed yet."""
        self._known = known
        self._parameters = model.parameters
        self._states = [_state_of(each, settings["optimizers"][at], values) for at, each in enumerate(known)]
        self._parts = [(each.optimizer.param_groups, each.optimizer.state) for each in known]

    def __enter__(self) -> "_WholeOptimizers":
        for known, state in zip(self._known, self._states, strict=True):
            held = known.optimizer
            held.param_groups = [
                {**group, "params": [self._parameters[name] for name in names]}
                | ({"param_names": list(names)} if "param_names" in group else {})
                for group, names in zip(held.param_groups, known.given, strict=True)
            ]
            held.state = defaultdict(dict, {self._parameters[name]: each for name, each in state.items()})
        return self

    def __exit__(self, *_: object) -> None:
        for known, (groups, state) in zip(self._known, self._parts, strict=True):
            known.optimizer.param_groups, known.optimizer.state = groups, state

    def _names(self) -> dict[torch.Tensor, str]:
        return {each: name for name, each in self._parameters.items()}

    def values(self) -> Pieces:
        """The state that they have now."""
        found: Pieces = {}
        for known in self._known:
            for name, key, tensor in known.entries(self._names()):
                found |= whole(state_name(name, key), tensor)
        return found

    def settings(self) -> dict[str, Any]:
        """Their groups and settings now, as a checkpoint has them."""
        return {"optimizers": [known.named_with_state(self._names()).to_json() for known in self._known]}

    def versions(self) -> list[Any]:
        """Others after every write, and where a state was loaded."""
        found: list[Any] = []
        for known in self._known:
            found += [id(known.optimizer.state), known.named().to_json()]
            for state in known.optimizer.state.values():
                found += [(id(each), each._version) for each in state.values() if isinstance(each, torch.Tensor)]
        return found


def _refuse_one_sided(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise ModelError, the same on all ranks, where the body failed on a rank, or only some of them wrote."""
    if failed := [rank for rank, each in enumerate(answers) if "failed" in each]:
        raise ModelError(f"inside engine.whole(), rank {failed[0]} raised {answers[failed[0]]['failed']}")
    if 0 < len(wrote := [rank for rank, each in enumerate(answers) if each]) < len(answers):
        raise ModelError(
            f"inside engine.whole(), only the ranks {wrote} wrote to the model or to an optimizer, and that is lost. "
            "Make the same calls on all ranks, or use engine.whole(rank0_only=True)"
        )


def _take_in(engine: "Engine", message: Mapping[str, Any], written: Pieces, *, optimizer: bool) -> None:
    """Give what rank 0 wrote to the ranks that hold it; alike on all ranks."""
    with agreed(engine.channel, purpose="verdict on the values written inside engine.whole()"):
        stored = {piece.name: piece for piece in whole_pieces(message["stored"])}
        restoration = engine.restore(stored, message["settings"] if optimizer else {})
        if optimizer and restoration.findings:
            raise CheckpointError("what was written inside engine.whole(): " + "; ".join(restoration.findings))
    reshard(written, targets_of(restoration, engine.model), engine.channel, cast=True)
    restoration.finish()
