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
    WIDTH,
    Chain,
    assert_changes_nothing,
    rows,
    square,
    statistics,
    train,
)
from tests.engine.expected import adamw
from tests.engine.hybrid_models import CASE, decoder, in_one_process, plan_of
from tests.engine.hybrid_models import train as train_hybrid
from tests.engine.models import word_loss
from tests.engine.pipeline.stages import plan_for
from tests.engine.pipeline.stages import train as train_stages
from tests.engine.pipeline.transformers_models import case_of

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.ActivationsWarning")

PARTS = sw.Activations(checkpoint=("blocks.*.attention", "*.up"))
SAVING = sw.Activations(checkpoint="blocks", save=("aten.mm", "aten.addmm.default"))
WHOLE = sw.Activations(checkpoint=(".",))
BATCHES = [rows(seed) for seed in range(3)]


def plan(mesh: str = "", *, stage: int = 1, **settings: Any) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh.parse(mesh) if mesh else sw.Mesh(),
        sharding=sw.Sharding(stage=stage),
        merge=sw.Merge(microbatches=2),
        **settings,
    )


@pytest.mark.parametrize(
    ("activations", "mesh", "settings"),
    [
        (BLOCKS, "pp=2,dp_shard=2,tp=2", {"stage": 3, "k": 2}),
        (BLOCKS, "dp_shard=2", {"stage": 2}),
        (PARTS, "dp_shard=2", {"stage": 3, "k": 2}),
        (PARTS, "pp=2", {"k": 3}),
        (SAVING, "tp=2", {"k": 2}),
        (SAVING, "pp=2", {"k": 2, "schedule": "interleaved"}),
        (SAVING, "dp_shard=2", {"stage": 3}),
        (replace(WHOLE, save=SAVING.save), "pp=2", {"k": 2}),
        (WHOLE, "dp_shard=2", {"stage": 3, "k": 2}),
        (replace(WHOLE, save=SAVING.save), "pp=2", {"k": 2, "schedule": "interleaved"}),
    ],
)
def test_every_plan_has_the_bits_that_it_has_without(
    activations: sw.Activations, mesh: str, settings: dict[str, Any]
) -> None:
    assert_changes_nothing(partial(decoder, 0.1), plan_of(mesh, **settings), CASE.batches, activations, loss=word_loss)


def test_one_rank_has_the_bits_of_plain_pytorch() -> None:
    asked = replace(plan_of(sw.Mesh(), k=2), activations=BLOCKS)
    got, wanted = train_hybrid(CASE, asked), in_one_process(CASE, asked)
    assert got.losses == wanted.losses
    for name, tensor in wanted.states[-1].items():
        assert torch.equal(got.states[-1][name], tensor.reshape(-1)), name


@pytest.mark.parametrize("make", [statistics, Chain])
@pytest.mark.parametrize(("mesh", "stage"), [("", 1), ("pp=2", 1), ("dp_shard=2", 3)])
def test_buffers_move_once_and_arguments_are_as_they_were(make: Callable[[], nn.Module], mesh: str, stage: int) -> None:
    assert_changes_nothing(make, plan(mesh, stage=stage), BATCHES)


def test_buffers_of_several_stages_move_once_in_one_region() -> None:
    assert_changes_nothing(statistics, plan("pp=2"), BATCHES, WHOLE)


class Scaled(nn.Module):
    """Computes with a parameter of its own between modules of two stages, and by a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.second(Doubled.apply(torch.tanh(self.first(input * self.scale))))  # type: ignore[no-untyped-call]
        return scaled * self.scale


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_a_region_of_several_stages_reads_parameters_outside_of_them() -> None:
    assert_changes_nothing(Scaled, plan("pp=2,dp_shard=2", stage=3), BATCHES, replace(WHOLE, save=SAVING.save))


def test_an_object_with_tensors_is_kept_and_named_once() -> None:
    with pytest.warns(
        ActivationsWarning, match=r"'blocks.1' is given a Memory, and the tensors in it are kept"
    ) as warned:
        train(Chain, plan(activations=BLOCKS), BATCHES)
    assert sum("activations" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize("activations", [BLOCKS, replace(SAVING, save=("aten.addmm",))])
def test_the_region_of_autocast_is_that_of_the_first_run(activations: sw.Activations) -> None:
    assert_changes_nothing(
        Chain, plan(), BATCHES, activations, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_modules_run_again_as_they_are_compiled() -> None:
    def make() -> nn.Module:
        model = statistics()
        for each in model.children():
            each.compile(backend="aot_eager")
        return model

    assert_changes_nothing(make, plan(), BATCHES)


@pytest.mark.parametrize("name", ["layers.*.self_attn", "layers.?"])
def test_layers_of_torch(name: str) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2)

    batches = [{"src": rows(seed, 8, 5)["input"]} for seed in range(2)]
    assert_changes_nothing(make, plan(), batches, sw.Activations(checkpoint=(name,)))


@pytest.mark.parametrize(
    ("name", "checkpointing", "schedule", "pp", "k"),
    [("llama", False, "1f1b", 1, 2), ("llama", True, "1f1b", 2, 2), ("gpt2", False, "interleaved", 2, 4)],
)
def test_models_of_transformers_with_and_without_checkpoints_of_their_own(
    name: str, checkpointing: bool, schedule: str, pp: int, k: int
) -> None:
    case = case_of(name, tied=False, checkpointing=checkpointing)
    without = plan_for(case, schedule=schedule, pp=pp, k=k)
    got, wanted = train_stages(case, replace(without, activations=BLOCKS)), train_stages(case, without)
    assert (got.losses, got.grad_norms, got.held_out) == (wanted.losses, wanted.grad_norms, wanted.held_out)
    for state, other in zip(got.states, wanted.states, strict=True):
        assert all(torch.equal(tensor, other[key]) for key, tensor in state.items())


class Counting(nn.Module):
    """Counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return torch.tanh(self.linear(x))


