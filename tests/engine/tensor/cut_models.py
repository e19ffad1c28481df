"""Models cut over simulated ranks by a plan of tensor parallelism alone, beside the whole model in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.recorded import Recorded, RecordedCall
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.styles import TensorParallel
from shardwise.engine.tensor.summed_gradients import SummedGradients
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_plan import TensorPlan

MakeModel = Callable[[], nn.Module]
Rules = Mapping[str, str]
Run = Callable[[nn.Module], torch.Tensor]
"""From a model to what is computed with it; its sum is what the gradients are of."""


@dataclass
class Computed:
    """What one process, or all ranks together, computed."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    plan: TensorPlan = field(default_factory=lambda: TensorPlan(num_ranks=1))
    calls: list[list[RecordedCall]] = field(default_factory=list)
    """Of each rank."""


def compute_whole(make_model: MakeModel, run: Run) -> Computed:
    """One process, the model as it is."""
    model = _made(make_model)
    output = run(model)
    output.sum().backward()
    return Computed(output.detach(), {name: each.grad for name, each in model.named_parameters()})


def compute_cut(
    make_model: MakeModel, rules: Mapping[str, str] | str, num_ranks: int, run: Run, *, is_completed: bool = False
) -> Computed:
    """Simulated ranks with the portions that the rules give them; the gradients put together.

    All that is whole is compared: outputs and gradients have the same bits on every rank. Which gradients are summed is
    read from the graph; it is what the rules say, unless it `is_completed` so.
    """

    def on_rank(
        channel: sw.Channel,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], TensorPlan, list[RecordedCall]]:
        model = _made(make_model)
        outline = tensor_outline(model)
        plan = plan_tensor(outline, rules, num_ranks=num_ranks)  # type: ignore[arg-type]
        for name, portion in plan.portions(channel.rank).items():
            parameter = model.get_parameter(name)
            parameter.data = portion_of(parameter.detach(), portion).clone()
        recorded = Recorded(channel)
        TensorParallel(model, plan, recorded)
        output = run(model)
        loss = output.sum()
        parameters = dict(model.named_parameters())
        watched = SummedGradients(parameters, cut=plan.cuts, summed=plan.summed, named=plan.named)
        watched.look_at(loss)
        summed = watched.names
        assert is_completed or summed == plan.summed, summed ^ plan.summed
        loss.backward()
        gradients = {name: each.grad for name, each in parameters.items()}
        return output.detach(), gradients, replace(plan, summed=summed), recorded.calls

    ranks = sw.simulate(num_ranks, on_rank)
    outputs, gradients, plans, calls = zip(*ranks, strict=True)
    plan = plans[0]
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
    return Computed(
        outputs[0],
        {name: _together(name, [each[name] for each in gradients], plan) for name in gradients[0]},
        plan,
        list(calls),
    )


def assert_cut_is_right(
    make_model: MakeModel, rules: Rules | str, run: Run, num_ranks: int = 2, *, is_completed: bool = False
) -> Computed:
    """The cut model computes what the whole one does."""
    got = compute_cut(make_model, rules, num_ranks, run, is_completed=is_completed)
    assert_close(got, compute_whole(make_model, run))
    return got


def assert_close(got: Computed, expected: Computed, *, relative: float = 1e-12, floor: float = 1.0) -> None:
    """Outputs and gradients are equal to `relative` of the largest element: sums were taken in another order.

    floor: what the largest element counts as at least, since terms of order 1 may cancel.
    """
    _assert_near("the output", got.output, expected.output, relative, floor)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in got.gradients.items():
        other = expected.gradients[name]
        assert (gradient is None) == (other is None), f"{name}: {gradient} and {other}"
        if gradient is not None and other is not None:
            _assert_near(name, gradient, other, relative, floor)


def _assert_near(what: str, one: torch.Tensor, other: torch.Tensor, relative: float, floor: float) -> None:
    assert one.shape == other.shape, what
    bound = relative * max(floor, float(other.abs().max()))
    largest = float((one - other).abs().max())
    assert largest <= bound, f"{what} differs by {largest}, more than {bound}"


def _made(make_model: MakeModel) -> nn.Module:
    torch.manual_seed(0)
    return make_model().double()


def _together(name: str, parts: list[torch.Tensor | None], plan: TensorPlan) -> torch.Tensor | None:
    held = [each for each in parts if each is not None]
    if not held:
        return None
    if name in plan.summed:
        return torch.stack(held).sum(0)
    if name not in plan.cuts:
        assert len(held) == len(parts)
        for other in held[1:]:
            assert torch.equal(other, held[0]), f"{name} has another gradient on another rank"
        return held[0]
    whole = torch.full(plan.cuts[name].shape, torch.nan, dtype=held[0].dtype)
    for rank, gradient in enumerate(held):
        for box, local in plan.portions(rank)[name].boxes():
            whole[_slices(box)] = gradient[_slices(local)]
    return whole


def _slices(box: sw.space.Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
