"""Working copies in another dtype than the batch: inputs follow them wherever they are; what stays in float32."""

import warnings
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import ModelError, UnderflowWarning
from tests.engine.loops import begun, mean_square, on_ranks, plan_of
from tests.engine.pipeline import transformers_models as models
from tests.oracle.batches import points, square_loss
from tests.oracle.places import train
from tests.oracle.program import Program, adamw, sgd
from tests.oracle.rank_order import RankOrder

BATCHES = [points(step, 8) for step in range(2)]
HELD: dict[str, Any] = {
    "itself": nn.Parameter,
    "a dict": lambda weight: nn.ParameterDict({"w": weight}),
    "a list": lambda weight: nn.ParameterList([weight]),
    "a dict of lists": lambda weight: nn.ParameterDict({"w": nn.ParameterList([weight])}),
    "parametrized": lambda weight: parametrizations.weight_norm(nn.Linear(4, 1, bias=False)),
    "child": lambda weight: nn.Linear(4, 1, bias=False),
    "cast by hand": lambda weight: nn.Linear(4, 1, bias=False),
}


class Held(nn.Module):
    """Multiplies by a parameter that it holds in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        weight = torch.randn(4, 1)
        self.way, self.held = way, HELD[way](weight)

    def forward(self, x: torch.Tensor) -> Any:
        match self.way:
            case "itself":
                return x @ self.held
            case "a dict":
                return x @ self.held["w"]
            case "a list":
                return x @ self.held[0]
            case "a dict of lists":
                return x @ self.held["w"][0]
            case "parametrized":
                return self.held(x)
            case "cast by hand":
                return nn.functional.linear(x.to(self.held.weight.dtype), self.held.weight)
        return nn.functional.linear(x, self.held.weight)


def losses(make: Any, stage: int = 1, compute: str | None = "bfloat16", **settings: Any) -> list[float]:
    keep, checkpoint = settings.pop("keep", ()), settings.pop("checkpoint", None)
    precision = sw.Precision(compute=compute, keep=keep)
    plan = plan_of("dp_shard=2", stage, precision=precision, checkpoint=checkpoint)
    return on_ranks(make, plan, BATCHES, **{"optimizer": sgd, "loss": square_loss, **settings}).losses


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["a dict", "a list", "a dict of lists"])
def test_inputs_follow_parameters_that_a_module_holds_in_any_way(way: str, stage: int) -> None:
    assert losses(lambda: Held(way), stage) == losses(lambda: Held("itself"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("checkpoint", [None, ("*",)])
def test_parameters_of_a_child_and_those_that_are_computed_meet_inputs_in_the_compute_dtype(
    stage: int, checkpoint: tuple[str, ...] | None
) -> None:
    found = [
        losses(lambda way=way: nn.Sequential(nn.Identity(), Held(way)), stage, checkpoint=checkpoint)
        for way in ("child", "cast by hand", "parametrized")
    ]
    assert found[0] == found[1]
    assert len(found[2]) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_a_child_that_meet_other_inputs_before_a_step_are_refused_with_a_way_out(stage: int) -> None:
    def run(channel: sw.Channel) -> None:
        plan = plan_of("dp_shard=2", stage, compute="bfloat16")
        make = lambda: nn.Sequential(nn.Identity(), Held("child"))  # noqa: E731
        begun(channel, make, plan, loss=square_loss).evaluate(points(0, 4))

    with pytest.raises(ModelError, match=r"'1' \(Held\) mixes dtypes under .*bfloat16.*x.to\(weight.dtype\)"):
        sw.simulate(2, run)
    assert len(losses(lambda: Held("child"), stage, keep=("held",))) == 2
    with torch.autocast("cpu", torch.bfloat16):
        engine = begun(alone(), lambda: Held("child"), plan_of(compute="bfloat16"), loss=square_loss)
        assert engine.step(points(0, 4)).loss > 0


class Notes(nn.Linear):
    def forward(self, x: torch.Tensor, notes: dict[str, int], order: list[str]) -> torch.Tensor:  # type: ignore[override]
        notes["calls"] = notes.get("calls", 0) + 1
        order.append("called")
        return super().forward(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Notes(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes, order = dict[str, int](), list[str]()
        out: torch.Tensor = self.inner(x, notes, order)
        assert (notes, order) == ({"calls": 1}, ["called"])
        return out


class Half(nn.Linear):
    """Is built in float16, and casts its input itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


