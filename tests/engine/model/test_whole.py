"""Inside `engine.whole()` model and optimizers are those of the plain program, and writes there are taken in."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import on_ranks
from tests.oracle.program import seeded

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.SameRowsWarning")

TP = sw.Tensor(rules={"layers.*.0": "column", "layers.*.2": "row"})
TWO = sw.Mesh(dp_shard=2)
STAGE3 = sw.Sharding(stage=3)
PLANS = {
    "one": sw.Plan(),
    "stage 0": sw.Plan(mesh=TWO, sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=3)),
    "whole": sw.Plan(mesh=TWO, sharding=sw.Sharding(stage=2, partition="whole")),
    "stage 3": sw.Plan(mesh=TWO, sharding=STAGE3),
    "recomputed": sw.Plan(mesh=TWO, sharding=STAGE3, activations=sw.Activations(checkpoint=("layers.*",))),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "all": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2, tp=2), tensor=TP, sharding=STAGE3),
}
EXACT = ("one", "stage 0", "whole", "stage 3", "recomputed", "pp")
"""Where the engine adds up as one process does: all data ranks, a power of two, have the same rows."""


class Net(nn.Module):
    """With ties, frozen and unused parameters, a scalar, one without elements, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(8.0), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.places
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(self.norm(self.frozen(x) * self.scale))
        return out


net = seeded(Net)


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two, of several groups, with frozen parameters in them, state that is None, and names."""
    inner = [each for each in model.named_parameters() if "layers.1" in each[0]]
    outer = [each for each in model.named_parameters() if "layers.1" not in each[0]]
    groups: list[dict[str, Any]] = [{"params": outer[::2]}, {"params": outer[1::2], "weight_decay": 0.3}]
    return [torch.optim.AdamW(groups, lr=1e-2), torch.optim.SGD([each for _, each in inner], lr=0.1)]


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), batch["wanted"])


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 12, (8,), generator=generator) for name in ("words", "wanted")}


class Plain:
    """The plain program."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizers = optimizers_of(self.model)

    def step(self, number: int) -> float:
        batch = batch_of(number)
        for each in self.optimizers:
            each.zero_grad()
        value = loss(self.model(batch["words"]), batch)
        value.backward()
        for each in self.optimizers:
            each.step()
        return value.item()

    def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return self.model.state_dict(), [each.state_dict() for each in self.optimizers]

    def load(self, model: Any, states: Any) -> None:
        self.model.load_state_dict(model)
        for each, state in zip(self.optimizers, states, strict=True):
            each.load_state_dict(state)


def engine_on(plan: sw.Plan, channel: sw.Channel) -> sw.Engine:
    model = net()
    return sw.parallelize(model, plan, optimizer=optimizers_of(model), loss=loss, channel=channel)


