"""Optimizers that must see whole matrices, where ranks have parts of them: brought together, updated once, given back.

Masters, averages and states are those of the plain optimizer on the same gradients, to the bit, under every layout.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.plan import matrix_homes
from shardwise.testing.accelerator import behind
from tests.covering import covering
from tests.engine.channels import SharesMemory
from tests.engine.matrix_optimizers import (
    GROUPS,
    Plain,
    Seen,
    apart,
    assert_is_plain,
    deep,
    engine_of,
    layout,
    muon_and_adamw,
    sights,
    stepped,
)

MESHES = ["tp=2", "dp_shard=2,tp=2", "pp=2,tp=2", "dp_replicate=2,tp=3", "dp_replicate=2,dp_shard=2", "dp_shard=3"]
TURNS = ("inner", None, "outer", None)
AVERAGED = {"average": sw.Average(decay=0.5)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"compute": "bfloat16"},
    "merged": {"k": 2, "clip_grad_norm": 0.3, "sharding": {"owners": "dp_shard"}},
    "whole": {"sharding": {"partition": "whole"}, **AVERAGED},
}
CASES: list[Any] = [
    ("tp=2", 0, "cast", "shared"),
    ("dp_shard=2,tp=2", 1, "whole", "shared"),
    ("dp_shard=2,tp=2", 3, "cast", "sent"),
    ("pp=2,tp=2", 2, "merged", "shared"),
    ("dp_replicate=2,tp=3", 2, "plain", "sent"),
    ("dp_replicate=2,dp_shard=2", 3, "merged", "sent"),
    ("dp_shard=3", 1, "plain", "sent"),
]
"""Every value once or twice; all pairs are for `make stress`. Last, how parts travel."""
PAIRS = covering(MESHES, [0, 1, 2, 3], list(SETTINGS), ["shared", "sent"], strength=2)
CASES += [pytest.param(*each, marks=pytest.mark.stress) for each in PAIRS if each not in CASES]


@pytest.fixture
def a_round_for_each_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_homes, "LEAST_BYTES", 1)


def given(channel: sw.Channel, way: str) -> sw.Channel:
    return SharesMemory(channel) if way == "shared" else channel


def train(plans: list[sw.Plan], *, way: str = "sent", device: str = "cpu", spoiled: int = -1, only: Any = ()) -> Any:
    """A step under each of the plans, one after the other."""

    def run(channel: sw.Channel) -> Seen:
        engine = engine_of(given(channel, way), plans[0], muon_and_adamw, groups=GROUPS if only else None)
        found = []
        for step, plan in enumerate(plans):
            engine = engine if plan is engine.plan else sw.relayout(engine, plan)
            found.append(stepped(engine, step, spoiled=step == spoiled, only=only[step] if only else None))
        return found

    return sw.simulate(plans[0].mesh.size, run, device=device)


def is_of_adamw(name: str) -> bool:
    """What is no matrix is updated by kernels of the host whose last bits depend on the cut."""
    return not name.endswith("weight") or name.startswith(("head", "conv"))


@pytest.mark.usefixtures("a_round_for_each_matrix")
@pytest.mark.parametrize(("mesh", "stage", "setting", "way"), CASES)
def test_matrices_are_updated_as_in_one_process(mesh: str, stage: int, setting: str, way: str) -> None:
    plan = layout(mesh, stage, **SETTINGS[setting])
    assert_is_plain(train([plan] * 2, way=way), Plain(muon_and_adamw))


@pytest.mark.slow
@pytest.mark.usefixtures("a_round_for_each_matrix")
@pytest.mark.parametrize(
    ("meshes", "settings", "more"),
    [
        (["dp_shard=2,tp=2"] * 3, {}, {"spoiled": 1}),
        (["dp_shard=2,tp=2", "dp_shard=4", "tp=4", "pp=2,tp=2"], {}, {}),
        (["dp_shard=2,tp=2"] * 4, AVERAGED, {"only": TURNS, "way": "shared"}),
        (["pp=2,tp=2"] * 4, {"stage": 3, **AVERAGED}, {"only": TURNS}),
    ],
    ids=["a skipped update", "relayouts", "a part, in shared memory", "a part, on stages"],
)
def test_skipped_updates_relayouts_and_updates_of_a_part_are_those_of_the_plain_optimizer(
    meshes: list[str], settings: dict[str, Any], more: dict[str, Any]
) -> None:
    """What is left out keeps its values and its momentum; averages go on, as the masters of all ranks are."""
    plans = {mesh: layout(mesh, **settings) for mesh in meshes}
    assert_is_plain(
        train([plans[mesh] for mesh in meshes], **more), Plain(muon_and_adamw), spoiled=more.get("spoiled", -1)
    )


@pytest.mark.usefixtures("a_round_for_each_matrix")
@pytest.mark.parametrize(
    ("mesh", "stage", "sharding"),
    [("dp_shard=2,tp=2", 1, {"offload": "state"}), ("dp_replicate=2,dp_shard=2", 3, {"owners": "dp_shard"})],
)
def test_devices_update_one_round_while_another_travels(fake: str, mesh: str, stage: int, sharding: Any) -> None:
    plan = layout(mesh, stage, sharding=sharding, compute="bfloat16")
    with behind(0):
        ranks = train([plan] * 2, device=fake)
    assert_is_plain(ranks, Plain(muon_and_adamw), near=is_of_adamw if "offload" in sharding else lambda name: False)


def test_rounds_take_turns_with_shared_memory() -> None:
    """A slow rank may read updated masters until the next exchange: nothing comes to that memory before it."""
    rounds: list[int] = []

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        recorded = sw.Recorded(SharesMemory(channel))
        found = deep(recorded)
        rounds.append(sum(call.purpose == "matrices of a round" for call in recorded.calls))
        return found

    for mine, other in zip(sw.simulate(2, run), sw.simulate(2, deep), strict=True):
        assert mine.keys() == other.keys() > set()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())
    assert rounds[0] == rounds[1] >= 2 * 6


class Counted(torch.optim.Muon):
    """Notes the shapes that it updates, once somebody asks for them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            vars(self).get("updated", []).extend(each.shape for each in group["params"] if each.grad is not None)
        super().step(closure)  # type: ignore[no-untyped-call]


