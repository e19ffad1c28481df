"""The state of an engine as pieces: what a checkpoint saves, what a load wants, what another plan takes over.

    a weight 4 x 2 in bfloat16, owner 0 of 2, AdamW:
        w                      run [0, 4) of 8    bfloat16    the owner's part of the working copy
        optimizer/w/master     run [0, 4) of 8    float32
        optimizer/w/exp_avg    run [0, 4) of 8    float32     under torch's key
        optimizer/w/step       whole              float32     every owner has it; it is saved once

All are views of live memory: a save copies nothing, and a load writes where training goes on. A load:

    [1] prepare   changes nothing: masters, buffers and unfused parameters are wanted in place; optimizer state in
                  place where the live tensor fits, else in fresh ones
    [2] (a load gathers all verdicts, then writes the wanted values)
    [3] finish    optimizer state and settings become the optimizers' own; masters are cast into the working copies,
                  and every bucket is gathered

What moves between ranks without a file has the names of the plain model: a master held apart stands for its parameter,
and a move casts (`sources_of`, `targets_of`). Buffers are those of the model, also what checkpoints leave out.
"""

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.local_tensors import dtype_name, torch_dtype
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.model.rank_parts import RankParts
from shardwise.engine.optimizers.known import KnownOptimizer
from shardwise.engine.optimizers.trials import with_shells
from shardwise.engine.step.edges import EntryRestoration
from shardwise.engine.step.loss_scaling import of_settings
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, load_alone, loads_as_torch_does, not_in_files
from shardwise.engine.zero.flat_params import FlatParams, Owned, placed, whole
from shardwise.errors import CheckpointError
from shardwise.moving import Gathering
from shardwise.moving.piece_exchange import PIECES, pack_pieces, tensors_in
from shardwise.plan.names import MASTER, named_by_wrappers, split_state_name, state_name
from shardwise.plan.optimizer_entries import (
    LiveParameter,
    OptimizerEntry,
    flat_once,
    has_own_form,
    has_updated,
    names_without_elements,
    plan_optimizers,
)
from shardwise.plan.saved_settings import settings_apart, stored_names, stored_ties, take_over, take_over_shared
from shardwise.space import Piece

Pieces = dict[Piece, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOver:
    """All that another engine needs to go on with the model."""

    rank: RankParts
    state: Pieces
    settings: dict[str, Any]
    optimizers: tuple[KnownOptimizer, ...]
    """With what came into their groups."""
    frozen: frozenset[str]
    """Parameters that are trained when they are unfrozen again."""
    unfrozen: frozenset[str]
    """Parameters that were frozen so far: they begin without optimizer state."""


def state_of(rank: RankParts, optimizers: Sequence[KnownOptimizer]) -> Pieces:
    """Everything this rank owns, as views: parameters, masters, optimizer state; buffers and unfused parameters whole.

    Names: a parameter's own name for its working copy, `optimizer/<parameter>/master` for a master of another dtype,
    and `optimizer/<parameter>/<key>` for the optimizer's state under torch's key; `weight_average` is that of averages.
    Where these are in the place of the weights, there is the model alone. Raises OptimizerError for state that is
    neither a tensor nor a number.
    """
    inventory, buffers, averages = rank.tensors.owned, rank.tensors.buffers, rank.updates.averages
    state = state_of_model(inventory, rank.model, buffers)
    if averages is not None and averages.are_in:
        return state
    updated = {each.segment.name: each for each in rank.updates.updated}
    updated_spec_of = {spec.name: spec for spec in inventory.uncut(buffers.ownership.homes).specs}
    for known in optimizers:
        for name, key, tensor in known.entries(rank.updates.name_of()):
            owned = updated[name]
            # The shape alone is not enough: the `step` of a scalar parameter has the shape of the parameter.
            if tensor.shape == owned.parameter.shape and key not in known.traits.whole_keys:
                state |= placed(state_name(name, key), tensor, updated_spec_of[name], owned.segment)
            else:
                state |= whole(state_name(name, key), tensor)
    return state if averages is None else state | averages.pieces()


def state_of_model(inventory: Inventory, model: nn.Module, buffers: FlatParams) -> Pieces:
    """The part of the state that does not depend on optimizers."""
    state: Pieces = {}
    spec_of = {spec.name: spec for spec in inventory.specs}
    for bucket in buffers.buckets:
        for name, segment in bucket.segments.items():
            span = slice(segment.start, segment.start + segment.run.num_elements)
            # Of two copies in one dtype, the one that the optimizer writes: a checkpoint is the same with `offload`.
            held = bucket.part if bucket.is_cast else bucket.master
            state |= placed(name, held[span], spec_of[name], segment)
            if bucket.is_cast:
                state |= placed(state_name(name, MASTER), bucket.master[span], spec_of[name], segment)
    for spec in inventory.specs:
        # Not fused into a bucket: every data rank has it whole, and a save takes it from one of them.
        if not buffers.holds(spec.name) or not spec.num_elements:  # what has no elements is in nobody's part
            state |= placed(spec.name, inventory.parameters[spec.name].detach(), spec)
    persistent = set(names_of_state(model))
    return state | {piece: buffer for piece, buffer in _buffers(model).items() if piece.name in persistent}


def names_of_state(model: nn.Module) -> list[str]:
    """Names of the model's parameters and persistent buffers in its own order, ties under each of their names."""
    # Not those of `state_dict`: torch's `checkpoint_wrapper` has other names there than in `named_parameters`.
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None and key not in not_in_files(module)
    ]


