"""What the tests of plans are drawn from: specs, parameters with the dtypes that a precision gives them, ownerships."""

from hypothesis import strategies as st

from shardwise.plan import (
    Activations,
    Average,
    Merge,
    Ownership,
    Parameter,
    Pipeline,
    Plan,
    Precision,
    Sharding,
    Tensor,
    plan_ownership,
)
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.outlines import describe
from shardwise.plan.schedules import make_schedule
from shardwise.space import Mesh
from tests.properties import tried

proven = tried(25)

DTYPES = (*COMPUTE_DTYPES, "complex64", "complex128", "int64", "bool")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
"""Any text that a file can hold: quotes, line ends, control characters, astral letters."""

_modules = st.none() | st.just("blocks") | st.lists(names, min_size=1, max_size=3).map(tuple)
_unit_names = st.none() | st.lists(names, min_size=1, max_size=3).map(tuple)
shardings = st.builds(
    Sharding,
    stage=st.sampled_from([0, 1]),
    partition=st.sampled_from(["slice", "whole"]),
    bucket_bytes=st.integers(1, 1 << 12),
    owners=st.sampled_from(["all", "dp_shard"]),
)
_of_precision = {
    "compute": st.none() | st.sampled_from(COMPUTE_DTYPES),
    **dict.fromkeys(("master", "accumulate", "reduce"), st.sampled_from(COMPUTE_DTYPES)),
}
precisions = st.builds(Precision, **_of_precision)
_schedules = st.sampled_from(["fthenb", "interleaved"])
_written = st.builds(
    lambda name, microbatches: make_schedule(name, num_ranks=2, num_chunks=2, num_microbatches=microbatches).text(),
    _schedules,
    st.integers(1, 4),
)
pipelines = (
    st.builds(Pipeline, balance=st.sampled_from(["parameters", "flops", "seconds"]))
    | st.builds(Pipeline, schedule=_schedules, chunks=st.none() | st.integers(1, 3))
    | st.builds(Pipeline, schedule=_written, stages=st.none() | st.dictionaries(names, st.integers(0, 1), min_size=1))
    | st.builds(Pipeline, stages=st.dictionaries(names, st.just(0), min_size=1, max_size=5))
)
_more_shardings = st.builds(
    Sharding,
    stage=st.just(3),
    units=_unit_names,
    keep_gathered=st.booleans(),
    offload=st.none() | st.sampled_from(["state", "parameters"]),
)
averages = st.builds(Average, decay=st.none() | st.just(0) | st.floats(0, 1, exclude_max=True), every=st.integers(1, 9))
activations = st.builds(
    Activations,
    checkpoint=_modules,
    offload=_modules,
    budget_bytes=st.none() | st.integers(1, 1 << 40),
) | st.builds(Activations, checkpoint=st.just("blocks"), save=st.none() | st.just(("aten.mm", "aten.addmm.default")))
plans = st.builds(
    Plan,
    mesh=st.builds(Mesh, pp=st.integers(1, 4), dp_replicate=st.integers(1, 4), dp_shard=st.integers(1, 4)),
    sharding=shardings | _more_shardings,
    merge=st.builds(Merge, microbatches=st.integers(1, 9), average=st.booleans()),
    precision=st.builds(Precision, **_of_precision, keep=st.lists(names, max_size=4).map(tuple)),
    pipeline=pipelines,
    clip_grad_norm=st.none()
    | st.floats(0, exclude_min=True, allow_nan=False)
    | st.integers(1, 1 << 40)
    | st.dictionaries(st.text(), st.floats(0, exclude_min=True, allow_nan=False), min_size=1, max_size=3),
    clip_grad_value=st.none() | st.floats(0, exclude_min=True, allow_nan=False),
    activations=activations,
    average=st.none() | averages,
    tensor=st.builds(Tensor, rules=st.none() | st.dictionaries(names, st.just("column"), max_size=3)),
)


SHAPES = ((), (0,), (1,), (16,), (17,), (3, 5), (4, 0, 2), (7, 9), (64,), (2, 3, 5, 3), (200,))


def models(precision: Precision, dtypes: tuple[str, ...] = DTYPES) -> st.SearchStrategy[list[Parameter]]:
    """Up to 9 parameters of up to 200 elements: of any dtype, scalars, without elements, frozen."""

    def model(draws: list[tuple[str, tuple[int, ...], bool]]) -> list[Parameter]:
        return [
            describe(
                name=f"layers.{at}.w",
                aliases=(),
                shape=shape,
                dtype=dtype,
                trainable=not frozen and dtype not in ("int64", "bool"),
                precision=precision,
            )
            for at, (dtype, shape, frozen) in enumerate(draws)
        ]

    one = st.tuples(st.sampled_from(dtypes), st.sampled_from(SHAPES), st.booleans())
    return st.lists(one, max_size=9).map(model)


@st.composite
def ownerships(draw: st.DrawFn, precision: Precision, dtypes: tuple[str, ...] = DTYPES) -> Ownership:
    """Ownerships of any model, for up to 9 ranks."""
    return plan_ownership(
        draw(models(precision, dtypes)),
        draw(shardings),
        num_owners=draw(st.integers(1, 9)),
        num_replicas=draw(st.integers(1, 3)),
    )
