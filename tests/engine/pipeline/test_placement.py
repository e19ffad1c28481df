"""Outlines and work of real models: what a placement is decided from."""

from collections import deque
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

import shardwise as sw
from shardwise.engine.forward.outline import outline_of
from shardwise.engine.forward.trial_runs import count_work
from shardwise.errors import ModelError
from shardwise.plan import Outline, Pipeline, Placement, place
from tests.engine.formed import formed
from tests.engine.pipeline.transformers_models import case_of
from tests.oracle.places import train_on
from tests.oracle.program import plan_of


def elements_by_stage(model: nn.Module, placement: Placement) -> list[int]:
    """Elements of each stage, ties counted at their first stage; every parameter must lie on exactly one stage."""
    counted: set[nn.Parameter] = set()
    loads = [0] * placement.num_stages
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages = {stage for placed, stage in placement.modules.items() if name.startswith(f"{placed}.")}
        stages |= {placement.parameters[name]} if name in placement.parameters else set()
        assert len(stages) == 1, f"{name} lies on {stages}"
        if parameter not in counted:
            loads[min(stages)] += parameter.numel()
        counted.add(parameter)
    assert set(placement.modules) <= {name for name, _ in model.named_modules()}
    return loads


def num_elements(outline: Outline) -> int:
    """Elements of all parameters; a tie counts once, where it is met first."""
    return sum(count for module in outline.modules() for _, count in module.own_parameters)


@pytest.mark.parametrize("name", ["t5", "mixtral", "perceiver", "vit"])
def test_a_balanced_placement_covers_every_model(name: str) -> None:
    case = case_of(name)
    model = case.make()
    outline = outline_of(model)
    work, order = count_work(model, lambda: model(**case.batches[0]), kind="flops")
    for num_stages in (2, 4):
        loads = elements_by_stage(model, place(outline, Pipeline(), num_ranks=num_stages))
        assert num_elements(outline) == sum(loads) == sum(parameter.numel() for parameter in model.parameters())
        assert min(loads) > 0
        placed = place(outline, Pipeline(balance="flops"), num_ranks=num_stages, work=work, order=order)
        elements_by_stage(model, placed)
        of_stages = [0.0] * num_stages
        for each, stage in placed.modules.items():
            of_stages[stage] += work[each]
        assert min(of_stages) >= 0
        assert max(of_stages) <= 0.85 * work[""]


@pytest.mark.parametrize("balance", ["parameters", "flops"])
def test_a_model_whose_first_forward_puts_hooks_on_trains_after_a_run_of_a_sample(balance: Any) -> None:
    program = case_of("mixtral")  # one rank runs the sample, and all put the hooks on in their first step

    def losses(channel: sw.Channel) -> list[float]:
        plan = plan_of(program, sw.Mesh(pp=channel.size), k=2)
        placed = replace(plan, pipeline=sw.Pipeline(balance=balance) if channel.size > 1 else sw.Pipeline())
        return train_on(channel, program, placed, sample=program.batches[0])[0]

    (alone,) = sw.simulate(1, losses)
    assert sw.simulate(2, losses) == [alone, alone]


