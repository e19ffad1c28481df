"""Programs that are legal and unlikely."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.expected import seeded
from tests.engine.oracle import Batch
from tests.engine.pipeline.models import CHAIN, ROWS, Block, Chain, square, vectors
from tests.engine.pipeline.oracle import Case, adamw
from tests.engine.pipeline.stages import assert_equals_one_process

BATCHES = [vectors(seed) for seed in range(3)]


class Parcel:
    """A class that nobody can look into."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


class Packing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Parcel(super().forward(x))


class Unpacking(Block):
    def forward(self, parcel: Any) -> torch.Tensor:
        return super().forward(parcel.content)


class Handing(nn.Module):
    """One module hands the next an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.packing = Packing()
        self.unpacking = Unpacking()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.unpacking(self.packing(self.first(x))))
        return out


def test_an_object_goes_from_module_to_module_of_one_stage() -> None:
    stages = {"first": 0, "packing": 1, "unpacking": 1, "last": 1}
    case = Case(make=seeded(Handing), batches=BATCHES, stages=stages, num_stages=2, loss=square)
    assert_equals_one_process(case, schedule="1f1b", pp=2, k=3)


def test_an_object_that_another_stage_looks_into_is_refused_by_its_class() -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"first": 0, "packing": 0, "unpacking": 1, "last": 1})
    )

    def run(channel: sw.Channel) -> None:
        sw.parallelize(seeded(Handing)(), plan, optimizer=adamw, loss=square, channel=channel).step(vectors(0))

    with pytest.raises(sw.ShardwiseError, match="'content' of a Parcel"):
        sw.simulate(2, run)


class Numbered(Chain):
    """Layers that keep tensors, and their numbers, in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            vars(block).update(number=number, table=torch.arange(3))


def test_layers_with_tensors_in_plain_attributes() -> None:
    case = Case(make=seeded(Numbered), batches=BATCHES, stages=CHAIN, loss=square)
    assert_equals_one_process(case, schedule="1f1b", pp=4, k=2)


class Scripted(Chain):
    """One of its modules is a script."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = torch.jit.script(Block())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scripted_modules_are_refused(num_ranks: int) -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(pp=channel.size))
        sw.parallelize(seeded(Scripted)(), plan, optimizer=adamw, loss=square, channel=channel)

    with pytest.raises(sw.ShardwiseError, match=r"'blocks\.1' is a script"):
        sw.simulate(num_ranks, run)


def test_a_data_rank_whose_microbatches_all_weigh_nothing_computes_nothing() -> None:
    def weight(batch: Batch) -> float:
        return float(batch["weight"][0])

    def run(channel: sw.Channel, pp: int) -> list[float]:
        plan = sw.Plan(
            mesh=sw.Mesh(pp=pp, dp_shard=2),
            merge=sw.Merge(microbatches=2),
            pipeline=sw.Pipeline(stages=Case(make=Chain, batches=[], stages=CHAIN).stages_for(pp) if pp > 1 else None),
        )
        engine = sw.parallelize(
            seeded(Chain)(), plan, optimizer=adamw, loss=square, loss_weight=weight, channel=channel
        )
        data_rank = channel.rank % 2
        batches = [{**vectors(seed + data_rank), "weight": torch.full((ROWS,), data_rank)} for seed in (0, 2)]
        return [engine.step(batch).loss for batch in batches]

    expected = sw.simulate(2, lambda channel: run(channel, 1))[0]
    assert sw.simulate(4, lambda channel: run(channel, 2)) == [expected] * 4


class Disordered(Chain):
    """Registers its last layer first."""

    def __init__(self) -> None:
        super().__init__()
        last = self.last
        del self.last
        modules = dict(self._modules)
        self._modules.clear()
        self.last = last
        self._modules.update(modules)


def test_a_sample_tells_the_order_in_which_modules_are_cut() -> None:
    def run(channel: sw.Channel, sample: Batch | None) -> tuple[int, ...]:
        engine = sw.parallelize(
            seeded(Disordered)(),
            sw.Plan(mesh=sw.Mesh(pp=2)),
            optimizer=adamw,
            loss=square,
            channel=channel,
            sample=sample,
        )
        engine.step(vectors(0))
        assert engine.pipeline is not None
        return tuple(target - source for source, target in engine.pipeline.transfers or ())

    assert sw.simulate(2, lambda channel: run(channel, vectors(1))) == [(1,)] * 2
    assert -1 in sw.simulate(2, lambda channel: run(channel, None))[0], "control: by registration values go back"


class Shared(nn.Module):
    """An activation of which a process has one object, as libraries keep them; nobody knows that it draws nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


ONE_FOR_ALL = Shared()


class Sharing(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.activation = ONE_FOR_ALL
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.dropout(h + self.activation(block(h)))
        out: torch.Tensor = self.last(h)
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_ranks_of_one_process_may_share_a_module_object(schedule: str) -> None:
    def run(channel: sw.Channel) -> list[float]:
        plan = sw.Plan(
            mesh=sw.Mesh(pp=channel.size),
            merge=sw.Merge(microbatches=3),
            pipeline=sw.Pipeline(schedule=schedule, chunks=1 if channel.size == 1 else None),
        )
        engine = sw.parallelize(seeded(Sharing)(), plan, optimizer=adamw, loss=square, channel=channel, seed=3)
        return [engine.step(batch).loss for batch in BATCHES]

    assert sw.simulate(2, run) == [sw.simulate(1, run)[0]] * 2


class Ignored(nn.Module):
    """A stage computes on what the loss needs, and its result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.ignored = Block()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.ignored(h)
        out: torch.Tensor = self.last(h.detach())
        return out


def test_a_stage_without_a_backward_of_its_own_answers_the_stage_before() -> None:
    stages = {"first": 0, "ignored": 1, "last": 2}
    case = Case(make=seeded(Ignored), batches=BATCHES[:1], stages=stages, num_stages=3, loss=square)
    assert_equals_one_process(case, schedule="1f1b", pp=3, k=2)
