"""From a model and a plan to an engine: check everything, agree, then change the model."""

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import agreed, compare, digest_of_values
from shardwise.comm.dtensors import is_dtensor
from shardwise.comm.dtypes import torch_dtype
from shardwise.engine.batches import Batch, LossFunction, LossOfModel, LossWeight
from shardwise.engine.channels import EngineChannels, data_rank_of
from shardwise.engine.computation import Computation
from shardwise.engine.counters import Counters
from shardwise.engine.engine import Engine
from shardwise.engine.gathering import Gathering
from shardwise.engine.given_dtensors import portions_of_dtensors
from shardwise.engine.hand_over import ModelNames
from shardwise.engine.initialisation import Initialisation
from shardwise.engine.inventory import Inventory, describe_model, take_inventory
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.optimizer_state import know
from shardwise.engine.optimizers import OptimizerSource, build, check_coverage, describe_settings, swap
from shardwise.engine.pipeline.gradient_kinds import GradientKinds
from shardwise.engine.pipeline.placing import agree_on_placement
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.stage_parameters import StageParameters, assign_parameters, drop_foreign, move_to
from shardwise.engine.pipeline.ties import StageTies, chains_of
from shardwise.engine.plain_calls import PlainCalls
from shardwise.engine.precision import computes_in_float16, let_inputs_follow, warn_of_underflow
from shardwise.engine.randomness import KeyedRandom
from shardwise.engine.sharded import (
    attend,
    make_buffers,
    make_gradients,
    number_microbatches,
    plan_layout,
    units_of,
)
from shardwise.engine.sizes import Sizes
from shardwise.engine.tensor.cutting import NO_CUTS, agree_on_tensor_plan, keep_portions
from shardwise.engine.tensor.proof import Proof
from shardwise.engine.tensor.running import TensorParallel
from shardwise.engine.tensor.tracing import SummedGradients
from shardwise.engine.trials import check_apart, check_elementwise, find_whole_keys
from shardwise.engine.values import ValueSource, fill, give_room
from shardwise.engine.wrapping import unwrap
from shardwise.errors import MismatchError, PlanError, ShardwiseError
from shardwise.plan import Plan
from shardwise.space import Portion


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: OptimizerSource,
    loss: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    channel: Channel | None = None,
    seed: int | None = None,
    sample: Batch | None = None,
) -> Engine:
    """Put a model under a plan. The object passed in is the one that trains: its parameters view working copies.

    optimizer: a function of the list of the model's parameters (in their own shapes) that returns a torch optimizer or
        several, or optimizers already built over them; their groups and attached schedulers stay.
    loss: f(output, microbatch) -> scalar tensor; None: the model is called with the whole microbatch and gives its own.
    loss_weight: f(microbatch) -> what the microbatch counts (say, its target tokens); None: its rows.
    seed: of the random numbers that forwards draw (dropout): they depend on it, on the step and on the microbatch, not
        on the plan; None: the seed that rank 0 last gave to torch.manual_seed.
    sample: a batch on which rank 0 measures the modules, for pipeline.balance "flops" and "seconds", and from which
        tensor.rules "auto" infers a plan for a model that carries none (see `engine.tensor_decision`).
    channel: None takes the initialised process group, else the processes that torchrun announces, else a world of one.

    A model that was built on the meta device, in part or as a whole, is initialised from `seed`, module by module: each
    rank makes room for what it computes with, and its values do not depend on the plan.

    Nothing is changed before all ranks have agreed. Raises, the same on all ranks: PlanError (mesh and world, `keep`
    that matches nothing), ModelError, OptimizerError, MismatchError (other model, values, plan or optimizer on another
    rank).
    """
    if channel is None:
        channel = default_channel()
    try:
        engine = parallelize_with(model, plan, optimizer, LossOfModel(model, loss), loss_weight, channel, seed, sample)
        engine.take_charge()
    except ShardwiseError:
        raise  # ranks agree on those
    except BaseException as error:
        channel.abort(f"{type(error).__name__} in parallelize: {error}")
        raise
    return engine