class Shared(nn.Module):
    """One block under two names, a tied weight, containers, parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh())
        other = nn.Linear(3, 3, bias=False)
        self.again = nn.ModuleDict({"block": self.first, "other": other})
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = other.weight
        self.tables = nn.ParameterList([torch.zeros(2), torch.zeros(4)])
        self.missing = None
        self.register_module("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.first(self.first(x * self.scale)))
        return out


def test_each_module_object_is_listed_once_with_its_other_names() -> None:
    linear = Outline(name="first.0", kind="Linear", own_parameters=(("first.0.weight", 9),), aliases=("again.block.0",))
    tanh = Outline(name="first.1", kind="Tanh", aliases=("again.block.1",))
    first = Outline(name="first", kind="Sequential", children=(linear, tanh), aliases=("again.block",))
    other = Outline(name="again.other", kind="Linear", own_parameters=(("again.other.weight", 9),))
    again = Outline(name="again", kind="ModuleDict", is_container=True, children=(other,))
    tied = Outline(name="tied", kind="Linear", own_parameters=(("tied.weight", 0),))
    tables = Outline(
        name="tables", kind="ParameterList", is_container=True, own_parameters=(("tables.0", 2), ("tables.1", 4))
    )
    expected = Outline(name="", kind="Shared", children=(first, again, tied, tables), own_parameters=(("scale", 3),))
    assert outline_of(Shared()) == expected
    assert num_elements(expected) == 27
    model: Any = nn.Sequential(nn.Module(), nn.Module())
    model[1].forward = lambda x: x
    assert [child.is_container for child in outline_of(model).children] == [True, False], "it was given a forward"


def test_a_compiled_module_is_placed_whole_and_a_compiled_model_is_refused() -> None:
    wrapped: Any = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), backend="eager")
    in_place = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    in_place.compile(backend="eager")
    model = nn.Sequential(wrapped, in_place)
    assert dict(place(outline_of(model), Pipeline(), num_ranks=2).modules) == {"0": 0, "1": 1}
    for whole in (wrapped, in_place):
        with pytest.raises(ModelError, match=r"compiled as a whole.*Compile the modules in it"):
            outline_of(whole)
    work, order = count_work(model, lambda: model(torch.ones(2, 3)), kind="flops")
    assert (work, order) == ({"": 144.0, "0": 72.0, "1": 72.0}, ["", "0", "1"])
    work, order = count_work(model, lambda: model(torch.ones(2, 3)), kind="seconds")
    assert order == ["", "0", "1"]
    assert work[""] > work["0"] > 0


def test_flops_are_those_of_the_matrix_products_with_all_calls() -> None:
    model = Shared()
    work, order = count_work(model, lambda: model(torch.ones(5, 3)), kind="flops")
    product = 2 * 5 * 3 * 3
    assert order == ["", "first", "first.0", "first.1", "tied"]
    counted = {"": 3 * product, "first": 2 * product, "first.0": 2 * product, "tied": product}
    assert work == {**dict.fromkeys(("first.1", "again", "again.other", "tables"), 0), **counted}


def test_flops_count_fused_attention_and_go_on_where_torch_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = case_of("llama", tied=False).make()
    ids = torch.zeros(2, 5, dtype=torch.long)
    work, _ = count_work(model, lambda: model(input_ids=ids), kind="flops")
    attention = model.get_submodule("model.layers.0.self_attn")
    linears = sum(2 * ids.numel() * each.weight.numel() for each in attention.modules() if isinstance(each, nn.Linear))
    # Queries with keys, and weights with values: 2 heads of 8 values, 5 times 5 words.
    assert work["model.layers.0.self_attn"] == linears + 2 * (2 * 2 * 2 * 5 * 5 * 8)

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, refuse)
    single = nn.Linear(3, 4)
    work, _ = count_work(single, lambda: single(torch.zeros(5, 3)), kind="flops")
    assert work[""] == 5 * 4  # an operation for each element that comes out


def noisy(net: Any, x: torch.Tensor) -> Any:
    """Draws, counts its calls in a buffer, replaces another, and behaves differently in training."""
    net.modes.append(net.training)
    net.calls += 1
    net.seen = x
    net.norm.train()(x)
    return net.linear(x) + torch.rand(3)


def put_buffers(net: Any) -> None:
    net.register_buffer("calls", torch.zeros(()))
    net.register_buffer("seen", torch.zeros(3).expand(2, 3))
    net.register_buffer("nothing", None)
    net.norm.eval()


@pytest.mark.parametrize("width", [3, pytest.param(4, id="fails")])
@pytest.mark.parametrize("kind", ["flops", "seconds"])
def test_counting_leaves_the_model_and_the_random_numbers_as_they_were(
    kind: Literal["flops", "seconds"], width: int
) -> None:
    model: Any = formed(
        noisy, put_buffers, linear=lambda: nn.Linear(3, 3), norm=lambda: nn.BatchNorm1d(3), modes=deque
    )()
    held = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in held.items()}
    state = torch.get_rng_state()
    try:
        count_work(model, lambda: model(torch.randn(2, width)), kind=kind)
    except (RuntimeError, ValueError):
        assert width == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert all(buffer is held[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert set(model.modes) == {False}
    assert (model.training, model.linear.training, model.norm.training) == (True, True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def rescaling(net: Any, x: torch.Tensor) -> Any:
    """Halves its weights once, and doubles what they give in each forward."""
    if not net.is_rescaled:
        with torch.no_grad():
            net.linear.weight.div_(2)
        net.is_rescaled = True
    return net.linear(x) * 2


def test_weights_that_a_first_forward_writes_are_not_written_again() -> None:
    model: Any = formed(rescaling, linear=lambda: nn.Linear(4, 4), is_rescaled=bool)()
    given = torch.ones(2, 4)
    expected = nn.functional.linear(given, model.linear.weight, 2 * model.linear.bias)
    count_work(model, lambda: model(given), kind="flops")
    assert torch.equal(model(given), expected)
