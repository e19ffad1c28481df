"""Parameters of several stages: computed with everywhere, summed once, updated by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError, ModelError
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import seeded
from tests.engine.oracle import Batch
from tests.engine.pipeline.oracle import Case, adamw
from tests.engine.pipeline.stages import assert_equals_one_process, share_of
from tests.engine.refusals import same_error_everywhere

WIDTH = 5


def batch_of(seed: int, rows: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, WIDTH, generator=generator)}


def square(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = (output.float() - batch["y"]).square().mean()
    return loss


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
    """Two ties: one over the layers 0, 2 and 3, one over 1 and 2, whose first name lies in layer 2."""

    uses_second = True

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.two = Layer()
        self.zero, self.one, self.three = Layer(), Layer(), Layer()
        for layer in (self.two, self.three):
            layer.first = self._tie(self.zero.first, tied=tied)
        self.one.second = self._tie(self.two.second, tied=tied)

    @staticmethod
    def _tie(other: nn.Linear, *, tied: bool) -> nn.Linear:
        own = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            own.weight.copy_(other.weight)
        if tied:
            own.weight = other.weight
        return own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.three(self.two(self.one(self.zero(x))))
        return out


def four(*, tied: bool = True) -> Four:
    return seeded(lambda: Four(tied=tied))()


RATE = 1024.0
"""So large that the last bit of every gradient shows."""

TIES = {"two.first.weight": (3, 2, 0), "two.second.weight": (2, 1)}
"""Name -> the layers that hold it, from the last to the first."""

LAYERS = ["zero", "one", "two", "three"]
STAGES = {name: stage for stage, name in enumerate(LAYERS)}
CASE = Case(make=four, batches=[batch_of(seed) for seed in range(3)], stages=STAGES, loss=square)


def plan_of(pp: int = 4, *, k: int = 1, dp_shard: int = 1, **settings: Any) -> sw.Plan:
    """Neighbouring layers together where there are fewer ranks."""
    stages = {name: stage * pp // 4 for name, stage in STAGES.items()}
    if settings.pop("interleaved", False):
        settings["pipeline"] = sw.Pipeline(schedule="interleaved", stages=STAGES)
    return sw.Plan(
        mesh=sw.Mesh(pp=pp, dp_shard=dp_shard),
        merge=sw.Merge(microbatches=k),
        **{"pipeline": sw.Pipeline(stages=stages), **settings},
    )


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 4), ("fthenb", 4), ("1f1b", 2)])
def test_one_microbatch_trains_to_the_bits_of_one_process(schedule: str, pp: int) -> None:
    assert_equals_one_process(CASE, schedule=schedule, pp=pp, k=1)


def held_after(plan: sw.Plan, num_steps: int, prepare: Callable[[Four], None] = lambda _: None) -> list[dict[str, Any]]:
    """For each rank what it computes with after some steps of plain descent, by all names."""

    def run(channel: sw.Channel) -> dict[str, Any]:
        model = four()
        prepare(model)
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            loss=square,
            channel=channel,
        )
        for step in range(num_steps):
            engine.step(share_of(batch_of(step, 12), plan.mesh, channel.rank))
        named = model.named_parameters(remove_duplicate=False)
        return {name: each.detach().clone() for name, each in named if not each.is_meta}

    return sw.simulate(plan.mesh.size, run)


def stepped_by_hand(k: int, dtype: torch.dtype, num_ranks: int) -> dict[str, torch.Tensor]:
    """One step: gradients of each rank's uses are added up over microbatches, then over ranks, from the last on."""
    model = four(tied=False).to(dtype)
    for part in zip(*(value.chunk(k) for value in batch_of(0, 12).values()), strict=True):
        square(model(part[0].to(dtype)), {"y": part[1]}).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            so_far = getattr(parameter, "so_far", None)
            now = parameter.grad.float() if k > 1 else parameter.grad
            parameter.so_far = now if so_far is None else so_far + now  # type: ignore[attr-defined]
            parameter.grad = None
    masters = dict(four().named_parameters())
    updated = {}
    for name, master in masters.items():
        layers = TIES.get(name, (LAYERS.index(name.split(".")[0]),))
        by_rank: dict[int, torch.Tensor] = {}
        for layer in layers:
            other = model.get_parameter(f"{LAYERS[layer]}.{name.split('.', 1)[1]}")
            rank = layer * num_ranks // 4
            assert rank not in by_rank, "uses of one rank are summed microbatch by microbatch"
            by_rank[rank] = other.so_far  # type: ignore[attr-defined]
        total, *others = by_rank.values()
        for other_sum in others:
            total = total + other_sum
        updated[name] = master.detach().add(total.float() / k, alpha=-RATE).to(dtype)
    return updated


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_sums_of_ranks_are_added_from_the_last_stage_to_the_first(k: int, precision: str) -> None:
    compute = None if precision == "float32" else precision
    expected = stepped_by_hand(k, getattr(torch, precision), 4)
    for held in held_after(plan_of(k=k, precision=sw.Precision(compute=compute)), 1):
        for name, value in held.items():
            if name in expected:
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(k=2),
        plan_of(2, k=3),
        plan_of(2, k=2, interleaved=True),
        plan_of(2, k=2, dp_shard=2),
        plan_of(4, k=1, dp_shard=2, sharding=sw.Sharding(bucket_bytes=128, partition="whole")),
        plan_of(2, k=2, dp_shard=2, precision=sw.Precision(compute="bfloat16"), sharding=sw.Sharding(bucket_bytes=128)),
    ],
    ids=["4", "2", "interleaved", "2 x 2 slices", "4 x 2 whole", "bfloat16"],
)
def test_all_ranks_compute_with_the_same_values_after_every_update(plan: sw.Plan) -> None:
    for num_steps in range(3):
        seen: dict[str, torch.Tensor] = {}
        for held in held_after(plan, num_steps):
            for name, value in held.items():
                assert torch.equal(seen.setdefault(name, value), value)
            ties = [("two.first.weight", "zero.first.weight"), ("three.first.weight", "zero.first.weight")]
            for one, other in [*ties, ("two.second.weight", "one.second.weight")]:
                assert (one in held) == (other in held)
                if one in held:
                    assert torch.equal(held[one], held[other])
        assert seen.keys() == dict(four().named_parameters(remove_duplicate=False)).keys()


