"""Optimizers of whole parameters as users bring them: what is found out about them, and that layouts change no bit."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.optimizers.traits import check_apart, check_steps
from shardwise.engine.optimizers.trials import traits_of
from shardwise.errors import OptimizerError
from tests.cli.processes import in_this_process
from tests.engine.matrix_optimizers import (
    OPTIMIZERS,
    Make,
    Normed,
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
    ("shampoo", "stages", "bfloat16 at stage 2"),
    ("shampoo", "bfloat16 at stage 2", "more ranks than matrices"),
    ("flagged", "stage 3", "one rank"),
    ("adafactor", "more ranks than matrices", "stage 0"),
    ("blocks", "stage 0", "tensor"),
    ("bitsandbytes", "one rank", "stage 3"),
]
"""Each optimizer, and each layout on both sides."""
CASES = [(name, one, other) for name in OPTIMIZERS for one, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True)]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [*WAYS, *(pytest.param(*each, marks=pytest.mark.stress) for each in CASES if each not in WAYS)],
)
def test_a_run_does_what_the_plain_optimizer_does_and_goes_on_in_another_layout(
    name: str, before: str, after: str, tmp_path: Path
) -> None:
    """Nested state, counts that steps put into groups, and flags from the constructor come through a checkpoint.

    Four updates and more: those of Shampoo begin in the second.
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


same = partial(torch.testing.assert_close, rtol=0, atol=0)


def test_the_state_goes_into_the_plain_optimizer_and_comes_from_it() -> None:
    """Lists, also empty ones, tuples, dicts, None, and what is of no parameter."""
    make, plan = OPTIMIZERS["shampoo"], LAYOUTS["stages"]

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
    same(state["state"], plain.optimizers[0].state_dict()["state"])
    same(list(one), list(other))
    assert type(state["state"][0]["roots"]) is tuple
    assert state["state"]["of all"] == {"steps": 3}
    fresh = make(sights())
    fresh.load_state_dict(state)
    same(fresh.state_dict()["state"], state["state"])


@pytest.mark.slow
def test_commands_show_and_rename_nested_state_and_refuse_to_turn_it(tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, LAYOUTS["stages"], OPTIMIZERS["shampoo"])
        stepped(engine, 0)
        sw.save(tmp_path / "saved", engine)

    def converted(rule: str) -> Any:
        (tmp_path / "names.rewrite").write_text(rule)
        given = ("convert", tmp_path / "saved", tmp_path / "converted", "--rewrite", tmp_path / "names.rewrite")
        return in_this_process("ckpt", *map(str, given))

    sw.simulate(LAYOUTS["stages"].mesh.size, run)
    # The factors of a square matrix have its shape, and are not turned with it.
    refused = converted("down.weight^T -> down.weight\n")
    assert "optimizer/down.weight/factors[0] belongs to the parameter as a whole" in " ".join(refused.stderr.split())
    assert converted("first.weight -> entry.weight\n").exit_code == 0
    shown = in_this_process("ckpt", "ls", str(tmp_path / "converted")).stdout
    assert "optimizer/entry.weight/factors[0]" in shown
    assert "optimizer/entry.weight/factors[1]=[]" in shown


