"""The model and its optimizers whole on a rank, for a while: what the plain program would have.

[1] gather     parameters (their masters, in the dtype in which the model came), buffers, optimizer state; rank to rank
[2] put in     whole tensors take the places of parts; the layers of the plan and the refusals come off
[3] the body   state_dict(), save_pretrained(), deepcopy(), torch.save(), load_state_dict()
[4] put back   the parts; where the body wrote, the values of rank 0 go to the ranks that hold them

A rank that takes no part keeps its parts, and waits in [4].
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.comm.agreement import a_table, aborting, agreed, of_form, understood
from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.aside import kept_attributes
from shardwise.engine.forward.batch_digests import digest_of_lines
from shardwise.engine.forward.inventory import all_carried, kind_in, named_places, with_values
from shardwise.engine.forward.layers import is_ours, unwrap
from shardwise.engine.guards.plain_calls import PlainCalls
from shardwise.engine.model.rank_parts import ModelNames
from shardwise.engine.model.state import (
    EngineRestoration,
    HandOver,
    Pieces,
    settings_texts,
    sources_of,
    stored_of_all,
    targets_of,
)
from shardwise.engine.optimizers.known import KnownOptimizer, of_no_parameter
from shardwise.engine.optimizers.trials import with_shells
from shardwise.engine.parameter_kinds import Swapped, inner_by_path, is_shell
from shardwise.engine.torch_private import COMPILED_CALL, HOOKS_OF_MODULES, DisableTorchFunctionSubclass, version_of
from shardwise.engine.zero.flat_params import whole
from shardwise.errors import CheckpointError, MismatchError, ModelError, few_of
from shardwise.moving import Gathering, reshard
from shardwise.moving.live_states import reshard_told
from shardwise.moving.piece_exchange import merged_settings, pack_pieces, tensors_in
from shardwise.plan import Parameter
from shardwise.plan.names import any_matches, holds_weights, is_state_name, split_state_name, state_name, unmatched
from shardwise.plan.optimizer_entries import flat_state, nested_state
from shardwise.plan.outlines import parents
from shardwise.plan.saved_settings import PYTHON_DTYPES
from shardwise.space import Piece

Restore: TypeAlias = Callable[[Mapping[str, Piece], Mapping[str, Any]], EngineRestoration]
"""Prepares a load into the whole model, as `Engine.restore` does."""

_PURPOSE = "the whole model"


@contextmanager
def whole_inside(
    hand_over: Callable[[], HandOver],
    restore: Restore,
    plain_calls: PlainCalls,
    *,
    optimizer: bool,
    rank0_only: bool,
    offload: bool,
    only: Collection[str] | None,
) -> Iterator[None]:
    """Let the model be whole inside (`Engine.whole`). only: globs or names."""
    handed = hand_over()
    channel = handed.rank.channels.world
    ranks = range(1) if rank0_only else range(channel.size)
    changes = _Changes()
    failure: Exception | None = None
    with aborting(channel, "engine.whole()"):
        settings, values = _gathered(handed, optimizer=optimizer, offload=offload, ranks=ranks, only=only)
        with ExitStack() as stack:
            stack.enter_context(plain_calls.waiting())
            held = None
            if channel.rank in ranks:
                stack.enter_context(plain_calls.lifted())
                model = stack.enter_context(_WholeModel(handed.rank.model, handed.rank.names, values))
                known = handed.optimizers if optimizer else ()
                held = model, stack.enter_context(_WholeOptimizers(known, settings, values, model))
                before = model.versions(), held[1].versions()
            try:
                yield
                if held is not None:
                    changes = _changes_since(*before, *held)
            except Exception as error:
                failure = error
        # Ranks that take no part wait here, and all learn whether the body failed or wrote somewhere.
        said = {"failed": f"{type(failure).__name__}: {failure}"} if failure is not None else changes.described()
        ends = channel.exchange(json.dumps(said).encode(), purpose=f"the end of {_PURPOSE}")
        answers = understood(ends, _end_in, purpose=_PURPOSE)
        if failure is None:
            _refuse_one_sided(answers, ranks)
            if answers[0]:
                _take_in(handed, restore, answers[0], changes.written if channel.rank == 0 else {})
    if failure is not None:
        raise failure


def _gathered(
    handed: HandOver, *, optimizer: bool, offload: bool, ranks: range, only: Collection[str] | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings that all ranks know together, and the whole tensors by name, on ranks that take part."""
    channel = handed.rank.channels.world
    asked = f"optimizer={optimizer}, rank0_only={ranks == range(1)}, offload={offload}"
    if only is not None:
        asked += f", only={few_of(sorted(only))} (digest {digest_of_lines(sorted(only))[:8]})"
    with Gathering(f"settings of {_PURPOSE}").agreed(channel) as gathered:
        gathered.own = settings_texts(handed.settings)
        gathered.value = asked.encode()
    calls = [each.decode(errors="replace") for each in gathered.values]
    if other := [rank for rank, each in enumerate(calls) if each != calls[0]]:
        raise MismatchError(
            f"rank {other[0]} calls engine.whole({calls[other[0]]}), but rank 0 engine.whole({calls[0]}); make the "
            "same call on all ranks"
        )
    settings = merged_settings(gathered.texts, purpose=f"settings of {_PURPOSE}")
    sources = {
        piece: each
        for piece, each in sources_of(handed).items()
        if not is_state_name(piece.name) or (optimizer and not holds_weights(piece.name))
    }
    if only is not None:
        meant = _meant(handed, only)
        sources = {
            piece: each
            for piece, each in sources.items()
            if is_state_name(piece.name) or _parameter_of(piece.name) in meant
        }
    stored, held = stored_of_all(channel, sources)
    shapes: dict[str, torch.Tensor] = {}
    if only is not None:
        # State of the others has shapes alone, but for numbers: optimizers turn these into Python's.
        left = {name for name, each in stored.items() if each.global_shape and _parameter_of(name) not in meant}
        shapes = {
            name: torch.empty(stored[name].global_shape, dtype=torch_dtype(stored[name].dtype), device="meta")
            for name in left
        }
        stored = {name: each for name, each in stored.items() if name not in left}
        sources = {piece: each for piece, each in sources.items() if piece.name not in left}
    wanted: Pieces = {}
    if channel.rank in ranks:
        dtypes = {spec.name: spec.dtype for spec in handed.rank.names.specs}
        for name, piece in stored.items():
            split = split_state_name(name)
            # Where torch has the count of updates, whatever the device.
            on_host = offload or (split is not None and split[1] == "step")
            device = torch.device("cpu") if on_host else channel.device
            dtype = torch_dtype(dtypes.get(name, piece.dtype))
            wanted |= whole(name, torch.empty(piece.global_shape, dtype=dtype, device=device))
    moved = reshard_told(sources, wanted, channel, held, cast=True, compare=False)
    return settings, shapes | {piece.name: tensor for piece, tensor in moved.items()}