def test_reductions_that_start_within_backward_wait_for_the_other_stages() -> None:
    plan = plan_of(2, k=2, dp_shard=2, sharding=sw.Sharding(bucket_bytes=1))

    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], int]:
        model = four()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)
        for step in range(2):
            engine.step(share_of(batch_of(step, 12), plan.mesh, channel.rank))
        values = {name: each.detach().clone() for name, each in model.named_parameters() if not each.is_meta}
        return values, engine.counters.early_reductions

    late, early = sw.simulate(4, run), sw.simulate(4, lambda channel: run(GoesOnAlone(channel)))
    for (values, num_early), (others, num_late) in zip(early, late, strict=True):
        assert num_early > 0
        assert num_late == 0
        assert all(torch.equal(values[name], others[name]) for name in others)


def test_the_owner_alone_has_it_in_optimizer_and_state() -> None:
    def run(channel: sw.Channel) -> tuple[set[str], int]:
        engine = sw.parallelize(four(), plan_of(), optimizer=adamw, loss=square, channel=channel)
        engine.step(batch_of(0))
        assert engine.settings()["ties"] == {
            "zero.first.weight": "two.first.weight",
            "three.first.weight": "two.first.weight",
            "one.second.weight": "two.second.weight",
        }
        return {piece.name for piece in engine.state()}, len(engine.optimizer.param_groups[0]["params"])

    ranks = sw.simulate(4, run)
    for name in TIES:
        assert [name in names for names, _ in ranks] == [False, False, True, False]
        assert [f"optimizer/{name}/exp_avg" in names for names, _ in ranks] == [False, False, True, False]
    assert sum(count for _, count in ranks) == len(list(four().parameters()))


class Switching(Four):
    """Uses the layers' first matrices in one mode only on the owner, in the other only on a replica."""

    where = "two"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in LAYERS:
            layer = self.get_submodule(name)
            x = layer(x) if name in (self.where, "one") else x + 0 * layer.get_parameter("own.bias")
        return x


@pytest.mark.parametrize("where", ["two", "zero", "three"])
def test_a_gradient_on_one_rank_alone_reaches_the_owner(where: str) -> None:
    def make() -> nn.Module:
        model = seeded(Switching)()
        model.where = where
        return model

    assert_equals_one_process(Case(make=make, batches=CASE.batches, stages=STAGES, loss=square), pp=4, k=1)


