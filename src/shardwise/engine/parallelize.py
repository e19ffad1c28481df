"""From a model and a plan to an engine: check everything, agree, then change the model."""

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm import Channel, default_channel
from shardwise.comm.agreement import agree, compare, digest_of_values
from shardwise.engine.batches import LossFunction, LossOfModel, LossWeight
from shardwise.engine.buffers import FlatBuffers
from shardwise.engine.counters import Counters
from shardwise.engine.engine import DataChannels, Engine
from shardwise.engine.gradients import Gradients
from shardwise.engine.inventory import Inventory, describe_model, take_inventory
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.optimizer_state import know
from shardwise.engine.optimizers import OptimizerSource, build, check_coverage, describe_settings, swap
from shardwise.engine.precision import let_inputs_follow
from shardwise.engine.trials import check_apart, check_elementwise, find_whole_keys
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan, plan_ownership

_DATA_AXES = ("dp_replicate", "dp_shard")


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: OptimizerSource,
    loss: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    channel: Channel | None = None,
) -> Engine:
    """Put a model under a plan. The object passed in is the one that trains: its parameters view working copies.

    optimizer: a function of the list of the model's parameters (in their own shapes) that returns a torch optimizer or
        several, or optimizers already built over them; their groups and attached schedulers stay.
    loss: f(output, microbatch) -> scalar tensor; None: the model is called with the whole microbatch and gives its own.
    loss_weight: f(microbatch) -> what the microbatch counts (say, its target tokens); None: its rows.
    channel: None takes the initialised process group, else the processes that torchrun announces, else a world of one.

    Nothing is changed before all ranks have agreed. Raises, the same on all ranks: PlanError (mesh and world, `keep`
    that matches nothing), ModelError, OptimizerError, MismatchError (other model, values, plan or optimizer on another
    rank).
    """
    if channel is None:
        channel = default_channel()
    try:
        return _parallelize(model, plan, optimizer, LossOfModel(model, loss), loss_weight, channel)
    except ShardwiseError:
        raise  # ranks agree on those
    except BaseException as error:
        channel.abort(f"{type(error).__name__} in parallelize: {error}")
        raise


def _parallelize(
    model: nn.Module,
    plan: Plan,
    source: OptimizerSource,
    loss: LossOfModel,
    loss_weight: LossWeight | None,
    channel: Channel,
) -> Engine:
    inventory, optimizers = _inspect(model, plan, source, channel)
    everyone = channel.over(plan.mesh.peers(channel.rank, _DATA_AXES))
    owners = channel.over(plan.mesh.peers(channel.rank, plan.sharding.owner_axes))
    replicas = channel.over(plan.mesh.peers(channel.rank, plan.sharding.replica_axes))
    ownership = plan_ownership(inventory.specs, plan.sharding, num_owners=owners.size, num_replicas=replicas.size)
    inventory.tie()
    model.to(channel.device)
    sliced = plan.sharding.partition == "slice" and owners.size > 1
    known = know(
        optimizers,
        inventory,
        [find_whole_keys(each, channel.device) if sliced else frozenset() for each in optimizers],
    )
    buffers = FlatBuffers(
        inventory,
        ownership,
        owners,
        keep_shapes=not sliced,
    )
    swap(optimizers, inventory, buffers.owned)
    let_inputs_follow(model, plan.precision)
    counters = Counters()
    gradients = Gradients(
        inventory.parameters, ownership, plan.precision, owners=owners, replicas=replicas, counters=counters
    )
    return Engine(
        model=model,
        plan=plan,
        inventory=inventory,
        loss=loss,
        loss_weight=loss_weight,
        channels=DataChannels(everyone=everyone, owners=owners, replicas=replicas),
        buffers=buffers,
        gradients=gradients,
        model_buffers=ModelBuffers(model),
        optimizers=known,
        counters=counters,
    )


def _inspect(
    model: nn.Module, plan: Plan, source: OptimizerSource, channel: Channel
) -> tuple[Inventory, tuple[torch.optim.Optimizer, ...]]:
    """Look at the model and the optimizer, and compare with the other ranks; raises the same error on all."""
    refusal: ShardwiseError | None = None
    inventory: Inventory | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    try:
        plan.mesh.check_world(channel.size)
        inventory = take_inventory(model, plan.precision)
        optimizers = build(source, list(model.parameters()))
        check_coverage(optimizers, inventory)
        if _num_owners(plan) > 1:
            check = check_elementwise if plan.sharding.partition == "slice" else check_apart
            check(optimizers, channel.device)
    except ShardwiseError as error:
        refusal = error
    agree(channel, refusal, purpose="verdict on the model and the optimizer")
    assert inventory is not None
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
    return inventory, optimizers


def _num_owners(plan: Plan) -> int:
    return len(plan.mesh.peers(0, plan.sharding.owner_axes))


def _digests(inventory: Inventory) -> Sequence[str]:
    tensors = {**inventory.parameters, **inventory.buffers}
    return [f"{name!r} with digest {digest_of_values(tensor)}" for name, tensor in tensors.items()]
