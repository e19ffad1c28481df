"""What an engine costs a rank in bytes, by the formulas of `plan.memory`: buffers, and what it sends in an update."""

from dataclasses import replace

from shardwise.comm.device_sums import sums_of
from shardwise.engine.model.rank_parts import RankParts
from shardwise.engine.zero.unshard import Unshard
from shardwise.plan import Footprint, Traffic, footprint, traffic
from shardwise.plan.memory import average_bytes


def footprint_of(rank: RankParts, num_microbatches: int) -> Footprint:
    """Bytes that the buffers of a rank take."""
    plan, tensors, matrices = rank.plan, rank.tensors, rank.updates.matrices
    layout, ties, owner = tensors.layout, tensors.ties, rank.channels.owners.rank
    channel = rank.channels.world  # the others move tensors as it does
    is_offloaded = plan.sharding.offload is not None and channel.device.type != "cpu"
    owned = footprint(
        layout,
        owner,
        plan.precision,
        num_microbatches=num_microbatches,
        keeps=plan.sharding.keep_gathered,
        sums=sums_of(channel),
        goes_ahead=channel.progresses_alone,
        offload=plan.sharding.offload if is_offloaded else None,
    )
    if matrices is not None:
        whole, messages = matrices.held_bytes
        # Where masters are on the host, messages are put together there, and pass through the device.
        owned = replace(
            owned,
            owned_elements=owned.owned_elements + matrices.added_elements,
            updating_bytes=messages + (0 if is_offloaded else whole),
            host_bytes=owned.host_bytes + (whole + messages if is_offloaded else 0),
        )
    return replace(
        owned,
        working_bytes=owned.working_bytes + ties.replica_bytes(),
        gradient_bytes=owned.gradient_bytes + ties.gradient_bytes(num_microbatches),
        # What no flat buffer has.
        frozen_bytes=tensors.held.num_bytes(but=[tensors.buffers.holds, ties.held.parameters.__contains__]),
        average_bytes=0 if plan.average is None else average_bytes(layout.ownership, owner),
    )


def traffic_of(rank: RankParts, num_microbatches: int) -> Traffic:
    """Bytes of gradients and parameters that a rank sends per update.

    The number of gatherings is that of the last step, if it had as many microbatches. Else it follows from the order of
    units in the model.
    """
    layout, ties, matrices = rank.tensors.layout, rank.tensors.ties, rank.updates.matrices
    passes, runner = rank.computation.forwards.passes, rank.computation.runner
    schedule = None if runner is None else runner.schedule
    actions = None
    if runner is not None and schedule is not None and schedule.num_microbatches == num_microbatches:
        actions = [(each.kind, each.stage) for each in schedule.orders[runner.stages.rank]]
    owned = traffic(
        layout,
        rank.channels.owners.rank,
        rank.plan.precision,
        num_microbatches=num_microbatches,
        gathers=passes.gathers_in(num_microbatches, actions) if isinstance(passes, Unshard) else None,
    )
    sent_gradients, sent_values = (0, 0) if matrices is None else matrices.sent_bytes
    return Traffic(
        reduce_bytes=owned.reduce_bytes + ties.sent_gradient_bytes(num_microbatches) + sent_gradients,
        gather_bytes=owned.gather_bytes + ties.sent_value_bytes() + sent_values,
    )
