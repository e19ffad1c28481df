"""Which parameters are whose, what a rank lets go of, and what all ranks still know of the whole model."""

import copy
import gc
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.inventory import Inventory, take_inventory
from shardwise.engine.kept_numbers import KeptNumbers
from shardwise.engine.norm import norms_of, total_of_norms
from shardwise.engine.pipeline.stage_contents import StageParameters, assign_parameters, drop_foreign, move_to
from shardwise.errors import BatchError, CheckpointError, MismatchError, PlanError
from shardwise.plan import Placement
from tests.engine.expected import adamw, points, seeded, square_loss
from tests.engine.refusals import same_error_everywhere


class Net(nn.Module):
    """Ties, a shared module, a parameter outside of placed modules, a recurrent net, buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6, bias=False)
        self.shared = nn.LayerNorm(6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), self.shared, nn.BatchNorm1d(6)) for _ in range(3)])
        self.memory = nn.LSTM(6, 6, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        table, mask = torch.arange(6.0), torch.ones(6)
        self.register_buffer("table", table)
        self.blocks[0].register_buffer("table", table)
        self.blocks[1].register_buffer("mask", mask)
        self.blocks[2].register_buffer("mask", mask)


PLACEMENT = Placement(
    num_ranks=3,
    num_stages=3,
    modules={"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "memory": 1, "head": 2},
    parameters={"scale": 1},
)


def assigned(model: nn.Module, placement: Placement = PLACEMENT) -> tuple[Inventory, StageParameters]:
    inventory = take_inventory(model, sw.Precision())
    return inventory, assign_parameters(model, inventory, placement)


def test_every_parameter_has_one_owner_and_the_users_that_hold_it() -> None:
    _, stages = assigned(Net())
    assert {
        name: (stages.owner(name), stages.users(name))
        for name in stages.stages
        if "." not in name or name.startswith(("blocks.0.", "memory."))
    } == {
        "scale": (1, {1: 1}),
        "blocks.0.0.weight": (0, {0: 0}),
        "blocks.0.0.bias": (0, {0: 0}),
        "blocks.0.2.weight": (0, {0: 0}),
        "blocks.0.2.bias": (0, {0: 0}),
        "memory.weight_ih_l0": (1, {1: 1}),
        "memory.weight_hh_l0": (1, {1: 1}),
        "memory.bias_ih_l0": (1, {1: 1}),
        "memory.bias_hh_l0": (1, {1: 1}),
    }
    assert (stages.owner("embed.weight"), stages.users("embed.weight")) == (0, {0: 0, 2: 2})
    assert (stages.owner("shared.weight"), stages.users("shared.weight")) == (0, {0: 0, 1: 1, 2: 2})
    assert stages.of_several_stages() == {"embed.weight", "shared.weight", "shared.bias"}
    owned = [stages.owned_by(coordinate) for coordinate in range(3)]
    assert sorted(chain(*owned)) == sorted(stages.stages)


def test_stages_of_one_rank_are_one_user() -> None:
    _, stages = assigned(
        Net(),
        Placement(
            num_ranks=2,
            num_stages=4,
            modules={"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "memory": 1, "head": 3},
            parameters={"scale": 1},
        ),
    )
    assert (stages.owner("embed.weight"), stages.users("embed.weight")) == (0, {0: 0, 1: 3})
    assert (stages.owner("shared.weight"), stages.users("shared.weight")) == (0, {0: 2, 1: 1})
    assert stages.held_by(0) & stages.held_by(1) == {"embed.weight", "shared.weight", "shared.bias"}


KEPT = {
    0: ["embed", "head", "shared", "blocks.0", "blocks.1.1", "blocks.2.1", "table"],
    1: [
        "blocks.1",
        "memory",
        "scale",
        "shared",
        "blocks.0.1",
        "blocks.2.1",
        "blocks.2.mask",
        "table",
        "blocks.0.table",
    ],
    2: ["blocks.2", "embed", "head", "shared", "blocks.0.1", "blocks.1.1", "blocks.1.mask", "table", "blocks.0.table"],
}
"""Prefixes of what each rank keeps: its stages, ties by any name, and buffers of the model itself."""


@pytest.mark.parametrize("coordinate", range(3))
def test_a_rank_keeps_what_its_stages_hold_and_not_a_byte_of_the_rest(coordinate: int) -> None:
    model = Net()
    inventory, stages = assigned(model)
    held = stages.held_by(coordinate)
    before = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    foreign = [weakref.ref(each) for name, each in inventory.parameters.items() if name not in held]
    drop_foreign(model, inventory, stages, coordinate, keeps_objects=False)
    move_to(model, torch.device("cpu"))
    kept = inventory.restricted(held)
    del inventory
    gc.collect()
    assert foreign
    assert all(reference() is None for reference in foreign)  # the list of a recurrent net lets go too
    assert kept.parameters.keys() == held
    for name, value in model.state_dict(keep_vars=True).items():
        is_kept = any(f"{name}.".startswith(f"{prefix}.") for prefix in KEPT[coordinate])
        assert value.is_meta is not is_kept, name
        assert (value.shape, value.dtype) == (before[name].shape, before[name].dtype)
        assert value.requires_grad is isinstance(value, nn.Parameter)
        if is_kept:
            assert torch.equal(value, before[name])
    assert model.embed.weight is model.head.weight
    assert model.get_buffer("blocks.1.mask") is model.get_buffer("blocks.2.mask")


def test_a_tie_that_is_nowhere_here_stays_a_tie() -> None:
    model = Net()
    inventory, stages = assigned(model)
    drop_foreign(model, inventory, stages, 1, keeps_objects=True)
    assert model.embed.weight.is_meta
    assert model.embed.weight is model.head.weight


def test_notes_of_the_user_on_a_parameter_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.get_parameter("1.weight").note = "kept"  # type: ignore[attr-defined]
    inventory, stages = assigned(model, Placement(num_ranks=2, num_stages=2, modules={"0": 0, "1": 1}, parameters={}))
    drop_foreign(model, inventory, stages, 0, keeps_objects=True)
    empty = model.get_parameter("1.weight")
    assert empty.is_meta
    assert empty.note == "kept"  # type: ignore[attr-defined]


# -- the norm


@pytest.mark.parametrize("seed", range(20))
def test_the_norm_of_norms_is_the_norm_of_one_process_in_every_bit(seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    dtypes = [[torch.float32], [torch.float32, torch.float64], [torch.float64, torch.complex64, torch.float32]][
        seed % 3
    ]
    gradients = [
        torch.randn(
            int(torch.randint(1, 3000, (), generator=numbers)), dtype=dtypes[at % len(dtypes)], generator=numbers
        )
        * 10.0 ** (at % 7 - 3)
        for at in range(1 + seed * 3)
    ]
    owner_of = torch.randint(0, 4, (len(gradients),), generator=numbers).tolist()
    norms = {}
    for owner in range(4):
        mine = [at for at in range(len(gradients)) if owner_of[at] == owner]
        for place, norm in norms_of([gradients[at] for at in mine]).items():
            norms[mine[place]] = norm.double()
    got = total_of_norms(norms, KeptNumbers(torch.device("cpu")), dtypes=[each.dtype for each in gradients])
    assert float(got) == float(nn.utils.get_total_norm(gradients))


def test_the_norm_of_nothing_is_zero() -> None:
    assert float(total_of_norms({}, KeptNumbers(torch.device("cpu")), dtypes=[])) == 0.0
    assert norms_of([]) == {}


# -- in an engine


def three_layers() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)))()


TWO_STAGES = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "1": 1, "2": 1}))


def parallelized(channel: sw.Channel, plan: sw.Plan = TWO_STAGES, **settings: Any) -> sw.Engine:
    return sw.parallelize(three_layers(), plan, optimizer=adamw, loss=square_loss, channel=channel, **settings)


def test_an_engine_keeps_nothing_foreign_alive_and_optimizes_what_it_owns() -> None:
    def run(channel: sw.Channel) -> set[str]:
        model = three_layers()
        parameters = {name: weakref.ref(each) for name, each in model.named_parameters()}
        engine = sw.parallelize(model, TWO_STAGES, optimizer=adamw, loss=square_loss, channel=channel)
        gc.collect()
        alive = {name for name, reference in parameters.items() if reference() is not None}
        assert alive == {name for name, each in model.named_parameters() if not each.is_meta}
        elements = sum(each.numel() for each in model.parameters() if not each.is_meta)
        assert engine.footprint().owned_elements == elements
        [group] = engine.optimizer.param_groups
        assert sum(each.numel() for each in group["params"]) == elements
        assert engine.settings()["optimizers"][0]["groups"][0]["parameters"] == list(parameters)
        assert {piece.name for piece in engine.state()} == alive
        return alive

    first, second = sw.simulate(2, run)
    assert first == {"0.weight", "0.bias"}
    assert second == {"1.0.weight", "1.0.bias", "2.weight", "2.bias"}


def test_a_rank_that_trains_nothing_takes_part() -> None:
    def run(channel: sw.Channel) -> tuple[float, float]:
        model = three_layers()
        model[0].requires_grad_(False)
        engine = sw.parallelize(model, TWO_STAGES, optimizer=adamw, loss=square_loss, channel=channel)
        report = engine.step(points(0, 4))
        assert engine.footprint().owned_elements == (0 if channel.rank == 0 else 49)
        return report.loss, report.grad_norm

    first, second = sw.simulate(2, run)
    assert first == second


def test_stages_that_are_given_different_batches_refuse_together() -> None:
    def run(channel: sw.Channel, change: str) -> None:
        engine = parallelized(channel)
        batch: dict[str, Any] = points(0, 4)
        if channel.rank == 1:
            batch |= {"value": {"y": batch["y"] + 1}, "dtype": {"y": batch["y"].double()}, "entry": {"z": 3}}[change]
        engine.step(batch)

    for change, difference in {
        "value": "Rank 0 has 'y' [4, 1] float32 with digest ",
        "dtype": "rank 1 has 'y' [4, 1] float64",
        "entry": "Rank 0 has nothing, rank 1 has 'z' 3",
    }.items():
        error = same_error_everywhere(2, lambda channel, change=change: run(channel, change))  # type: ignore[misc]
        assert type(error) is MismatchError
        assert "rank 1 got another one than the first" in str(error)
        assert difference in str(error)


def test_data_ranks_have_batches_of_their_own() -> None:
    mesh = sw.Mesh(pp=2, dp_shard=2)
    plan = sw.Plan(mesh=mesh, pipeline=TWO_STAGES.pipeline)

    def run(channel: sw.Channel) -> float:
        engine = parallelized(channel, plan)
        return engine.step(points(mesh.coordinates(channel.rank)["dp_shard"], 3)).weight

    assert sw.simulate(4, run) == [6.0] * 4


def test_a_bad_batch_on_one_stage_is_refused_by_all() -> None:
    def run(channel: sw.Channel) -> None:
        engine = parallelized(channel)
        engine.step({"x": torch.ones(2, 4), "y": torch.ones(3 if channel.rank == 1 else 2, 1)})

    assert type(same_error_everywhere(2, run)) is BatchError


def test_a_placement_that_cannot_be_is_refused_before_anything_changes() -> None:
    plans = {
        "names no module": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "nothing": 1})),
        "stages": sw.Plan(mesh=sw.Mesh(pp=8)),
        "sample": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance="flops")),
    }
    for word, plan in plans.items():

        def run(channel: sw.Channel, plan: sw.Plan = plan) -> None:
            model = three_layers()
            try:
                sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
            finally:
                assert not any(each.is_meta for each in model.parameters())

        error = same_error_everywhere(plan.mesh.size, run)
        assert type(error) is PlanError
        assert word in str(error)


@pytest.mark.parametrize("balance", ["flops", "seconds"])
def test_a_sample_is_measured_by_rank_0_and_moves_nothing(balance: Any) -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance=balance))

    def run(channel: sw.Channel) -> tuple[set[str], float]:
        engine = parallelized(channel, plan, sample=points(0, 4))
        return {piece.name for piece in engine.state()}, engine.step(points(0, 4)).loss

    (first, loss), (second, other) = sw.simulate(2, run)
    assert first.isdisjoint(second)
    assert loss == other


def test_a_parameter_of_one_stage_that_one_rank_freezes_is_found_by_all() -> None:
    def run(channel: sw.Channel) -> None:
        model = three_layers()
        engine = sw.parallelize(model, TWO_STAGES, optimizer=adamw, loss=square_loss, channel=channel)
        model[2].requires_grad_(channel.rank == 0)
        engine.step(points(0, 4))

    error = same_error_everywhere(2, run)
    assert type(error) is MismatchError
    assert "'2.weight'" in str(error)


# -- buffers that several stages have


class Counting(nn.Module):
    """A count between the stages, and a buffer that two stages have and one writes to."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = Writing(True)
        self.last = Writing(False)
        self.last.shared = self.first.shared
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out: torch.Tensor = self.last(torch.tanh(self.first(x)))[:, :1]
        return out


