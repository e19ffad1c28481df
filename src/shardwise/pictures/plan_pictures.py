"""What a plan looks like: what each rank of its mesh holds, one update on each rank, the parts of its buckets."""

from shardwise.pictures.svg import INK, MUTED, Picture, colour, shortened
from shardwise.plan.buckets import Ownership
from shardwise.plan.schedule_check import adapt, chain
from shardwise.plan.schedules import make_schedule
from shardwise.plan.specs import Plan
from shardwise.plan.timeline import simulate_schedule

_SHOWN_RANKS = 32
_SHOWN_BUCKETS = 12
_NAMED_WIDTH = 80
"""A narrower segment of a bucket bears no name; its tooltip has it."""
_KINDS = (("parameters", 3), ("gradients", 2), ("masters", 1), ("optimizer state", 1))
"""What ranks hold, and the sharding stage from which data ranks hold parts of it only."""
_ON_HOST = {"state": ("masters", "optimizer state"), "parameters": ("parameters", "masters", "optimizer state")}
"""What is in the host's memory where ranks have devices, by `offload`."""


def held(plan: Plan, rank: int) -> dict[str, tuple[float, float]]:
    """For each kind the part of the model that `rank` holds: from and to, of a model that is 1 long.

    Elements are taken to be spread evenly over stages, ranks along tp, and owners: `engine.footprint()` has the exact
    bytes. The parts of all ranks are disjoint but for replicas, and cover everything.
    """
    mesh, at = plan.mesh, plan.mesh.coordinates(rank)
    owners = mesh.peers(rank, plan.sharding.owner_axes)
    found = {}
    for kind, stage in _KINDS:
        width = 1 / (mesh.pp * mesh.tp)
        start = at["pp"] / mesh.pp + at["tp"] * width
        if plan.sharding.stage >= stage:
            width /= len(owners)
            start += owners.index(rank) * width
        found[kind] = (start, start + width)
    return found


