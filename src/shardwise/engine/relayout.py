"""Relayout: the model of a running engine under another plan, without a file.

[1] hand over   the old engine's state as pieces, with its settings, and a snapshot to go back to
[2] empty       every parameter and buffer of the model becomes one without values
[3] plan        the model is put under the new plan, as any model without values is
[4] move        pieces of the old layout to those of the new one, from rank to rank

w 4 x 2 = [[0 1] [2 3] [4 5] [6 7]], from 2 owners of slices to tp = 2, cut by columns:

    rank 0   0 1 2 3   --+--[4]--+-->   0 2 4 6      a rank holds its old part and its new one until [4] has ended,
    rank 1   4 5 6 7   --+       +-->   1 3 5 7      never the whole model
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import aborting, agreed
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.forward.aside import kept_attributes
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.inventory import all_carried, exchange, kind_in, named_places, take_over, with_values
from shardwise.engine.forward.kept_objects import aliases_in, take_along
from shardwise.engine.model.rank_parts import Asked, Settled
from shardwise.engine.model.state import (
    EngineRestoration,
    HandOver,
    settings_texts,
    sources_of,
    stored_of_all,
    targets_of,
)
from shardwise.engine.optimizers.known import of_no_parameter
from shardwise.engine.parameter_kinds import Swapped, is_shell
from shardwise.errors import CheckpointError, PlanError, ShardwiseError
from shardwise.moving import Gathering
from shardwise.moving.live_states import reshard_told
from shardwise.moving.piece_exchange import merged_settings
from shardwise.plan import Parameter, Plan
from shardwise.plan.saved_settings import ADDED
from shardwise.space import Piece

Model = TypeVar("Model", bound=nn.Module)


def relayout(engine: Engine[Model], plan: Plan) -> Engine[Model]:
    """Put the model of an engine under another plan: an engine that goes on where this one is, to the bit.

    Parameters, masters, optimizer state, averages of the weights (where the new plan keeps some), buffers, the step and
    the random numbers stay what they are. The optimizers stay the same objects, with their settings and with the
    schedulers that hold them. All ranks call it together. What a rank holds meanwhile is its state under the old plan
    and under the new one. The old engine is used up.

    Raises the errors of `parallelize`, the same on all ranks: then the old engine goes on. PeerError when a rank is
    lost on the way: then neither does.
    """
    if not isinstance(engine, Engine):
        raise PlanError(f"relayout was given a {type(engine).__name__}; give the engine that sw.parallelize returned")
    return _relaid(engine, plan)


def _relaid(engine: Engine[Model], plan: Plan, counters: Counters | None = None) -> Engine[Model]:
    handed = engine.hand_over()
    channel = handed.rank.channels.world
    swapped: Swapped = []
    engine._rank.updates.plain_calls.reads.turn(on=False)
    with aborting(channel, "relayout"), _going_back(engine, handed, swapped):
        sources = sources_of(handed)
        settings = _settings_of_all(channel, handed, plan)
        aliases = aliases_in(engine.model, dict(engine.model.named_parameters()))
        stored, held = stored_of_all(channel, sources)
        _empty(handed, swapped)
        old, runner = engine.plan, engine.pipeline
        has_stages = runner is not None and (plan.mesh.pp, plan.pipeline) == (old.mesh.pp, old.pipeline)
        has_cuts = plan.mesh.tp > 1 and (plan.mesh.tp, plan.tensor) == (old.mesh.tp, old.tensor)
        asked = Asked(
            loss=handed.rank.computation.loss,
            plan=plan,
            optimizer=tuple(known.optimizer for known in handed.optimizers),
            channel=channel,
            seed=settings["random"]["seed"],
            sample=None,
            groups={name: each.globs for name, each in handed.rank.names.groups.items()},
            settled=Settled(
                # Initialising the emptied model would be work for nothing: the move overwrites all.
                is_filled_later=True,
                # What was decided on a run of the model stays: emptied, it cannot run, and there is no batch for it.
                placement=runner.placement if runner is not None and has_stages else None,
                decision=engine.tensor_decision if has_cuts else None,
                counters=counters or Counters(),
            ),
        )
        new = engine.rebuild(asked)
        restoration = _restoration(channel, new, stored, settings)
        reshard_told(sources, targets_of(restoration, handed.rank.model), channel, held, cast=True, compare=False)
        restoration.finish()
        take_along(aliases, dict(engine.model.named_parameters()))
        # Last: an error before leaves the old engine in charge.
        new.trained_batches = engine.trained_batches
        engine.successor = new  # from here on the old one refuses
        new.take_charge(frozen=handed.frozen)
    return new


def refit(engine: Engine[Model]) -> None:
    """Take in, in place, what an engine has to train and could not before: parameters that were unfrozen, or that came
    into a group of its optimizers. All ranks call it together; a relayout to the same plan.

    Raises the errors of `parallelize`, the same on all ranks: then the engine is as it was.
    """
    counted = engine.counters.__getstate__()
    try:
        new = _relaid(engine, engine.plan, engine.counters)
    finally:
        engine.counters.__setstate__(counted)  # of the steps before
    # A program may hold any of these objects, and has set what is in them. Each has one dict with the one that takes
    # its place: whichever is asked, it is the same.
    new.recorder.__dict__ = engine.recorder.__dict__
    engine.activations.__dict__ = new.activations.__dict__
    if engine.pipeline is not None:
        engine.pipeline.__dict__ = new.pipeline.__dict__
    for name in (
        "see_losses",
        "see_gradients",
        "asked_to_stop",
        "_asks_to_stop",
        *engine.__dict__.keys() - new.__dict__.keys(),
    ):
        new.__dict__[name] = engine.__dict__[name]
    new._computation.loss_parameters = engine._computation.loss_parameters
    engine.__dict__ = new.__dict__


def _settings_of_all(channel: Channel, handed: HandOver, plan: object) -> dict[str, Any]:
    """The settings that ranks know together. Raises, on all ranks, where it cannot go on."""
    with Gathering("settings of a relayout").agreed(channel) as gathered:
        if not isinstance(plan, Plan):
            raise PlanError(f"relayout was given a {type(plan).__name__} as the plan; give sw.Plan(mesh=sw.Mesh(..))")
        gathered.own = settings_texts(handed.settings)
    settings = merged_settings(gathered.texts, purpose="settings of a relayout")
    return {**settings, ADDED: sorted(handed.unfrozen)}


def _restoration(
    channel: Channel, new: Engine, stored: Mapping[str, Piece], settings: Mapping[str, Any]
) -> EngineRestoration:
    """What the new engine takes over. Where one rank cannot, all raise the same."""
    with agreed(channel, purpose="verdict on a relayout"):
        restoration = new.restore(stored, settings)
        if restoration.findings:
            raise CheckpointError("the new plan cannot take over the state: " + "; ".join(restoration.findings))
    return restoration


@torch.no_grad()
def _empty(handed: HandOver, swapped: Swapped) -> None:
    """Put parameters and buffers without values, in their global shapes, into every place of the model.

    swapped: takes note of the parameters that stay the same objects, and of what has their content now.
    """
    spec_of = {spec.name: spec for spec in handed.rank.names.specs}
    fresh: dict[str, nn.Parameter] = {}
    ties = handed.rank.names.ties
    # What has no spec came since, and stays what it is.
    carried = [each for each in all_carried(handed.rank.model, ties) if each.is_view or each.name in spec_of]
    for module, attribute, place, parameter in list(named_places(handed.rank.model)):
        if is_shell(parameter):  # what is inside is emptied below
            continue
        # Each tie gets one object, and specs have shapes without cuts: what the old plan made of them is undone here,
        # and the new one plans the model as it was built.
        name = handed.rank.names.ties.get(place, place)
        if name not in fresh:
            spec = spec_of[name]
            made = with_values(parameter, _empty_of(spec))
            # A frozen one that had its turn keeps its master and state, for the time when it is unfrozen.
            made.requires_grad_(made.requires_grad or spec.trainable)
            fresh[name] = take_over(parameter, made)
            if fresh[name] is parameter:
                swapped.append((parameter, made))
        setattr(module, attribute, fresh[name])
    empty = {each.name: _empty_of(spec_of[each.name]) for each in carried if not each.is_view}
    swapped += kind_in(handed.rank.model).put_in(handed.rank.model, carried, empty)
    rooms: dict[torch.Tensor, torch.Tensor] = {}
    for module in handed.rank.model.modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            module._buffers[attribute] = rooms.setdefault(buffer, torch.empty_like(buffer, device="meta"))
    for known in handed.optimizers:
        # The moments are in `handed.state` now; kept here they would be cut like a whole parameter's.
        shared = of_no_parameter(known.optimizer.state)
        known.optimizer.state.clear()
        known.optimizer.state.update(shared)
        for group, names in zip(known.optimizer.param_groups, known.given, strict=True):
            group["params"] = [fresh[name] for name in names]


def _empty_of(spec: Parameter) -> torch.Tensor:
    return torch.empty(spec.global_shape, dtype=torch_dtype(spec.dtype), device="meta")


@contextmanager
def _going_back(engine: Engine[Any], handed: HandOver, swapped: Swapped) -> Iterator[None]:
    """Where ranks agree that it cannot be, leave model and optimizers as they were."""
    # Objects, not values: nothing is copied. Old parameters stay alive until the body ends, which is the memory that
    # this snapshot costs.
    put_back = kept_attributes(handed.rank.model.modules(), contents=True)
    optimizers = [
        (
            known.optimizer,
            dict(known.optimizer.state),
            [list(group["params"]) for group in known.optimizer.param_groups],
        )
        for known in handed.optimizers
    ]
    try:
        yield
    except ShardwiseError:
        for parameter, before in reversed(swapped):
            exchange(parameter, before)
        put_back()
        for optimizer, state, groups in optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        engine._rank.updates.plain_calls.reads.turn(on=True)
        raise
