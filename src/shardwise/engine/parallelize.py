"""From a model and a plan to an engine, in three phases: inspect, agree, build.

    [1] inspect, alone      model      -> names, ties, shapes, buffers (`Inventory`)
                            optimizer  -> covers every trainable parameter once? tried on small matrices
        ~~~~ exchange: the verdict of each rank, its seed ~~~~
    [2] agree, together     equal on all ranks: plan text; model and optimizer settings; digests of all values
                            decided alike: stages, units of stage 3, cuts along tp, who initialises what
        ~~~~ the last point where all ranks raise and no tensor has changed ~~~~
    [3] build, in step      tensors   cut -> drop other stages -> room -> move -> flat buffers -> optimizers -> values
                            forwards  casts, and the layers of the plan in the order of `layers.Place`

Tensors on the meta device wait for their values through all of that. Each rank takes room in [3] for its own tensors
only. Then the model's initialisers give whole tensors one after the other, and the rank keeps its part of each.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import a_list, aborting, agreed, compare, understood
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.activations.kept_activations import ActivationModules, KeptActivations, modules_of
from shardwise.engine.engine import Engine
from shardwise.engine.forward.batches import Batch, BatchRows, LossFunction, LossOfModel, LossWeight, RowDims
from shardwise.engine.forward.inventory import (
    Inventory,
    describe_model,
    describe_values,
    kind_in,
    take_inventory,
    take_over,
    with_values,
)
from shardwise.engine.forward.kept_objects import Alias, aliases_in, take_along
from shardwise.engine.forward.layers import unwrap
from shardwise.engine.forward.padded_encoders import let_encoders_pad
from shardwise.engine.forward.precision import computes_in_float16, let_inputs_follow, warn_of_underflow
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.forward.trained_parameters import GivenGroups, Groups, groups_in
from shardwise.engine.guards.forward_writes import ModelBuffers
from shardwise.engine.guards.plain_calls import PlainCalls
from shardwise.engine.model.batch_statistics import synchronise, synchronised_in
from shardwise.engine.model.meta_init import Initialisation
from shardwise.engine.model.rank_parts import (
    Asked,
    ModelNames,
    RankGradients,
    RankParts,
    RankTensors,
    RankUpdates,
)
from shardwise.engine.optimizers.known import (
    KnownOptimizer,
    MasterOf,
    OptimizerSource,
    build,
    check_coverage,
    describe_settings,
    know,
    on_host,
    swap,
)
from shardwise.engine.optimizers.matrix_updates import MatrixUpdates
from shardwise.engine.optimizers.traits import STAGE_0, OptimizerTraits, check_apart, check_steps, work_of_wholes
from shardwise.engine.optimizers.trials import traits_of
from shardwise.engine.pipeline.crossings import GradientKinds
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.stages import (
    StageParameters,
    agree_on_placement,
    assign_parameters,
    drop_foreign,
    move_to,
)
from shardwise.engine.pipeline.ties import StageTies, chains_of
from shardwise.engine.relayout import refit
from shardwise.engine.step.channels import EngineChannels
from shardwise.engine.step.computation import Computation, Forwards
from shardwise.engine.step.edges import RegionProof, StateEntry
from shardwise.engine.step.norm import clipped_parts
from shardwise.engine.tensor.styles import put_styles
from shardwise.engine.tensor.summed_gradients import SummedGradients
from shardwise.engine.tensor.tensor_decision import (
    TensorDecision,
    agree_on_tensor_plan,
    keep_portions,
    portion_of,
)
from shardwise.engine.zero.flat_params import FlatParams, note_masters
from shardwise.engine.zero.grad_buffers import HostGradients
from shardwise.engine.zero.install import install, plan_layout, units_of
from shardwise.engine.zero.reduce import GradReduce
from shardwise.engine.zero.unshard import Unshard
from shardwise.errors import MismatchError, PlanError
from shardwise.plan import OwnedLayout, Ownership, Placement, Plan
from shardwise.plan.units import Unit, unit_of

Model = TypeVar("Model", bound=nn.Module)

BufferPlace = tuple[nn.Module, str]
"""A module and the name under which it holds a buffer."""


def parallelize(
    model: Model,
    plan: Plan,
    *,
    optimizer: OptimizerSource,
    loss: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    channel: Channel | None = None,
    seed: int | None = None,
    sample: Batch | None = None,
    rows: RowDims = 0,
    groups: GivenGroups | None = None,
) -> Engine[Model]:
    """Put a model under a plan. The object passed in is the one that trains: its parameters view working copies.

    optimizer: a function of the list of the model's parameters (in their own shapes) that returns a torch optimizer or
        several, or optimizers already built over them. Their groups and attached schedulers stay. None where all
        parameters are frozen: a reference, a reward model, a model that only generates.
    loss: f(output, microbatch) -> scalar tensor, or a dict with it under "loss" and with other numbers to report. None:
        the model is called with the whole microbatch and gives its own. f(microbatch), with one argument, calls what it
        needs of the model itself.
    groups: {name: glob or globs of parameters or modules}: what `engine.step(batch, only=name)` updates alone. They may
        overlap.
    loss_weight: f(microbatch) -> what the microbatch counts (say, its target tokens); None: its rows.
    seed: of the random numbers that forwards draw (dropout). They depend on it, the step and the microbatch, not on the
        plan. None: the seed that rank 0 last gave to torch.manual_seed.
    sample: a batch on which rank 0 measures the modules, for pipeline.balance "flops" and "seconds". From it
        tensor.rules "auto" also infers a plan for a model that carries none (see `engine.tensor_decision`).
    rows: the dim of batches' tensors that has their rows; {name or glob: dim} where they differ, None in it for a
        tensor that is for all rows. Names are the keys and positions that lead to a tensor: "inputs.0".
    channel: None takes the initialised process group, else the processes that torchrun announces, else a world of one.

    A model that was built on the meta device, in part or as a whole, is initialised from `seed`, module by module. Each
    rank makes room for its own tensors, and their values do not depend on the plan.

    Nothing is changed before all ranks have agreed. Raises, the same on all ranks: PlanError (mesh and world, `keep`
    that matches nothing), ModelError, OptimizerError, MismatchError (other model, values, plan or optimizer on another
    rank).
    """
    if channel is None:
        channel = default_channel()
    # A failure of one rank alone (no memory, a bug in a module) aborts: the others are in a collective or on the way.
    with aborting(channel, "parallelize"):
        asked = Asked(
            loss=LossOfModel(model, loss, BatchRows(rows), loss_weight),
            plan=plan,
            optimizer=optimizer,
            channel=channel,
            seed=seed,
            sample=sample,
            groups=groups,
        )
        engine: Engine[Model] = parallelize_with(asked)
        # Not in `parallelize_with`: relayout may still go back to the old engine after that, which then must not find
        # the new one's refusals on the model.
        engine.take_charge()
    return engine


def parallelize_with(asked: Asked) -> Engine[Any]:
    """`parallelize`, for callers on whose errors the peers are stopped."""
    channel = asked.channel
    with agreed(channel, purpose="verdict on the model and the optimizer") as agreement:
        asked.loss.check()
        inspected = _inspect(asked)
        # The seeds travel with the verdict: one message less. Torch's own is sent because ranks may have seeded it
        # differently, and rank 0's holds then.
        agreement.value = json.dumps([asked.seed, torch.initial_seed()]).encode()
    seed = _seed_of_all(understood(agreement.values, _seeds_in, purpose="verdict on the model and the optimizer"))
    return _build(asked, inspected, _agree(asked, inspected, seed))


# [1] inspect: what this rank was given, without a word to the others, and without a change -----------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inspected:
    inventory: Inventory
    aliases: Sequence[Alias]
    optimizers: tuple[torch.optim.Optimizer, ...]
    groups: Groups
    activations: ActivationModules
    traits: Sequence[OptimizerTraits]
    work: Mapping[str, int]
    """Of one update, for each parameter that its optimizer must see whole, where ranks would have parts."""


def _inspect(asked: Asked) -> _Inspected:
    """Look at the model and the optimizer. Raises what is wrong with them on this rank."""
    model, plan, channel = asked.loss.model, asked.plan, asked.channel
    plan.mesh.check_world(channel.size)
    if asked.seed is not None and type(asked.seed) is not int:
        raise PlanError(f"seed: {asked.seed!r} is not a whole number; None takes the one of torch.manual_seed")
    inventory = take_inventory(model, plan.precision)
    aliases = aliases_in(model, inventory.parameters)
    if plan.mesh.num_data_ranks > 1:
        synchronised_in(model)
    optimizers = build(asked.optimizer, list(model.parameters()))
    check_coverage(optimizers, inventory)
    home, at_home = _home(plan, channel.device, optimizers)
    with at_home:
        traits = [traits_of(each, home) for each in optimizers]
    check_steps(traits, is_alone=channel.size == 1)
    if _shares_updates(plan) or plan.mesh.pp > 1:  # stages have parameters of their own
        check_apart(traits, instead=_alone(plan))
    named = groups_in(asked.groups, inventory.specs)
    if isinstance(plan.clip_grad_norm, Mapping):
        clipped_parts(plan.clip_grad_norm, named, inventory.specs)
    return _Inspected(
        inventory=inventory,
        aliases=aliases,
        optimizers=optimizers,
        groups=named,
        activations=modules_of(model, plan.activations),
        traits=traits,
        work=work_of_wholes(traits, inventory) if _shares_updates(plan) else {},
    )


def _home(
    plan: Plan, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[torch.device, AbstractContextManager[None]]:
    """Where masters are, and what is around the steps of optimizers there."""
    if plan.sharding.offload is None or device.type == "cpu":
        return device, nullcontext()
    return torch.device("cpu"), on_host(optimizers)


def _shares_updates(plan: Plan) -> bool:
    """Whether no rank has all that it would need to update a whole parameter for itself, or one does it for others."""
    return plan.mesh.tp > 1 or (plan.sharding.stage > 0 and plan.mesh.num_data_ranks > 1)


def _alone(plan: Plan) -> str:
    """What to do with an optimizer whose update of one parameter depends on the others."""
    if plan.mesh.tp > 1:
        return "Leave mesh.tp at 1"
    if plan.mesh.pp > 1:
        return "Leave mesh.pp at 1, and use sw.Sharding(stage=0) (sharding.stage)"
    return STAGE_0


# [2] agree: all ranks were given the same, and decide the same -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _AgreedTerms:
    seed: int
    placement: Placement
    units: Sequence[Unit]
    decision: TensorDecision
    values: Initialisation | None
    """Of what waits on the meta device; None where nothing waits, or values come later."""


def _agree(asked: Asked, inspected: _Inspected, seed: int) -> _AgreedTerms:
    """Compare with the other ranks, and decide with them. Raises the same error on all."""
    model, plan, channel, inventory = asked.loss.model, asked.plan, asked.channel, inspected.inventory
    placement, decision = asked.settled.placement, asked.settled.decision
    values: Initialisation | None = None
    compare(
        channel,
        plan.text().splitlines(),
        subject="plans",
        hint="Give every rank the same plan.",
    )
    compare(
        channel,
        # Names and shapes before values: digests of different models would say only that everything differs.
        [
            *describe_model(inventory),
            *describe_settings(inspected.optimizers, inventory),
            *(f"group {name!r} of {list(each.globs)}" for name, each in inspected.groups.items()),
            *(f"update of all of {name!r}, {work} operations" for name, work in inspected.work.items()),
        ],
        subject="models or optimizers",
        hint="Build the same model and optimizer on every rank.",
    )
    compare(
        channel,
        # Data ranks hold the same parameters, and nothing compares them later: an owner's values would replace those
        # of the others at the first all-gather. A digest per tensor names the first that differs.
        describe_values(inventory),
        subject="values",
        hint="Build the model from the same seed on every rank (torch.manual_seed), or load the same checkpoint.",
    )
    if channel.rank == 0 and plan.precision.loss_scale is None and computes_in_float16(inventory.specs):
        warn_of_underflow("the model trains in float16")
    # What an earlier plan has put around modules comes off: the model may run on the sample here.
    unwrap(model)
    if placement is None:
        placement = agree_on_placement(model, plan, asked.loss, asked.sample, channel)
    units = units_of(model, inventory, plan, placement)
    if decision is None:
        decision = agree_on_tensor_plan(model, plan, channel, loss=asked.loss, sample=asked.sample)
    if not asked.settled.is_filled_later and inventory.waiting():
        with agreed(channel, purpose="verdict on the initialisation"):
            inventory.refuse_waiting_packed()
            values = Initialisation(model, seed)
    return _AgreedTerms(seed=seed, placement=placement, units=units, decision=decision, values=values)


def _seeds_in(answer: bytes) -> tuple[int | None, int]:
    own, of_torch = a_list(answer)
    if not (own is None or type(own) is int) or type(of_torch) is not int:
        raise TypeError("no seeds")
    return own, of_torch


def _seed_of_all(seeds: Sequence[tuple[int | None, int]]) -> int:
    """From each rank's own seed and that of torch: the seed that all were given, else torch's on rank 0."""
    if len({own for own, _ in seeds}) > 1:
        raise MismatchError(f"ranks were given the seeds {[own for own, _ in seeds]}; give all of them the same")
    own, of_torch = seeds[0]
    # Rank 0's, not each rank's own: masks of a microbatch must not depend on the rank that has it.
    return of_torch if own is None else own


# [3] build: change the model, first its tensors, then its forwards -----------------------------------------------


def _build(asked: Asked, inspected: _Inspected, terms: _AgreedTerms) -> Engine[Any]:
    model, plan, channel, counters = asked.loss.model, asked.plan, asked.channel, asked.settled.counters
    placement, decision = terms.placement, terms.decision
    channels = EngineChannels.of(plan, channel)
    random = KeyedRandom(model, channel.device, terms.seed)
    inventory, stages, tensors, optimizers, matrices = _keep_own(asked, inspected, terms, channels)
    updated = tensors.buffers.owned if matrices is None else matrices.updated
    held, buffers = tensors.held, tensors.buffers
    # Layers of forwards stand at their `Place`, whatever the order of these calls.
    let_inputs_follow(model, plan.precision)
    synchronise(model, channels.everyone, random)
    let_encoders_pad(model, plan)
    put_styles(model, decision.plan, channels.tensor)
    cut = [spec.name for spec in held.specs if spec.portion is not None]
    summed = SummedGradients(held.parameters, cut=cut, summed=decision.plan.summed, named=decision.plan.named)
    host_gradients = None
    if buffers.is_offloaded:
        host_gradients = HostGradients(buffers, channel.device, summed.may_change if channels.tensor.size > 1 else None)
    runner = None
    if placement.num_stages > 1:
        tied = _tied_wholes(inventory, stages)
        # After the styles: it notes those of placed modules, which decide shapes.
        runner = PipelineRunner(
            model=model,
            placement=placement,
            pipeline=plan.pipeline,
            channel=channels.pipeline,
            random=random,
            ties=tensors.ties,
            chains=chains_of(inventory.specs, stages),
            kinds=GradientKinds(summed, tied, channels.pipeline) if decision.plan.styles else None,
        )
    gradients, passes = install(
        model,
        tensors.layout,
        tensors.owned,
        plan,
        buffers,
        replicas=channels.replicas,
        counters=counters,
        microbatch=(lambda: 0) if runner is None else runner.microbatch,
        taker=host_gradients,
    )
    # Each loss's graph is looked at before its backward: whether a gradient is whole or a term of a sum is read
    # there, not from the rules.
    watchers: list[Callable[[torch.Tensor], None]] = [summed.look_at] if decision.plan.styles else []
    proof: RegionProof | None = None
    if plan.tensor.prove and plan.mesh.tp > 1:
        from shardwise.engine.tensor.proof.region_proof import Proof

        proof = Proof(
            model,
            decision.plan,
            channels.tensor,
            world=channel,
            gather=passes.holding if isinstance(passes, Unshard) else None,
            is_followed=lambda: passes.is_followed,
            is_local=lambda name: runner is None or any(_is_within(name, each) for each in placement.modules),
        )
    forwards = Forwards(
        random=random,
        runner=runner,
        passes=passes,
        activations=KeptActivations(model, plan, inspected.activations, random, channel, passes, runner),
        decision=decision,
        proof=proof,
        on_loss=watchers,
    )
    owns_all = channels.owners.size * placement.num_stages == 1 and not (cut or tensors.layout.ownership.homes)
    rank = RankParts(
        model=model,
        plan=plan,
        # Of the whole model, on every rank: flags in the step's exchange are numbered by it.
        names=ModelNames(
            trainable={spec.name: torch_dtype(spec.master) for spec in inventory.specs if spec.trainable},
            ties=inventory.ties(),
            specs=inspected.inventory.specs,
            groups=inspected.groups,
        ),
        channels=channels,
        tensors=tensors,
        gradients=RankGradients(reduced=gradients, on_host=host_gradients, summed=summed),
        updates=RankUpdates(
            optimizers=optimizers,
            updated=updated,
            matrices=matrices,
            averages=_averages(plan, buffers, tensors.owned),
            plain_calls=PlainCalls(
                model,
                inspected.optimizers,
                cut=[held.parameters[name] for name in cut],
                owns_all=owns_all,
                master_of=MasterOf(model, inventory, updated, owns_all=owns_all),
            ),
            counters=counters,
        ),
        computation=Computation(asked.loss, plan, channels, forwards),
    )
    return Engine(rank, rebuild=parallelize_with, refit=refit)


def _averages(plan: Plan, buffers: FlatParams, inventory: Inventory) -> StateEntry | None:
    if plan.average is None:
        return None
    from shardwise.engine.averages import WeightAverages

    return WeightAverages(plan.average, buffers, inventory)


def _tied_wholes(inventory: Inventory, stages: StageParameters) -> list[str]:
    """Trained parameters of several stages that are whole along `tp`; alike on all ranks of a pipeline."""
    specs = [spec for spec in inventory.specs if spec.trainable and spec.portion is None]
    return [spec.name for spec in specs if len(stages.users(spec.name)) > 1]


def _is_within(name: str, other: str) -> bool:
    """Whether `name` is `other`, or a module or parameter inside it."""
    return name == other or name.startswith(f"{other}.")


def _keep_own(
    asked: Asked, inspected: _Inspected, terms: _AgreedTerms, channels: EngineChannels
) -> tuple[Inventory, StageParameters, RankTensors, tuple[KnownOptimizer, ...], MatrixUpdates | None]:
    """Leave the model with what this rank has of it, in flat buffers, and the optimizers with the owned masters.

    The inventory that comes back is of all parameters of the model.
    """
    model, plan = asked.loss.model, asked.plan
    device, coordinate, counters = channels.world.device, channels.pipeline.rank, asked.settled.counters
    waiting = inspected.inventory.waiting()
    inventory = inspected.inventory.cut(terms.decision.plan.portions(channels.tensor.rank))
    stages = assign_parameters(model, inventory, terms.placement)
    model_buffers = ModelBuffers(model)  # all of them: ranks number buffers alike, also those that they drop
    inventory.tie()
    sliced = plan.sharding.partition == "slice" and channels.owners.size > 1
    work = inspected.work
    # Parameters are cut and dropped before anything moves to the device, which may not have room for the whole model.
    keep_portions(inventory)
    # What code of the user holds stays the model's. Not under initialisers, which look at the model as it was built.
    keeps = terms.values is None
    kept_buffers = drop_foreign(model, inventory, stages, coordinate, keeps_objects=keeps)
    # What is held alone, and on the device at once: never the whole model, and nothing on the host first.
    inventory = give_room(inventory, stages.held_by(coordinate), kept_buffers, device, keeps_objects=keeps)
    held = inventory.restricted(stages.held_by(coordinate))
    owned = inventory.restricted(stages.owned_by(coordinate))
    homes = channels.homes(plan) if work else None
    layout = plan_layout(
        owned,
        plan,
        terms.units,
        late=frozenset(stages.of_several_stages()),
        stage_of=stages.first_stage,
        owners=channels.owners,
        replicas=channels.replicas,
        work=work,
        num_homes=1 if homes is None else homes.size,
    )
    # What goes to flat buffers stays where it was built until its buffer takes it, which may want a part of it only:
    # whole parameters and buffers would be on the device at once. Replicas of ties have buffers of their own.
    buffered = {slot.name for bucket in layout.ownership.buckets for slot in bucket.slots}
    for name, each in held.carried().items():
        if name not in buffered and not each.is_meta and each.device != device:
            torch.utils.swap_tensors(each, each.to(device))  # the objects stay
    move_to(
        model,
        device,
        but=[each for name, each in held.parameters.items() if name in buffered or name not in owned.parameters],
    )
    optimizers = know(inspected.traits, inventory)  # while they still have all parameters
    buffers = FlatParams(
        owned,
        layout.ownership,
        channels.owners,
        unit_of=unit_of(layout.units),
        whole=work.keys() if sliced else held.parameters.keys(),
        waiting=waiting,
        offload=plan.sharding.offload,
    )
    matrices = MatrixUpdates(buffers, owned, homes) if homes is not None and layout.ownership.homes else None

    def keep_gradients(parameters: Mapping[str, nn.Parameter], ownership: Ownership, alone: Channel) -> GradReduce:
        # Like those of any parameter, with this rank as the only owner: nothing is reduced.
        own = OwnedLayout(ownership=ownership)
        return GradReduce(parameters, own, plan.precision, owners=alone, replicas=alone, counters=counters)

    ties = StageTies(held, stages, plan, pipeline=channels.pipeline, keep_gradients=keep_gradients, waiting=waiting)
    # State that an optimizer has already is cut along, so this comes after the masters are there and before the first
    # step.
    updated = buffers.owned if matrices is None else matrices.updated
    swap(inspected.optimizers, inventory.uncut(layout.ownership.homes), updated)
    if terms.values is not None:
        # Buffers of other stages stay without values here.
        here = {name for name, each in model.named_buffers() if not each.is_meta}
        mine = [name for name in waiting if name in held.parameters or name in here]
        fill(terms.values, mine, held=held, model=model, buffers=buffers, ties=ties)
    take_along(inspected.aliases, held.parameters)
    kind_in(model).settle(model, [(view, inventory.parameters[name]) for view, name in inventory.views])
    note_masters(buffers.buckets)
    model_buffers.settle(channels.everyone, channels.pipeline)  # it remembers values, so all are here by now
    tensors = RankTensors(
        held=held, owned=owned, layout=layout, buffers=buffers, ties=ties, model_buffers=model_buffers
    )
    return inventory, stages, tensors, optimizers, matrices


@torch.no_grad()
def give_room(
    inventory: Inventory,
    held: Collection[str],
    buffers: Iterable[BufferPlace],
    device: torch.device,
    *,
    keeps_objects: bool,
) -> Inventory:
    """Put parameters on `device` in the place of those of `held` that have no values, and buffers likewise.

    What moves to a flat buffer takes no memory before. keeps_objects: parameters stay the objects that they are, where
    torch lets them. Returns the inventory with the parameters that are there now.
    """
    fresh: dict[str, nn.Parameter] = {}
    for spec in inventory.specs:
        old = inventory.parameters[spec.name]
        if spec.name in held and old.is_meta:
            # A fused parameter moves to a flat buffer next. One element, expanded to its shape, stands for it until
            # then: memory for both at once would double the peak.
            room = torch.empty(() if spec.fused else spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            made = with_values(old, room.expand(spec.shape))
            fresh[spec.name] = take_over(old, made) if keeps_objects else made
    for module, attribute, name in inventory.places:
        if name in fresh:
            setattr(module, attribute, fresh[name])  # not register_parameter: recurrent modules keep lists of theirs
    # By the old tensor: a buffer that several modules hold stays one.
    rooms: dict[torch.Tensor, torch.Tensor] = {}
    for module, attribute in buffers:
        buffer = module._buffers[attribute]
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = rooms.setdefault(buffer, torch.empty_like(buffer, device=device))
    return replace(
        inventory,
        parameters={**inventory.parameters, **fresh},
        name_of={**inventory.name_of, **{each: name for name, each in fresh.items()}},
    )


def fill(
    source: Initialisation,
    waiting: Collection[str],
    *,
    held: Inventory,
    model: nn.Module,
    buffers: FlatParams,
    ties: StageTies,
) -> None:
    """Keep of each tensor that `source` gives what this rank has of it.

    waiting: names of parameters and buffers. held: the parameters with which this rank computes.
    """
    spec_of = {spec.name: spec for spec in held.specs}
    buffer_of = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in source.values(waiting):
            if (spec := spec_of.get(name)) is None:
                buffer_of[name].copy_(tensor)
                continue
            # The source gives whole tensors on every rank, so that values do not depend on the cut; each is dropped
            # before the next.
            local = tensor if spec.portion is None else portion_of(tensor, spec.portion)
            if not buffers.write(name, local) and not ties.write(name, local):
                held.parameters[name].copy_(local)