class Hiding(Own):
    """Plain descent, but steps by a norm of what is larger than a size."""

    def __init__(self, params: Any, *, above: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.above = above

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return gradient if parameter.numel() <= self.above else gradient * gradient.norm()


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
        if self.kind == "out of sight":
            return gradient / float(np.linalg.norm(gradient.numpy()))
        if self.kind == "names" and "norm" in group["param_names"]:
            gradient = gradient / gradient.norm()
        return gradient * (1 + 1e-9 * (group.get("distance", 0.0) > 1e30))


def hiding(*shape: int, above: int) -> torch.optim.Optimizer:
    return Hiding([nn.Parameter(torch.zeros(shape))], above=above)


def rare(kind: str, name: str = "w") -> torch.optim.Optimizer:
    optimizer = Rare([(name, nn.Parameter(torch.ones(4, 6)))], {"lr": 0.1})
    optimizer.kind = kind
    return optimizer


VERDICTS: dict[str, tuple[Any, bool]] = {
    "below a size": (lambda: hiding(10, 10, above=100), True),
    "above a size": (lambda: hiding(11, 10, above=100), False),
    "above a size that is too large for numbers": (lambda: hiding(3000, 1000, above=10**6), False),
    "below a large size": (lambda: hiding(3000, 1000, above=3 * 10**6), True),
    "plain": (lambda: rare(""), True),
    "rare values": (lambda: rare("nearly orthogonal"), False),
    "a norm that no operation of torch shows": (lambda: rare("out of sight"), False),
    "a harmless name": (lambda: rare("names"), True),
    "a name": (lambda: rare("names", "norm"), False),
    **{name: (lambda make=make: make(sights()), False) for name, make in OPTIMIZERS.items()},
    "shampoo, late": (lambda: Shampoo(sights().parameters(), lr=0.1, begin=500, every=1000), False),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_what_goes_element_by_element_is_told_from_what_goes_by_shapes_names_and_rare_values(
    case: str,
) -> None:
    make, expected = VERDICTS[case]
    found = traits_of(make(), CPU).of_groups[-1].values()
    assert {each.looks_at for each in found} <= {"element", "parameter"}
    assert all(each.looks_at == "element" for each in found) == expected


class Noted(Own):
    """Descent by the direction alone, where the state says so before the first step."""

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        return gradient / gradient.norm() if state.get("normed") else gradient


@pytest.mark.parametrize("flag", [True, "yes", 1, 0.5, torch.tensor(True), torch.ones(1, dtype=torch.int8)])
def test_flags_of_every_type_tell_parameters_of_one_group_apart(flag: object) -> None:
    noted, plain = (nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optimizer = Noted([noted, plain], {"lr": 0.1})
    optimizer.state[noted]["normed"] = flag
    (found,) = traits_of(optimizer, CPU).of_groups
    assert [each.looks_at for each in found.values()] == ["parameter", "element"]
    assert optimizer.state[noted] == {"normed": flag}


def test_no_long_vector_is_tried_on_what_needs_whole_parameters() -> None:
    longest: list[int] = []

    class Watched(Shampoo):
        def begin(self, group: dict[str, Any]) -> None:
            longest.extend(max(each.shape) for each in group["params"])
            super().begin(group)

    optimizer = Watched([nn.Parameter(torch.ones(8, 6))], lr=0.1)
    assert traits_of(optimizer, CPU).of_all.looks_at == "parameter"
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


def refuse_coupled(optimizer: torch.optim.Optimizer, instead: str = "Use sw.Sharding(stage=0)") -> None:
    check_apart([traits_of(optimizer, CPU)], instead=instead)


def test_an_optimizer_of_kernels_updates_each_parameter_alone() -> None:
    refuse_coupled(OfKernels([nn.Parameter(torch.ones(2, 3, 3, 3))] * 1, {"lr": 0.1}), "")


class Talking(torch.optim.SGD):
    """Shares the work itself, as the Muon of several processes does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = torch.distributed.get_world_size()
        for group in self.param_groups:
            all_of_them = [torch.empty_like(each) for each in group["params"]] * size
            torch.distributed.all_gather(all_of_them, group["params"][0])


def built(make: Make, plan: sw.Plan) -> None:
    raise same_error_everywhere(plan.mesh.size, lambda channel: engine_of(channel, plan, make))


def talking_to_a_live_group(folder: Path) -> None:
    """Before anything is sent."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        check_steps([traits_of(Talking([nn.Parameter(torch.zeros(4, 6))], lr=0.1), CPU)], is_alone=False)
    finally:
        torch.distributed.destroy_process_group()


def talking(model: nn.Module) -> torch.optim.Optimizer:
    return Talking(model.parameters(), lr=0.1)


def paired() -> None:
    refuse_coupled(Paired([nn.Parameter(torch.ones(each)) for each in SHAPES], lr=0.1))


def normed(model: nn.Module, share: float = 1.0) -> torch.optim.Optimizer:
    return Normed(model.parameters(), 0.1, of_all=True, share=share)


MESHES = ("dp_shard=2", "pp=2", "tp=2")
SHAPES = ((2, 600), (300, 2), (2, 300), (5, 2))
REFUSED = Refusals(
    "engine.optimizer_trials",
    {
        "a sum over parameters": lambda: refuse_coupled(rare("distance")),
        "pairs": paired,
        **{f"a shared norm under {mesh}": lambda mesh=mesh: built(normed, layout(mesh)) for mesh in MESHES},
        "a shared norm that hardly counts": lambda: refuse_coupled(normed(sights(), 1e-5), "Instead: none"),
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
    assert traits_of(Shampoo(sights().parameters(), lr=0.1), CPU).of_all.made == {"step"}
    assert not traits_of(auxiliary_muon(sights()), CPU).of_all.made
    stepping = Shampoo([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    stepping.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    stepping.step()
    assert traits_of(stepping, CPU).of_all.made == {"step"}