def parallelize_with(
    model: nn.Module,
    plan: Plan,
    source: OptimizerSource,
    loss: LossOfModel,
    loss_weight: LossWeight | None,
    channel: Channel,
    seed: int | None,
    sample: Batch | None,
    values: ValueSource | None = None,
) -> Engine:
    """`parallelize`, for callers on whose errors the peers are stopped. `values`: of what is on the meta device."""
    inventory, optimizers, given, agreed_seed = _inspect(model, plan, source, channel, seed)
    PipelineRunner.take_off(model)
    unwrap(model)
    placement = agree_on_placement(model, plan, loss, sample, channel)
    units = units_of(model, inventory, plan, placement)
    decision = agree_on_tensor_plan(model, plan, channel, given=given, loss=loss, sample=sample)
    waiting = inventory.waiting()
    if waiting and values is None:
        values = _agree_on_initialisation(model, agreed_seed, channel)
    whole = inventory.specs
    channels = EngineChannels.of(plan, channel)
    inventory = inventory.cut({**decision.plan.portions(channels.tensor.rank), **given})
    stages = assign_parameters(model, inventory, placement)
    random = KeyedRandom(model, channel.device, agreed_seed)
    model_buffers = ModelBuffers(model)
    inventory.tie()
    sliced = plan.sharding.partition == "slice" and channels.owners.size > 1
    is_partial = sliced or plan.mesh.tp > 1
    whole_keys = [find_whole_keys(each, channel.device) if is_partial else frozenset() for each in optimizers]
    keep_portions(inventory)
    kept_buffers = drop_foreign(model, inventory, stages, channels.pipeline.rank)
    inventory = give_room(inventory, stages.held_by(channels.pipeline.rank), kept_buffers, channel.device)
    move_to(model, channel.device)
    held = inventory.restricted(stages.held_by(channels.pipeline.rank))
    owned = inventory.restricted(stages.owned_by(channels.pipeline.rank))
    layout = plan_layout(owned, stages, plan, units, owners=channels.owners, replicas=channels.replicas)
    known = know(optimizers, inventory, whole_keys)
    counters = Counters()
    buffers = make_buffers(layout, owned, channels.owners, keep_shapes=not sliced, waiting=waiting)
    ties = StageTies(held, stages, plan, pipeline=channels.pipeline, counters=counters, waiting=waiting)
    swap(optimizers, inventory, buffers.owned)
    if values is not None:
        here = {name for name, each in model.named_buffers() if not each.is_meta}
        mine = [name for name in waiting if name in held.parameters or name in here]
        fill(values, mine, held=held, model=model, buffers=buffers, ties=ties)
    model_buffers.settle(channels.pipeline)
    let_inputs_follow(model, plan.precision)
    TensorParallel(model, decision.plan, channels.tensor)
    gradients = make_gradients(
        layout, owned, plan, owners=channels.owners, replicas=channels.replicas, counters=counters
    )
    sharded = attend(model, layout, owned, plan, buffers, gradients, owners=channels.owners, counters=counters)
    proof = Proof(
        model,
        decision.plan if plan.tensor.prove else NO_CUTS,
        channels.tensor,
        world=channel,
        gather=sharded.holding if isinstance(sharded, Gathering) else None,
        is_followed=lambda: isinstance(sharded, Gathering) and sharded.is_followed,
        is_local=lambda name: placement.num_stages == 1 or any(_is_within(name, each) for each in placement.modules),
    )
    summed = SummedGradients(
        held.parameters,
        cut=[spec.name for spec in held.specs if spec.portion is not None],
        summed=decision.plan.summed,
        named=decision.plan.named,
    )
    runner = None
    if placement.num_stages > 1:
        runner = PipelineRunner(
            model=model,
            placement=placement,
            pipeline=plan.pipeline,
            channel=channels.pipeline,
            random=random,
            ties=ties,
            chains=chains_of(inventory.specs, stages),
            kinds=GradientKinds(summed, _tied_wholes(inventory, stages), channels.pipeline)
            if decision.plan.styles
            else None,
        )
        number_microbatches(sharded, runner)
    watchers: list[Callable[[torch.Tensor], None]] = [summed.look_at] if decision.plan.styles else []
    if given:  # their modules may have hooks of their own, which sum gradients over ranks, say
        watchers.append(lambda _: gradients.collectors.stay_last())
    return Engine(
        model=model,
        plan=plan,
        inventory=owned,
        names=ModelNames(
            trainable={spec.name: torch_dtype(spec.master) for spec in inventory.specs if spec.trainable},
            ties=inventory.ties(),
            specs=whole,
        ),
        computation=Computation(
            model=model,
            loss=loss,
            random=random,
            runner=runner,
            device=channel.device,
            rank=channel.rank,
            data_rank=data_rank_of(plan, channel.rank),
            precision=plan.precision,
            sharded=sharded,
            on_loss=watchers,
            proof=proof,
        ),
        loss_weight=loss_weight,
        channels=channels,
        buffers=buffers,
        gradients=gradients,
        ties=ties,
        model_buffers=model_buffers,
        optimizers=known,
        counters=counters,
        sizes=Sizes(plan, layout, owner=channels.owners.rank, ties=ties, sharded=sharded, runner=runner),
        summed=summed,
        plain_calls=PlainCalls(
            model,
            optimizers,
            cut=[held.parameters[spec.name] for spec in held.specs if spec.portion is not None],
            owns_all=channels.owners.size * placement.num_stages == 1
            and all(spec.portion is None for spec in inventory.specs),
        ),
        tensor_decision=decision,
    )