def test_a_module_runs_twice_in_training_and_once_in_evaluation() -> None:
    counts: list[list[int]] = []
    models: list[nn.Module] = []

    def look(_: sw.Engine, model: nn.Module) -> None:
        counts.append(runs_of(model))
        models[:] = [model]

    def make() -> nn.Module:
        return nn.Sequential(Counting(), Counting(), nn.Linear(WIDTH, 1))

    train(make, plan(activations=sw.Activations(checkpoint=("0", "1"))), BATCHES[:1], look=look)
    assert counts == [[4, 4]], "two microbatches, each twice"
    assert runs_of(models[0]) == [6, 6], "and in the evaluation once"


@pytest.mark.parametrize("activations", [BLOCKS, sw.Activations(budget_bytes=1 << 30)])
def test_copies_and_pickles_of_the_model_are_plain_modules(activations: sw.Activations) -> None:
    model = nn.Sequential(Counting(), Counting())
    engine = sw.parallelize(model, sw.Plan(activations=activations), optimizer=adamw, loss=square)
    engine.step(BATCHES[0])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = runs_of(copied)
        copied(BATCHES[0]["input"]).sum().backward()
        assert [after - one for after, one in zip(runs_of(copied), before, strict=True)] == [1, 1]


def runs_of(model: nn.Module) -> list[int]:
    return [each.runs for each in model.children() if isinstance(each, Counting)]


class Changing(nn.Module):
    """Writes to a large buffer from its second call on; of small ones there is always a copy."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(40_000))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            self.count += 1
        out: torch.Tensor = self.linear(x)
        return out


class MaxNorm(nn.Module):
    """An embedding that renorms its rows in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(x.abs().long().clamp(0, 7)).mean(1)
        return out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Changing, "this forward of '0' writes to the buffer 'count' of a Changing, which the first one did not"),
        (MaxNorm, "the forward of '0' writes to a parameter, and would do so twice"),
    ],
)
def test_a_module_that_cannot_run_again_as_it_ran_is_refused(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        train(lambda: nn.Sequential(kind()), plan(activations=sw.Activations(checkpoint=("0",))), BATCHES)


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        (sw.Activations(checkpoint=("block.*",)), "'block.*' matches none of the 10 modules; the nearest"),
        (sw.Activations(checkpoint=("blocks",)), "'blocks', a ModuleList without a call of its forward"),
        (sw.Activations(checkpoint=("attention.out_proj",)), "part of 'attention', which computes with its"),
        (sw.Activations(checkpoint="blocks", save=("aten.mmm",)), "torch.ops has no operator 'aten.mmm'"),
        (sw.Activations(checkpoint="blocks", save=("aten.mm.x",)), "'aten.mm.x'; its overloads are default, out"),
    ],
)
def test_names_that_mean_nothing_are_refused_before_anything_changes(activations: sw.Activations, message: str) -> None:
    def make() -> nn.Module:
        if "out_proj" in str(activations):
            return nn.ModuleDict({"attention": nn.MultiheadAttention(WIDTH, 2)})
        return Chain()

    with pytest.raises(PlanError) as raised:
        train(make, plan("dp_shard=2", activations=activations), BATCHES)
    assert message in str(raised.value)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match='"blocks" asked, but no block of the model repeats'):
        train(MaxNorm, plan(activations=BLOCKS), BATCHES)
