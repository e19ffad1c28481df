"""Optimizers of whole parameters as users bring them: what is found out about them, and that layouts change no bit."""

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
from tests.engine.loops import begun, plan_of
from tests.engine.matrix_optimizers import (
    OPTIMIZERS,
    Make,
    Own,
    Plain,
    Seen,
    Shampoo,
    assert_is_plain,
    auxiliary_muon,
    engine_of,
    layout,
    sights,
    stepped,
)
from tests.engine.refusals import same_error_everywhere
from tests.refusals import Refusals

CPU = torch.device("cpu")
LAYOUTS: dict[str, sw.Plan] = {
    "one rank": layout("single"),
    "stage 0": layout("dp_shard=2", 0, 2),
    "more ranks than matrices": layout("dp_shard=7", sharding={"partition": "whole"}),
    "bfloat16 at stage 2": layout("dp_shard=2", 2, 2, compute="bfloat16"),
    "stage 3": layout("dp_shard=3", 3, clip_grad_norm=0.3),
    "stages": layout("pp=2,dp_shard=2", k=2),
    "tensor": layout("tp=2,dp_shard=2", 3),
}
WAYS = [
    ("auxiliary muon", "tensor", "stages"),
    ("soap", "stages", "tensor"),
    ("soap", "bfloat16 at stage 2", "bfloat16 at stage 2"),
    ("shampoo", "tensor", "stage 3"),
    ("flagged", "stage 3", "stages"),
    ("adafactor", "one rank", "tensor"),
    ("adafactor", "more ranks than matrices", "stage 0"),
    ("blocks", "stages", "stage 3"),
    ("blocks in a tensor", "stage 3", "stages"),
    ("blocks in a tensor", "tensor", "stage 0"),
    ("bitsandbytes", "stage 3", "stages"),
]
CASES = [(name, one, other) for name in OPTIMIZERS for one, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True)]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [*WAYS, *(pytest.param(*each, marks=pytest.mark.stress) for each in CASES if each not in WAYS)],
)
def test_a_run_does_what_the_plain_optimizer_does_and_goes_on_in_another_layout(
    name: str, before: str, after: str, tmp_path: Path
) -> None:
    """Nested state, counts that steps put into groups, and flags from the constructor come through a checkpoint.

    Four updates and more: those of Shampoo and SOAP begin in the second, and their bases change in the third.
    """
    make = OPTIMIZERS[name]

    def begin(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, LAYOUTS[before], make)
        sw.save(tmp_path / "begun", engine)
        found = [stepped(engine, step) for step in range(4)]
        sw.save(tmp_path / "saved", engine)
        return found

    def go_on(channel: sw.Channel) -> Seen:
        engine = engine_of(channel, LAYOUTS[after], make)
        stepped(engine, 17)  # what is loaded replaces its state
        sw.load(tmp_path / "saved", engine)
        found = [stepped(engine, step) for step in (4, 5)]
        sw.load(tmp_path / "begun", engine)  # back to before the first step: what steps have made goes
        return [*found, stepped(engine, 0)]

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
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(("name", "before"), [("soap", "tensor"), ("shampoo", "stages")])
def test_the_state_goes_into_the_plain_optimizer_and_comes_from_it(name: str, before: str) -> None:
    make, plan = OPTIMIZERS[name], LAYOUTS[before]

    def run(channel: sw.Channel) -> tuple[Seen, Any, list[Any]]:
        engine, other = (engine_of(channel, plan, make) for _ in range(2))
        found = [stepped(engine, step) for step in range(3)]
        given = sw.full_state_dict(engine, optimizer=True)
        with other.whole(optimizer=True, rank0_only=True):
            if channel.rank == 0:
                other.model.load_state_dict(given[0])
                other.optimizer.load_state_dict(given[1])
        for each in (engine, other):  # both go on
            stepped(each, 3)
        return found, given[1], [sw.full_state_dict(each, optimizer=True) for each in (engine, other)]

    ranks, plain = sw.simulate(plan.mesh.size, run), Plain(make)
    assert_is_plain([rank[0] for rank in ranks], plain)
    _, state, (one, other) = ranks[0]
    assert alike(state["state"], plain.optimizers[0].state_dict()["state"])
    assert alike(list(one), list(other))
    assert name != "shampoo" or state["state"]["of all"] == {"steps": 3}
    fresh = make(sights())
    fresh.load_state_dict(state)
    assert alike(fresh.state_dict()["state"], state["state"])