class EngineRestoration:
    """A load into an engine that is about to happen. Nothing has changed yet."""

    def __init__(
        self,
        rank: RankParts,
        optimizers: Sequence[KnownOptimizer],
        *,
        stopping_peers: Callable[[], AbstractContextManager[None]],
        stored: Mapping[str, Piece],
        settings: Mapping[str, Any],
        take_note: Callable[[], None],
    ) -> None:
        """`optimizers`: with what came into their groups. `take_note`: called once it is done."""
        model, inventory, buffers, aliases = rank.model, rank.tensors.owned, rank.tensors.buffers, rank.names.ties
        self._rank = rank
        self._take_note = take_note
        self._spec_of = {spec.name: spec for spec in inventory.specs}
        self._updated_spec_of = {spec.name: spec for spec in inventory.uncut(buffers.ownership.homes).specs}
        self._random = _random_of(settings)
        self._loss_scale = of_settings(settings)
        self._optimizers = optimizers
        self._stopping_peers = stopping_peers
        # Before anything is written: a buffer that a forward changed and the ranks have not agreed on yet stays
        # pending over the load.
        self._pending_buffers = rank.tensors.model_buffers.changed()
        buffers.settle()
        own = [spec.name for spec in inventory.specs] + [name for name, _ in model.named_buffers()]
        self.aliases: Mapping[str, str] = {
            **named_by_wrappers(stored, {**{name: name for name in own}, **aliases}),
            **aliases,
        }
        """Other names of wanted tensors, of ties and of modules with other wrappers: alias -> name."""
        self._trained = list(_trained(rank.updates.updated, optimizers))
        self._plan = plan_optimizers(
            [known.named() for known in optimizers],
            [self._live(known, owned) for known, _, owned in self._trained],
            self.aliases,
            stored=stored,
            settings=settings,
        )
        own = [type(known.optimizer).__name__ for known in optimizers if has_own_form(known.optimizer)]
        self.findings: Sequence[str] = (
            *self._plan.findings,
            *(
                f"{each} has a load_state_dict of its own for the state in this file, and an engine cannot call it for "
                "its parts. Load it into sw.checkpoint.TorchState(model, optimizer), save that, and load the save here"
                for each in own
                if self._plan.is_of_a_file
            ),
        )
        """What of the stored settings does not fit."""
        # Working copies that have a master are not read: [3] casts them, and the two cannot disagree.
        cast = buffers.cast_from_masters()
        shapes = {spec.name: spec.global_shape for spec in inventory.specs}
        empty = names_without_elements(shapes, self.aliases, stored=stored, settings=settings)
        self.accounted: Collection[str] = empty | {name for name in cast if 0 not in shapes[name]}
        """Names that are not read: working copies, made from masters, and parameters without elements."""
        self._resized = _resized_buffers(model, self.aliases, stored, settings)
        self.wanted: Pieces = {
            piece: tensor
            for piece, tensor in state_of_model(inventory, model, buffers).items()
            if piece.name not in self.accounted and piece.name not in self._resized
        }
        """What to read, and the tensors that take it."""
        for name, (_, room) in self._resized.items():
            self.wanted |= whole(name, room)
        self._taken: dict[str, dict[str, torch.Tensor]] = {}
        given: set[int] = set()
        for known, group, owned in self._trained:
            self._want_state(known, group, owned, given)
        self._averages: EntryRestoration | None = None
        self.notes: Sequence[str] = ()
        """What the load decides, and refuses nothing for."""
        if rank.updates.averages is not None:
            self._averages = rank.updates.averages.restoration(stored, settings, self.aliases)
            self.wanted |= self._averages.wanted
            self.notes = self._averages.notes

    def leave_entries(self) -> None:
        """Averages and the record stay what they are: this is no load of a whole model."""
        self._averages, self._take_note = None, lambda: None

    def finish(self) -> None:
        """Make the values that were read the engine's own; one all-gather per bucket, which all ranks call together."""
        rank = self._rank
        with self._stopping_peers(), torch.no_grad():
            over = self._plan.over
            for known, taken, shared in zip(self._optimizers, over.settings, over.shared, strict=True):
                for group, settings in zip(known.optimizer.param_groups, taken, strict=True):
                    take_over(group, settings)
                take_over_shared(known.optimizer.state, shared)
            for known, settings_of, owned in self._trained:
                if not self._plan.replaces_state_of(owned.segment.name):
                    continue
                # Replaced as a whole: a key that the checkpoint does not have must not survive from the run before.
                known.optimizer.state.pop(owned.parameter, None)
                if state := self._plan.state_of(owned.segment.name, self._taken[owned.segment.name]):
                    with DisableTorchFunctionSubclass():  # it has a shape, if no values between two updates
                        like = owned.parameter.detach()
                    own = with_shells(known.optimizer, dict(settings_of), like, state)
                    known.optimizer.state[owned.parameter] = own
            for known in self._optimizers if self._plan.is_of_a_file else ():
                # As `load_state_dict` does: torch before 1.12 had `step` as a number, which today's Adam refuses.
                known.optimizer.__setstate__(
                    {"state": known.optimizer.state, "param_groups": known.optimizer.param_groups}
                )
            if self._averages is not None:
                self._averages.finish()
            # After the masters: the working copies of all ranks follow from them, and replicas of ties from these.
            rank.tensors.buffers.publish_restored(rank.updates.counters)
            rank.tensors.ties.publish_restored()
            if self._random is not None:
                rank.computation.random.seed, rank.computation.step = self._random
            if self._loss_scale is not None and rank.computation.loss_scale is not None:
                rank.computation.loss_scale.restore(self._loss_scale)
            self._take_note()
            for buffer, room in self._resized.values():
                buffer.data = room  # the object stays the module's
            rank.tensors.model_buffers.agreed_unless(self._pending_buffers)

    def _live(self, known: KnownOptimizer, owned: Owned) -> LiveParameter:
        state = known.optimizer.state.get(owned.parameter, {})
        return LiveParameter(
            name=owned.segment.name,
            shape=self._spec_of[owned.segment.name].global_shape,
            dtype=dtype_name(owned.parameter.dtype),
            has_state=has_updated(state),
            whole_keys=known.traits.whole_keys,
        )

    def _want_state(self, known: KnownOptimizer, group: Mapping[str, Any], owned: Owned, given: set[int]) -> None:
        """Make room for the state of a parameter. given: see `flat_once`."""
        name = owned.segment.name
        live = flat_once(known.optimizer.state.get(owned.parameter, {}), given)
        self._taken[name] = {}
        for entry in self._plan.entries.get(name, ()):
            tensor = _room_for(entry, live.get(entry.key), group, owned.parameter)
            if entry.along:
                self.wanted |= placed(entry.whole.name, tensor, self._updated_spec_of[name], owned.segment)
            else:
                self.wanted |= whole(entry.whole.name, tensor)
            self._taken[name][entry.key] = tensor


