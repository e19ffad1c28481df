"""What users do to a model between updates, its second life under another plan, and a rank that stops all others."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import Work, alone
from shardwise.errors import PeerError
from tests.costs import calls_in
from tests.engine.loops import begun, mean_square, plan_of, sgd
from tests.oracle.batches import points, square_loss
from tests.oracle.words import Curve, curve_batch, curve_loss
from tests.refusals import Refusals

SETTINGS: Any = {"loss": curve_loss}


def test_a_backward_of_the_users_own_keeps_its_gradients_and_does_not_count_in_the_next_update() -> None:
    disturbed, quiet = (begun(alone(), Curve, **SETTINGS) for _ in range(2))
    for _ in range(2):
        batch = curve_batch(1, 6)
        curve_loss(disturbed.model(batch["x"]), batch).backward()
        assert all(parameter.grad is not None for parameter in disturbed.model.parameters())
        assert disturbed.step(batch) == quiet.step(batch)
    for ours, theirs in zip(disturbed.model.parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def changed(mesh: str, stage: int, change: Callable[[nn.Module, int], object]) -> None:
    """A step after the program has changed the model."""

    def run(channel: sw.Channel) -> None:
        engine = begun(channel, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), plan_of(mesh, stage))
        change(engine.model, channel.rank)
        engine.step({"input": torch.ones(2, 3)})

    sw.simulate(sw.Mesh.parse(mesh).size, run)


def parameter(model: Any, rank: int) -> None:
    if rank:
        model[0].weight = nn.Parameter(torch.ones(3, 3))


def module(model: Any, rank: int) -> None:
    model[1] = nn.Linear(3, 3)


def without_gradient(make: Any = lambda: nn.Linear(4, 1), loss: Any = square_loss) -> None:
    engine = begun(alone(), make, loss=loss)
    assert engine.evaluate(points(0, 4)).loss >= 0
    engine.step(points(0, 4))


REFUSED = Refusals(
    "engine.engine",
    {
        "a parameter was replaced on one rank": lambda: changed("dp_shard=2", 1, parameter),
        "a module came into the model": lambda: changed("single", 1, module),
        "a module came into the model under stage 2": lambda: changed("dp_shard=2", 2, module),
        "a module came into the model under stage 3": lambda: changed("dp_shard=2", 3, module),
        "the loss has no graph": lambda: without_gradient(loss=lambda output, _: output.square().sum().detach()),
        "nothing trains": lambda: without_gradient(lambda: nn.Linear(4, 1).requires_grad_(False)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_step_can_be_made_of_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_an_error_of_the_users_own_leaves_a_rank_alone_able_to_go_on() -> None:
    def fails(output: torch.Tensor, batch: Any) -> torch.Tensor:
        if batch.get("fails"):
            raise ZeroDivisionError
        return curve_loss(output, batch)

    engine, quiet = begun(alone(), Curve, loss=fails), begun(alone(), Curve, **SETTINGS)
    with pytest.raises(ZeroDivisionError):
        engine.step({**curve_batch(1, 6), "fails": True})
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert [engine.step(curve_batch(1, 6)) for _ in range(2)] == [quiet.step(curve_batch(1, 6)) for _ in range(2)]


def test_a_model_put_under_a_second_plan_trains_under_that_one_alone() -> None:
    first = begun(alone(), Curve, plan_of(k=2, compute="bfloat16"), **SETTINGS)
    first.step(curve_batch(1, 6))
    model = first.model
    second = begun(alone(), lambda: model, plan_of(compute="float32"), **SETTINGS)
    fresh = begun(alone(), Curve, **SETTINGS)
    fresh.model.load_state_dict(model.state_dict())
    assert [second.step(curve_batch(seed, 6)) for seed in (0, 1)] == [fresh.step(curve_batch(at, 6)) for at in (0, 1)]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_an_engine_that_is_let_go_gives_its_memory_back_at_once() -> None:
    """Without the collector: its buffers may fill a device, and the next engine needs the room."""

    def used(channel: sw.Channel) -> Any:
        engine, batch = (
            begun(channel, Curve, plan_of(f"pp={channel.size}", average=sw.Average(decay=0.9))),
            points(0, 4, 3),
        )
        engine.step(batch)
        engine.evaluate(batch)
        with engine.averaged():
            pass
        return engine

    def is_gone(channel: sw.Channel) -> bool:
        engine = used(channel)
        held = weakref.ref(engine), weakref.ref(engine.activations)  # which know what has the gradients
        del engine
        return all(each() is None for each in held)

    gc.disable()
    try:
        for size in (1, 2):
            sw.simulate(size, is_gone)  # torch makes some cycles once, in the first trial of an optimizer
            assert sw.simulate(size, is_gone) == [True] * size
    finally:
        gc.enable()


class Unread(nn.Module):
    """Layers that give what nothing reads as well, as a pooler does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x, unread = x + layer(x), layer(x)
        return x, unread


