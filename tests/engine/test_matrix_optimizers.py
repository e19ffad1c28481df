"""Optimizers of whole matrices as users bring them: each layout does to the bit what the plain optimizer does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.optimizer_trials import check_apart, check_silent, is_elementwise, made_by_steps
from shardwise.errors import OptimizerError
from tests.cli.processes import in_this_process
from tests.engine.matrix_optimizers import (
    OPTIMIZERS,
    Plain,
    Seen,
    Shampoo,
    apart,
    assert_is_plain,
    auxiliary_muon,
    engine_of,
    plan_of,
    seen,
    sights,
    stepped,
)

CPU = torch.device("cpu")

LAYOUTS: dict[str, sw.Plan] = {
    "one rank": plan_of("dp_shard=1"),
    "stage 0": plan_of("dp_shard=2", {"stage": 0}, merge=sw.Merge(microbatches=2)),
    "more ranks than matrices": plan_of("dp_shard=7", {"partition": "whole"}),
    "bfloat16 at stage 2": plan_of(
        "dp_shard=2", {"stage": 2}, precision=sw.Precision(compute="bfloat16"), merge=sw.Merge(microbatches=2)
    ),
    "stage 3": plan_of("dp_shard=3", {"stage": 3}, clip_grad_norm=0.3),
    "stages": plan_of("pp=2,dp_shard=2", merge=sw.Merge(microbatches=2)),
    "tensor": plan_of("tp=2,dp_shard=2", {"stage": 3}),
}

CASES = [
    ("auxiliary muon", "stage 3"),
    ("auxiliary muon", "tensor"),
    ("flagged muon", "stages"),
    ("flagged muon", "stage 0"),
    ("shampoo", "more ranks than matrices"),
    ("shampoo", "tensor"),
    ("soap", "bfloat16 at stage 2"),
    ("soap", "stages"),
    ("adafactor", "one rank"),
    ("adafactor", "tensor"),
    ("adafactor of transformers", "stage 3"),
    ("adafactor of transformers", "stages"),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        each if each in CASES else pytest.param(*each, marks=pytest.mark.stress)
        for each in ((name, layout) for name in OPTIMIZERS for layout in LAYOUTS)
    ],
)
def test_a_layout_does_what_the_plain_optimizer_does(name: str, layout: str) -> None:
    """Four updates: those of Shampoo and SOAP begin in the second, and their bases change in the third."""
    make, plan = OPTIMIZERS[name], LAYOUTS[layout]

    def run(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, plan, make)
        found = []
        for step in range(4):
            stepped(engine, channel, step)
            found.append(seen(engine))
        return found

    assert_is_plain(sw.simulate(plan.mesh.size, run), Plain(make))


@pytest.mark.parametrize(("layout", "copies"), [("stage 0", 2), ("stage 3", 1), ("tensor", 1), ("stages", 1)])
def test_each_matrix_is_updated_once_in_the_world(layout: str, copies: int) -> None:
    """Of the matrices with a gradient; at stage 0 each rank updates all."""

    class Counted(torch.optim.Muon):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                vars(self).get("updated", []).extend(each.shape for each in group["params"] if each.grad is not None)
            super().step(closure)  # type: ignore[no-untyped-call]

    def make(model: nn.Module) -> Any:
        (conv, *matrices), others = apart(model)
        return [Counted(matrices, lr=0.02), torch.optim.SGD([conv, *others], lr=0.1)]

    def run(channel: sw.Channel) -> list[torch.Size]:
        engine = engine_of(channel, LAYOUTS[layout], make)
        vars(engine.optimizers[0])["updated"] = []  # no doubles any more
        stepped(engine, channel, 0)
        found: list[torch.Size] = vars(engine.optimizers[0])["updated"]
        return found

    updated = [each for found in sw.simulate(LAYOUTS[layout].mesh.size, run) for each in found]
    assert sorted(updated) == sorted([(8, 36), (8, 8), (8, 8), (5, 8)] * copies)


WAYS = [
    ("soap", "stages", "tensor"),
    ("shampoo", "tensor", "stage 3"),
    ("flagged muon", "stage 3", "one rank"),
    ("adafactor of transformers", "more ranks than matrices", "stages"),
]


@pytest.mark.parametrize(("name", "before", "after"), WAYS)
def test_a_run_goes_on_in_another_layout(name: str, before: str, after: str, tmp_path: Path) -> None:
    """Nested state, counts that steps put into groups, and flags from the constructor come through a checkpoint."""
    make = OPTIMIZERS[name]

    def begin(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, LAYOUTS[before], make)
        sw.save(tmp_path / "begun", engine)
        found = []
        for step in range(3):
            stepped(engine, channel, step)
            found.append(seen(engine))
        sw.save(tmp_path / "saved", engine)
        return found

    def go_on(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, LAYOUTS[after], make)
        stepped(engine, channel, 17)  # what is loaded replaces its state
        sw.load(tmp_path / "saved", engine)
        found = []
        for step in range(3, 5):
            stepped(engine, channel, step)
            found.append(seen(engine))
        # Back to before the first step: what steps have made goes.
        sw.load(tmp_path / "begun", engine)
        stepped(engine, channel, 0)
        return [*found, seen(engine)]

    plain = Plain(make)
    assert_is_plain(sw.simulate(LAYOUTS[before].mesh.size, begin), plain)
    ranks = sw.simulate(LAYOUTS[after].mesh.size, go_on)
    assert_is_plain([rank[:2] for rank in ranks], plain)
    assert_is_plain([rank[2:] for rank in ranks], Plain(make))


def alike(one: Any, other: Any) -> bool:
    """Whether two states are of the same kinds and values, containers too."""
    if isinstance(one, torch.Tensor):
        return torch.is_tensor(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and isinstance(one, list) == isinstance(other, list)
            and len(one) == len(other)
            and all(map(alike, one, other))
        )
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(("name", "layout"), [("soap", "tensor"), ("shampoo", "stages")])
def test_the_state_goes_into_the_plain_optimizer_and_comes_from_it(name: str, layout: str) -> None:
    make, plan = OPTIMIZERS[name], LAYOUTS[layout]

    def run(channel: sw.Channel) -> tuple[Seen, Any, list[Any]]:
        engine = engine_of(channel, plan, make)
        found = []
        for step in range(3):
            stepped(engine, channel, step)
            found.append(seen(engine))
        given = sw.full_state_dict(engine, optimizer=True)
        # Into another engine, which goes on.
        other = engine_of(channel, plan, make)
        with other.whole(optimizer=True, rank0_only=True):
            if channel.rank == 0:
                other.model.load_state_dict(given[0])
                other.optimizer.load_state_dict(given[1])
        both = []
        for each in (engine, other):
            stepped(each, channel, 3)
            both.append(sw.full_state_dict(each, optimizer=True))
        return found, given, both

    ranks = sw.simulate(plan.mesh.size, run)
    plain = Plain(make)
    assert_is_plain([rank[0] for rank in ranks], plain)
    _, (_, state), (one, other) = ranks[0]
    assert alike(state["state"], plain.optimizer.state_dict()["state"])
    assert alike(list(one), list(other))
    if name == "shampoo":
        assert state["state"]["of all"] == {"steps": 3}
    fresh = make(sights())
    fresh.load_state_dict(state)
    assert alike(fresh.state_dict()["state"], state["state"])


def test_commands_show_compare_and_convert_nested_state(tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, LAYOUTS["stages"], OPTIMIZERS["soap"])
        for step in range(2):
            stepped(engine, channel, step)
            sw.save(tmp_path / f"saved-{step}", engine)

    sw.simulate(LAYOUTS["stages"].mesh.size, run)
    saved = str(tmp_path / "saved-1")
    shown = in_this_process("ckpt", "ls", saved)
    assert shown.exit_code == 0
    assert "optimizer/first.weight/GG[0]" in shown.stdout
    assert in_this_process("ckpt", "verify", saved).exit_code == 0
    assert in_this_process("ckpt", "diff", saved, saved).exit_code == 0
    differs = in_this_process("ckpt", "diff", saved, str(tmp_path / "saved-0"))
    assert "optimizer/first.weight/GG[0]" in differs.stdout
    converted = str(tmp_path / "converted")
    rewrite = tmp_path / "names.rewrite"
    rewrite.write_text("first.weight -> entry.weight\n")
    assert in_this_process("ckpt", "convert", saved, converted, "--rewrite", str(rewrite)).exit_code == 0
    shown = in_this_process("ckpt", "ls", converted)
    assert "optimizer/entry.weight/GG[0]" in shown.stdout
    assert "optimizer/entry.weight/GG[1]=[]" in shown.stdout
    # The factors of a square matrix have its shape, and are not turned with it.
    rewrite.write_text("up.weight^T -> up.weight\n")
    refused = in_this_process("ckpt", "convert", saved, str(tmp_path / "turned"), "--rewrite", str(rewrite))
    assert "optimizer/up.weight/Q[0] belongs to the parameter as a whole" in " ".join(refused.stderr.split())


class Hiding(torch.optim.SGD):
    """Plain descent until a count reaches `delay`; then steps go by a norm. Each place keeps one count."""

    def __init__(self, params: Any, *, delay: int, place: str, above: int = 0, all_of_group: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.delay, self.place, self.above, self.all_of_group = delay, place, above, all_of_group
        self.count = 0
        self.more = {"count": 0}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        self.more["count"] += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                count = {
                    "attribute": self.count,
                    "dict": self.more["count"],
                    "group": group["count"],
                    "state": state["count"],
                    "tensor": float(state["step"]),
                }[self.place]
                length = 1.0
                if (count == self.delay or count % self.delay == 0) and parameter.numel() > self.above:
                    every = group["params"] if self.all_of_group else [parameter]
                    length = math.hypot(*(float(each.grad.norm()) for each in every if each.grad is not None))
                parameter.sub_(parameter.grad, alpha=group["lr"] * length)


def hiding(shape: tuple[int, ...] = (16, 8), **settings: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = Hiding([nn.Parameter(torch.zeros(shape))], **settings)
    return optimizer, optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("place", "delay"), [("attribute", 2), ("dict", 10), ("group", 100), ("state", 1000), ("tensor", 25)]
)
def test_what_begins_late_is_found_out(place: str, delay: int) -> None:
    assert not is_elementwise(*hiding(delay=delay, place=place), CPU)
    optimizer, _ = hiding(delay=delay, place=place, all_of_group=True)
    with pytest.raises(OptimizerError, match=r"Hiding cannot update parameters one by one.*stage=0"):
        check_apart([optimizer], CPU, instead="Use sw.Sharding(stage=0)")


def test_what_begins_above_a_size_is_found_out_by_the_shapes_of_the_group() -> None:
    above = {"delay": 1, "place": "attribute", "above": 100}
    assert is_elementwise(*hiding((10, 10), **above), CPU)
    assert not is_elementwise(*hiding((11, 10), **above), CPU)
    # Too large for numbers: the operations differ.
    assert not is_elementwise(*hiding((3000, 1000), **{**above, "above": 1_000_000}), CPU)
    assert is_elementwise(*hiding((3000, 1000), **{**above, "above": 3_000_000}), CPU)


class Rare(torch.optim.SGD):
    """Plain descent, but for values that no trial has."""

    kind = ""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            distance = group.get("distance", 0.0)
            for parameter in group["params"]:
                gradient = parameter.grad
                if self.kind == "nearly orthogonal" and parameter.ndim > 1:
                    turned = bool((gradient * parameter).sum().abs() < 1e-9)
                    gradient = gradient * gradient.norm() if turned else gradient
                if self.kind == "distance":
                    distance += float(gradient.double().square().sum())
                if self.kind == "names" and "norm" in group["param_names"]:
                    gradient = gradient / gradient.norm()
                parameter.sub_(gradient, alpha=group["lr"] * (1 + 1e-9 * (distance > 1e30)))
            if self.kind == "distance":
                group["distance"] = distance


def rare(kind: str, name: str = "w") -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer = Rare([(name, nn.Parameter(torch.ones(4, 6)))], lr=0.1)
    optimizer.kind = kind
    return optimizer, optimizer.param_groups[0]


def test_what_happens_for_rare_values_only_is_found_out_by_what_is_kept_and_summed() -> None:
    assert is_elementwise(*rare(""), CPU)
    assert not is_elementwise(*rare("nearly orthogonal"), CPU)
    optimizer, group = rare("distance")
    with pytest.raises(OptimizerError, match="one by one"):
        is_elementwise(optimizer, group, CPU)
    with pytest.raises(OptimizerError, match="one by one"):
        check_apart([optimizer], CPU, instead="")


def test_a_verdict_is_of_the_names_of_a_group_too() -> None:
    assert is_elementwise(*rare("names"), CPU)
    assert not is_elementwise(*rare("names", "norm"), CPU)


def test_no_long_vector_is_tried_on_what_needs_whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    step = Shampoo.step

    def watched(self: Shampoo) -> None:
        longest.extend(max(each.shape) for group in self.param_groups for each in group["params"])
        step(self)

    monkeypatch.setattr(Shampoo, "step", watched)
    optimizer = Shampoo([nn.Parameter(torch.ones(8, 6))], lr=0.1)
    assert not is_elementwise(optimizer, optimizer.param_groups[0], CPU)
    assert max(longest) <= 24


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_none_of_these_is_taken_for_one_that_goes_element_by_element(name: str) -> None:
    optimizer = OPTIMIZERS[name](sights())
    assert not is_elementwise(optimizer, optimizer.param_groups[-1], CPU)
    late = Shampoo(sights().parameters(), lr=0.1, begin=500, every=1000)
    assert not is_elementwise(late, late.param_groups[0], CPU)


def test_a_shared_norm_is_refused_where_stages_have_parameters_of_their_own() -> None:
    def run(channel: sw.Channel) -> None:
        engine_of(
            channel,
            plan_of("pp=2"),
            lambda model: Hiding(model.parameters(), delay=1, place="group", all_of_group=True),
        )

    with pytest.raises(sw.ShardwiseError, match=r"Hiding cannot update parameters one by one.*mesh\.pp at 1"):
        sw.simulate(2, run)


class Paired(torch.optim.SGD):
    """Steps by the product of two parameters that follow each other, as optimizers of low-rank adapters do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            downs, ups = group["params"][::2], group["params"][1::2]
            for down, up in zip(downs, ups, strict=True):
                length = (up @ down).norm()
                for each in (down, up):
                    each.sub_(each.grad / (1 + length), alpha=group["lr"])