def _resized_buffers(
    model: nn.Module, aliases: Mapping[str, str], stored: Mapping[str, Piece], settings: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Buffers that are stored in another shape, which their module takes, and room for it: {name: (buffer, room)}."""
    held = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    found: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, called in stored_names(list(held), aliases, stored, stored_ties(settings)).items():
        owner, buffer = name.rpartition(".")[0], held[name]
        if buffer.shape != (shape := torch.Size(stored[called].global_shape)):
            found.setdefault(owner, {})[name] = buffer, torch.zeros(shape, dtype=buffer.dtype, device=buffer.device)
    return {
        name: each for owner, of in found.items() if _takes(model.get_submodule(owner), of) for name, each in of.items()
    }


def _takes(module: nn.Module, resized: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the module loads a state with buffers of these shapes: a copy of it is asked, as torch would ask it."""
    if loads_as_torch_does(module):
        return False  # it refuses other shapes
    twin = copy.copy(module)
    vars(twin).update(_parameters={}, _modules={}, _buffers={})
    for key, buffer in module._buffers.items():
        twin._buffers[key] = None if buffer is None else buffer.detach().clone()
    given = {name.rpartition(".")[2]: room for name, (_, room) in resized.items()}
    state = {key: buffer.clone() for key, buffer in twin._buffers.items() if buffer is not None} | given
    errors = load_alone(twin, state)
    taken = {key: buffer.shape for key, buffer in twin._buffers.items() if buffer is not None}
    return not errors and all(taken.get(key) == room.shape for key, room in given.items())


def _random_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Seed and step of the checkpoint's random numbers; None where it has none."""
    if "random" not in settings:
        return None
    random = settings["random"]
    found = [random.get(key) for key in ("seed", "step")] if isinstance(random, dict) else []
    match found:
        case [int(seed), int(step)]:
            return seed, step
    raise CheckpointError(
        f"the checkpoint's settings have random={random!r}, which is not a seed and a step. No engine wrote it, or it "
        "was changed since"
    )


def _trained(
    updated: Sequence[Owned], optimizers: Sequence[KnownOptimizer]
) -> Iterator[tuple[KnownOptimizer, Mapping[str, Any], Owned]]:
    """Everything that is trained here, with its optimizer and group."""
    # By the master object: groups of an optimizer hold masters, since `swap`.
    owned_of = {owned.parameter: owned for owned in updated}
    for known in optimizers:
        for group in known.optimizer.param_groups:
            for parameter in group["params"]:
                yield known, group, owned_of[parameter]


def _room_for(entry: OptimizerEntry, live: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """The live tensor where it can take the entry, else a fresh one."""
    dtype = torch_dtype(entry.whole.dtype)
    shape = parameter.shape if entry.along else torch.Size(entry.whole.global_shape)
    if isinstance(live, torch.Tensor) and live.dtype == dtype and live.shape == shape and live.is_contiguous():
        return live
    if isinstance(live, torch.Tensor):
        # Where the optimizer has it now, which it chose itself.
        device = live.device
    else:
        device = torch.device("cpu") if entry.on_host(group) else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def sources_of(handed: HandOver) -> Pieces:
    """This rank's state, each value once: a master held apart stands for its parameter, under the parameter's name."""
    # Another plan may hold masters apart where this one does not, or the other way round. Under one name the two
    # meet, and the move casts.
    masters = {split[0] for piece in handed.state if (split := split_state_name(piece.name)) and split[1] == MASTER}
    given = {_of_parameter(piece): tensor for piece, tensor in handed.state.items() if piece.name not in masters}
    return given | _buffers(handed.rank.model)


def targets_of(restoration: EngineRestoration, model: nn.Module) -> Mapping[Piece, torch.Tensor | None]:
    """What takes them over, with buffers."""
    wanted = {_of_parameter(piece): tensor for piece, tensor in restoration.wanted.items()}
    return _buffers(model) | wanted


def _of_parameter(piece: Piece) -> Piece:
    split = split_state_name(piece.name)
    return piece if split is None or split[1] != MASTER else replace(piece, name=split[0])


def _buffers(model: nn.Module) -> Pieces:
    """All buffers that are here, also those that checkpoints leave out."""
    pieces: Pieces = {}
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:  # another stage has it
            pieces |= whole(name, buffer.detach())
    return pieces


def stored_of_all(channel: Channel, pieces: Pieces) -> tuple[dict[str, Piece], Gathering]:
    """Every tensor that ranks hold together in these pieces, as one piece, as a checkpoint would hold it.

    The gathering then knows the pieces of all ranks: with it, a move of them does not send their texts again.
    """
    gathering = Gathering(PIECES)
    (texts,) = gathering.gather(channel, [pack_pieces(list(pieces))])
    return tensors_in(texts), gathering


def settings_texts(settings: Mapping[str, Any]) -> list[bytes]:
    """The settings of a rank, as they travel."""
    return [json.dumps(each).encode() for each in settings_apart(settings)]