@pytest.mark.parametrize("budget", [None, 10_000_000])
def test_steps_leave_no_graph_of_outputs_that_the_loss_does_not_read(budget: int | None) -> None:
    """No collector sees what a node of autograd holds: its own output would hold it for ever."""
    plan = replace(plan_of("dp_shard=2", 3), activations=sw.Activations(budget_bytes=budget))

    def run(channel: sw.Channel) -> list[int]:
        engine = begun(channel, Unread, plan, loss=lambda output, batch: output[0].square().mean())
        alive = []
        for _ in range(4):
            engine.step({"x": torch.ones(4, 3)})
            channel.exchange(b"", purpose="one counts for all")
            if channel.rank == 0:
                gc.collect()
                alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
            channel.exchange(b"", purpose="it has counted")
        return alive

    counts, _ = sw.simulate(2, run)
    assert counts[1] == counts[2] == counts[3], counts


class Stumbling(nn.Module):
    """Raises in forward, or in backward, for rows that hold a number from 97 on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 97).any()):
            raise KeyboardInterrupt
        if bool((x == 99).any()):
            raise ArithmeticError("cannot do 99")
        y: torch.Tensor = self.linear(x)
        if bool((x == 98).any()):
            y.register_hook(_raise)
        return y


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("cannot undo 98")


class Failing(torch.optim.SGD):
    """Raises in its second step, where a setting says so."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2 and self.param_groups[0]["nesterov"]:
            raise ArithmeticError("no second step")
        return super().step(closure)


class Unhookable(nn.Linear):
    """Modules whose parameters are narrower than their inputs get a hook, after the ranks have agreed."""

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("cannot hook")


def with_value(value: float, row: int = 0) -> dict[str, torch.Tensor]:
    batch = points(0, 4)
    batch["x"][row, 0] = value
    return batch


def steps(engine: Any, is_wrong: bool, batch: Any = None, method: str = "step") -> None:
    getattr(engine, method)(batch if is_wrong else points(0, 4))


def two_steps(engine: Any, is_wrong: bool) -> None:
    engine.optimizer.param_groups[0].update(nesterov=is_wrong, momentum=0.9)
    for _ in range(2):
        engine.step(points(0, 4))


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def weight_of(batch: Any) -> float:
    return float(batch["no such entry"]) if bool((batch["x"] == 99).any()) else 1.0


STOPS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "forward": (partial(steps, batch=with_value(99)), "ArithmeticError in a step: cannot do 99", {}),
    "backward": (partial(steps, batch=with_value(98, 3)), "ArithmeticError in a step: cannot undo 98", {}),
    "evaluation": (
        partial(steps, batch=with_value(99), method="evaluate"),
        "ArithmeticError in an evaluation: cannot do 99",
        {},
    ),
    "weight": (
        partial(steps, batch=with_value(99)),
        "KeyError in splitting a batch: 'no such entry'",
        {"loss_weight": weight_of},
    ),
    "optimizer": (two_steps, "ArithmeticError in a step: no second step", {"optimizer": partial(Failing, lr=0.1)}),
    "interruption": (partial(steps, batch=with_value(97)), "KeyboardInterrupt in a step", {}),
    "building": (steps, "ArithmeticError in parallelize: cannot hook", {}),
}


