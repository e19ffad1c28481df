"""Modules that backward runs again: the bits of a plan without, whatever they draw, write to or are given."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ActivationsWarning, ModelError, PlanError
from tests.engine.activations.nets import (
    BLOCKS,
    DROPPING,
    REMEMBERING,
    SCALED,
    WIDTH,
    assert_changes_nothing,
    program,
    remembering,
    rows,
    square,
    statistics,
)
from tests.engine.formed import formed
from tests.engine.refusals import same_error_everywhere
from tests.oracle.places import train
from tests.oracle.program import Program, adamw, plan_of, seeded
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.ActivationsWarning")

PARTS = sw.Activations(checkpoint=("blocks.*.attention", "*.up"))
SAVING = sw.Activations(checkpoint="blocks", save=("aten.mm", "aten.addmm.default"))
WHOLE = sw.Activations(checkpoint=(".",))
WHOLE_SAVING = replace(WHOLE, save=SAVING.save)


@pytest.mark.parametrize(
    ("activations", "settings"),
    [
        (BLOCKS, {"mesh": "pp=2,tp=2", "k": 2}),
        (BLOCKS, {"mesh": "dp_shard=2", "stage": 2}),
        (PARTS, {"mesh": "dp_shard=2", "stage": 3, "k": 2}),
        (SAVING, {"mesh": "tp=2", "k": 2}),
        (WHOLE, {"mesh": "dp_shard=2", "stage": 3, "k": 2}),
        (WHOLE_SAVING, {"mesh": "pp=2", "k": 2, "schedule": "interleaved"}),
    ],
)
def test_every_plan_has_the_bits_that_it_has_without(activations: sw.Activations, settings: dict[str, Any]) -> None:
    assert_changes_nothing(DROPPING, plan_of(DROPPING, **settings), activations)


def in_autocast(net: Any, input: torch.Tensor) -> Any:
    """Backward runs outside of it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return remembering(net, input)


def compiled() -> nn.Module:
    model = statistics()
    for each in model.children():
        each.compile(backend="aot_eager")
    return model


def layers_of_torch() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2)


SOURCES = [{"src": rows(seed, 8, 5)["input"]} for seed in range(2)]
BOTH: dict[str, Callable[[], nn.Module]] = {"statistics": statistics, "memory": REMEMBERING}
PROGRAMS: dict[str, tuple[Program, str, sw.Activations, int]] = {
    **{
        f"{kind}, {mesh}": (program(make), mesh, BLOCKS, stage)
        for kind, make in BOTH.items()
        for mesh, stage in {"single": 1, "pp=2": 1, "dp_shard=2": 3}.items()
    },
    "statistics of several stages": (program(statistics), "pp=2", WHOLE, 1),
    "parameters outside": (program(SCALED), "pp=2,dp_shard=2", WHOLE_SAVING, 3),
    "autocast": (program(formed(in_autocast, base=REMEMBERING)), "single", BLOCKS, 1),
    "autocast, saving": (
        program(formed(in_autocast, base=REMEMBERING)),
        *("single", replace(SAVING, save=("aten.addmm",)), 1),
    ),
    "compiled": (program(compiled), "single", BLOCKS, 1),
    "layers of torch": (program(layers_of_torch, SOURCES), "single", sw.Activations(checkpoint=("layers.?",)), 1),
    "attention of torch": (
        program(layers_of_torch, SOURCES),
        *("single", sw.Activations(checkpoint=("layers.*.self_attn",)), 1),
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_blocks_write_draw_and_are_given_is_as_it_was(name: str) -> None:
    case, mesh, activations, stage = PROGRAMS[name]
    assert_changes_nothing(case, plan_of(case, mesh, k=2, stage=stage), activations)


def test_an_object_with_tensors_is_kept_and_named_once() -> None:
    case = program(REMEMBERING)
    with pytest.warns(
        ActivationsWarning, match=r"'blocks.1' is given a Memory, and the tensors in it are kept"
    ) as warned:
        train(case, plan_of(case, k=2, activations=BLOCKS))
    assert sum("activations" in str(each.message) for each in warned) == 1


class Counting(nn.Linear):
    """Counts its runs."""

    runs = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return torch.tanh(super().forward(input))


def runs_of(model: nn.Module) -> list[int]:
    return [each.runs for each in model.children() if isinstance(each, Counting)]


@pytest.mark.parametrize("activations", [BLOCKS, sw.Activations(budget_bytes=1 << 30)])
def test_a_module_runs_twice_in_training_and_once_in_evaluation_and_in_copies(activations: sw.Activations) -> None:
    model = nn.Sequential(Counting(WIDTH, WIDTH), Counting(WIDTH, WIDTH))
    merge = sw.Merge(microbatches=2)
    engine = sw.parallelize(model, sw.Plan(activations=activations, merge=merge), optimizer=adamw, loss=square)
    engine.step(rows(0))
    if activations is BLOCKS:
        assert runs_of(model) == [4, 4], "two microbatches, each twice"
        engine.evaluate(rows(0))
        assert runs_of(model) == [6, 6], "and in the evaluation once"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = runs_of(copied)
        copied(rows(0)["input"]).sum().backward()
        assert runs_of(copied) == [each + 1 for each in before]


def change_later(net: Any, x: torch.Tensor) -> Any:
    """Writes to a large buffer from its second call on; of small ones there is always a copy."""
    net.calls += 1
    if net.calls > 1:
        net.count += 1
    return net.linear(x)


def renorm(net: Any, x: torch.Tensor) -> Any:
    """An embedding renorms its rows in forward."""
    return net.embedding(x.abs().long().clamp(0, 7)).mean(1)


CHANGING = formed(
    change_later,
    lambda net: net.register_buffer("count", torch.zeros(40_000)),
    linear=partial(nn.Linear, WIDTH, WIDTH),
    calls=lambda: 0,
)
RENORMING = formed(renorm, embedding=partial(nn.Embedding, 8, WIDTH, max_norm=0.5))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "counted": torch.no_grad()(lambda tensor: tensor.mul_(2)),
    "data": lambda tensor: tensor.data.mul_(2),
    "numpy": lambda tensor: tensor.detach().numpy().__imul__(2),
}
READ: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "parameter": lambda block, _: block.linear.weight,
    "large parameter": lambda block, _: block.table,
    "small buffer": lambda block, _: block.scale,
    "large buffer": lambda block, _: block.rows,
    "given": lambda _, x: x,
}


