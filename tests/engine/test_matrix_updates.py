"""Optimizers that must see whole matrices, where ranks have parts of them: brought together, updated once, given back.

The oracle is torch's optimizer in one process, stepped on the gradients that the ranks report: masters, averages and
states equal it to the bit, under every layout. That these gradients are right is a matter of the layouts' own tests;
losses are compared with those of one process here.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import _muon

import shardwise as sw
from shardwise.engine.matrix_rooms import SentMatrices, SharedMatrices
from shardwise.errors import OptimizerError
from shardwise.plan import matrix_homes
from shardwise.testing.accelerator import behind
from tests.checkpoint.layouts import assembled
from tests.covering import covering
from tests.engine.channels import SharesMemory
from tests.engine.test_optimizers import Normed
from tests.properties import tried

RULES = {"mix": "packed_colwise", "down": "row"}
"""`mix` is cut into two boxes on a rank, unevenly; `first` and `unused` are whole on all ranks along tp."""


class Gated(nn.Module):
    """Matrices of several forms, one without a gradient and one that is frozen; vectors and an odd one for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.mix = nn.Linear(10, 18)
        self.down = nn.Linear(9, 10, bias=False)
        self.unused = nn.Linear(3, 4, bias=False)
        self.fixed = nn.Linear(10, 10, bias=False)
        self.head = nn.Linear(10, 5)
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        gate, up = self.mix(hidden).chunk(2, -1)
        hidden = hidden + self.down(torch.tanh(gate) * up)
        out: torch.Tensor = self.head(torch.tanh(self.fixed(hidden)))
        return out


def gated() -> Gated:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gated()


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What is no matrix of a hidden layer goes to AdamW."""
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "head" not in name]
    others = [each for name, each in model.named_parameters() if each.ndim != 2 or "head" in name]
    return [torch.optim.Muon(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


class Mixed(torch.optim.Optimizer):
    """One optimizer with groups of two kinds, as the first Muon had: matrices by their norm, the others by the sign."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    state["step"] = state.get("step", 0) + 1
                    momentum.lerp_(parameter.grad, 0.5)
                    way = momentum / momentum.norm() if group["whole"] else momentum.sign()
                    parameter.sub_(way, alpha=group["lr"])


def mixed(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    whole = [each for each in named.values() if each.ndim == 2]
    others = [each for each in named.values() if each.ndim != 2]
    return [Mixed([{"params": others, "whole": False}, {"params": whole, "whole": True}])]


def batch_of(seed: int, rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, size, generator=generator) for name, size in (("x", 6), ("y", 5))}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (output.float() - batch["y"]).square().mean()


def plan_of(mesh: str, *, sharding: Mapping[str, Any] | None = None, **settings: Any) -> sw.Plan:
    axes = sw.Mesh.parse(mesh)
    return sw.Plan(
        mesh=axes,
        sharding=sw.Sharding(**{"bucket_bytes": 400, **(sharding or {})}),
        tensor=sw.Tensor(rules=RULES if axes.tp > 1 else None),
        pipeline=sw.Pipeline(stages={"first": 0, "mix": 0, "down": 0, "unused": 1, "fixed": 1, "head": 1})
        if axes.pp > 1
        else sw.Pipeline(),
        **settings,
    )


Pieces = dict[sw.Piece, torch.Tensor]
Rank = tuple[list[float], list[Pieces], list[Pieces]]
"""Losses, and for each step gradients and the state after it."""

GROUPS = {"inner": ("mix", "down"), "outer": ("first", "head")}

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def cloned(pieces: Mapping[sw.Piece, torch.Tensor]) -> Pieces:
    return {piece: each.detach().cpu().clone() for piece, each in pieces.items()}


def trained(
    channel: sw.Channel,
    plans: Sequence[sw.Plan],
    optimizers: Optimizers = muon_and_adamw,
    spoiled: int = -1,
    only: Mapping[int, str] | None = None,
) -> Rank:
    """A step under each of the plans, one after the other. spoiled: the step whose gradient is not finite."""
    model = gated()
    engine = sw.parallelize(
        model, plans[0], optimizer=optimizers(model), loss=loss_of, channel=channel, groups=GROUPS if only else None
    )
    losses, gradients, states = [], [], []
    for step, plan in enumerate(plans):
        if plan is not engine.plan:
            engine = sw.relayout(engine, plan)
        share = {name: each.chunk(plan.mesh.num_data_ranks) for name, each in batch_of(step).items()}
        mine = {name: each[plan.mesh.data_rank(channel.rank)] for name, each in share.items()}
        if step == spoiled:
            mine["y"] = mine["y"] * math.inf
        losses.append(engine.step(mine, only=(only or {}).get(step)).loss)
        gradients.append(cloned(engine.gradients()))
        states.append(cloned(engine.state()))
        matrices = engine._closing._bucket_updates._matrices
        assert matrices is None or all(piece.name.startswith("master ") for piece in matrices._routes.sources)
    return losses, gradients, states