def test_commands_show_compare_and_convert_nested_state(tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, LAYOUTS["stages"], OPTIMIZERS["soap"])
        for step in range(2):
            stepped(engine, step)
            sw.save(tmp_path / f"saved-{step}", engine)

    def ckpt(*given: object) -> Any:
        return in_this_process("ckpt", *map(str, given))

    sw.simulate(LAYOUTS["stages"].mesh.size, run)
    saved, converted, rewrite = (tmp_path / name for name in ("saved-1", "converted", "names.rewrite"))
    assert "optimizer/first.weight/GG[0]" in ckpt("ls", saved).stdout
    assert (ckpt("verify", saved).exit_code, ckpt("diff", saved, saved).exit_code) == (0, 0)
    assert "optimizer/first.weight/GG[0]" in ckpt("diff", saved, tmp_path / "saved-0").stdout
    rewrite.write_text("first.weight -> entry.weight\n")
    assert ckpt("convert", saved, converted, "--rewrite", rewrite).exit_code == 0
    shown = ckpt("ls", converted).stdout
    assert "optimizer/entry.weight/GG[0]" in shown
    assert "optimizer/entry.weight/GG[1]=[]" in shown
    # The factors of a square matrix have its shape, and are not turned with it.
    rewrite.write_text("down.weight^T -> down.weight\n")
    refused = ckpt("convert", saved, tmp_path / "turned", "--rewrite", rewrite)
    assert "optimizer/down.weight/Q[0] belongs to the parameter as a whole" in " ".join(refused.stderr.split())