class Read(nn.Module):
    """Adds what it reads, so that no saved tensor shows a write."""

    scale: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(8192, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("rows", torch.ones(8192, WIDTH))
        self.write: Callable[[Any, torch.Tensor], object] = lambda *_: None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.linear(input)
        self.write(self, input)
        out: torch.Tensor = torch.tanh(x + input + self.scale + (self.table + self.rows).mean(0))
        return out


class Around(nn.Module):
    """A block, and what is done after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Read(), nn.Linear(WIDTH, WIDTH)
        self.write: Callable[[Any, torch.Tensor], object] = lambda *_: None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        given = self.first(input)
        y = self.block(given)
        self.write(self.block, given)
        last: torch.Tensor = self.last(y)
        return last


@pytest.mark.parametrize("when", ["in its forward", "after it"])
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("what", READ)
def test_what_was_written_since_is_not_read_again(what: str, way: str, when: str) -> None:
    """A second run would compute with other values than the first. What torch counts is seen in any step.

    So is any write of a forward to a large buffer; others are looked for in the steps that are due.
    """
    is_always_seen = way == "counted" or (what, when) == ("large buffer", "in its forward")

    def losses(*checkpoint: str) -> list[float]:
        model = seeded(Around)()
        plan = sw.Plan(activations=sw.Activations(checkpoint=checkpoint or None))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square)
        found = [engine.step(rows(seed)).loss for seed in range(3 if is_always_seen else 0)]
        writer = model.block if when == "in its forward" else model
        writer.write = lambda block, x: WRITES[way](READ[what](block, x))
        return [*found, *(engine.step(rows(seed)).loss for seed in range(3, 5))]

    if what == "small buffer":  # of which there is a copy
        assert losses("block") == losses()
        return
    # Of what is given it, torch itself sees what it has counted.
    words = "modified by an inplace operation" if (what, way) == ("given", "counted") else "runs it again"
    if what == "large buffer" and when == "in its forward":
        words = "which the first one did not"
    with pytest.raises(RuntimeError if "inplace" in words else ModelError, match=words):
        losses("block")


def of(
    make: Callable[[], nn.Module], *checkpoint: str, save: tuple[str, ...] = (), size: int = 2
) -> Callable[[], None]:
    asked = sw.Activations(checkpoint=checkpoint or "blocks", save=save or None)
    case = program(make)

    def run(channel: sw.Channel) -> None:
        case.engine(plan_of(case, sw.Mesh(dp_shard=size), k=2, activations=asked), channel).step(rows(0))

    def call() -> None:
        raise same_error_everywhere(size, run)

    return call


REFUSED = Refusals(
    "engine.recomputation",
    {
        "a write that the first run did not": of(lambda: nn.Sequential(CHANGING()), "0", size=1),
        "a write to a parameter": of(lambda: nn.Sequential(RENORMING()), "0", size=1),
        "a pattern of nothing": of(REMEMBERING, "block.*"),
        "a list": of(REMEMBERING, "blocks"),
        "a part of attention": of(
            lambda: nn.ModuleDict({"attention": nn.MultiheadAttention(WIDTH, 2)}), "attention.out_proj"
        ),
        "an operator of nothing": of(REMEMBERING, save=("aten.mmm",)),
        "no blocks": of(RENORMING, size=1),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_again_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_an_overload_of_nothing_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(PlanError, match=r"'aten\.mm\.x'; its overloads are default, out"):
        of(REMEMBERING, save=("aten.mm.x",))()


class Masked(nn.Module):
    """Gives its layer a mask of one row for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Bilinear(4, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.read(x, torch.ones(1, 4).expand(len(x), 4))
        return found


def test_a_saved_tensor_that_comes_back_with_other_strides_was_not_written_to() -> None:
    def squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    losses = []
    for plan in (sw.Plan(), sw.Plan(activations=sw.Activations(checkpoint=("read",)))):
        torch.manual_seed(0)
        engine = sw.parallelize(Masked(), plan, optimizer=lambda each: torch.optim.SGD(each, lr=0.1), loss=squares)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.clone(memory_format=torch.contiguous_format), lambda kept: kept
        ):
            losses.append([engine.step({"x": torch.ones(3, 4)}).loss for _ in range(3)])
    assert losses[0] == losses[1]