def train(
    plans: Sequence[sw.Plan],
    *,
    optimizers: Optimizers = muon_and_adamw,
    device: str = "cpu",
    spoiled: int = -1,
    only: Mapping[int, str] | None = None,
    way: str = "sent",
) -> list[Rank]:
    def run(channel: sw.Channel) -> Rank:
        return trained(SharesMemory(channel) if way == "shared" else channel, plans, optimizers, spoiled, only)

    return sw.simulate(plans[0].mesh.size, run, device=device)


def in_one_process(num_steps: int, optimizers: Optimizers = muon_and_adamw) -> list[float]:
    model, losses = gated(), []
    steppers = optimizers(model)
    for step in range(num_steps):
        model.zero_grad()
        loss = loss_of(model(batch_of(step)["x"]), batch_of(step))
        loss.backward()
        for each in steppers:
            each.step()
        losses.append(loss.item())
    return losses


def assert_updates_are_those_of_torch(
    ranks: Sequence[Rank], *, optimizers: Optimizers = muon_and_adamw, spoiled: int = -1, are_fused: bool = False
) -> None:
    """Masters and states after each step, against torch's optimizers on the gradients of all ranks.

    are_fused: what is no matrix is updated by kernels whose last bits depend on the cut.
    """

    def same(one: torch.Tensor, other: torch.Tensor, name: str) -> bool:
        near = are_fused and not (name.endswith("weight") and "head" not in name)
        return torch.allclose(one, other, rtol=1e-5, atol=1e-8) if near else torch.equal(one, other)

    model = gated()
    named = dict(model.named_parameters())
    steppers = optimizers(model)
    averages: dict[str, torch.Tensor] = {}
    for step in range(len(ranks[0][0])):
        gradients = assembled(rank[1][step] for rank in ranks)
        state = assembled(rank[2][step] for rank in ranks)
        for name, parameter in named.items():
            found = gradients.get(name)
            parameter.grad = None if found is None or not parameter.requires_grad else found.view(parameter.shape)
        named["unused.weight"].grad = None
        for each in steppers if step != spoiled else ():
            each.step()
        for name, parameter in named.items():
            master = state.get(f"optimizer/{name}/master", state[name])
            assert same(master, parameter.detach().reshape(-1), name), (step, name)
            averages[name] = averages[name].lerp(master, 0.5) if name in averages else master
            assert torch.equal(state.get(f"optimizer/{name}/weight_average", averages[name]), averages[name])
        for each in steppers:
            for name, parameter in named.items():
                for key, value in each.state.get(parameter, {}).items():
                    held = state[f"optimizer/{name}/{key}"]
                    assert same(held, torch.as_tensor(value).reshape(-1).to(held.dtype), name), (step, name, key)


MESHES = {
    "tp": "tp=2",
    "dp x tp": "dp_shard=2,tp=2",
    "pp x tp": "pp=2,tp=2",
    "uneven": "dp_replicate=2,tp=3",
    "replicas": "dp_replicate=2,dp_shard=2",
    "dp": "dp_shard=3",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"precision": sw.Precision(compute="bfloat16")},
    "merged": {"merge": sw.Merge(microbatches=2), "clip_grad_norm": 0.3, "sharding": {"owners": "dp_shard"}},
    "whole": {"sharding": {"partition": "whole"}, "average": sw.Average(decay=0.5)},
}


CASES: list[Any] = [
    ("tp", 0, "cast", "shared"),
    ("tp", 2, "plain", "sent"),
    ("dp x tp", 1, "whole", "shared"),
    ("dp x tp", 3, "cast", "sent"),
    ("pp x tp", 2, "merged", "shared"),
    ("uneven", 1, "plain", "shared"),
    ("uneven", 3, "merged", "sent"),
    ("replicas", 3, "whole", "shared"),
]
"""Every value once or twice; all pairs are for `make stress`. Last, how parts travel."""
PAIRS = covering(list(MESHES), [0, 1, 2, 3], list(SETTINGS), ["shared", "sent"], strength=2)
CASES += [pytest.param(*each, marks=pytest.mark.stress) for each in PAIRS if each not in CASES]


