"""Any torch optimizer, unchanged: what it does to slices and to whole parameters is what it does in one process."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.channels import SharesMemory
from tests.engine.loops import share
from tests.engine.matrix_optimizers import Normed, Own
from tests.engine.tower import on_ranks
from tests.oracle.batches import points, square_loss, word_batch
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.one_process import train_in_one_process, values_of
from tests.oracle.program import Program, plan_of
from tests.oracle.programs import on_points, on_words
from tests.oracle.words import Words


class Lion(Own):
    """What a user brings along (Chen et al., 2023, arXiv:2302.06675): element by element; one setting is a function."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "shape": torch.sign})

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        first, second = group["betas"]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        way = group["shape"](momentum * first + gradient * (1 - first))
        momentum.mul_(second).add_(gradient, alpha=1 - second)
        return way


class GradientIsKept(Own):
    """The last gradient is the tensor that backward made, and the first one is the momentum."""

    def __init__(self, params: Any, *, whole: bool) -> None:
        """whole: by the norm of what it updates."""
        super().__init__(params, {"lr": 0.05, "whole": whole})

    def direction(self, group: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-7) if group["whole"] else gradient.sign()

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        change = gradient - state.get("last", 0)
        state["momentum"] = state["momentum"].mul(0.9).add(change) if "momentum" in state else gradient.view_as(change)
        state["last"] = gradient
        return self.direction(group, state["momentum"])


class ValuesAreReplaced(GradientIsKept):
    """New values are a new tensor, and the old one is kept; now and then it goes back half of the way."""

    def way(self, group: Any, parameter: nn.Parameter, gradient: torch.Tensor, state: Any) -> Any:
        change = parameter.data - state["before"] if "before" in state else 0.0
        state["before"] = parameter.data
        state["step"] = state.get("step", 0) + 1
        parameter.data = parameter.data - group["lr"] * self.direction(group, gradient) + 0.3 * change
        if state["step"] % 3 == 0:
            parameter.data = parameter.data.lerp(state["before"], 0.5)


class Bare(torch.optim.SGD):
    """A class that left out `Optimizer.__init__`, and has what steps need: no hooks of its state."""

    def __init__(self, params: Any) -> None:
        made = vars(torch.optim.SGD(params, lr=0.1))
        vars(self).update({key: each for key, each in made.items() if "state_dict" not in key and key != "step"})


ALL: dict[str, Any] = {
    name: partial(kind, lr=0.01)  # type: ignore[call-arg]
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    # The base class, and what is refused.
    if name not in ("Optimizer", "LBFGS", "SparseAdam")
}
OPTIMIZERS: dict[str, Any] = ALL | {
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "foreach sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "fused sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "fused adagrad": partial(torch.optim.Adagrad, lr=0.01, fused=True),
    "lr in a tensor": lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.01)),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "maximize": partial(torch.optim.SGD, lr=0.01, maximize=True, dampening=0.1, momentum=0.5),
    "centered": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "of somebody else": partial(Lion, lr=0.01),
    "without hooks": Bare,
    "looks at its whole parameter": partial(Normed, lr=0.01),
    "looks at all": partial(Normed, lr=0.01, of_all=True),
    **{f"keeps gradients, whole={whole}": partial(GradientIsKept, whole=whole) for whole in (False, True)},
    **{f"replaces values, whole={whole}": partial(ValuesAreReplaced, whole=whole) for whole in (False, True)},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "slice": ("dp_shard=3", {}),
    "whole": ("dp_shard=3", {"partition": "whole"}),
    "stage 0": ("dp_shard=3", {"stage": 0}),
    "stage 3": ("dp_shard=2", {"stage": 3}),
    "owners of nothing": ("dp_shard=8", {"bucket_bytes": 1 << 20}),
    "whole, owners of nothing": ("dp_shard=8", {"partition": "whole"}),
    "one": ("single", {}),
}


def matrices(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in pairwise(sizes)))


def program_of(optimizer: Any, *, is_small: bool = False, batches: int = 3) -> Program:
    """Words, or few parameters; matrices only for Muon."""
    if is_small or optimizer is OPTIMIZERS["Muon"]:
        make = (lambda: matrices(4, 13, 5, 1)) if optimizer is OPTIMIZERS["Muon"] else (lambda: nn.Linear(4, 1))
        given = [{"input": each["x"], "y": each["y"]} for each in (points(seed, 24) for seed in range(batches))]
        return on_points(make, batches=given, optimizer=optimizer)
    return on_words(Words, batches=[word_batch(seed, 24) for seed in range(batches)], optimizer=optimizer)


CASES = [
    pytest.param(name, layout, marks=() if (each - at) % 7 in (0, 3) else pytest.mark.stress)
    for at, name in enumerate(OPTIMIZERS)
    for each, layout in enumerate(LAYOUTS)
    if name != "looks at all" or layout in ("one", "stage 0")  # elsewhere it is refused
]
"""Two of each, by turns."""


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_optimizer_does_what_it_does_in_one_process(name: str, layout: str) -> None:
    (mesh, sharding), is_small = LAYOUTS[layout], "nothing" in layout
    program = program_of(OPTIMIZERS[name], is_small=is_small)
    assert_trains_like_one_process(program, plan_of(program, mesh, k=1 if is_small else 2, **sharding))


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """No decay for vectors and scalars; another learning rate for the embedding; names along."""
    (embedding, *others) = [(str(at), each) for at, each in enumerate(parameters)]
    return torch.optim.AdamW(
        [
            {"params": [each for each in others if each[1].ndim > 1], "weight_decay": 0.3},
            {"params": [each for each in others if each[1].ndim <= 1], "weight_decay": 0.0},
            {"params": [embedding], "lr": 0.002, "weight_decay": 0.1},
        ],
        lr=0.01,
    )


