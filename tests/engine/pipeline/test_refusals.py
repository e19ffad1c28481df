"""What stages cannot do is said on every rank, with the module, the stage and the user's line; nothing hangs."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import BatchError, MismatchError, PeerError, PlanError
from tests.engine.expected import seeded
from tests.engine.oracle import Batch
from tests.engine.pipeline.models import CASES, ROWS, Block, Chain, square, vectors
from tests.engine.pipeline.oracle import adamw
from tests.engine.refusals import same_error_everywhere

STAGES = {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "last": 2}
PLAN = sw.Plan(mesh=sw.Mesh(pp=3), merge=sw.Merge(microbatches=2), pipeline=sw.Pipeline(stages=STAGES))
"""Three stages; the second makes what is read."""


def engine_of(channel: sw.Channel, model: nn.Module, plan: sw.Plan = PLAN) -> sw.Engine:
    return sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)


def texts_of_step(
    make: Callable[[int], nn.Module], *, plan: sw.Plan = PLAN, batches: Mapping[int, Batch] = {}
) -> list[tuple[BaseException, str]]:
    """What every rank raises in its first step, with the notes."""

    def run(channel: sw.Channel) -> tuple[BaseException, str]:
        engine = engine_of(channel, make(channel.rank), plan)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            engine.step(batches.get(channel.rank, vectors(0)))
        return caught.value, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    return sw.simulate(plan.mesh.size, run)


class Between(Chain):
    """Something is done with what the second block gave; the third gets the tensor that comes out of it."""

    def __init__(self, act: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.first(x)))
        made = self.act(h)
        h = made if isinstance(made, torch.Tensor) else h
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](h)))
        return out


def between(act: Callable[[torch.Tensor], Any]) -> Callable[[int], nn.Module]:
    return lambda rank: seeded(lambda: Between(act))()


ACCESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda h: h.data_ptr(),
    "storage": lambda h: h.untyped_storage(),
    "deepcopy": lambda h: copy.deepcopy(h.detach()),
    "backward": lambda h: h.sum().backward(),
    "grad_fn": lambda h: h.grad_fn,
}


@pytest.mark.parametrize("name", ACCESSES)
def test_memory_and_graph_of_a_value_are_refused_with_its_module_stage_and_line(name: str) -> None:
    line = ACCESSES[name].__code__.co_firstlineno
    for error, text in texts_of_step(between(ACCESSES[name])):
        assert isinstance(error, sw.ShardwiseError)
        assert "blocks.1" in text
        assert "stage 1" in text
        assert f"{Path(__file__).name}:{line}" in text


def test_shapes_dtypes_and_devices_of_values_may_be_read() -> None:
    seen: list[Any] = []

    def look(h: torch.Tensor) -> None:
        seen.append((h.shape, len(h), h.ndim, h.dtype, h.device.type, h.numel(), h.requires_grad, h.is_contiguous()))

    def run(channel: sw.Channel) -> None:
        engine_of(channel, between(look)(0)).step(vectors(0))

    sw.simulate(3, run)
    assert set(seen) == {((6, 7), 6, 2, torch.float32, "cpu", 42, True, True)}


class Straying(Chain):
    """The forward of rank 1 is another."""

    def __init__(self, rank: int, way: str) -> None:
        super().__init__()
        self.rank = rank
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strays = self.rank == 1
        h = self.blocks[0](self.first(x))
        if self.way == "leaves out a module" and strays:
            out: torch.Tensor = self.last(self.blocks[3](self.blocks[1](h)))
            return out
        h = self.blocks[1](h)
        for _ in range(2 if self.way == "calls a module twice" and strays else 1):
            h = self.blocks[2](h)
        if self.way == "computes something else" and strays:
            h = h * 2
        h = h * (0.5 if self.way == "computes with another number" and strays else 0.25)
        if self.way == "sends another value" and strays:
            h = h + self.first(x) * 0
        out = self.last(self.blocks[3](h))
        return out  # noqa: RET504


@pytest.mark.parametrize("schedule", ["1f1b", "fthenb"])
@pytest.mark.parametrize(
    "way",
    [
        *("leaves out a module", "calls a module twice", "computes something else", "computes with another number"),
        "sends another value",
    ],
)
def test_a_forward_that_differs_between_ranks_is_found(way: str, schedule: str) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(pp=3),
        merge=sw.Merge(microbatches=2),
        pipeline=sw.Pipeline(stages=STAGES, schedule=schedule),
    )
    told = texts_of_step(lambda rank: seeded(lambda: Straying(rank, way))(), plan=plan)
    assert all(isinstance(error, sw.ShardwiseError) for error, _ in told)
    if way == "sends another value":  # which nobody sends: the ranks wait for each other, and say for what
        assert "waiting for the value of microbatch 0 from stage 0" in told[1][1]
    else:
        assert any(isinstance(error, MismatchError) and "forward" in text for error, text in told)


OTHER_BATCHES: dict[str, Batch] = {
    "other values": vectors(1),
    "other rows": vectors(0, rows=8),
    "other dtype": {**vectors(0), "x": vectors(0)["x"].double()},
    "another entry": {**vectors(0), "mask": torch.ones(ROWS)},
    "another flag": {**vectors(0), "flag": 1},
    "no row": {name: value[:0] for name, value in vectors(0).items()},
}


@pytest.mark.parametrize("way", OTHER_BATCHES)
def test_stages_that_are_given_different_batches_refuse_them(way: str) -> None:
    """And go on with the next."""

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, CASES["chain"].make())
        engine.step(vectors(5))
        try:
            engine.step(OTHER_BATCHES[way] if channel.rank == 1 else vectors(0))
        finally:
            assert not engine.step(vectors(6)).skipped

    error = same_error_everywhere(3, run)
    assert isinstance(error, BatchError | MismatchError)
    assert "rank 1" in str(error)


class FailingInside(nn.Linear):
    """Its third call raises, on the rank that executes it."""

    num_calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 3 and torch.is_grad_enabled():
            raise FloatingPointError("the pressure is too high")
        return super().forward(input)


def failing_inside(rank: int) -> nn.Module:
    model = seeded(Chain)()
    broken = FailingInside(9, 7)
    broken.load_state_dict(model.blocks[1].get_submodule("outer").state_dict())
    model.blocks[1].outer = broken
    return model


@pytest.mark.parametrize("schedule", ["fthenb", "1f1b"])
def test_an_exception_inside_one_stages_module_is_told_once_and_stops_all(schedule: str) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(pp=3),
        merge=sw.Merge(microbatches=5),
        pipeline=sw.Pipeline(stages=STAGES, schedule=schedule),
    )
    told = texts_of_step(failing_inside, plan=plan)
    error, text = told[1]
    assert type(error) is FloatingPointError
    assert error.__traceback__ is not None
    for words in ("rank 1", "stage 1", "blocks.1", "microbatch 2"):
        assert words in text
    assert text.count("the pressure is too high") == 1
    for rank in (0, 2):
        error, text = told[rank]
        assert isinstance(error, PeerError)
        assert error.rank == 1
        assert "the pressure is too high" in text


def test_an_exception_in_one_stages_backward_names_where_it_was() -> None:
    def make(rank: int) -> nn.Module:
        model = seeded(Chain)()
        seen: list[torch.Tensor] = []

        def count(gradient: torch.Tensor) -> None:
            seen.append(gradient)
            if len(seen) == 2:
                raise FloatingPointError("the pressure is too low")

        model.blocks[2].get_submodule("inner").weight.register_hook(count)  # type: ignore[operator]
        return model

    told = texts_of_step(make)
    error, text = told[1]
    assert type(error) is FloatingPointError
    for words in ("rank 1", "stage 1", "microbatch 1", "backward"):
        assert words in text
    assert all(isinstance(told[rank][0], PeerError) and "too low" in told[rank][1] for rank in (0, 2))


def test_an_exception_between_modules_is_every_ranks_own() -> None:
    def act(h: torch.Tensor) -> None:
        raise KeyError("no such layer")

    for error, text in texts_of_step(between(act)):
        assert isinstance(error, KeyError | PeerError)
        assert "no such layer" in text


GLUE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "reentrant checkpointing": (lambda h: checkpoint(torch.tanh, h, use_reentrant=True), "use_reentrant=False"),
}


@pytest.mark.parametrize("name", GLUE)
def test_what_only_works_inside_modules_is_refused_between_them(name: str) -> None:
    act, words = GLUE[name]
    for error, text in texts_of_step(between(act)):
        assert isinstance(error, sw.ShardwiseError)
        assert words in text


PLACEMENTS: dict[str, tuple[Mapping[str, int], list[str]]] = {
    "nothing matches": ({**STAGES, "layers.*": 1}, ["layers.*"]),
    "two stages for one module": ({**STAGES, "blocks.*": 1}, ["blocks.0", "blocks.*"]),
    "a parameter nowhere": ({name: at for name, at in STAGES.items() if name != "last"}, ["last.weight"]),
    "a stage with nothing": ({name: at if at < 2 else 1 for name, at in STAGES.items()}, ["stage 2"]),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_that_cannot_hold_is_refused_before_anything_is_touched(name: str) -> None:
    stages, words = PLACEMENTS[name]
    plan = sw.Plan(mesh=sw.Mesh(pp=3), pipeline=sw.Pipeline(stages=stages))
    models: dict[int, nn.Module] = {}

    def run(channel: sw.Channel) -> None:
        models[channel.rank] = CASES["chain"].make()
        engine_of(channel, models[channel.rank], plan)

    error = same_error_everywhere(3, run)
    assert isinstance(error, PlanError)
    assert all(word in str(error) for word in words)
    for model in models.values():
        assert model(**{"x": vectors(0)["x"]}).shape == (ROWS, 3)


def test_more_stages_than_modules_are_refused() -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=3))
    error = same_error_everywhere(
        3, lambda channel: engine_of(channel, seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))(), plan)
    )
    assert "3" in str(error)
    assert "stages" in str(error)


def test_plans_with_different_stages_are_refused() -> None:
    other = sw.Plan(mesh=sw.Mesh(pp=3), merge=PLAN.merge, pipeline=sw.Pipeline(stages={**STAGES, "blocks.0": 1}))
    error = same_error_everywhere(
        3, lambda channel: engine_of(channel, CASES["chain"].make(), other if channel.rank == 2 else PLAN)
    )
    assert isinstance(error, MismatchError)


def test_a_module_called_outside_of_a_step_says_what_to_call() -> None:
    def run(channel: sw.Channel) -> None:
        model = CASES["chain"].make()
        engine_of(channel, model)
        model(vectors(0)["x"])

    assert "engine" in str(same_error_everywhere(3, run))


def test_a_value_kept_from_a_forward_cannot_be_used_after_it() -> None:
    kept: dict[int, torch.Tensor] = {}

    def run(channel: sw.Channel) -> None:
        def keep(h: torch.Tensor) -> None:
            kept[channel.rank] = h

        engine_of(channel, between(keep)(0)).step(vectors(0))
        kept[channel.rank] + 1

    assert "forward has ended" in str(same_error_everywhere(3, run))


class Remembering(Chain):
    """A module that all ranks run keeps a mean of what a stage made in its own buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](self.blocks[1](h))))
        return out


def test_a_value_of_a_stage_in_a_buffer_of_all_ranks_is_refused() -> None:
    for error, text in texts_of_step(lambda rank: seeded(Remembering)()):
        assert isinstance(error, sw.ShardwiseError)
        assert re.search("buffer 'mean' of the model", text)


class Leaving(Chain):
    """Every block leaves a penalty in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        for block in self.blocks:
            assert isinstance(block, LeavingBlock)
            out = out + block.penalty
        return out


class LeavingBlock(Block):
    penalty = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = x.square().mean()
        return super().forward(x)


def leaving(rank: int) -> nn.Module:
    def build() -> nn.Module:
        model = Leaving()
        model.blocks = nn.ModuleList(LeavingBlock() for _ in range(4))
        return model

    return seeded(build)()


def test_a_tensor_with_a_gradient_that_a_module_left_in_an_attribute_is_refused() -> None:
    for error, text in texts_of_step(leaving):
        assert isinstance(error, sw.ShardwiseError)
        assert "left it in an attribute" in text