class Hiding(torch.optim.SGD):
    """Plain descent until a count reaches `delay`; then steps go by a norm. Each place keeps one count."""

    def __init__(self, params: Any, *, delay: int, place: str, above: int = 0, all_of_group: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.delay, self.place, self.above, self.all_of_group = delay, place, above, all_of_group
        self.count, self.more = 0, {"count": 0}

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


class Rare(Own):
    """Plain descent, but for values that no trial has."""

    kind = ""

    def begin(self, group: dict[str, Any]) -> None:
        if self.kind == "distance":
            squares = sum(float(each.grad.double().square().sum()) for each in group["params"])
            group["distance"] = group.get("distance", 0.0) + squares

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        if self.kind == "nearly orthogonal" and parameter.ndim > 1:
            turned = bool((gradient * parameter).sum().abs() < 1e-9)
            gradient = gradient * gradient.norm() if turned else gradient
        if self.kind == "names" and "norm" in group["param_names"]:
            gradient = gradient / gradient.norm()
        return gradient * (1 + 1e-9 * (group.get("distance", 0.0) > 1e30))


def hiding(shape: tuple[int, ...] = (16, 8), **settings: Any) -> torch.optim.Optimizer:
    return Hiding([nn.Parameter(torch.zeros(shape))], **settings)


def rare(kind: str, name: str = "w") -> torch.optim.Optimizer:
    optimizer = Rare([(name, nn.Parameter(torch.ones(4, 6)))], {"lr": 0.1})
    optimizer.kind = kind
    return optimizer


LATE = [("attribute", 2), ("dict", 10), ("group", 100), ("state", 1000), ("tensor", 25)]
ABOVE: dict[str, Any] = {"delay": 1, "place": "attribute", "above": 100}
VERDICTS: dict[str, tuple[Any, bool]] = {
    **{f"late by {place}": (lambda p=place, d=delay: hiding(delay=d, place=p), False) for place, delay in LATE},
    "below a size": (lambda: hiding((10, 10), **ABOVE), True),
    "above a size": (lambda: hiding((11, 10), **ABOVE), False),
    "above a size that is too large for numbers": (lambda: hiding((3000, 1000), **{**ABOVE, "above": 10**6}), False),
    "below a large size": (lambda: hiding((3000, 1000), **{**ABOVE, "above": 3 * 10**6}), True),
    "plain": (lambda: rare(""), True),
    "rare values": (lambda: rare("nearly orthogonal"), False),
    "a harmless name": (lambda: rare("names"), True),
    "a name": (lambda: rare("names", "norm"), False),
    **{name: (lambda make=make: make(sights()), False) for name, make in OPTIMIZERS.items()},
    "shampoo, late": (lambda: Shampoo(sights().parameters(), lr=0.1, begin=500, every=1000), False),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_what_goes_element_by_element_is_told_from_what_begins_late_or_goes_by_shapes_names_and_rare_values(
    case: str,
) -> None:
    make, expected = VERDICTS[case]
    optimizer = make()
    assert is_elementwise(optimizer, optimizer.param_groups[-1], CPU) == expected


def test_no_long_vector_is_tried_on_what_needs_whole_parameters() -> None:
    longest: list[int] = []

    class Watched(Shampoo):
        def begin(self, group: dict[str, Any]) -> None:
            longest.extend(max(each.shape) for each in group["params"])
            super().begin(group)

    optimizer = Watched([nn.Parameter(torch.ones(8, 6))], lr=0.1)
    assert not is_elementwise(optimizer, optimizer.param_groups[0], CPU)
    assert max(longest) <= 24


class Paired(torch.optim.SGD):
    """Steps by the product of two parameters that follow each other, as optimizers of low-rank adapters do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for down, up in zip(group["params"][::2], group["params"][1::2], strict=True):
                length = (up @ down).norm()
                for each in (down, up):
                    each.sub_(each.grad / (1 + length), alpha=group["lr"])


class OfKernels(Own):
    """Steps of one length for each kernel of a convolution: it wants four dims."""

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return gradient / gradient.norm(dim=(2, 3), keepdim=True)


def test_an_optimizer_of_kernels_updates_each_parameter_alone() -> None:
    check_apart([OfKernels([nn.Parameter(torch.ones(2, 3, 3, 3))] * 1, {"lr": 0.1})], CPU, instead="")


class Talking(torch.optim.SGD):
    """Shares the work itself, as the Muon of several processes does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = torch.distributed.get_world_size()
        for group in self.param_groups:
            all_of_them = [torch.empty_like(each) for each in group["params"]] * size
            torch.distributed.all_gather(all_of_them, group["params"][0])


class Normed(Own):
    """Goes by the norm of all that it has."""

    def begin(self, group: dict[str, Any]) -> None:
        group["norm"] = math.hypot(*(float(each.grad.norm()) for each in group["params"] if each.grad is not None))

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return gradient / (1 + group["norm"])


def built(make: Make, plan: sw.Plan) -> None:
    raise same_error_everywhere(plan.mesh.size, lambda channel: engine_of(channel, plan, make))


def talking_to_a_live_group(folder: Path) -> None:
    """Before anything is sent."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        check_silent([Talking([nn.Parameter(torch.zeros(4, 6))], lr=0.1)], CPU)
    finally:
        torch.distributed.destroy_process_group()


def talking(model: nn.Module) -> torch.optim.Optimizer:
    return Talking(model.parameters(), lr=0.1)


def paired(device: torch.device) -> None:
    pairs = [nn.Parameter(torch.ones(each)) for each in SHAPES]
    check_apart([Paired(pairs, lr=0.1)], device, instead="Use sw.Sharding(stage=0)")


SHAPES = ((2, 600), (300, 2), (2, 300), (5, 2))
REFUSED = Refusals(
    "engine.optimizer_trials",
    {
        **{
            f"goes by a group, late by {place}": lambda place=place, delay=delay: check_apart(
                [hiding(delay=delay, place=place, all_of_group=True)], CPU, instead="Use sw.Sharding(stage=0)"
            )
            for place, delay in LATE
        },
        "a sum over parameters": lambda: check_apart([rare("distance")], CPU, instead="Use sw.Sharding(stage=0)"),
        "pairs": lambda: paired(CPU),
        "a shared norm under pp": lambda: built(lambda model: Normed(model.parameters(), {"lr": 0.1}), layout("pp=2")),
        "a shared norm under tp": lambda: built(lambda model: Normed(model.parameters(), {"lr": 0.1}), layout("tp=2")),
        "talks to other ranks": lambda: built(talking, layout("dp_shard=2")),
        "talks to other ranks at stage 0": lambda: built(talking, layout("dp_shard=2", 0)),
        "talks to a live group": talking_to_a_live_group,
    },
    kind=(OptimizerError, sw.ShardwiseError),
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_looks_beyond_a_parameter_or_talks_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_settings_that_steps_make_are_told_from_those_that_were_given() -> None:
    assert made_by_steps(Shampoo(sights().parameters(), lr=0.1), CPU) == {"step"}
    assert not made_by_steps(auxiliary_muon(sights()), CPU)
    stepping = Shampoo([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    stepping.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    stepping.step()
    assert made_by_steps(stepping, CPU) == {"step"}


class Bare(torch.optim.SGD):
    """A class that left out `Optimizer.__init__`, and has what steps need."""

    def __init__(self, params: Any) -> None:
        made = torch.optim.SGD(params, lr=0.1)
        vars(self).update({key: each for key, each in vars(made).items() if "state_dict" not in key and key != "step"})


def test_an_optimizer_without_hooks_of_its_state_trains() -> None:
    def run(channel: sw.Channel) -> list[float]:
        engine = begun(channel, lambda: nn.Linear(3, 2), plan_of("dp_shard=2"), optimizer=Bare)
        return [engine.step({"input": torch.ones(2, 3)}).loss for _ in range(2)]

    one, other = sw.simulate(2, run)
    assert one == other
    assert one[0] > one[1]