@pytest.mark.parametrize(
    ("where", "rank"), [*((where, at % 3) for at, where in enumerate(STOPS)), ("forward", 1), ("forward", 2)]
)
def test_a_rank_that_stops_keeps_its_error_and_the_others_are_told_which_rank_it_was(where: str, rank: int) -> None:
    act, words, settings = STOPS[where]
    plan = plan_of("dp_shard=3", k=2, compute="bfloat16" if where == "building" else None)

    def run(channel: sw.Channel) -> tuple[BaseException | None, BaseException | None]:
        is_wrong, engines = channel.rank == rank, list[Any]()
        make: Any = partial(Unhookable if is_wrong else nn.Linear, 4, 1) if where == "building" else Stumbling

        def first() -> None:
            engines.append(begun(channel, make, plan, **{"loss": square_loss, **settings}))
            act(engines[0], is_wrong)

        return error_of(first), error_of(lambda: engines[0].step(points(0, 4)))

    results = sw.simulate(3, run)
    error, _ = results.pop(rank)
    assert type(error).__name__ == words.split()[0]
    if where in ("forward", "backward"):
        assert error is not None
        assert error.__notes__ == [f"shardwise: on rank {rank}, in microbatch {int(where == 'backward')} of 2"]
    for told, later in results:
        assert isinstance(told, PeerError), told
        assert told.rank == rank
        assert f"rank {rank} stopped: {words}" in str(told)
        assert told.operation
        assert told.purpose
        assert where == "building" or (isinstance(later, PeerError) and later.rank == rank), "refused at once"


WIDTH, FEW, MANY = 4, 8, 24
"""Blocks, of two parameters each."""


def calls_of(step: Callable[[], object]) -> int:
    """Calls in a step; not in the first ones, which lay out buffers, and make views of buckets in each of them."""
    for _ in range(6):
        step()
    # The least of several: some steps also do what is due once per second, such as reading the peak of memory.
    return min(calls_in(step) for _ in range(5))


class Zeros(Silence):
    """The parts of others are zeros. What memory had before may be no number, and a step with such ones is skipped."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        own = input.clone()
        output.zero_()
        return super().all_gather(output, own, purpose=purpose, counts=counts)


def tower(num_blocks: int, stage: int, num_ranks: int) -> Any:
    make = lambda: nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(num_blocks)))  # noqa: E731
    return begun(Zeros(rank=0, size=num_ranks), make, plan_of(f"dp_shard={num_ranks}", stage))


def calls_of_engine(num_blocks: int, stage: int, num_ranks: int) -> int:
    engine = tower(num_blocks, stage, num_ranks)
    return calls_of(lambda: engine.step({"input": torch.ones(2, WIDTH)}))


def calls_of_plain_loop(num_blocks: int) -> int:
    model = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(num_blocks)))
    optimizer = sgd(model.parameters())

    def step() -> None:
        mean_square(model(torch.ones(2, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return calls_of(step)


def per_parameter(calls: Callable[[int], int]) -> float:
    return (calls(MANY) - calls(FEW)) / (2 * (MANY - FEW))


@pytest.mark.parametrize(("stage", "most"), [(0, 33), (1, 23), (2, 23), (3, 114)])
def test_an_update_adds_few_calls_per_parameter_for_any_number_of_ranks(stage: int, most: int) -> None:
    """Times are in `benchmarks.host_cost`; calls are the same on every machine.

    In stage 3 each block of this model is a unit, with all that goes around one for two parameters.
    """
    plain = per_parameter(calls_of_plain_loop)
    added = [per_parameter(partial(calls_of_engine, stage=stage, num_ranks=ranks)) - plain for ranks in (2, 32)]
    assert max(added) < most
    assert added[1] < 1.1 * added[0]


def test_building_an_engine_takes_four_times_as_many_calls_for_four_times_as_many_units() -> None:
    tower(2, 3, 2)  # imports, and what is tried once
    few, many = (calls_in(partial(tower, count, 3, 2)) for count in (25, 100))
    assert many < 4.1 * few