def mesh_picture(plan: Plan) -> Picture:
    """The ranks, with what each holds of parameters, gradients, masters and optimizer state."""
    picture = Picture(f"{plan.mesh}, sharding stage {plan.sharding.stage}: the model's parts on each rank")
    on_host = _ON_HOST.get(plan.sharding.offload or "", ())
    named = [f"{kind} (host)" if kind in on_host else kind for kind, _ in _KINDS]
    picture.legend([(colour(number), kind) for number, kind in enumerate(named)])
    num_shown = min(plan.mesh.size, _SHOWN_RANKS)
    columns = min(num_shown, 4)
    wide = (picture.width - 32) / columns
    axes = [axis for axis in plan.mesh.coordinates(0) if getattr(plan.mesh, axis) > 1]
    # Long names of axes do not fit above each rank: they stand above all ranks once.
    longest = f"rank {num_shown}: " + ", ".join(f"{axis} {getattr(plan.mesh, axis)}" for axis in axes)
    is_short = 7 * len(longest) < wide
    if not is_short:
        picture.text(16, picture.y, f"rank: {', '.join(axes)}", fill=MUTED)
        picture.y += 12
    for rank in range(num_shown):
        x, y = 16 + rank % columns * wide, picture.y + rank // columns * 84
        places = plan.mesh.coordinates(rank)
        at = ", ".join(f"{axis} {places[axis]}" if is_short else str(places[axis]) for axis in axes)
        picture.text(x, y + 10, f"rank {rank}" + (f": {at}" if at else ""))
        for number, (kind, (start, stop)) in enumerate(held(plan, rank).items()):
            top = y + 18 + 13 * number
            picture.box(x, top, wide - 20, 10, "#eef0f2")
            share = f"{kind}: {stop - start:.4g} of the model"
            picture.box(x + (wide - 20) * start, top, (wide - 20) * (stop - start), 10, colour(number), title=share)
    picture.y += -(-num_shown // columns) * 84
    picture.more(plan.mesh.size - num_shown, "ranks")
    return picture


def step_picture(plan: Plan) -> Picture:
    """One update on each rank along pp: forwards and backwards by the schedule, and what data ranks exchange.

    All stages take the same time, a backward twice that of a forward; exchanges are marks without a length.
    """
    k, pipeline, stage = plan.merge.microbatches, plan.pipeline, plan.sharding.stage
    asked = make_schedule(
        pipeline.schedule if plan.mesh.pp > 1 else "1f1b",
        num_ranks=plan.mesh.pp,
        num_chunks=pipeline.num_chunks if plan.mesh.pp > 1 else 1,
        num_microbatches=k,
    )
    transfers = chain(asked.num_stages)
    schedule = adapt(asked, transfers)
    ones = [1.0] * asked.num_stages
    timeline = simulate_schedule(schedule, transfers, forward_s=ones, backward_s=[2.0] * asked.num_stages)
    order = f"{schedule.name}, " if plan.mesh.pp > 1 else ""
    picture = Picture(f"one update: {order}{k} microbatch{'es' if k > 1 else ''}, sharding stage {stage}")
    marks = {"gather": colour(2, 0.9), "reduce": colour(3, 0.9), "update": colour(5, 0.9)}
    has_data_ranks = plan.mesh.num_data_ranks > 1
    num_chunks = schedule.num_stages // plan.mesh.pp
    darker = " (darker: a later stage of the rank)" if num_chunks > 1 else ""
    legend = [(colour(0, 0.35), "forward"), (colour(1, 0.35), f"backward{darker}")]
    used = {"gather": has_data_ranks and stage > 0, "reduce": has_data_ranks, "update": True}
    legend += [(fill, name) for name, fill in marks.items() if used[name]]
    picture.legend(legend)
    length = timeline.makespan_s + 1
    scale = (picture.width - 96) / length
    spans = timeline.busy_spans()

    def mark(x: float, name: str, title: str) -> None:
        picture.box(x, picture.y + 26, 4, 8, marks[name], title=title)

    for rank in range(min(plan.mesh.pp, _SHOWN_RANKS)):
        y = picture.y
        picture.text(16, y + 17, f"pp {rank}" if plan.mesh.pp > 1 else "each rank")
        own = [span for span in spans if span.rank == rank]
        for span in own:
            x, wide = 80 + span.start_s * scale, (span.stop_s - span.start_s) * scale
            words = (
                f"{'forward' if span.kind == 'F' else 'backward'} of microbatch {span.microbatch}, stage {span.stage}"
            )
            depth = 0.35 + 0.35 * (span.stage // plan.mesh.pp) / max(1, num_chunks - 1)
            picture.box(x, y, _with_gap(wide), 24, colour("FB".index(span.kind), depth), title=words)
            if wide > 14:
                picture.text(x + wide / 2, y + 16, str(span.microbatch), middle=True, fill=INK)
            if has_data_ranks and stage == 3:
                mark(x, "gather", "all-gather of each unit before it computes")
            if has_data_ranks and stage >= 2 and span.kind == "B":
                mark(x + wide - 5, "reduce", "reduce-scatter of this microbatch's gradients")
        end = 80 + max(span.stop_s for span in own) * scale
        if has_data_ranks and stage < 2:
            mark(end, "reduce", f"{'reduce-scatter' if stage else 'all-reduce'} of the merged gradients")
        update = 80 + timeline.makespan_s * scale
        picture.box(update, y, _with_gap(scale), 24, marks["update"], title="norm, clip, optimizer, one cast")
        if has_data_ranks and 0 < stage < 3:
            mark(80 + length * scale - 5, "gather", "all-gather of updated parameters")
        picture.y += 42
    picture.more(plan.mesh.pp - _SHOWN_RANKS, "ranks along pp")
    picture.text(16, picture.y + 6, f"bubble {timeline.bubble:.1%}", fill=MUTED)
    picture.y += 24
    return picture


def _with_gap(width: float) -> float:
    """A little less than `width`, so that neighbours do not touch: a pixel, or a tenth of what is narrow."""
    return max(width - 1, 0.9 * width)


def bucket_picture(ownership: Ownership) -> Picture:
    """The flat buffers: whose part each is, and which parameters stand in it."""
    picture = Picture(f"{len(ownership.buckets)} buckets, {ownership.num_owners} owners each")
    for number, bucket in enumerate(ownership.buckets[:_SHOWN_BUCKETS]):
        scale = (picture.width - 32) / max(1, bucket.num_elements)
        unit = f", unit {bucket.unit}" if bucket.unit is not None else ""
        words = f"bucket {number}: {bucket.num_elements:,} elements, {bucket.working}, masters {bucket.master}{unit}"
        picture.text(16, picture.y + 2, words)
        picture.y += 8
        for owner in range(ownership.num_owners):
            part = bucket.part(owner)
            x, wide = 16 + part.start * scale, part.num_elements * scale
            title = f"part of owner {owner}: {part.num_elements:,} elements"
            picture.box(x, picture.y, wide, 8, colour(owner, 0.8), title=title)
            for segment in bucket.segments(owner):
                at = 16 + (part.start + segment.start) * scale
                own = segment.run.num_elements * scale
                title = f"{segment.name}: elements {segment.run.start:,} to {segment.run.stop:,}, owner {owner}"
                picture.box(at, picture.y + 9, own, 22, colour(owner, 0.15), title=title, line="#ffffff")
                if own > _NAMED_WIDTH:
                    name = shortened(segment.name, own - 6, size=11)
                    picture.text(at + own / 2, picture.y + 24, name, size=11, middle=True)
        picture.y += 50
    picture.more(len(ownership.buckets) - _SHOWN_BUCKETS, "buckets")
    return picture