@pytest.mark.parametrize(("mesh", "stage", "setting", "way"), CASES)
def test_matrices_are_updated_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, mesh: str, stage: int, setting: str, way: str
) -> None:
    monkeypatch.setattr(matrix_homes, "_LEAST_BYTES", 1)  # a round for each matrix
    settings = dict(SETTINGS[setting])
    sharding = {"stage": stage, **settings.pop("sharding", {})}
    ranks = train([plan_of(MESHES[mesh], sharding=sharding, **settings)] * 2, way=way)
    assert_updates_are_those_of_torch(ranks)
    if setting in ("plain", "whole"):
        assert ranks[0][0] == pytest.approx(in_one_process(2), rel=1e-4)


@pytest.mark.parametrize(
    ("mesh", "stage", "way"), [("dp_shard=2,tp=2", 1, "shared"), ("pp=2,tp=2", 3, "sent"), ("tp=3", 2, "shared")]
)
def test_a_part_of_the_matrices_is_trained_while_all_are_averaged(
    monkeypatch: pytest.MonkeyPatch, mesh: str, stage: int, way: str
) -> None:
    """What is left out keeps its values and its momentum; averages go on, as the masters of all ranks are."""
    monkeypatch.setattr(matrix_homes, "_LEAST_BYTES", 1)
    plan = plan_of(mesh, sharding={"stage": stage}, average=sw.Average(decay=0.5))
    ranks = train([plan] * 4, only={0: "inner", 2: "outer"}, way=way)
    assert_updates_are_those_of_torch(ranks)