class Writing(nn.Module):
    shared: torch.Tensor

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shared", torch.zeros(4))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.writes:
            self.shared += x.detach().mean(0)
        out: torch.Tensor = self.linear(x) + self.shared
        return out


def test_buffers_that_several_stages_have_stay_equal() -> None:
    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        model = seeded(Counting)()
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"first": 0, "last": 1}))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        seen = []
        for step in range(2):
            engine.step(points(step, 4))
            seen.append({name: each.clone() for name, each in model.named_buffers()})
        return seen

    first, last = sw.simulate(2, run)
    for one, other in zip(first, last, strict=True):
        assert one.keys() == other.keys() == {"count", "first.shared"}
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert first[1]["count"] == 2
    assert torch.equal(first[0]["first.shared"], points(0, 4)["x"].mean(0))


# -- checkpoints of random numbers


def test_settings_without_random_numbers_are_taken_and_damaged_ones_refused() -> None:
    def run(channel: sw.Channel) -> None:
        engine = parallelized(channel, sw.Plan(), seed=5)
        engine.step(points(0, 4))
        stored = {piece.name: piece for piece in engine.state()}
        settings = engine.settings()
        assert settings["random"] == {"seed": 5, "step": 1}
        old = copy.deepcopy(settings)
        del old["random"]
        restoration = engine.restore(stored, old)
        assert not restoration.findings
        restoration.finish()
        assert engine.settings()["random"] == {"seed": 5, "step": 1}
        engine.restore(stored, {**settings, "random": {"seed": 9, "step": 4}}).finish()
        assert engine.settings()["random"] == {"seed": 9, "step": 4}
        for damaged in (3, {"seed": 1}, {"seed": "1", "step": 2}, [1, 2]):
            with pytest.raises(CheckpointError, match="random="):
                engine.restore(stored, {**settings, "random": damaged})

    sw.simulate(1, run)