def test_pairs_of_parameters_are_refused_where_a_rank_may_have_one_of_them() -> None:
    pairs = [nn.Parameter(torch.ones(shape)) for shape in ((2, 600), (300, 2), (2, 300), (5, 2))]
    with pytest.raises(OptimizerError, match=r"Paired cannot update parameters one by one.*stage=0"):
        check_apart([Paired(pairs, lr=0.1)], CPU, instead="Use sw.Sharding(stage=0)")
    # It wants four dims, and updates each parameter alone.
    kernels = [nn.Parameter(torch.ones(2, 3, 3, 3)) for _ in range(2)]
    check_apart([OfKernels(kernels, lr=0.1)], CPU, instead="")


class OfKernels(torch.optim.SGD):
    """Steps of one length for each kernel of a convolution."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad / each.grad.norm(dim=(2, 3), keepdim=True), alpha=group["lr"])


class Talking(torch.optim.SGD):
    """Shares the work itself, as the Muon of several processes does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = torch.distributed.get_world_size()
        for group in self.param_groups:
            torch.distributed.all_gather(
                [torch.empty_like(each) for each in group["params"]] * size, group["params"][0]
            )


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_that_talks_to_other_ranks_itself_is_refused(stage: int) -> None:
    def run(channel: sw.Channel) -> None:
        engine_of(channel, plan_of("dp_shard=2", {"stage": stage}), lambda model: Talking(model.parameters(), lr=0.1))

    with pytest.raises(sw.ShardwiseError, match=r"Talking talks to other ranks in its step.*class for one process"):
        sw.simulate(2, run)