def test_what_is_given_to_write_to_is_given_itself() -> None:
    """A dict or a list among the inputs without anything to cast."""
    assert len(losses(Outer)) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_float16_is_warned_of_once_and_again_when_every_gradient_is_zero(stage: int) -> None:
    def tiny(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.float().mean() * 1e-9

    linear = partial(nn.Linear, 4, 1)
    with pytest.warns(UnderflowWarning, match="the model trains in float16: .*bfloat16") as seen:
        losses(linear, stage, "float16")
    assert sum(each.category is UnderflowWarning for each in seen) == 1
    with pytest.warns(UnderflowWarning, match="all gradients of a step are zero: .*bfloat16") as seen:
        losses(linear, stage, "float16", loss=tiny)
    assert sum(each.category is UnderflowWarning for each in seen) == 3  # and two steps
    with pytest.warns(UnderflowWarning):
        losses(lambda: Half(4, 1).half(), stage, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnderflowWarning)
        losses(linear, stage, loss=tiny)
        losses(linear, stage, "float16", loss=tiny, keep=("*",))


class Routed(nn.Module):
    """Modules that users keep in float32: a batch norm, an RMS norm, and a router between experts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch_norm, self.rms_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.RMSNorm(4)
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.rms_norm(self.batch_norm(self.convolution(x)).mean((2, 3)))
        share = self.router(hidden).softmax(-1)
        mixed = torch.stack([share[:, at, None] * expert(hidden) for at, expert in enumerate(self.experts)]).sum(0)
        return {"loss": nn.functional.cross_entropy(mixed.float(), labels)}


def pictures(seed: int, size: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (12,), generator=generator)
    return {"x": torch.randn(12, 3, size, size, generator=generator), "labels": labels}


def kept_by_hand(model: nn.Module, kept: tuple[str, ...]) -> list[str]:
    """Give modules that have parameters and such a name float32 inputs, and their outputs back in bfloat16."""

    def around(forward: Any) -> Any:
        return lambda x: forward(x.float()).bfloat16()

    names = [
        name
        for name, module in model.named_modules()
        if any(fnmatchcase(name.rsplit(".", 1)[-1], each) for each in kept) and list(module.parameters(recurse=False))
    ]
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = around(module.forward)
    return names


# A model, its batches, and what is kept in float32; batch norms are also where nobody names them.
KEPT: dict[str, tuple[Any, Any, tuple[str, ...], tuple[str, ...]]] = {
    "batch norm": (Routed, pictures, (), ("batch_norm",)),
    "routed": (Routed, pictures, ("batch_norm", "rms_norm", "router"), ("batch_norm", "rms_norm", "router")),
    "llama": (lambda: models.llama()(), models.sentences, ("*norm*",), ("*norm*",)),
    "gpt2": (lambda: models.gpt2_still()(), models.sentences, ("*ln_*",), ("*ln_*",)),
    "t5": (lambda: models.t5()(), models.sentences, (), ()),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_model_in_bfloat16_trains_as_written_by_hand(name: str) -> None:
    make, batch_of, keep, by_hand = KEPT[name]
    program = Program(make=lambda: seed_of(make), batches=[batch_of(seed) for seed in range(3)], optimizer=adamw)
    reference = program.make()
    kept = tuple(f"{each}." for each in kept_by_hand(reference, by_hand))
    assert bool(kept) == bool(by_hand)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        given = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
        loss: torch.Tensor = model(**given)["loss"]
        return loss

    expected = RankOrder(
        model=reference,
        make_optimizer=adamw,
        loss_of=loss_of,
        num_microbatches=2,
        clip=1.0,
        working=lambda each: torch.float32 if each.startswith(kept) else torch.bfloat16,
    ).train(program.batches)
    precision = sw.Precision(compute="bfloat16", keep=keep)
    got = train(program, plan_of(k=2, precision=precision, clip_grad_norm=1.0))
    assert got.losses == pytest.approx(expected.losses, rel=1e-12)
    for parameter, value in expected.parameters.items():
        assert torch.equal(got.states[-1][parameter], value), parameter


def seed_of(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "made", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrized_modules_may_be_kept(made: Any, stage: int) -> None:
    """They compute in float32, and the weight that is computed stays in it."""
    dtypes: set[torch.dtype] = set()

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), made(nn.Linear(6, 4)))
        model[1].register_forward_pre_hook(lambda module, _: dtypes.add(module.weight.dtype))
        return model

    plan = plan_of("dp_shard=2", stage, precision=sw.Precision(compute="bfloat16", keep=("1",)))
    on_ranks(make, plan, [{"input": torch.linspace(-1, 1, 48).view(8, 6)}] * 2, loss=mean_square)
    assert dtypes == {torch.float32}
