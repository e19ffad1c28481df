"""Gradients that a forward or a loss takes itself: the numbers of one process under every plan, or words.

Ways to take one x where it is taken x plans.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import shardwise as sw
from shardwise.errors import MismatchError, ModelError
from tests.covering import pairwise

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by jvp itself

Call = Callable[[torch.Tensor], torch.Tensor]
Way = Callable[[nn.Module, Call, torch.Tensor], Any]


def total(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call(x).square().sum()


def slope(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    (found,) = torch.autograd.grad(total(call, x), x, create_graph=True)
    return (found.norm(dim=-1) - 1).square().mean()


def slope_of_slope(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    (first,) = torch.autograd.grad(total(call, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


def ratio(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """An adaptive weight: nothing is differentiated twice, and the graph is used again."""
    weights = list(module.parameters())
    ones, others = call(x).square().mean(), (call(x + 1) - 1).square().mean()
    norms = [
        torch.stack(
            [
                g.square().sum()
                for g in torch.autograd.grad(term, weights, retain_graph=True, allow_unused=True)
                if g is not None
            ]
        ).sum()
        for term in (ones, others)
    ]
    return ones + (norms[0] / (norms[1] + 1e-4)).sqrt().detach() * others


def norm_of_gradients(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    found = torch.autograd.grad(total(call, x), list(module.parameters()), create_graph=True, allow_unused=True)
    return torch.stack([each.square().sum() for each in found if each is not None]).sum().sqrt()


def product(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """The Hessian times a vector."""
    weights = list(module.parameters())
    first = torch.autograd.grad(call(x).square().mean(), weights, create_graph=True)
    along: Any = sum((each * each.detach()).sum() for each in first)
    return sum(0.1 * each.square().mean() for each in torch.autograd.grad(along, weights, create_graph=True))


def projected(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """Two losses whose gradients are combined, and given back as a sum with the parameters."""
    weights = list(module.parameters())
    terms = [call(x).square().mean(), (call(x) - 1).square().mean()]
    one, other = [
        [
            torch.zeros_like(w) if g is None else g
            for w, g in zip(
                weights, torch.autograd.grad(term, weights, retain_graph=True, allow_unused=True), strict=True
            )
        ]
        for term in terms
    ]
    dot: Any = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    out: Any = sum((w * (a + b * dot.sigmoid())).sum() for w, a, b in zip(weights, one, other, strict=True))
    return out


def of_function(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return grad(lambda x: total(call, x))(x).square().mean()


def pulled_back(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    output, back, *_ = vjp(call, x)
    return back(torch.ones_like(output))[0].square().mean() + output.mean()


def pushed(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return jvp(call, (x,), (torch.ones_like(x),))[1].square().mean()


def jacobians(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    one = x[:1]
    return jacrev(call)(one).square().mean() + jacfwd(call)(one).square().mean()


def curvature(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return hessian(lambda one: total(call, one))(x[:1]).square().mean()


def per_row(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return vmap(grad(lambda row: total(call, row)))(x).square().mean()


def inner_step(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """One step of the weights, as in MAML."""
    now = dict(module.named_parameters())
    found = grad(lambda given: functional_call(module, given, (x,)).square().mean())(now)
    after = {name: now[name] - 0.1 * found[name] for name in now}
    return functional_call(module, after, (x,)).square().mean()


def inner_step_by_autograd(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    now = dict(module.named_parameters())
    found = torch.autograd.grad(call(x).square().mean(), list(now.values()), create_graph=True)
    after = {name: now[name] - 0.1 * each for name, each in zip(now, found, strict=True)}
    return functional_call(module, after, (x,)).square().mean()


WAYS: dict[str, Way] = {
    each.__name__: each
    for each in (
        *(slope, slope_of_slope, ratio, norm_of_gradients, product, projected, of_function, pulled_back, pushed),
        *(jacobians, curvature, per_row, inner_step, inner_step_by_autograd),
    )
}


class Block(nn.Module):
    def __init__(self, way: Way | None) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(4, 8), nn.Linear(8, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way is not None:
            x = x if x.requires_grad else x.clone().requires_grad_()
            x = x + self.way(self.up, lambda each: torch.tanh(self.up(each)), x)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Energy(nn.Module):
    """Takes a gradient in a block ("child"), in its forward ("root"), or nowhere."""

    def __init__(self, place: str, way: Way) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(way if place == "child" and at == 1 else None) for at in range(3))
        self.head = nn.Linear(4, 1)
        self.way = way if place == "root" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.through(x)
        if self.way is not None:
            x = x.clone().requires_grad_()
            out = out + self.way(self.blocks[1], lambda each: self.head(self.blocks[1](each)), x)
        return out

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


PLACES = ("child", "root", "loss of output", "loss that calls")
BATCHES = [{"x": torch.linspace(-1, 1, 32).view(8, 4).roll(at, 0) * (1 + at)} for at in range(2)]


def loss_of(place: str, way: Way, model: nn.Module) -> Callable[..., torch.Tensor]:
    def of_output(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = (output - 1).square().mean()
        if place == "loss of output":
            (found,) = torch.autograd.grad(output.square().sum(), batch["x"], create_graph=True)
            loss = loss + found.square().mean()
        return loss

    def calling(batch: Mapping[str, torch.Tensor]) -> Any:
        x = batch["x"].clone().requires_grad_()
        return (model(x) - 1).square().mean() + way(model, model, x)

    return calling if place == "loss that calls" else of_output


def by_one_process(place: str, way: Way) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Energy(place, way)
    loss, optimizer = loss_of(place, way, model), torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in BATCHES:
        parts = [{"x": each.clone().requires_grad_(place == "loss of output")} for each in batch["x"].chunk(2)]
        found = [loss(part) if place == "loss that calls" else loss(model(part["x"]), part) for part in parts]
        for each in found:
            (each / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack([each.detach() for each in found]).sum() / 2)
    return [torch.stack(losses), *(each.detach() for each in model.parameters())]


def by_engine(place: str, way: Way, plan: sw.Plan) -> list[torch.Tensor]:
    ranks = plan.mesh.dp_shard

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Energy(place, way)
        loss = loss_of(place, way, model)
        engine = sw.parallelize(
            model, plan, loss=loss, channel=channel, optimizer=lambda each: torch.optim.SGD(each, lr=0.05)
        )
        losses = []
        for batch in BATCHES:
            x = batch["x"].chunk(ranks)[plan.mesh.coordinates(channel.rank)["dp_shard"]]
            losses.append(engine.step({"x": x.clone().requires_grad_(place == "loss of output")}).loss)
        return [torch.tensor(losses), *(value for _, value in sw.full(engine, channel=channel))]

    first, *_ = sw.simulate(plan.mesh.size, run)
    return first


def plan_of(
    stage: int = 1,
    k: int = 1,
    checkpoint: Any = None,
    units: Any = None,
    keep: bool = False,
    **mesh: int,
) -> sw.Plan:
    rules = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if "tp" in mesh else None
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        merge=sw.Merge(microbatches=k),
        sharding=sw.Sharding(stage=stage, units=units, keep_gathered=keep),
        activations=sw.Activations(checkpoint=checkpoint),
        tensor=sw.Tensor(rules=rules),
    )


PLANS = {
    "one rank": plan_of(0, 2),
    "stage 0": plan_of(0, dp_shard=2),
    "stage 2": plan_of(2, dp_shard=2),
    "stage 2, checkpoint": plan_of(2, checkpoint="blocks", dp_shard=2),
    "stage 3": plan_of(3, dp_shard=2),
    "stage 3, one unit": plan_of(3, units=(".",), dp_shard=2),
    "stage 3, nested": plan_of(3, units=(".", "blocks.*.up"), dp_shard=2),
    "stage 3, kept": plan_of(3, keep=True, dp_shard=2),
    "stage 3, checkpoint": plan_of(3, checkpoint="blocks", dp_shard=2),
    "tp": plan_of(0, 2, tp=2),
    "tp, stage 3": plan_of(3, dp_shard=2, tp=2),
    "pp": plan_of(1, 2, pp=2),
    "pp, stage 3": plan_of(3, dp_shard=2, pp=2),
}
FORWARD_MODE = ("pushed", "jacobians", "curvature")
OF_FUNCTIONS = (*FORWARD_MODE, "of_function", "pulled_back", "per_row", "inner_step")
OF_PARAMETERS = ("ratio", "norm_of_gradients", "product", "projected", "inner_step_by_autograd")


def words_of(way: str, place: str, plan: str) -> str:
    """What may be said where the numbers are not given: the rest has to be right."""
    said = []
    if way in FORWARD_MODE and ("stage 3" in plan or "tp" in plan):
        said.append("one forward-mode derivative at a time in a process")
    if way in OF_FUNCTIONS and "checkpoint" in plan and place == "child":
        said.append("Leave the module out of activations.checkpoint")
    if "tp" in plan and way in OF_FUNCTIONS:
        said.append("leave the module out of tensor.rules|gives other numbers when it is cut")
    if "tp" in plan and way in OF_PARAMETERS:
        said.append("their losses are .* itself takes gradients of cut parameters")
    if "pp" in plan and place != "child":
        said += [
            "asks for the graph of a value",
            "its stage is not known",
            "Transform functions in the forward of a placed",
        ]
    return "|".join(said)


@pytest.mark.parametrize(("place", "way", "plan"), pairwise(PLACES, list(WAYS), list(PLANS)))
def test_gradients_inside_are_those_of_one_process(place: str, way: str, plan: str) -> None:
    words, refusal = words_of(way, place, plan), ""
    try:
        got = by_engine(place, WAYS[way], PLANS[plan])
    except (ModelError, MismatchError) as error:
        refusal = str(error)
    if refusal:
        assert words, refusal
        assert re.search(words, refusal), refusal
        return
    for one, other in zip(got, by_one_process(place, WAYS[way]), strict=True):
        torch.testing.assert_close(one, other)


def test_ranks_that_skip_a_microbatch_follow_those_that_take_gradients_in_it() -> None:
    def run(channel: sw.Channel, stage: int) -> list[float]:
        torch.manual_seed(0)
        model = Energy("root", slope)
        engine = sw.parallelize(
            model,
            plan_of(stage, dp_shard=2),
            loss=lambda output, batch: (output - batch["y"]).square().mean(),
            loss_weight=lambda batch: float(batch["counts"]),
            channel=channel,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.05),
        )
        x = BATCHES[0]["x"].chunk(2)[channel.rank]
        parts = [{"x": x, "y": x.sum(), "counts": counts} for counts in ((1.0, 2.0), (0.0, 1.0))[channel.rank]]
        return [engine.step(parts).loss for _ in range(3)]

    assert sw.simulate(2, lambda channel: run(channel, 3)) == sw.simulate(2, lambda channel: run(channel, 2))


class Forces(Energy):
    """Gives the slope of its energy, in evaluations too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(self.through(x).sum(), x, create_graph=self.training)
        return found