def test_a_collective_of_a_live_group_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(OptimizerError, match=r"c10d.*allgather"):
            check_silent([Talking([nn.Parameter(torch.zeros(4, 6))], lr=0.1)], CPU)
    finally:
        torch.distributed.destroy_process_group()


def test_settings_that_steps_make_are_told_from_those_that_were_given() -> None:
    assert made_by_steps(Shampoo(sights().parameters(), lr=0.1), CPU) == {"step"}
    assert not made_by_steps(auxiliary_muon(sights()), CPU)
    stepping = Shampoo([nn.Parameter(torch.ones(3, 2, requires_grad=True))], lr=0.1)
    stepping.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    stepping.step()
    assert made_by_steps(stepping, CPU) == {"step"}


class Bare(torch.optim.SGD):
    """A class that left out `Optimizer.__init__`, and has what steps need."""

    def __init__(self, params: Any) -> None:
        made = torch.optim.SGD(params, lr=0.1)
        kept = {key: value for key, value in vars(made).items() if "state_dict" not in key and key != "step"}
        vars(self).update(kept)


def test_an_optimizer_without_hooks_of_its_state_trains() -> None:
    def run(channel: sw.Channel) -> float:
        engine = sw.parallelize(
            nn.Linear(3, 2),
            sw.Plan(mesh=sw.Mesh(dp_shard=2)),
            optimizer=Bare,
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        return [engine.step({"input": torch.ones(2, 3)}).loss for _ in range(2)][-1]

    assert len(set(sw.simulate(2, run))) == 1
