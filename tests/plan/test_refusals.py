"""What cannot be planned is refused with every problem at once, in words that say what to do."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shardwise.errors import PlanError, ShardwiseError
from shardwise.plan import Activations, Merge, Outline, Pipeline, Plan, Precision, Sharding, Tensor, place
from shardwise.plan.optimizer_entries import nested_state, python_type, values_of
from shardwise.plan.outlines import check_keep, describe
from shardwise.plan.saved_settings import shared_to_json, stored_optimizers
from shardwise.plan.schedule_check import adapt, check
from shardwise.plan.schedules import Schedule, make_schedule
from shardwise.plan.timeline import ideal_bubble, simulate_schedule
from shardwise.plan.units import meant_modules, plan_units
from shardwise.routes.reshard import plan_reshard
from shardwise.space import Mesh, Piece
from tests.plan.outlines import Tree, layers, model, shared_embedding
from tests.refusals import Refusals

Call = Callable[[], object]
of: Any = partial
"""A call with arguments of types that it does not take."""


def each(call: Any, *values: object) -> Call:
    """What is said of each of the values."""

    def calls() -> None:
        said: list[str] = []
        for value in values:
            with pytest.raises(ShardwiseError) as caught:
                call(value)
            said += getattr(caught.value, "problems", [str(caught.value)])
        raise PlanError(*said)

    return calls


def setting(kind: Any, name: str, *values: object, **others: object) -> Call:
    return each(lambda value: kind(**{name: value}, **others), *values)


SPECS: dict[str, Call] = {
    "sharding": of(Sharding, stage=4, partition="slices", bucket_bytes=0, owners="tp"),
    "stages of sharding": setting(Sharding, "stage", -1, True, "1", None, 0.5),
    "units below stage 3": of(Sharding, stage=2, units=("a",), keep_gathered=True),
    "no units": of(Sharding, stage=3, units=()),
    "offload": setting(Sharding, "offload", "optimizer", "parameters", stage=2),
    "merge": setting(Merge, "microbatches", 0, -3, 1.0, True, "2", None, average=1),
    "precision": of(Precision, compute="bf16", master=None, accumulate="int8", reduce=32, keep="*norm*"),
    "names to keep": setting(Precision, "keep", "norm", ("norm", 1), None, 5, {"norm": 1}),
    "plan": of(Plan, mesh="dp_shard=2", sharding=1, merge=4, precision="bf16", pipeline=2, clip_grad_norm=0),
    "clips": setting(Plan, "clip_grad_norm", 0.0, -1.0, math.nan, True, "1.0", {}, {"a": -1}),
    "clips of values": setting(Plan, "clip_grad_value", 0),
    "rules": setting(Tensor, "rules", 5, ["a"], {1: "column"}, {"a": 1}, "all"),
    "pipeline": of(Pipeline, schedule="gpipe", chunks=0, balance="time", stages={"a": -1, "b": True, "c": 0}),
    "stages of modules": setting(Pipeline, "stages", 5, ["a"], {1: 0}, "a", {}),
    "stages and a balance": of(Pipeline, chunks=2, stages={"a": 0}, balance="flops"),
    "a stage of no rank": lambda: Plan(
        mesh=Mesh(pp=2), pipeline=Pipeline(schedule="fthenb", chunks=2, stages={"a": 0, "b": 3, "c": 4})
    ),
    "a schedule in bad words": of(Pipeline, schedule="own: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0 X\n"),
    "activations": each(
        lambda settings: Activations(**settings),
        {"checkpoint": "layers.*", "offload": (), "save": ("mm",), "budget_bytes": 0},
        {"checkpoint": (1,), "save": "aten.mm", "budget_bytes": True},
        {"save": ("aten.mm",), "offload": "blocks"},
    ),
    "unknown settings": of(
        Plan.parse, "clip_grad_nrom = 1\nshardign.stage = 1\n[mesh]\ndp_shrad = 2\n[merge]\nzzz = 1\n"
    ),
    "bad values in a text": of(
        Plan.parse,
        "merge = 4\nclip_grad_norm = -1\nmesh.tp = 0\nsharding = {stage = 7, stge = 1}\nprecision.keep = 'norm'\n",
    ),
    "no TOML": of(Plan.parse, "mesh.dp_shard = 2\nmesh.dp_shard = \n"),
    "a dtype": of(describe, name="w", aliases=(), shape=(1,), dtype="uint16", trainable=True, precision=Precision()),
    "names to keep that mean nothing": lambda: check_keep(
        Precision(keep=("*nrom*", "head", "tail")), ["norm.w", "head.w"]
    ),
    "names to keep of nothing": lambda: check_keep(Precision(keep=("x",)), []),
}


def given_stages(tree: Tree | Outline, stages: dict[str, int], num_ranks: int = 2) -> Call:
    outline = tree if isinstance(tree, Outline) else model(tree)
    return lambda: place(outline, Pipeline(stages=stages), num_ranks=num_ranks)


def balanced(tree: Tree, num_ranks: int) -> Call:
    return lambda: place(model(tree), Pipeline(), num_ranks=num_ranks)


LAYER: Tree = {"norm": 1, "mlp": {"up": 2, "down": 2}}
STAGES = {
    "more stages than modules": balanced({"a": 1, "activation": 0, "b": {"c": 1, "d": 1}}, 4),
    "stages without modules": balanced({".p": 1}, 2),
    "a shared module on two stages": given_stages(
        shared_embedding(), {"shared": 0, "encoder": 0, "decoder": 1, "head": 1}
    ),
    "all of given stages": given_stages(
        {".scale": 1, "layers[]": {"0": LAYER, "1": LAYER}, "lm_head": 3, "a": 1, "b": 1, "c": 1, "d": 1},
        {"layers.0": 0, "*norm*": 1, "layers.1.mlp": 1, "lm_haed": 1, "layers.*": 4},
        4,
    ),
    "a parameter inside of another stage": given_stages(
        {"a": 1, "b": 1, "c": {".bias": 1}}, {"a": 0, "b": 1, "c": 1, "*.bias": 0}
    ),
}


def made(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


def broken(orders: str, heading: str = "own: 2 stages, 2 ranks, 2 microbatches") -> Call:
    """The findings of the check of a schedule; of each rank the actions."""

    def call() -> None:
        ranks = "".join(f"rank {at}: {order}\n" for at, order in enumerate(orders.split("|")))
        raise PlanError(*check(Schedule.parse(f"{heading}\n{ranks}"), [(0, 1)]))

    return call


FEEDBACK = [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 3)]
"""Four stages; the third gives the first a value to work on again."""

SCHEDULES = {
    "a schedule of other sizes": lambda: made(made("interleaved", 2, 2, 8).text(), 4, 1, 4),
    "an almost known schedule": of(made, "1F1Bs", 2, 1, 2),
    "an unknown schedule": of(made, "zero bubble", 2, 1, 2),
    "chunks of 1f1b": of(made, "1f1b", 2, 3, 2),
    "no chunks": of(made, "1f1b", 2, 0, 0),
    "names without a line": each(lambda name: Schedule(name, 1, 1, ((),)), "", " padded", "two\nlines"),
    "texts of schedules": each(
        Schedule.parse,
        *("", "\n\nrank 0: F0.0\n", "x: 1 stage, 1 rank, 1 microbatch\nrank 0: F0.0 f0.0\n"),
        "x: 1 stage, 1 rank, 1 microbatch\n\nrank 0: B0.0.1\n",
        "x: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0\nrank 2: F0.1\n",
        "x: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0\n",
        "x: 3 stages, 2 ranks, 1 microbatch\nrank 0:\nrank 1:\n",
        "x: 1 stage, 1 rank, 0 microbatches\nrank 0:\n",
        "x: 1 stage, 0 ranks, 1 microbatch\n",
        "x: 2 stages, 2 ranks, 1 microbatch\nrank 0: A B\nrank 7: C\n",
    ),
    "a backward that lacks": broken("F0.0 F1.0 B0.0|F0.1 B0.1 F1.1 B1.1"),
    "a rank without actions": broken("F0.0 F1.0 B0.0 B1.0|"),
    "a forward twice": broken("F0.0 F0.0 F1.0 B0.0 B1.0|F0.1 B0.1 F1.1 B1.1"),
    "backwards in another order": broken("F0.0 F1.0 B1.0 B0.0|F0.1 F1.1 B0.1 B1.1"),
    "a backward before its forward": broken("B0.0 F0.0 F1.0 B1.0|F0.1 B0.1 F1.1 B1.1"),
    "an action of another rank": broken("F0.0 F1.0 B0.0 B1.0 F1.1|F0.1 B0.1 B1.1"),
    "actions of nothing": broken("F0.0 F1.0 B0.0 B1.0|F0.1 B0.1 F1.1 B1.1 F2.1 B0.2"),
    "stages in another order": broken("F0.1 F0.0 B0.0 B0.1", "own: 2 stages, 1 rank, 1 microbatch"),
    "a deadlock of a written schedule": lambda: adapt(made(made("1f1b", 4, 1, 6).text(), 4, 1, 6), FEEDBACK),
    "a transfer to no stage": each(lambda name: adapt(made(name, 4, 1, 2), [(0, 1), (1, 4)]), "fthenb", "1f1b"),
    "a bubble without a formula": of(ideal_bubble, "own", num_ranks=2, num_chunks=1, num_microbatches=2),
    "times of a timeline": each(
        lambda change: simulate_schedule(
            made("1f1b", 2, 1, 2),
            **{"transfers": [(0, 1)], "forward_s": [1.0, 1.0], "backward_s": [1.0, 1.0], **change},
        ),
        *({"transfers": [(0, 7)]}, {"forward_s": [1.0]}, {"backward_s": [1.0, -1.0]}),
        *({"transfer_s": math.nan}, {"forward_s": [1.0, math.inf]}),
    ),
}


def module(name: str, kind: str, *children: Outline, is_indivisible: bool = False) -> Outline:
    own = () if children else ((f"{name}.weight", 4),)
    return Outline(
        name=name,
        kind=kind,
        is_container=kind == "ModuleList",
        children=children,
        own_parameters=own,
        is_indivisible=is_indivisible,
    )


ATTENTION = module("layers.0", "MultiheadAttention", module("layers.0.out", "Linear"), is_indivisible=True)
NET = module("", "Model", module("embedding", "Embedding"), module("layers", "ModuleList", ATTENTION))
LLAMA: Tree = {"model": {"embed": 9, "layers[]": layers(8, 8, 8), "norm": 1}, "head": 9}

MODULES = {
    "activations of no module": each(
        lambda asked: meant_modules(NET, asked, setting="activations.offload"),
        *(("layer.0",), ("layers",), ("*.out",)),
    ),
    "no block that repeats": lambda: meant_modules(model({"one": 1}), "blocks", setting="activations.checkpoint"),
    "units of no module": each(
        lambda pattern: plan_units(model(LLAMA), first_names={}, patterns=[pattern]), "model.layer.*", "model.layers"
    ),
}


def piece(name: str = "w", whole: tuple[int, ...] = (8, 4), dtype: str = "float32", **place: Any) -> Piece:
    return Piece(name=name, dtype=dtype, global_shape=whole, **place)


HELD = [
    [piece("a"), piece("b"), piece("c"), piece("d"), piece("z", dtype="complex64"), piece("q", dtype="int5")],
    [piece("d", dtype="float16")],
]
WANTED = [
    [
        *(piece("a", (4, 8)), piece("b", dtype="float16"), *map(piece, ("x", "x1", "x2", "x3", "x4"))),
        piece("q", dtype="int5"),
    ],
    [piece("d"), piece("z", dtype="float32"), piece("y"), piece("y")],
]


RESHARDS = {
    "all of a reshard": of(plan_reshard, HELD, WANTED, cast=False),
    "a cast to real numbers": of(plan_reshard, [[HELD[0][4]], []], [[], [WANTED[1][1]]], cast=True),
    "rows that nobody holds": of(plan_reshard, [[piece(shape=(7, 4))], []], [[], [piece(), piece()]]),
    "another number of ranks": of(plan_reshard, [[], []], [[]]),
    "too few bytes": of(plan_reshard, [[], []], [[]] * 2, max_bytes=63),
}


class Shaped:
    """Stands for a parameter that the model does not have."""

    shape = (2, 3)


OPTIMIZERS = {
    "settings of optimizers": each(
        lambda optimizers: stored_optimizers({"optimizers": optimizers}),
        *(3, [3], [{}], [{"kind": "Adam"}], [{"kind": "Adam", "groups": [{"parameters": ["w"]}]}]),
    ),
    "values that no tensor keeps": each(partial(python_type, "w", "k"), 1 << 63, -(1 << 63) - 1, 1j, "x", []),
    "state of an unknown parameter": lambda: list(values_of("Adam", {Shaped(): {"step": 1}}, {"w": "w"})),
    "state for all parameters": lambda: shared_to_json("Adam", {"what": type}),
    "keys of nested state": each(
        lambda keys: nested_state(dict.fromkeys(keys, 1)),
        *(["a[1]"], ["a[0]", "a(1)"], ["a[0", "b"], ["a[x]"], ["a={"], ["a[0][0]", "a[0]"], ["a[0]", "a"]),
        *(['a["x"]'], ["a" + "[0" * 9999]),
    ),
}

REFUSED = Refusals("plan.plans", {**SPECS, **STAGES, **SCHEDULES, **MODULES, **RESHARDS, **OPTIMIZERS})


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused(case: str) -> None:
    REFUSED.check(case)