@pytest.mark.parametrize("units", [None, (".",)])
def test_forces_are_given_in_steps_evaluations_and_predictions(units: tuple[str, ...] | None) -> None:
    def run(channel: sw.Channel, stage: int) -> list[Any]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            Forces("nowhere", slope),
            plan_of(stage, units=units if stage == 3 else None, dp_shard=2),
            loss=lambda output, _: (output - 1).square().mean(),
            channel=channel,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.05),
        )
        found: list[Any] = []
        for _ in range(2):
            batch = {"x": BATCHES[0]["x"].chunk(2)[channel.rank]}
            found += [engine.step(batch).loss, engine.evaluate(batch).loss, engine.predict(batch).tolist()]
        return found

    assert sw.simulate(2, lambda channel: run(channel, 3)) == sw.simulate(2, lambda channel: run(channel, 1))


def test_programs_without_such_gradients_gather_as_before() -> None:
    """Nothing stays that would have been freed, also where an earlier step took such gradients."""

    def run(channel: sw.Channel) -> None:
        model = Energy("nowhere", slope)
        engine = sw.parallelize(
            model,
            plan_of(3, dp_shard=2),
            loss=lambda output, _: output.square().mean(),
            channel=channel,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.05),
        )
        batch = {"x": BATCHES[0]["x"].chunk(2)[channel.rank]}
        engine.step(batch)
        before, foretold = engine.counters.all_gathers, engine.traffic().gather_bytes
        engine.step(batch)
        assert engine.counters.all_gathers - before == 2 * 4 - 1
        assert engine.traffic().gather_bytes == foretold
        model.way = slope
        engine.step(batch)
        model.way = None
        engine.step(batch)  # gathers as the one with the penalty
        before = engine.counters.all_gathers
        engine.step(batch)
        assert engine.counters.all_gathers - before == 2 * 4 - 1
        assert engine.traffic().gather_bytes == foretold

    sw.simulate(2, run)