def _tied_wholes(inventory: Inventory, stages: StageParameters) -> list[str]:
    """Trained parameters of several stages that are whole along `tp`; alike on all ranks of a pipeline."""
    specs = [spec for spec in inventory.specs if spec.trainable and spec.portion is None]
    return [spec.name for spec in specs if len(stages.users(spec.name)) > 1]


def _agree_on_initialisation(model: nn.Module, seed: int, channel: Channel) -> Initialisation:
    with agreed(channel, purpose="verdict on the initialisation"):
        return Initialisation(model, seed)


def _inspect(
    model: nn.Module, plan: Plan, source: OptimizerSource, channel: Channel, seed: int | None
) -> tuple[Inventory, tuple[torch.optim.Optimizer, ...], Mapping[str, Portion], int]:
    """Look at the model and the optimizer, and compare with the other ranks; raises the same error on all.

    Returns also the portions of parameters that were cut before, and the seed of all ranks.
    """
    with agreed(channel, purpose="verdict on the model and the optimizer") as agreement:
        plan.mesh.check_world(channel.size)
        if seed is not None and type(seed) is not int:
            raise PlanError(f"seed: {seed!r} is not a whole number; None takes the one of torch.manual_seed")
        inventory = take_inventory(model, plan.precision)
        portions = portions_of_dtensors(inventory, plan, channel.rank)
        optimizers = build(source, list(model.parameters()))
        check_coverage(optimizers, inventory)
        if plan.mesh.tp > 1:
            check_elementwise(optimizers, channel.device, instead="Leave mesh.tp at 1")
        elif _num_owners(plan) > 1 and plan.sharding.partition == "slice":
            check_elementwise(optimizers, channel.device)
        elif _num_owners(plan) > 1:
            check_apart(optimizers, channel.device)
        agreement.value = json.dumps([seed, torch.initial_seed()]).encode()
    seeds = [json.loads(each) for each in agreement.values]
    if len({own for own, _ in seeds}) > 1:
        raise MismatchError(f"ranks were given the seeds {[own for own, _ in seeds]}; give all of them the same")
    compare(
        channel,
        plan.text().splitlines(),
        subject="plans",
        hint="Give every rank the same plan.",
    )
    compare(
        channel,
        [*describe_model(inventory), *describe_settings(optimizers, inventory)],
        subject="models or optimizers",
        hint="Build the same model and optimizer on every rank.",
    )
    compare(
        channel,
        _digests(inventory),
        subject="values",
        hint="Build the model from the same seed on every rank (torch.manual_seed), or load the same checkpoint.",
    )
    if channel.rank == 0 and computes_in_float16(inventory.specs):
        warn_of_underflow("the model trains in float16")
    return inventory, optimizers, portions, seeds[0][1] if seed is None else seed


def _is_within(name: str, other: str) -> bool:
    """Whether a name is that of a module or of what is in it."""
    return name == other or name.startswith(f"{other}.")


def _num_owners(plan: Plan) -> int:
    return len(plan.mesh.peers(0, plan.sharding.owner_axes))


def _digests(inventory: Inventory) -> Sequence[str]:
    tensors = {**inventory.parameters, **inventory.buffers}
    return [
        f"{name!r} with digest {digest_of_values(tensor)}"
        for name, tensor in tensors.items()
        if not tensor.is_meta and not is_dtensor(tensor)  # of which each rank has its own part
    ]