def _meant(handed: HandOver, only: Collection[str]) -> frozenset[str]:
    """The parameters and buffers that `only` means. Raises ModelError, the same on all ranks, where that is nothing."""
    names = {spec.name: (spec.name, *spec.aliases) for spec in handed.rank.names.specs}
    buffers: dict[int, list[str]] = {}
    for name, each in handed.rank.model.named_buffers(remove_duplicate=False):
        buffers.setdefault(id(each), []).append(name)
    names |= {each[0]: tuple(each) for each in buffers.values()}
    # The name of a packed weight means what belongs to it, too: its codes are worth nothing alone.
    belongs = {name: leads for name in names if (leads := [each for each in parents(name) if each in names])}
    names |= {name: (*names[name], *leads) for name, leads in belongs.items()}
    # Names first: a large model may have thousands, and a glob would compare each with all others.
    asked = frozenset(only)
    exact = {name for name, alike in names.items() if not asked.isdisjoint(alike)}
    known = {each for name in exact for each in names[name]}
    globs = [each for each in only if each not in known]
    if problems := unmatched(
        globs, [each for alike in names.values() for each in alike], role="engine.whole(only=...)"
    ):
        raise ModelError(*problems)
    # Numbers that belong to packed weights are always there: modules write them into texts of their state dicts.
    exact |= {spec.name for spec in handed.rank.names.specs if spec.name in belongs and not spec.shape}
    return frozenset(exact | {name for name, alike in names.items() if globs and any_matches(globs, alike)})


