"""The claim of this folder: under any plan, in any place, a program trains as one process does.

    assert_trains_like_one_process(program, plan_of(program, "pp=2,dp_shard=2", stage=3, k=2))

It compares losses, norms, parameters, buffers and moments after every update, and the loss evaluated at the end.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from tests.oracle.batches import Batch, microbatches_of
from tests.oracle.one_process import Trained, expected
from tests.oracle.places import Place, simulated, train
from tests.oracle.program import Program
from tests.oracle.rank_order import in_rank_order

RELATIVE = 1e-10
"""Of the largest element of a float64 tensor.

Far above what is left of a difference, the order of sums: a gradient that is noise moves AdamW by at most its noise
over epsilon, 1e-17 / 1e-8 of the rate. Far below what a missing or a doubled term does.
"""


def has_bits_of_one_process(program: Program, plan: sw.Plan) -> bool:
    """Whether a plan adds up in an order that `in_rank_order` has.

    Not where ranks along tp have parts of a sum, and not where a parameter lies on two stages of a pipeline (a tie) and
    more than one microbatch is computed: each stage adds up its own uses first. Nor where another stage uses a value
    more than once, and its own stage again after that: the other stage's gradients come as their sum. Nor does a
    norm in float64 have one order, by which gradients are clipped.
    """
    num_microbatches = max(program.counts or [plan.merge.microbatches]) * plan.mesh.num_data_ranks
    if plan.mesh.tp > 1 or program.of_whole_batches:
        return False
    if plan.clip_grad_norm is not None and plan.mesh.num_data_ranks > 1 and program.is_wide():
        return False
    return plan.mesh.pp == 1 or (program.has_order and not (num_microbatches > 1 and program.is_tied()))


def without_stages(plan: sw.Plan) -> sw.Plan:
    """The plan with the same data ranks, and no other ones."""
    mesh = replace(plan.mesh, pp=1, tp=1)
    return replace(plan, mesh=mesh, pipeline=sw.Pipeline(), tensor=sw.Tensor(), activations=sw.Activations())


def wanted_of(program: Program, plan: sw.Plan) -> Trained:
    """What a plan has to give: one process in the order of its ranks.

    Where one process would need other random numbers, or casts that are the engine's, the engine without stages.
    """
    casts = plan.precision.compute is not None and plan.precision.keep and not program.rounds_by_hand
    if program.draws or casts:
        alone = without_stages(plan)
        sharding = replace(alone.sharding, stage=1, units=None, keep_gathered=False, offload=None)
        if plan.merge.microbatches == 1 or plan.sharding.stage < 2:  # else the stage says in which order sums are
            alone = replace(alone, sharding=sharding)
        return train(program, alone)
    if program.of_whole_batches:
        alone = replace(without_stages(plan), mesh=sw.Mesh())
        return in_rank_order(replace(program, batches=[in_rounds(batch, plan) for batch in program.batches]), alone)
    return in_rank_order(program, plan)


def in_rounds(batch: Batch, plan: sw.Plan) -> Batch:
    """The rows in the order in which data ranks compute them: the first microbatch of each comes first."""
    k = plan.merge.microbatches
    parts = microbatches_of(batch, plan.mesh.num_data_ranks, k)
    return {name: torch.cat([part[at][name] for at in range(k) for part in parts]) for name in batch}


def assert_trains_like_one_process(program: Program, plan: sw.Plan, place: Place = simulated) -> None:
    """To the bit where sums have one order; else in float64, where another order hardly differs."""
    if has_bits_of_one_process(program, plan):
        is_alone = plan.mesh.num_data_ranks == 1
        assert_same(train(program, plan, place), wanted_of(program, plan), exact=is_alone)
    else:
        wide = program.in_float64()
        assert_close(train(wide, plan, place), wanted_of(wide, plan), relative=program.relative, noise=program.noise)


def assert_same(got: Trained, wanted: Trained, *, exact: bool = False) -> None:
    """Everything is equal in every bit; of means and norms, which ranks add up in float64, all but the last ones.

    exact: these too.
    """
    for at, (state, other) in enumerate(zip(got.states, wanted.states, strict=True)):
        assert state.keys() == other.keys(), f"update {at}: {sorted(state.keys() ^ other.keys())}"
        different = [
            f"{name} by {float((value.double() - other[name].double()).abs().max())}"
            for name, value in state.items()
            if not torch.equal(value, other[name])
        ]
        assert not different, f"after update {at} of {len(got.states)}: {len(different)} of {len(state)}: {different}"
    near = 0.0 if exact else 1e-12
    assert got.losses == pytest.approx(wanted.losses, rel=near, abs=0)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=near, abs=0)
    assert got.held_out == pytest.approx(wanted.held_out, rel=near, abs=0)
    assert math.isfinite(got.held_out)


def assert_close(
    got: Trained,
    wanted: Trained,
    *,
    relative: float = RELATIVE,
    names: Iterable[str] | None = None,
    noise: tuple[str, ...] = (".k.bias",),
) -> None:
    """Losses, norms and every tensor after every update, to `relative` of the largest element of each.

    noise: endings of parameters whose gradient is nothing but rounding, as of the bias of keys (softmax does not see
    what all scores share). AdamW divides those 1e-18 by an epsilon of 1e-8: they are compared with 1.
    """
    assert got.losses == pytest.approx(wanted.losses, rel=relative)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=relative)
    assert got.held_out == pytest.approx(wanted.held_out, rel=relative)
    for state, other in zip(got.states, wanted.states, strict=True):
        for name in names or other:
            one, expects = state[name].reshape(-1), other[name].reshape(-1)
            if not len(expects):
                continue
            largest = float((one.double() - expects.double()).abs().max())
            scale = 1.0 if name.endswith(noise) else 1e-3
            assert largest <= relative * max(scale, float(expects.abs().max())), f"{name} differs by {largest}"


def in_one_process(program: Program, plan: sw.Plan) -> Trained:
    """Plain PyTorch on the microbatches of all data ranks, those of the first data rank first."""
    k = plan.merge.microbatches * plan.mesh.num_data_ranks
    assert isinstance(plan.clip_grad_norm, float | None)
    return expected(program, k, clip=plan.clip_grad_norm)
