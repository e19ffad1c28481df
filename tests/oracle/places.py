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
from tests.oracle.batches import Batch, share_of
from tests.oracle.one_process import State, Trained
from tests.oracle.program import Program

Pieces = dict[sw.Piece, torch.Tensor]
OfRank = tuple[list[float], list[float], float, list[Pieces]]
"""Losses, norms, the evaluated loss at the end, and the pieces after every update."""
Place = Callable[[Program, sw.Plan], Sequence[OfRank]]


def data_share(batch: Batch, mesh: sw.Mesh, rank: int) -> Batch:
    """The same rows for all stages and parts; consecutive rows for each data rank."""
    return share_of(batch, mesh.data_rank(rank), mesh.dp_replicate * mesh.dp_shard)


def train_on(channel: sw.Channel, program: Program, plan: sw.Plan, **settings: Any) -> OfRank:
    """One rank's part; `settings` are arguments of `parallelize`."""
    engine = program.engine(plan, channel, **settings)
    losses, grad_norms, states = [], [], []
    for batch in program.batches:
        report = engine.step(data_share(batch, plan.mesh, channel.rank))
        assert not report.skipped
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
        states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
    held_out = engine.evaluate(data_share(program.batches[0], plan.mesh, channel.rank)).loss
    return losses, grad_norms, held_out, states


def simulated(program: Program, plan: sw.Plan) -> Sequence[OfRank]:
    """Simulated ranks in this process."""
    return sw.simulate(plan.mesh.size, lambda channel: train_on(channel, program, plan))


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
        for piece, tensor in ((piece, tensor.cpu()) for piece, tensor in held.items()):
            if is_step(piece.name):
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