BUILT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "groups": grouped,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    **{name: ALL[name] for name in ("AdamW", "Adagrad", "NAdam", "ASGD", "Muon", "Adafactor")},
}


@pytest.mark.parametrize(
    ("name", "layout", "begins"),
    [
        *(("groups", "whole", 2), ("groups", "slice", 0), ("SGD", "slice", 2), ("AdamW", "stage 0", 2)),
        *(("Adagrad", "one", 2), ("NAdam", "slice", 2), ("ASGD", "whole", 2), ("Muon", "slice", 2)),
        *(("Muon", "stage 0", 0), ("Adafactor", "whole", 2)),
    ],
)
def test_what_was_built_before_goes_on_with_its_groups_schedule_and_state(name: str, layout: str, begins: int) -> None:
    """`begins`: updates in one process before. One microbatch per rank: gradients are added in one order."""
    program = program_of(BUILT[name], batches=4)
    plan = plan_of(program, LAYOUTS[layout][0], **LAYOUTS[layout][1])

    def built(updates: int) -> tuple[nn.Module, Any, Any]:
        model = program.make()
        optimizer: Any = BUILT[name](list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
        for batch in program.batches[:updates]:
            assert program.loss is not None
            train_in_one_process(model, optimizer, [batch], loss=program.loss, num_microbatches=plan.mesh.size)
            scheduler.step()
        return model, optimizer, scheduler

    def run(channel: sw.Channel) -> None:
        model, optimizer, scheduler = built(begins)
        groups = optimizer.param_groups
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=program.loss, channel=channel)
        assert engine.optimizer is optimizer
        assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
        assert all(len(group["params"]) == len(group.get("param_names", group["params"])) for group in groups)
        for batch in program.batches[begins:]:
            engine.step(share(engine, batch))
            scheduler.step()
        assert scheduler.get_last_lr() == expected[2].get_last_lr()
        wanted = values_of(expected[0])
        assert [key for key, each in values_of(model).items() if not torch.equal(each, wanted[key])] == []

    expected = built(4)
    on_ranks(plan, run)


def test_the_trial_leaves_no_trace_in_the_optimizer() -> None:
    """An optimizer built before, with a scheduler in warm-up at 0, and a hook."""
    model, calls = Words(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    before = torch.get_rng_state()
    sw.parallelize(model, sw.Plan(), optimizer=optimizer, loss=square_loss)
    assert not calls
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(before, torch.get_rng_state())


def muon_and_adamw(parameters: list[nn.Parameter]) -> Any:
    """`test_matrix_updates` has what they do."""
    made = [[each for each in parameters if (each.ndim == 2) == is_matrix] for is_matrix in (True, False)]
    return [torch.optim.Muon(made[0], lr=0.02), torch.optim.AdamW(made[1], lr=0.01)]


def test_two_optimizers_have_no_single_one_and_a_rank_holds_its_slice_of_their_state() -> None:
    program = on_words(Words, optimizer=muon_and_adamw)

    def run(channel: sw.Channel) -> int:
        engine = program.engine(plan_of(program, "dp_shard=3", partition="whole"), channel)
        with pytest.raises(sw.ShardwiseError, match=r"2 optimizers; use engine\.optimizers"):
            _ = engine.optimizer
        engine.step(share(engine, program.batches[0]))
        states = [state for each in engine.optimizers for state in each.state.values()]
        return sum(state[key].numel() for state in states for key in ("exp_avg", "momentum_buffer") if key in state)

    held = sw.simulate(3, run)
    assert sum(held) == sum(each.numel() for name, each in Words().named_parameters() if "unused" not in name)
    assert max(held) < sum(held) * 0.6


@pytest.mark.parametrize("kind", [GradientIsKept, ValuesAreReplaced])
@pytest.mark.parametrize("whole", [False, True])
def test_an_optimizer_may_keep_gradients_and_replace_values_in_memory_that_ranks_share(kind: Any, whole: bool) -> None:
    """Matrices of so many bytes that those along tp are updated in several rounds."""
    rules = {"0": "column", "1": "row", "2": "column", "3": "row"}
    batches = [{"input": each["x"], "y": each["y"]} for each in (points(seed, 8, 6) for seed in range(5))]
    program = on_points(lambda: matrices(6, 256, 300, 256, 6), batches=batches, rules=rules)

    def run(channel: sw.Channel) -> list[float]:
        engine = program.engine(plan_of(program, "tp=2"), SharesMemory(channel), optimizer=partial(kind, whole=whole))
        return [engine.step(batch).loss for batch in batches]

    model = program.make()
    wanted = train_in_one_process(model, kind(model.parameters(), whole=whole), batches, loss=square_loss).losses
    assert sw.simulate(2, run)[0] == pytest.approx(wanted, rel=1e-5)