def assert_alike(one: Any, other: Any, *, exact: bool = True) -> None:
    """Everything nested in both is equal: kinds, keys and their order, dtypes, and bits."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 1e-2, check_device=False)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for key in one:
            assert_alike(one[key], other[key], exact=exact)
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs, exact=exact)
    else:
        assert (type(one), one) == (type(other), other)


@pytest.mark.parametrize("layout", PLANS)
def test_a_plain_program_goes_on_from_it_and_it_from_a_plain_program(layout: str) -> None:
    plan, exact = PLANS[layout], layout in EXACT
    fresh, plain = Plain(), Plain()
    for step in range(3):
        plain.step(step)
    given = copy.deepcopy(plain.state())
    goes_on = [plain.step(step) for step in (3, 4)]

    def run(channel: sw.Channel) -> Any:
        engine = engine_on(plan, channel)
        assert_alike(fresh.state(), sw.full_state_dict(engine, optimizer=True, rank0_only=False))
        engine.step(batch_of(0))
        engine.step(batch_of(1))
        found = sw.full_state_dict(engine, optimizer=True)
        assert channel.rank == 0 or found == ({}, {})
        went_on = engine.step(batch_of(2)).loss, sw.full_state_dict(engine, optimizer=True, rank0_only=False)
        with engine.whole(rank0_only=channel.size > 1):
            if channel.rank == 0:
                engine.model.load_state_dict(given[0])
                for each, state in zip(engine.optimizers, given[1], strict=True):
                    each.load_state_dict(copy.deepcopy(state))
        assert_alike(given, sw.full_state_dict(engine, optimizer=True, rank0_only=False))
        return found, went_on, [engine.step(batch_of(step)).loss for step in (3, 4)]

    results = sw.simulate(plan.mesh.size, run)
    found, (value, after), _ = results[0]
    again = Plain()
    again.load(*found)
    assert again.step(2) == pytest.approx(value, rel=0 if exact else 1e-5)
    assert_alike(again.state(), after, exact=exact)
    for _, _, losses in results:
        assert losses == pytest.approx(goes_on, rel=0 if exact else 1e-3)


@pytest.mark.parametrize("layout", ["one", "stage 3", "recomputed", "tp", "pp"])
def test_inside_the_model_is_the_plain_one_and_afterwards_the_engines(layout: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine, other = (engine_on(PLANS[layout], channel) for _ in range(2))
        for each in (engine, other):
            each.step(batch_of(0))
        model: Any = engine.model
        words = batch_of(1)["words"]
        plain = net()
        plain.load_state_dict(sw.full_state_dict(engine, rank0_only=False))
        before = model.state_dict(keep_vars=True)
        with engine.whole(optimizer=False):
            for name, parameter in plain.named_parameters():
                assert torch.equal(parameter, model.get_parameter(name))
            copied = copy.deepcopy(model)
            file = io.BytesIO()
            torch.save(model, file)
            loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            for each in (model, copied, loaded):
                assert torch.equal(each.eval()(words), plain.eval()(words))
                each.train()
            assert model.head.weight is model.embed.weight
            refused: list[Callable[[], object]] = [
                lambda: engine.step(batch_of(1)),
                lambda: engine.predict(batch_of(1)),
                engine.state,
                lambda: engine.whole().__enter__(),
            ]
            for call in refused:
                with pytest.raises(ModelError, match=r"leave it before the engine goes on"):
                    call()
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        if layout != "one":
            with pytest.raises(ModelError, match=r"engine\.whole\(\)"):
                copy.deepcopy(model)
        assert engine.step(batch_of(1)).loss == other.step(batch_of(1)).loss
        assert_alike(sw.full_state_dict(engine), sw.full_state_dict(other))
        copied(words)  # of nobody: it runs without the other ranks

    on_ranks(PLANS[layout], run)


@pytest.mark.parametrize("layout", ["stage 3", "pp", "tp"])
def test_state_of_what_is_left_out_has_shapes_alone(layout: str) -> None:
    def run(channel: sw.Channel) -> str:
        engine = engine_on(PLANS[layout], channel)
        engine.step(batch_of(0))
        _, whole = sw.full_state_dict(engine, optimizer=True, rank0_only=False)
        with engine.whole(only=["scale"]):
            assert [name for name, each in engine.model.named_parameters() if not each.is_meta] == ["scale"]
            found = [each.state_dict() for each in engine.optimizers]
            names = {id(each): name for name, each in engine.model.named_parameters()}
            numbered = [[names[id(each)] for each in group["params"]] for group in engine.optimizers[0].param_groups]
        wholes = whole if isinstance(whole, list) else [whole]
        number = [name for group in numbered for name in group].index("scale")
        for one, other in zip(found, wholes, strict=True):
            assert one["param_groups"] == other["param_groups"]
            for at, state in other["state"].items():
                for key, value in state.items():
                    assert one["state"][at][key].shape == value.shape
                    has_value = not one["state"][at][key].is_meta
                    assert has_value == (value.dim() == 0 or (one is found[0] and at == number))
        with pytest.raises(ModelError, match="'nothing' matches none"), engine.whole(only="nothing"):
            pass
        with pytest.raises(ModelError) as caught, engine.whole(only=["scale"]):
            engine.optimizers[0].load_state_dict(found[0])
        return str(caught.value)

    assert all("engine.whole(only=...) leaves it out" in each for each in sw.simulate(PLANS[layout].mesh.size, run))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": torch.no_grad()(lambda tensor: tensor.fill_(2.0)),
    "data": lambda tensor: tensor.data.fill_(2.0),
    "numpy": lambda tensor: tensor.detach().numpy().fill(2.0),
}


@pytest.mark.parametrize(("layout", "way"), [("stage 3", "numpy"), ("bfloat16", "in place"), ("bfloat16", "data")])
def test_what_is_written_is_taken_in_with_a_freeze_and_nothing_else_changes(layout: str, way: str) -> None:
    """Also where masters have more digits than what is shown."""
    plan = (PLANS | {"bfloat16": sw.Plan(mesh=TWO, precision=sw.Precision(compute="bfloat16"))})[layout]

    def run(channel: sw.Channel) -> None:
        engine = engine_on(plan, channel)
        model: Any = engine.model
        for step in range(2):
            engine.step(batch_of(step))
        before = {piece: tensor.clone() for piece, tensor in engine.state().items()}
        with engine.whole():
            (scale,) = (
                each for group in engine.optimizers[0].param_groups for each in group["params"] if not each.ndim
            )
            for each in (model.scale, model.norm.running_mean, engine.optimizers[0].state[scale]["exp_avg"]):
                WRITES[way](each)
            model.layers.requires_grad_(False)
        changed = {piece.name: each for piece, each in engine.state().items() if not torch.equal(each, before[piece])}
        written = {"scale", "norm.running_mean", "optimizer/scale/exp_avg", "optimizer/scale/master"}
        assert changed.keys() <= written
        assert {value.unique().item() for value in changed.values()} == {2}
        weights = sw.full_state_dict(engine, rank0_only=False)
        assert weights["scale"] == 2
        engine.step(batch_of(0))
        after = sw.full_state_dict(engine, rank0_only=False)
        same = {name for name in weights if torch.equal(weights[name], after[name])}
        assert {name for name in weights if name.startswith("layers")} <= same
        assert "scale" not in same

    sw.simulate(2, run)


def written_on_some(channel: sw.Channel) -> None:
    engine = engine_on(PLANS["stage 3"], channel)
    with engine.whole(), torch.no_grad():
        if channel.rank:
            engine.model.get_parameter("scale").fill_(2.0)


def asked_for_unlike(channel: sw.Channel) -> None:
    engine_on(PLANS["pp"], channel).whole(rank0_only=bool(channel.rank)).__enter__()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (written_on_some, "only the ranks [1] wrote"),
        (asked_for_unlike, "rank 1 calls engine.whole(optimizer=True, rank0_only=True"),
    ],
)
def test_what_ranks_do_unlike_is_refused_on_all(run: Callable[[sw.Channel], None], words: str) -> None:
    assert words in str(same_error_everywhere(2, run))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("rank0_only", [True, False])
def test_an_error_inside_ends_it_on_all_ranks_and_the_engine_goes_on(failing: int, rank0_only: bool) -> None:
    def run(channel: sw.Channel) -> str:
        engine = engine_on(PLANS["pp"], channel)
        engine.step(batch_of(0))

        def body() -> None:
            with engine.whole(rank0_only=rank0_only):
                if channel.rank == failing:
                    raise OSError("disk full")

        with pytest.raises((OSError, ModelError)) as caught:
            body()
        engine.step(batch_of(1))
        return str(caught.value)

    told = sw.simulate(2, run)
    assert told[failing] == "disk full"
    assert told[1 - failing] == f"inside engine.whole(), rank {failing} raised OSError: disk full"


def test_ranks_tell_each_other_once_what_they_hold() -> None:
    """Wanted are the tensors of the plain model, alike on all ranks: that is told in digests."""

    def run(channel: sw.Channel) -> list[str]:
        recorded = sw.Recorded(channel)
        engine = engine_on(PLANS["stage 3"], recorded)
        engine.step(batch_of(0))
        recorded.clear()
        with engine.whole():
            return [each.purpose for each in recorded.calls if each.purpose.endswith("pieces to reshard")]

    digests = "digests of pieces to reshard"
    assert sw.simulate(2, run) == [[digests, "pieces to reshard", digests]] * 2


@pytest.mark.parametrize(("layout", "offload"), [("stage 3", True), ("pp", False)])
def test_on_a_device(fake: str, layout: str, offload: bool) -> None:
    def run(channel: sw.Channel) -> Any:
        engine = engine_on(PLANS[layout], channel)
        engine.step(batch_of(0))
        with engine.whole(offload=offload):
            devices = {each.device.type for each in (*engine.model.parameters(), *engine.model.buffers())}
            assert devices == {"cpu" if offload else fake}
            state = copy.deepcopy(engine.model.state_dict())
            engine.model.load_state_dict(state)
        engine.step(batch_of(1))
        return sw.full_state_dict(engine, optimizer=True)

    plain = Plain()
    plain.step(0)
    plain.step(1)
    assert_alike(plain.state(), sw.simulate(2, run, device=fake)[0], exact=False)