def counted(model: nn.Module) -> Any:
    (conv, *matrices), others = apart(model)
    return [Counted(matrices, lr=0.02), torch.optim.SGD([conv, *others], lr=0.1)]


@pytest.mark.parametrize(
    ("mesh", "stage", "copies"),
    [("dp_shard=2,tp=2", 0, 2), ("dp_shard=2,tp=2", 2, 1), ("dp_replicate=2,dp_shard=2", 3, 1)],
)
def test_each_matrix_is_updated_once_in_the_world(mesh: str, stage: int, copies: int) -> None:
    """Of the matrices with a gradient; at stage 0 each data rank updates what it has."""

    def run(channel: sw.Channel) -> list[torch.Size]:
        engine = engine_of(channel, layout(mesh, stage, sharding={"owners": "dp_shard"}), counted)
        found: list[torch.Size] = []
        vars(engine.optimizers[0])["updated"] = found  # no doubles any more
        stepped(engine, 0)
        return found

    updated = [tuple(each) for found in sw.simulate(4, run) for each in found]
    assert sorted(updated) == sorted([(10, 36), (20, 10), (10, 10), (5, 10)] * copies)


def test_code_that_sees_each_step_sees_one() -> None:
    """A hook on one rank: all ranks then bring all matrices together at once."""
    calls: list[int] = []

    def run(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, layout("dp_shard=2,tp=2"), muon_and_adamw)
        if channel.rank == 1:
            engine.optimizers[0].register_step_post_hook(lambda *_: calls.append(channel.rank))
        return [stepped(engine, step) for step in range(3)]

    assert_is_plain(sw.simulate(4, run), Plain(muon_and_adamw))
    assert calls == [1] * 3


def test_matrices_are_frozen_and_chosen_as_others_are() -> None:
    """Against one rank: a step of one group, one with a frozen matrix, one of all with it unfrozen again."""

    def all_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        return muon_and_adamw(model.requires_grad_(True))

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = engine_of(channel, layout("dp_shard=2,tp=2" if channel.size > 1 else "single"), all_of, groups=GROUPS)
        stepped(engine, 0, only="inner")
        for step, on in ((1, False), (2, True), (3, True)):
            engine.model.mix.weight.requires_grad_(on)
            engine.model.fixed.weight.requires_grad_(on)
            stepped(engine, step)
        return {name: each.clone() for name, each in sw.full(engine)}

    [expected], [found, *_] = sw.simulate(1, run), sw.simulate(4, run)
    for name, each in expected.items():
        # Gradients are rounded otherwise, and Muon makes their directions orthogonal in bfloat16.
        torch.testing.assert_close(found[name], each, rtol=1e-2, atol=1e-3)
        assert not torch.equal(each, sights().state_dict()[name]) or name == "unused.weight"


@pytest.mark.usefixtures("a_round_for_each_matrix")
def test_bytes_are_those_that_the_formulas_say() -> None:
    """What optimizers have, and what an update sends on the recorded channel; nothing where memory is shared."""

    def run(channel: sw.Channel, way: str) -> tuple[int, int]:
        recorded = sw.Recorded(given(channel, way))
        engine = engine_of(recorded, layout("dp_shard=2,tp=2"), muon_and_adamw)
        had = [each.numel() for optimizer in engine.optimizers for each in optimizer.param_groups[0]["params"]]
        assert sum(had) == engine.footprint().owned_elements
        assert engine.footprint().updating_bytes > 0
        recorded.clear()
        stepped(engine, 0)
        sent = dict.fromkeys(("matrices", "gradients", "parameters"), 0)
        for each in recorded.calls:
            what = each.purpose.replace(",", " ").split()[0]
            sent[what] = sent.get(what, 0) + each.bytes_sent
        planned = engine.traffic()
        others = sent["gradients"] + sent["parameters"]
        return sent["matrices"], planned.reduce_bytes + planned.gather_bytes - others

    ranks = sw.simulate(4, lambda channel: run(channel, "sent"))
    assert sum(sent for sent, _ in ranks) > 0
    for sent, by_formula in ranks:
        # What has no gradient is not sent; parts are aligned in messages.
        assert by_formula - 2 * 4 * 12 <= sent <= by_formula + 1024
    assert [sent for sent, _ in sw.simulate(4, lambda channel: run(channel, "shared"))] == [0] * 4
