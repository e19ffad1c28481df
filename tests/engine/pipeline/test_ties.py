"""Parameters of several stages: computed with everywhere, summed once, updated by one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.channels import GoesOnAlone
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import parts_of, points, square_loss
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.places import data_share
from tests.oracle.program import Program, adamw, plan_of, seeded
from tests.oracle.programs import PROGRAMS
from tests.refusals import Refusals

WIDTH = 5


def batch_of(seed: int, rows: int = 6) -> dict[str, torch.Tensor]:
    return points(seed, rows, WIDTH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.own(self.first(x) + self.second(-x)))
        return out


class Four(nn.Module):
    """Two ties: one over the layers 0, 2 and 3, one over 1 and 2, whose first name lies in layer 2.

    only: the layers that are used.
    """

    def __init__(self, *, only: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.two = Layer()
        self.zero, self.one, self.three = Layer(), Layer(), Layer()
        self.only = only
        for layer, other, name in (
            (self.two, self.zero, "first"),
            (self.three, self.zero, "first"),
            (self.one, self.two, "second"),
        ):
            getattr(layer, name).weight = getattr(other, name).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in LAYERS:
            layer = self.get_submodule(name)
            x = x + 0 * layer.get_parameter("own.bias") if self.only and name not in self.only else layer(x)
        return x


def four(**settings: Any) -> Any:
    return seeded(lambda: Four(**settings))()


TIES = ("two.first.weight", "two.second.weight")
LAYERS = ["zero", "one", "two", "three"]
STAGES = {name: stage for stage, name in enumerate(LAYERS)}
PROGRAM = Program(make=four, batches=[batch_of(seed) for seed in range(3)], stages=STAGES, loss=square_loss)
plan_on = partial(plan_of, PROGRAM)
Change = Callable[[Any], object]
descent = partial(torch.optim.SGD, lr=1024.0)  # so large that the last bit of every gradient shows


def engine_of(channel: sw.Channel, model: nn.Module, plan: sw.Plan, optimizer: Any = adamw) -> sw.Engine:
    return sw.parallelize(model, plan, optimizer=optimizer, loss=square_loss, channel=channel)


def held_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a rank computes with, by all names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: each.detach().clone() for name, each in named if not each.is_meta}


def held_after(plan: sw.Plan, num_steps: int, prepare: Change = lambda _: None) -> list[dict[str, torch.Tensor]]:
    """For each rank what it computes with after some steps of plain descent."""

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = four()
        prepare(model)
        engine = engine_of(channel, model, plan, descent)
        for step in range(num_steps):
            engine.step(data_share(batch_of(step, 12), plan.mesh, channel.rank))
        return held_by(model)

    return sw.simulate(plan.mesh.size, run)


def freeze(model: Any) -> None:
    model.two.first.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("plan", "prepare"),
    [
        (plan_on("pp=4", k=2), freeze),
        (plan_on("pp=4,dp_shard=2", bucket_bytes=128, partition="whole"), lambda model: None),
        (plan_on("pp=2,dp_shard=2", k=2, precision=sw.Precision(compute="bfloat16")), lambda model: None),
    ],
    ids=["4, frozen", "4 x 2 whole", "bfloat16"],
)
def test_all_ranks_compute_with_the_same_values_after_every_update(plan: sw.Plan, prepare: Change) -> None:
    for num_steps in range(3):
        seen: dict[str, torch.Tensor] = {}
        for held in held_after(plan, num_steps, prepare):
            for name, value in held.items():
                assert torch.equal(seen.setdefault(name, value), value)
            ties = [("two.first.weight", "zero.first.weight"), ("three.first.weight", "zero.first.weight")]
            for one, other in [*ties, ("two.second.weight", "one.second.weight")]:
                assert (one in held) == (other in held)
                assert one not in held or torch.equal(held[one], held[other])
        assert seen.keys() == dict(four().named_parameters(remove_duplicate=False)).keys()
        frozen = seen["two.first.weight"]
        assert prepare is not freeze or torch.equal(frozen, four().two.first.weight.to(frozen.dtype))


def test_a_tie_is_summed_from_its_last_stage_to_the_first() -> None:
    """Of each stage what its microbatches add up to; by hand, with a weight for each use."""
    model = four()
    uses = [model.three.first, model.two.first, model.zero.first]
    before: torch.Tensor = uses[0].weight.detach()
    for each in uses:
        each.weight = nn.Parameter(before.clone())
    for part in parts_of(batch_of(0, 12), 2):
        square_loss(model(part["x"]), part).backward()

    def updated(gradients: list[torch.Tensor]) -> torch.Tensor:
        return before.add((gradients[0] + gradients[1] + gradients[2]) / 2, alpha=-1024.0)

    gradients = [each.weight.grad for each in uses]
    assert not torch.equal(updated(gradients), updated(gradients[::-1])), "the order shows"
    for held in held_after(plan_on("pp=4", k=2), 1):
        assert torch.equal(held.get("two.first.weight", updated(gradients)), updated(gradients))


ONLY = [("one", "two"), ("one", "zero"), ("one", "three"), ()]
ONE_MICROBATCH: list[tuple[Program, str]] = [
    *((replace(PROGRAM, make=partial(four, only=only)), "pp=4") for only in ONLY),
    *((PROGRAMS[name], "pp=4") for name in ("tied head", "borrowed tie")),
    (PROGRAMS["tied head"], "pp=2"),  # the owner is the first stage that uses it
]


@pytest.mark.parametrize(("program", "mesh"), ONE_MICROBATCH)
def test_a_gradient_on_one_rank_alone_and_one_that_went_down_reach_the_owner_once(program: Program, mesh: str) -> None:
    assert_trains_like_one_process(program, plan_of(program, mesh))


def test_reductions_that_start_within_backward_wait_for_the_other_stages() -> None:
    plan = plan_on("pp=2,dp_shard=2", k=2, bucket_bytes=1)

    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], int]:
        model = four()
        engine = engine_of(channel, model, plan)
        for step in range(2):
            engine.step(data_share(batch_of(step, 12), plan.mesh, channel.rank))
        return held_by(model), engine.counters.early_reductions

    late, early = sw.simulate(4, run), sw.simulate(4, lambda channel: run(GoesOnAlone(channel)))
    for (values, num_early), (others, num_late) in zip(early, late, strict=True):
        assert num_early > 0
        assert num_late == 0
        assert all(torch.equal(values[name], others[name]) for name in others)


def test_the_owner_alone_has_it_in_optimizer_and_state() -> None:
    def run(channel: sw.Channel) -> tuple[set[str], int]:
        engine = engine_of(channel, four(), plan_on("pp=4"))
        engine.step(batch_of(0))
        assert engine.settings()["ties"] == {
            "zero.first.weight": "two.first.weight",
            "three.first.weight": "two.first.weight",
            "one.second.weight": "two.second.weight",
        }
        return {piece.name for piece in engine.state()}, len(engine.optimizer.param_groups[0]["params"])

    ranks = sw.simulate(4, run)
    for name in TIES:
        for held in (name, f"optimizer/{name}/exp_avg"):
            assert [held in names for names, _ in ranks] == [False, False, True, False]
    assert sum(count for _, count in ranks) == len(list(four().parameters()))


def changed(change: Change) -> Callable[[], None]:
    """On the first rank alone."""

    def run(channel: sw.Channel) -> None:
        model = four()
        engine = engine_of(channel, model, plan_on("pp=4"))
        if channel.rank == 0:
            change(model.zero.first)
        engine.step(batch_of(0))

    def call() -> None:
        raise same_error_everywhere(4, run)

    return call


def zeros() -> torch.Tensor:
    return torch.zeros(WIDTH, WIDTH)


REFUSED = Refusals(
    "engine.ties_of_stages",
    {
        "replaced": changed(lambda layer: setattr(layer, "weight", nn.Parameter(zeros()))),
        "moved": changed(lambda layer: setattr(layer.weight, "data", zeros())),
        "frozen": changed(lambda layer: layer.weight.requires_grad_(False)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_a_replica_that_is_changed_is_found_by_all(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize(("k", "compute"), [(1, None), (2, "bfloat16")])
def test_replicas_are_in_the_footprint_and_their_messages_in_the_traffic(k: int, compute: str | None) -> None:
    tie, whole = WIDTH * WIDTH, WIDTH * (WIDTH + 1)
    working = 4 if compute is None else 2
    gradient = working if k == 1 else 4

    def run(channel: sw.Channel) -> tuple[int, int]:
        model = four()
        engine = engine_of(channel, model, plan_on("pp=4", k=k, precision=sw.Precision(compute=compute)))
        engine.step(batch_of(0))
        elements = sum(each.numel() for each in model.parameters() if not each.is_meta)
        footprint, traffic = engine.footprint(), engine.traffic()
        assert elements == whole + 2 * tie
        assert elements * working <= footprint.working_bytes < (elements + 5 * 16) * working
        assert footprint.gradient_bytes >= elements * gradient
        return traffic.gather_bytes, traffic.reduce_bytes

    # Rank 2 owns both ties: two replicas of one, one of the other.
    told = [(0, tie * gradient), (0, tie * gradient), (3 * tie * working, 0), (0, tie * gradient)]
    assert sw.simulate(4, run) == told