def deep(channel: sw.Channel) -> dict[str, torch.Tensor]:
    """Masters after three steps of more rounds than shared memory has room for. The second one is of one round."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    rules = {str(at): "column" if at % 2 == 0 else "row" for at in range(12)}
    engine = sw.parallelize(
        model,
        sw.Plan(
            mesh=sw.Mesh(tp=2),
            sharding=sw.Sharding(bucket_bytes=1 << 16),
            tensor=sw.Tensor(rules=rules),
            precision=sw.Precision(compute="bfloat16"),
        ),
        optimizer=torch.optim.Muon(model.parameters(), lr=0.02),
        loss=lambda output, batch: output.float().square().mean(),
        channel=channel,
        groups={"back": ("10", "11")},
    )
    matrices = engine._closing._bucket_updates._matrices
    assert matrices is not None
    assert len(matrices._rounds) == 6
    for step in range(3):
        engine.step({"input": torch.ones(2, 256) * (step + 1)}, only="back" if step == 1 else None)
        assert all(piece.name.startswith("master ") for piece in matrices._routes.sources)  # no gradient is kept
    return {piece.name: each.clone() for piece, each in engine.state().items() if piece.name.endswith("master")}


def test_rounds_take_turns_with_shared_memory() -> None:
    expected = sw.simulate(2, deep)
    found = sw.simulate(2, lambda channel: deep(SharesMemory(channel)))
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())


@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        ("dp_shard=2,tp=2", {"stage": 1, "offload": "state"}),
        ("pp=2,tp=2", {"stage": 3}),
        ("dp_replicate=2,dp_shard=2", {"stage": 3, "owners": "dp_shard"}),
    ],
)
def test_devices_update_one_round_while_another_travels(
    fake: str, monkeypatch: pytest.MonkeyPatch, layout: str, setting: dict[str, Any]
) -> None:
    monkeypatch.setattr(matrix_homes, "_LEAST_BYTES", 1)
    plan = plan_of(layout, sharding=setting, precision=sw.Precision(compute="bfloat16"))
    with behind(0):
        assert_updates_are_those_of_torch(train([plan] * 2, device=fake), are_fused="offload" in setting)


@given(touched=st.sets(st.integers(0, 8)))
@example(touched={0, 3})
@example(touched={0, 6})
@tried(40)
def test_all_ranks_meet_before_memory_takes_the_next_round(touched: set[int]) -> None:
    """A slow rank may read updated masters until the next exchange: nothing may come to that memory before it."""
    events: list[str] = []

    class Noting:
        def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
            events.append("all meet")
            return [value]

    class Noted(list[Any]):
        """Copies of nothing."""

        def __init__(self, event: str) -> None:
            super().__init__()
            self.event = event

        def __iter__(self) -> Iterator[Any]:
            events.append(self.event)
            return super().__iter__()

    names = [str(at) for at in range(9)]
    rooms = object.__new__(SharedMatrices)
    rooms._channel = cast("sw.Channel", Noting())
    rooms._gradients = {}
    rooms._masters = {name: Noted(f"put {name}") for name in names}
    rooms._updated = {name: Noted(f"take {name}") for name in names}
    rounds = [[name] if int(name) in touched else [] for name in names]
    for number in range(-1, len(rounds) + rooms.num_behind):
        rooms.bring(rounds, number)
    for at in sorted(touched):
        put, take = events.index(f"put {at}"), events.index(f"take {at}")
        assert "all meet" in events[put:take]
        for later in touched & {at + 3, at + 6}:
            assert "all meet" in events[take : events.index(f"put {later}")]
    assert events.count("all meet") <= len(touched) * 3


def test_one_optimizer_may_have_groups_of_both_kinds() -> None:
    plans = [plan_of("dp_shard=2,tp=2", sharding={"stage": stage}) for stage in (1, 1)]
    assert_updates_are_those_of_torch(train(plans, optimizers=mixed), optimizers=mixed)


def test_a_skipped_update_leaves_all_as_it_was() -> None:
    assert_updates_are_those_of_torch(train([plan_of("dp_shard=2,tp=2")] * 3, spoiled=1), spoiled=1)


def test_a_relayout_takes_matrices_and_their_state_along() -> None:
    layouts = ["dp_shard=2,tp=2", "dp_shard=4", "tp=4", "pp=2,tp=2"]
    assert_updates_are_those_of_torch(train([plan_of(layout) for layout in layouts]))


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("dp_shard=2,tp=2", 0),
        ("dp_shard=2,tp=2", 1),
        ("dp_shard=2,tp=2", 2),
        ("dp_replicate=2,dp_shard=2", 3),
        ("dp_shard=4", 1),
    ],
)
def test_each_matrix_is_updated_once_in_the_world(monkeypatch: pytest.MonkeyPatch, mesh: str, stage: int) -> None:
    """Under stage 0 every data rank updates what it has."""
    lock = threading.Lock()
    counted: list[torch.Size] = []

    def counting(gradient: torch.Tensor, *settings: Any) -> torch.Tensor:
        with lock:
            counted.append(gradient.shape)
        return orthogonalised(gradient, *settings)

    orthogonalised = _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", counting)

    def run(channel: sw.Channel) -> list[torch.Size]:
        model = gated()
        plan = plan_of(mesh, sharding={"stage": stage, "owners": "dp_shard"})
        engine = sw.parallelize(model, plan, optimizer=muon_and_adamw(model), loss=loss_of, channel=channel)
        share = batch_of(0)
        engine.step(share)
        channel.exchange(b"", purpose="trials are over")
        if channel.rank == 0:
            counted.clear()
        channel.exchange(b"", purpose="counting begins")
        engine.step(share)
        channel.exchange(b"", purpose="counting ends")
        return list(counted)

    shapes = sorted(sw.simulate(4, run)[0])
    copies = 1 if stage else sw.Mesh.parse(mesh).num_data_ranks
    assert shapes == sorted([torch.Size((10, 6)), torch.Size((10, 9)), torch.Size((18, 10))] * copies)


def test_code_that_sees_each_step_sees_one() -> None:
    """A hook on one rank: all ranks then bring all matrices together at once."""

    def run(channel: sw.Channel) -> tuple[int, list[float]]:
        model = gated()
        optimizers, calls = muon_and_adamw(model), []
        plan = plan_of("dp_shard=2,tp=2")
        engine = sw.parallelize(model, plan, optimizer=optimizers, loss=loss_of, channel=channel)
        if channel.rank == 1:
            engine.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
        losses = [engine.step(batch_of(step)).loss for step in range(3)]
        return len(calls), losses

    ranks = sw.simulate(4, run)
    assert [num_calls for num_calls, _ in ranks] == [0, 3, 0, 0]
    assert [losses for _, losses in ranks] == [pytest.approx(in_one_process(3), rel=1e-4)] * 4


def test_matrices_are_frozen_and_chosen_as_others_are() -> None:
    """Against one rank: a step of one group, one with a frozen matrix, one of all with it unfrozen again."""

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = gated()
        plan = plan_of("dp_shard=2,tp=2" if channel.size > 1 else "single")
        engine = sw.parallelize(
            model,
            plan,
            optimizer=muon_and_adamw(model),
            loss=loss_of,
            channel=channel,
            groups=GROUPS,
        )
        engine.step(batch_of(0), only="inner")
        model.mix.weight.requires_grad_(False)
        engine.step(batch_of(1))
        model.mix.weight.requires_grad_(True)
        model.fixed.weight.requires_grad_(True)
        for step in (2, 3):
            engine.step(batch_of(step))
        return {name: each.clone() for name, each in sw.full(engine)}

    expected = sw.simulate(1, run)[0]
    found = sw.simulate(4, run)[0]
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-4)
        assert not torch.equal(each, gated().state_dict()[name]) or name == "unused.weight"


def test_a_save_loads_into_other_layouts_and_into_the_plain_optimizer(tmp_path: Path) -> None:
    def begin(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = gated()
        plan = plan_of("dp_shard=2,tp=2")
        engine = sw.parallelize(model, plan, optimizer=muon_and_adamw(model), loss=loss_of, channel=channel)
        engine.step(batch_of(0))
        sw.save(tmp_path / "save", engine)
        with engine.whole():
            names = [name for name, each in model.named_parameters() if each.ndim == 2 and "head" not in name]
            state = engine.optimizers[0].state_dict()["state"]
            return {names[at]: each["momentum_buffer"].clone() for at, each in state.items()}

    def go_on(channel: sw.Channel, layout: str) -> list[float]:
        model = gated()
        plan = plan_of(layout, sharding={"stage": 2})
        engine = sw.parallelize(model, plan, optimizer=muon_and_adamw(model), loss=loss_of, channel=channel)
        sw.load(tmp_path / "save", engine)
        return [engine.step(batch_of(step)).loss for step in (1, 2)]

    momenta = sw.simulate(4, begin)
    model = gated()
    muon, _ = muon_and_adamw(model)
    loss_of(model(batch_of(0)["x"]), batch_of(0)).backward()
    muon.step()
    for name, parameter in model.named_parameters():
        if name in momenta[0]:
            expected = muon.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(momenta[0][name], expected, rtol=1e-4, atol=1e-6)
    losses = in_one_process(3)[1:]
    for layout in ("single", "dp_shard=3", "tp=3", "pp=2,tp=2"):
        size = sw.Mesh.parse(layout).size
        assert sw.simulate(size, partial(go_on, layout=layout))[0] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2"])
def test_bytes_are_those_that_the_formulas_say(monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    """What optimizers have, what an update holds, and what it sends on the recorded channel."""
    monkeypatch.setattr(matrix_homes, "_LEAST_BYTES", 1)

    def used(model: Gated, output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(output, batch) + model.unused.weight.sum()

    def run(channel: sw.Channel, way: str) -> tuple[int, int]:
        model = gated()
        recorded = sw.Recorded(SharesMemory(channel) if way == "shared" else channel)
        plan = plan_of(mesh, sharding={"owners": "dp_shard"})
        engine = sw.parallelize(
            model, plan, optimizer=muon_and_adamw(model), loss=partial(used, model), channel=recorded
        )
        matrices = engine._closing._bucket_updates._matrices
        assert matrices is not None
        whole, messages = matrices.held_bytes
        assert engine.footprint().updating_bytes == whole + messages
        had = [each.numel() for optimizer in engine.optimizers for each in optimizer.param_groups[0]["params"]]
        assert sum(had) == engine.footprint().owned_elements
        rooms = matrices._rooms
        held: list[int] = []
        if isinstance(rooms, SentMatrices):
            finish = rooms._mover.finish

            def watched(begun: Any) -> None:
                held.append(sum(each.nbytes for each in rooms._rooms.values()))
                finish(begun)

            monkeypatch.setattr(rooms._mover, "finish", watched)
        recorded.clear()
        engine.step(batch_of(0))
        if isinstance(rooms, SentMatrices):
            in_messages = sum(len(each._memory) for pair in rooms._mover._memories for each in pair)
            assert (max(held, default=0), in_messages) == (whole, messages)
        else:
            assert isinstance(rooms, SharedMatrices)
            memory = next(iter(rooms._rooms.values())).untyped_storage()
            assert (memory.nbytes(), 0) == (whole, messages)
        return sum(each.bytes_sent for each in recorded.calls if each.purpose.startswith("matrices")), sum(
            matrices.sent_bytes
        )

    ranks = sw.simulate(4, lambda channel: run(channel, "sent"))
    assert sum(sent for sent, _ in ranks) > 0
    for sent, by_formula in ranks:
        assert by_formula <= sent <= by_formula + 1024  # parts are aligned in messages
    # As much is read in place, and nothing sent.
    assert sw.simulate(4, lambda channel: run(channel, "shared")) == [(0, by_formula) for _, by_formula in ranks]


def test_an_optimizer_that_looks_at_other_parameters_is_refused_under_tp() -> None:
    with pytest.raises(OptimizerError, match=r"Normed cannot update parameters one by one.*mesh\.tp"):
        train([plan_of("tp=2")], optimizers=lambda model: [Normed(model.parameters(), lr=0.1, of_all=True)])
