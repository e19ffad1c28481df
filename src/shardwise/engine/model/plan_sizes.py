"""What an engine costs a rank in bytes: its buffers, and what it sends in an update."""

from dataclasses import replace

from shardwise.comm.device_sums import sums_of
from shardwise.engine.model.rank_parts import RankParts
from shardwise.engine.zero.unshard import Unshard
from shardwise.plan import Footprint, Traffic, footprint, traffic
from shardwise.plan.memory import average_bytes


class PlanSizes:
    """The formulas of `plan.memory` for what this rank has."""

    def __init__(self, rank: RankParts) -> None:
        channel = rank.channels.world  # the others move tensors as it does
        tensors, passes = rank.tensors, rank.computation.forwards.passes
        # What no flat buffer has.
        buffered = [tensors.buffers.holds, tensors.ties.held.parameters.__contains__]
        self._frozen_bytes = tensors.held.num_bytes(but=buffered)
        self._sums = sums_of(channel)
        self._goes_ahead = channel.progresses_alone
        self._offload = rank.plan.sharding.offload if channel.device.type != "cpu" else None
        self._plan = rank.plan
        self._layout = tensors.layout
        self._owner = rank.channels.owners.rank
        self._ties = tensors.ties
        self._unshard = passes if isinstance(passes, Unshard) else None
        self._runner = rank.computation.runner
        self._matrices = rank.updates.matrices

    def footprint(self, num_microbatches: int) -> Footprint:
        """Bytes that the buffers take."""
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        owned = footprint(
            layout.ownership,
            self._owner,
            precision,
            num_microbatches=k,
            stage=layout.stage,
            units=[unit.name for unit in layout.units.units],
            keeps=self._plan.sharding.keep_gathered,
            late=layout.late,
            sums=self._sums,
            goes_ahead=self._goes_ahead,
            offload=self._offload,
        )
        if self._matrices is not None:
            whole, messages = self._matrices.held_bytes
            is_offloaded = self._offload is not None
            # Where masters are on the host, messages are put together there, and pass through the device.
            owned = replace(
                owned,
                owned_elements=owned.owned_elements + self._matrices.added_elements,
                updating_bytes=messages + (0 if is_offloaded else whole),
                host_bytes=owned.host_bytes + (whole + messages if is_offloaded else 0),
            )
        return replace(
            owned,
            working_bytes=owned.working_bytes + self._ties.replica_bytes(),
            gradient_bytes=owned.gradient_bytes + self._ties.gradient_bytes(k),
            frozen_bytes=self._frozen_bytes,
            average_bytes=0 if self._plan.average is None else average_bytes(layout.ownership, self._owner),
        )

    def traffic(self, num_microbatches: int) -> Traffic:
        """Bytes of gradients and parameters that are sent per update.

        The number of gatherings is that of the last step, if it had as many microbatches. Else it follows from the
        order of units in the model.
        """
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        schedule = None if self._runner is None else self._runner.schedule
        actions = None
        if self._runner is not None and schedule is not None and schedule.num_microbatches == k:
            actions = [(each.kind, each.stage) for each in schedule.orders[self._runner.stages.rank]]
        owned = traffic(
            layout.ownership,
            self._owner,
            precision,
            num_microbatches=k,
            stage=layout.stage,
            gathers=None if self._unshard is None else self._unshard.gathers_in(k, actions),
            late=layout.late,
        )
        sent_gradients, sent_values = (0, 0) if self._matrices is None else self._matrices.sent_bytes
        return Traffic(
            reduce_bytes=owned.reduce_bytes + self._ties.sent_gradient_bytes(k) + sent_gradients,
            gather_bytes=owned.gather_bytes + self._ties.sent_value_bytes() + sent_values,
        )
