"""Where a program trains under a plan: on simulated ranks, or in real processes; each place gives what ranks have.

train(program, plan)                                  # simulated ranks; on the fake device by its fixtures
train(program, plan, Processes(pool))                 # real processes
train(program, plan, Processes(pool, STRICT_DEVICE))  # with a fake device each, over the strict double of NCCL
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shardwise as sw
from shardwise.space import check_cover
from tests.oracle.batches import Batch, rows_of, share_of
from tests.oracle.one_process import State, Trained
from tests.oracle.program import Program

Pieces = dict[sw.Piece, torch.Tensor]
OfRank = tuple[list[float], list[float], float, list[Pieces]]
"""Losses, norms, the evaluated loss at the end, and the pieces after every update."""
Place = Callable[[Program, sw.Plan], Sequence[OfRank]]


def data_share(batch: Batch, mesh: sw.Mesh, rank: int) -> Batch:
    """The same rows for all stages and parts; consecutive rows for each data rank."""
    return share_of(batch, mesh.data_rank(rank), mesh.dp_replicate * mesh.dp_shard)


def look_between(engine: sw.Engine, share: Batch) -> None:
    """Evaluate and predict: other numbers of rows on the data ranks, none on the first; and so with averages."""
    mesh = engine.plan.mesh
    some = rows_of(share, range(min(mesh.data_rank(engine.channel.rank), 2) if mesh.num_data_ranks > 1 else 2))
    engine.evaluate(some)
    engine.predict(rows_of(share, range(2)))
    if engine.plan.average is not None:
        # Right after a prediction and before one: others may still read this rank's part in its place.
        with engine.averaged():
            engine.evaluate(share)
            engine.predict(rows_of(share, range(2)))


def train_on(channel: sw.Channel, program: Program, plan: sw.Plan, *, between: bool = False, **settings: Any) -> OfRank:
    """One rank's part. between: it evaluates and predicts after each update. settings: arguments of `parallelize`."""
    engine = program.engine(plan, channel, **settings)
    losses, grad_norms, states = [], [], []
    counts: Sequence[int | None] = program.counts or [None] * len(program.batches)
    for batch, count in zip(program.batches, counts, strict=True):
        share = data_share(batch, plan.mesh, channel.rank)
        report = engine.step(share, microbatches=count)
        assert not report.skipped
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
        states.append({piece: tensor.to("cpu", copy=True) for piece, tensor in engine.state().items()})
        if between:
            look_between(engine, share)
    held_out = engine.evaluate(data_share(program.batches[0], plan.mesh, channel.rank)).loss
    return losses, grad_norms, held_out, states


def simulated(program: Program, plan: sw.Plan) -> Sequence[OfRank]:
    """Simulated ranks in this process."""
    # Some programs compile, and the machine may have other work.
    return sw.simulate(plan.mesh.size, lambda channel: train_on(channel, program, plan), timeout_seconds=600)


@dataclass(frozen=True)
class Processes:
    """Real processes, which find the program in the table by its name."""

    pool: Any
    transport: Any = None

    def __call__(self, program: Program, plan: sw.Plan) -> Sequence[OfRank]:
        assert program.name, "a program of the table"
        ranks: Sequence[OfRank] = self.pool.run(
            plan.mesh.size, train_named, program.name, plan.text(), transport=self.transport
        )
        return ranks


def train_named(channel: sw.Channel, name: str, plan: str) -> OfRank:
    """`train_on` for a process of its own."""
    from tests.oracle.programs import program_named

    return train_on(channel, program_named(name), sw.Plan.parse(plan))


def train(program: Program, plan: sw.Plan, place: Place = simulated) -> Trained:
    """The training of all ranks, put together."""
    return put_together(place(program, plan))


def put_together(ranks: Sequence[Any]) -> Trained:
    """What all ranks have, after a check that they report the same floats."""
    for other in ranks[1:]:
        assert other[:3] == ranks[0][:3]
    losses, grad_norms, held_out, _ = ranks[0]
    states = [whole_state([rank[3][at] for rank in ranks]) for at in range(len(losses))]
    return Trained(losses=losses, grad_norms=grad_norms, held_out=held_out, states=states)


def whole_state(ranks: Sequence[Pieces]) -> State:
    """The values of all pieces. Those that several ranks hold are the same in every bit, and nothing is missing."""
    distinct: Pieces = {}
    for held in ranks:
        for piece, tensor in held.items():
            if is_step(piece.name) or (piece.name.startswith("optimizer/") and 0 in piece.global_shape):
                continue
            assert torch.equal(distinct.setdefault(piece, tensor), tensor), f"{piece} differs between ranks"
    assert check_cover(distinct) == []
    state: State = {}
    for piece, tensor in distinct.items():
        whole = state.setdefault(piece.name, torch.empty(piece.global_shape, dtype=tensor.dtype))
        box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
        elements = torch.arange(whole.numel()).view(piece.global_shape)[box].reshape(-1)
        start, stop = piece.run or (0, len(elements))
        whole.view(-1)[elements[start:stop]] = tensor.reshape(-1)
    return state


def is_step(name: str) -> bool:
    """Whether the state of this name counts the updates of a parameter."""
    return name.startswith("optimizer/") and name.endswith("/step")
