"""What a plan costs one rank of an engine: bytes held and bytes sent."""

from dataclasses import replace

from shardwise.engine.gathering import Gathering
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.ties import StageTies
from shardwise.engine.rounds import Sharded
from shardwise.engine.sharded import Layout
from shardwise.plan import Footprint, Plan, Traffic, footprint, traffic
from shardwise.plan.gathers import Use, count_gathers, one_by_one
from shardwise.plan.memory import sharded_footprint, sharded_traffic


class Sizes:
    """The formulas of `plan.memory` for what this rank has."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        *,
        owner: int,
        ties: StageTies,
        sharded: Sharded | None,
        runner: PipelineRunner | None,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._owner = owner
        self._ties = ties
        self._gathering = sharded if isinstance(sharded, Gathering) else None
        self._runner = runner

    def footprint(self, num_microbatches: int) -> Footprint:
        """Bytes that the buffers take."""
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        if layout.stage < 2:
            owned = footprint(layout.ownership, self._owner, precision, num_microbatches=k)
        else:
            units = [unit.name for unit in layout.units.units]
            owned = sharded_footprint(
                layout.ownership,
                self._owner,
                precision,
                num_microbatches=k,
                units=units,
                keeps=self._plan.sharding.keep_gathered,
                late=layout.late,
            )
        return replace(
            owned,
            working_bytes=owned.working_bytes + self._ties.replica_bytes(),
            gradient_bytes=owned.gradient_bytes + self._ties.gradient_bytes(k),
        )

    def traffic(self, num_microbatches: int) -> Traffic:
        """Bytes of gradients and parameters that are sent per update.

        How often units are gathered follows from the order in which the last step used them; before there was one,
        from their order in the model.
        """
        layout, precision, k = self._layout, self._plan.precision, num_microbatches
        if layout.stage < 2:
            owned = traffic(layout.ownership, self._owner, precision, num_microbatches=k)
        else:
            gathers = None if self._gathering is None else self._gathers(self._gathering, k)
            owned = sharded_traffic(
                layout.ownership, self._owner, precision, num_microbatches=k, gathers=gathers, late=layout.late
            )
        return Traffic(
            reduce_bytes=owned.reduce_bytes + self._ties.sent_gradient_bytes(k),
            gather_bytes=owned.gather_bytes + self._ties.sent_value_bytes(),
        )

    def _gathers(self, gathering: Gathering, k: int) -> dict[str, int]:
        """How often each unit is gathered in an update of k microbatches."""
        stage_of = {unit.number: unit.stage for unit in gathering.units}
        stages = sorted(set(stage_of.values()))
        forward: dict[int, list[Use]] = {stage: [] for stage in stages}
        for use in gathering.order or one_by_one(len(gathering.units)):
            forward[stage_of[use.unit]].append(use)
        actions = [(kind, at) for _ in range(k) for kind, order in (("F", stages), ("B", stages[::-1])) for at in order]
        schedule = None if self._runner is None else self._runner.schedule
        if self._runner is not None and schedule is not None and schedule.num_microbatches == k:
            actions = [(each.kind, each.stage) for each in schedule.orders[self._runner.stages.rank]]
        found = count_gathers(
            forward,
            actions,
            keeps=self._plan.sharding.keep_gathered,
            backward=gathering.differentiated if gathering.order else None,
        )
        return {unit.plan.name: found[unit.number] for unit in gathering.units}
