"""Training on the stages of a pipeline, and the comparison with one process."""

import math
from collections.abc import Sequence
from typing import Any

import torch

import shardwise as sw
from shardwise.plan.names import is_state_name, split_state_name
from shardwise.space import check_cover
from tests.engine.oracle import Batch, Optimizers
from tests.engine.pipeline.oracle import Case, State, Trajectory, adamw, expected, microbatches_of

Pieces = dict[sw.Piece, torch.Tensor]


def plan_for(
    case: Case,
    *,
    schedule: str = "1f1b",
    pp: int = 2,
    k: int = 1,
    chunks: int | None = None,
    mesh: sw.Mesh | None = None,
    **settings: Any,
) -> sw.Plan:
    """The plan that cuts `case` into the stages of `schedule` on `pp` ranks (or on those of `mesh`)."""
    mesh = mesh or sw.Mesh(pp=pp)
    num_stages = mesh.pp * sw.Pipeline(schedule=schedule, chunks=chunks).num_chunks
    pipeline = sw.Pipeline(schedule=schedule, chunks=chunks, stages=case.stages_for(num_stages))
    if mesh.pp == 1:
        pipeline = sw.Pipeline()
    return sw.Plan(mesh=mesh, merge=sw.Merge(microbatches=k), pipeline=pipeline, **settings)


def train_on(channel: sw.Channel, case: Case, plan: sw.Plan, optimizer: Optimizers = adamw) -> tuple[Any, ...]:
    """One rank's part: losses, norms, the pieces it has after every update, and the evaluated loss."""
    engine = sw.parallelize(case.make(), plan, optimizer=optimizer, loss=case.loss, channel=channel)
    losses, grad_norms, states = [], [], []
    for batch in case.batches:
        report = engine.step(share_of(batch, plan.mesh, channel.rank))
        assert not report.skipped
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
        states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
    held_out = engine.evaluate(share_of(case.batches[0], plan.mesh, channel.rank)).loss
    return losses, grad_norms, held_out, states


def share_of(batch: Batch, mesh: sw.Mesh, rank: int) -> Batch:
    """The same rows for all stages; consecutive rows for each data rank."""
    at = mesh.coordinates(rank)
    return microbatches_of(batch, mesh.dp_replicate * mesh.dp_shard)[
        at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]
    ]


def train(case: Case, plan: sw.Plan, optimizer: Optimizers = adamw) -> Trajectory:
    """The training on simulated ranks, put together."""
    return put_together(sw.simulate(plan.mesh.size, lambda channel: train_on(channel, case, plan, optimizer)))


def put_together(ranks: Sequence[tuple[Any, ...]]) -> Trajectory:
    """What all ranks have, after a check that they report the same floats."""
    for other in ranks[1:]:
        assert other[:3] == ranks[0][:3]
    losses, grad_norms, held_out, _ = ranks[0]
    states = [whole_state([rank[3][at] for rank in ranks]) for at in range(len(losses))]
    return Trajectory(losses=losses, grad_norms=grad_norms, held_out=held_out, states=states)


def whole_state(ranks: Sequence[Pieces]) -> State:
    """The values of all pieces. Those that several ranks hold are the same in every bit, and nothing is missing."""
    distinct: Pieces = {}
    for held in ranks:
        for piece, tensor in ((piece, tensor.cpu()) for piece, tensor in held.items()):
            name = split_state_name(piece.name)
            if name is not None and name[1] not in ("exp_avg", "exp_avg_sq"):
                continue
            assert piece.run is not None or piece.shape == piece.global_shape
            assert torch.equal(distinct.setdefault(piece, tensor), tensor), f"{piece} differs between ranks"
    assert check_cover(distinct) == []
    state: State = {}
    for piece, tensor in distinct.items():
        whole = state.setdefault(piece.name, torch.empty(piece.global_shape, dtype=tensor.dtype))
        start, stop = piece.run or (0, whole.numel())
        whole.view(-1)[start:stop] = tensor.reshape(-1)
    return state


def assert_same(got: Trajectory, wanted: Trajectory) -> None:
    """Losses, norms, parameters, buffers and moments after every update are equal in every bit."""
    for at, (state, other) in enumerate(zip(got.states, wanted.states, strict=True)):
        assert state.keys() == other.keys(), f"update {at}: {sorted(state.keys() ^ other.keys())}"
        different = [
            f"{name} by {float((value.double() - other[name].double()).abs().max())}"
            for name, value in state.items()
            if not torch.equal(value, other[name])
        ]
        assert got.losses[at] == wanted.losses[at], f"loss of update {at}; {different}"
        assert not different, f"after update {at} of {len(got.states)}: {len(different)} of {len(state)}: {different}"
        assert got.grad_norms[at] == wanted.grad_norms[at], f"norm of update {at}"
    assert got.held_out == wanted.held_out
    assert math.isfinite(got.held_out)


def assert_equals_one_process(case: Case, **layout: Any) -> None:
    """The pipeline trains to the bits that one process gives."""
    plan = plan_for(case, **layout)
    wanted = expected(case, plan.merge.microbatches, clip=plan.clip_grad_norm)
    assert_same(train(case, plan), wanted)


def largest_difference(one: State, other: State) -> float:
    """Of any element of any parameter or buffer."""
    return max(
        float((one[name].double() - other[name].double()).abs().max()) for name in one if not is_state_name(name)
    )