def _parameter_of(name: str) -> str:
    split = split_state_name(name)
    return name if split is None else split[0]


def _state_of(known: KnownOptimizer, settings: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """For each parameter that an optimizer trains its state, by torch's keys, in the order of its groups."""
    found: dict[str, dict[str, Any]] = {name: {} for names in known.parameters for name in names}
    for name, tensor in values.items():
        if (split := split_state_name(name)) is not None and split[0] in found:
            python = settings["plain"].get(split[1])
            is_python = python is not None and not tensor.dim() and tensor.dtype == torch_dtype(PYTHON_DTYPES[python])
            found[split[0]][split[1]] = tensor.item() if is_python else tensor
    states = {name: nested_state(state) for name, state in found.items() if state}
    for state in states.values():
        for key in settings["none"]:
            state.setdefault(key, None)
    return states


def _values_of(spec: Parameter, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if (tensor := values.get(spec.name)) is None:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
    return tensor


class _WholeModel:
    """A model with whole tensors in the places of parts, as long as this is entered."""

    def __init__(self, model: nn.Module, names: ModelNames, values: Mapping[str, torch.Tensor]) -> None:
        """values: of parameters and buffers, by the names of the engine; others have none. Nothing is changed yet."""
        self._model = model
        self._ties = ties = names.ties
        specs = {spec.name: spec for spec in names.specs}
        self.parameters: dict[str, nn.Parameter] = {}
        self._parts = [(module, key, place, held) for module, key, place, held in named_places(model)]
        for _, _, place, part in self._parts:
            name = ties.get(place, place)
            if is_shell(part):  # stays, and what is inside gets the whole content
                self.parameters[name] = part
            elif name not in self.parameters:
                self.parameters[name] = with_values(part, _values_of(specs[name], values))
        self._carried = list(all_carried(model, ties))
        self._contents = {each.name: _values_of(specs[each.name], values) for each in self._carried if not each.is_view}
        self._swapped: Swapped = []
        name_of = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffers = [
            (module._buffers, key, buffer, values.get(name_of[id(buffer)], buffer.to("meta")))
            for module in model.modules()
            for key, buffer in module.named_buffers(recurse=False)
        ]
        self._put_layers_back: Callable[[], None] = lambda: None
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> "_WholeModel":
        for each in self._model.modules():
            for hooks in [held for name, held in vars(each).items() if name in HOOKS_OF_MODULES and held]:
                self._hooks.append((hooks, dict(hooks)))
                for number in [number for number, hook in hooks.items() if is_ours(hook)]:
                    del hooks[number]
        self._put_layers_back = kept_attributes(self._model.modules(), names=("forward", COMPILED_CALL))
        unwrap(self._model)
        for module, key, place, _ in self._parts:
            # Not register_parameter: recurrent modules keep lists of theirs.
            setattr(module, key, self.parameters[self._ties.get(place, place)])
        for buffers, key, _, values in self._buffers:
            buffers[key] = values
        self._swapped = kind_in(self._model).put_in(self._model, self._carried, self._contents)
        return self

    def __exit__(self, *error: object) -> None:
        for module, key, place, part in self._parts:
            setattr(module, key, part)
            trains = self.parameters[self._ties.get(place, place)].requires_grad
            if part.requires_grad != trains and error == (None, None, None):
                with DisableTorchFunctionSubclass():  # at rest or not
                    part.requires_grad_(trains)
        for buffers, key, buffer, _ in self._buffers:
            buffers[key] = buffer
        for each, content in reversed(self._swapped):
            torch.utils.swap_tensors(each, content)
        self._put_layers_back()
        for hooks, order in self._hooks:
            added = {number: hook for number, hook in hooks.items() if number not in order}
            hooks.clear()
            hooks.update(order | added)

    def _now(self) -> dict[str, torch.Tensor]:
        places = {place: getattr(module, key) for module, key, place, _ in self._parts if place not in self._ties}
        carried = {each.name: each.tensor for each in all_carried(self._model, self._ties) if not each.is_view}
        return {
            name: each
            for name, each in (places | dict(self._model.named_buffers()) | carried).items()
            if not is_shell(each)
        }

    def values(self, names: Sequence[str]) -> Pieces:
        """What is in their places now."""
        now = self._now()
        found: Pieces = {}
        for name in names:
            found |= whole(name, now[name].detach())
        return found

    def versions(self) -> dict[str, object]:
        """By name, another after every write, and where another tensor was put in."""
        return {name: _version_of(each) for name, each in self._now().items()}


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
            group_of = {id(each): group for group in held.param_groups for each in group["params"]}
            held.state = defaultdict(dict, of_no_parameter(held.state))
            for name, each in state.items():
                parameter = self._parameters[name]
                held.state[parameter] = with_shells(held, group_of[id(parameter)], parameter.detach(), each)
        return self

    def __exit__(self, *error: object) -> None:
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
        return {"optimizers": [known.named(self._names()).to_json() for known in self._known]}

    def versions(self) -> list[Any]:
        """Others after every write, and where a state was loaded."""
        found: list[Any] = []
        for known in self._known:
            found += [id(known.optimizer.state), known.named().to_json()]
            found += [
                _version_of(each) for state in known.optimizer.state.values() for each in flat_state(state).values()
            ]
        return found


def _version_of(value: object) -> object:
    """Another after every write to a tensor, and for another value."""
    if isinstance(value, torch.Tensor) and is_shell(value):
        return id(value), *map(_version_of, inner_by_path(value).values())
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return id(value), version_of(value)
        # Torch counts no writes to `.data`, and none through numpy.
        return id(value), version_of(value), digest_of_values(value)
    return value if isinstance(value, int | float) else id(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Changes:
    """What the body wrote."""

    written: Pieces = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of optimizers, where it wrote to one."""

    def described(self) -> dict[str, Any]:
        """As JSON, without the values; empty where nothing was written."""
        if not self.written and not self.settings:
            return {}
        return {"stored": pack_pieces(list(self.written)).decode(), "settings": self.settings}


def _changes_since(
    model_before: Mapping[str, object], before: Sequence[object], model: _WholeModel, optimizers: _WholeOptimizers
) -> _Changes:
    names = [name for name, each in model.versions().items() if model_before[name] != each]
    written = model.values(names)
    settings: Mapping[str, Any] = {}
    if before != optimizers.versions():
        written, settings = written | optimizers.values(), optimizers.settings()
    if lost := [piece.name for piece, each in written.items() if each.is_meta]:
        raise ModelError(f"{lost[0]!r} was written to, and engine.whole(only=...) leaves it out; add it to `only`")
    return _Changes(written=written, settings=settings)


def _end_in(answer: bytes) -> dict[str, Any]:
    said = a_table(answer)
    if "failed" in said:
        of_form(said["failed"], str)
    elif said:
        of_form([said["stored"], said["settings"]], tuple[str, dict[str, Any]])
    return said


def _refuse_one_sided(answers: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ModelError, the same on all ranks, where the body failed on a rank, or only some of `ranks` wrote."""
    if failed := [rank for rank, each in enumerate(answers) if "failed" in each]:
        raise ModelError(f"inside engine.whole(), rank {failed[0]} raised {answers[failed[0]]['failed']}")
    if 0 < len(wrote := [rank for rank in ranks if answers[rank]]) < len(ranks):
        raise ModelError(
            f"inside engine.whole(), only the ranks {wrote} wrote to the model or to an optimizer, and that is lost. "
            "Make the same calls on all ranks, or use engine.whole(rank0_only=True)"
        )


def _take_in(handed: HandOver, restore: Restore, message: Mapping[str, Any], written: Pieces) -> None:
    """Give what rank 0 wrote to the ranks that hold it. All ranks call this, with the message of rank 0."""
    with agreed(handed.rank.channels.world, purpose="verdict on the values written inside engine.whole()"):
        stored = tensors_in([message["stored"].encode()])
        restoration = restore(stored, message["settings"])
        # Without settings no optimizer was written to: it goes on with its state.
        if message["settings"] and restoration.findings:
            raise CheckpointError("what was written inside engine.whole(): " + "; ".join(restoration.findings))
        restoration.leave_entries()
    # No others: a master that is wider than the model's own dtype would be rounded.
    targets = {
        piece: each for piece, each in targets_of(restoration, handed.rank.model).items() if piece.name in stored
    }
    reshard(written, targets, handed.rank.channels.world, cast=True, compare=False)
    restoration.finish()