def test_frozen_ties_have_their_values_on_all_stages_and_never_move() -> None:
    def freeze(model: Four) -> None:
        model.two.first.weight.requires_grad_(False)

    for precision in (sw.Precision(), sw.Precision(compute="bfloat16")):
        for held in held_after(plan_of(k=2, precision=precision), 2, freeze):
            for name in ("zero.first.weight", "two.first.weight", "three.first.weight"):
                if name in held:
                    assert torch.equal(held[name], four().two.first.weight.to(held[name].dtype))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_a_restored_tie_reaches_all_stages(is_frozen: bool, compute: str | None) -> None:
    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = four()
        model.two.first.weight.requires_grad_(not is_frozen)
        plan = plan_of(precision=sw.Precision(compute=compute))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)
        pieces = {piece.name: piece for piece in engine.state()}
        restoration = engine.restore(pieces, {})
        for tensor in restoration.wanted.values():
            tensor.fill_(0.25)
        restoration.finish()
        return {name: each.detach().clone() for name, each in model.named_parameters() if not each.is_meta}

    for held in sw.simulate(4, run):
        assert held
        assert all(torch.all(value == 0.25) for value in held.values())


def test_values_that_are_loaded_on_all_ranks_hold_on_all() -> None:
    """`load_state_dict` with the state of the whole model, as anybody writes it."""
    other = seeded(Four)()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)

    def run(channel: sw.Channel, pp: int) -> list[float]:
        model = four()
        plan = plan_of(pp) if pp > 1 else sw.Plan()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)
        with torch.no_grad():
            named = dict(model.named_parameters(remove_duplicate=False))
            for name, value in other.state_dict().items():
                if not named[name].is_meta:
                    named[name].copy_(value)
        return [engine.step(batch_of(step)).loss for step in range(3)]

    [alone] = sw.simulate(1, lambda channel: run(channel, 1))
    assert sw.simulate(4, lambda channel: run(channel, 4)) == [alone] * 4


def test_a_replica_that_is_replaced_or_moved_is_found_by_all() -> None:
    def replace(model: Four) -> None:
        model.zero.first.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def move(model: Four) -> None:
        model.zero.first.weight.data = torch.zeros(WIDTH, WIDTH)

    def freeze(model: Four) -> None:
        model.zero.first.weight.requires_grad_(False)

    for change, word, kind in (
        (replace, "replaced", ModelError),
        (move, "other storage", ModelError),
        (freeze, "frozen", MismatchError),
    ):

        def run(channel: sw.Channel, change: Callable[[Four], None] = change) -> None:
            model = four()
            engine = sw.parallelize(model, plan_of(), optimizer=adamw, loss=square, channel=channel)
            if channel.rank == 0:
                change(model)
            engine.step(batch_of(0))

        error = same_error_everywhere(4, run)
        assert type(error) is kind
        assert word in str(error)
        assert "first.weight'" in str(error)


@pytest.mark.parametrize(("k", "compute"), [(1, None), (2, None), (1, "bfloat16"), (2, "bfloat16")])
def test_replicas_are_in_the_footprint_and_their_messages_in_the_traffic(k: int, compute: str | None) -> None:
    plan = plan_of(k=k, precision=sw.Precision(compute=compute))
    tie, whole = WIDTH * WIDTH, WIDTH * (WIDTH + 1)
    working = 4 if compute is None else 2
    gradient = working if k == 1 else 4

    def run(channel: sw.Channel) -> tuple[sw.Engine, int]:
        model = four()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)
        engine.step(batch_of(0))
        return engine, sum(each.numel() for each in model.parameters() if not each.is_meta)

    ranks = sw.simulate(4, run)
    assert [elements for _, elements in ranks] == [whole + 2 * tie] * 4
    for engine, elements in ranks:
        footprint = engine.footprint()
        assert elements * working <= footprint.working_bytes < (elements + 5 * 16) * working
        assert footprint.gradient_bytes >= elements * gradient
    # Rank 2 owns both ties: two replicas of one, one of the other.
    assert [engine.traffic().gather_bytes for engine, _ in ranks] == [0, 0, 3 * tie * working, 0]
    assert [engine.traffic().reduce_bytes for engine, _ in ranks] == [
        tie * gradient,
        tie * gradient,
        0,
        tie * gradient,
    ]
