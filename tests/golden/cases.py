"""The plans that are kept as text: what they decide for a small transformer changes only when somebody means it to."""

from pathlib import Path

from shardwise.plan import Merge, Ownership, Plan, Precision, Sharding, footprint, plan_arena, plan_ownership, traffic
from shardwise.plan.buckets import OwnedLayout
from shardwise.plan.outlines import describe
from shardwise.space import Mesh

FOLDER = Path(__file__).parent

SHAPES = {
    "embed.weight": (96, 32),  # tied to the head
    **{
        f"layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "norm_1.weight": (32,),
            "attention.qkv.weight": (96, 32),
            "attention.out.weight": (32, 32),
            "norm_2.weight": (32,),
            "up.weight": (88, 32),
            "down.weight": (32, 88),
            "scale": (),
        }.items()
    },
    "norm.weight": (32,),
    "adapter.frozen": (5, 7),
}

BF16 = Precision(compute="bfloat16", keep=("*norm*",))

PLANS = {
    "replicated-fp32": Plan(mesh=Mesh(dp_shard=2), sharding=Sharding(stage=0, bucket_bytes=16 << 10)),
    "slice-bf16": Plan(
        mesh=Mesh(dp_shard=3), sharding=Sharding(bucket_bytes=8 << 10), precision=BF16, clip_grad_norm=1.0
    ),
    "slice-bf16-merged": Plan(
        mesh=Mesh(dp_shard=4), sharding=Sharding(bucket_bytes=8 << 10), precision=BF16, merge=Merge(microbatches=4)
    ),
    "whole-bf16": Plan(
        mesh=Mesh(dp_shard=3), sharding=Sharding(partition="whole", bucket_bytes=16 << 10), precision=BF16
    ),
    "hybrid-all": Plan(mesh=Mesh(dp_replicate=2, dp_shard=2), precision=BF16),
    "hybrid-replicas": Plan(
        mesh=Mesh(dp_replicate=2, dp_shard=2), sharding=Sharding(owners="dp_shard"), precision=BF16
    ),
}


def path_of(case: str) -> Path:
    """Where the text of a case is kept."""
    return FOLDER / f"{case}.txt"


def text_of(case: str) -> str:
    """What the plan of a case decides: its settings, the ownership, and the bytes of every owner."""
    plan = PLANS[case]
    ownership = ownership_of(plan)
    lines = [f"owner {owner}: {_bytes_of(ownership, owner, plan)}" for owner in range(ownership.num_owners)]
    return plan.text() + "\n" + _written(ownership) + "\n" + "\n".join(lines) + "\n"


def _written(ownership: Ownership) -> str:
    """A line per bucket and slot."""
    lines = [f"owners {ownership.num_owners} replicas {ownership.num_replicas}"]
    for bucket in ownership.buckets:
        kind = "trainable" if bucket.trainable else "frozen"
        parts = ",".join(map(str, bucket.counts))
        lines.append(f"bucket {bucket.working} {bucket.master} {kind} parts {parts}")
        lines += [f'  {slot.start} +{slot.num_elements} "{slot.name}"' for slot in bucket.slots]
    return "\n".join(lines) + "\n"


def ownership_of(plan: Plan) -> Ownership:
    """The ownership of the small transformer under a plan."""
    specs = [
        describe(
            name=name,
            aliases=("head.weight",) if name == "embed.weight" else (),
            shape=shape,
            dtype="float32",
            trainable=not name.endswith("frozen"),
            precision=plan.precision,
        )
        for name, shape in SHAPES.items()
    ]
    num_owners = len(plan.mesh.peers(0, plan.sharding.owner_axes))
    num_replicas = len(plan.mesh.peers(0, plan.sharding.replica_axes))
    return plan_ownership(specs, plan.sharding, num_owners=num_owners, num_replicas=num_replicas)


def _bytes_of(ownership: Ownership, owner: int, plan: Plan) -> str:
    k = plan.merge.microbatches
    layout = OwnedLayout(ownership=ownership)
    held = footprint(layout, owner, plan.precision, num_microbatches=k)
    sent = traffic(layout, owner, plan.precision, num_microbatches=k)
    arena = plan_arena(ownership, owner, plan.precision, num_microbatches=k)
    regions = ", ".join(
        f"{each.gradient_dtype} {each.gradient_start_bytes} -> {each.reduced_start_bytes}" for each in arena.regions
    )
    return (
        f"working {held.working_bytes}, gradients {held.gradient_bytes}, masters {held.master_bytes}, "
        f"owned elements {held.owned_elements}; sends {sent.reduce_bytes} + {sent.gather_bytes}; arena {regions}"
    )
