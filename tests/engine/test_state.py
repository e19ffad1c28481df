"""The state of an engine: pieces that cover every tensor exactly once, with the values that one process has."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.space import check_cover
from tests.engine.expected import adamw, points, seeded, sgd, square_loss
from tests.engine.oracle import Optimizers, RankOrder, share_of

MESH = sw.Mesh(dp_replicate=2, dp_shard=2)
SHARDINGS = pytest.mark.parametrize(
    "sharding",
    [
        sw.Sharding(stage=0, bucket_bytes=200),
        sw.Sharding(bucket_bytes=200),
        sw.Sharding(bucket_bytes=200, partition="whole"),
        sw.Sharding(bucket_bytes=200, owners="dp_shard"),
        sw.Sharding(bucket_bytes=200, owners="dp_shard", partition="whole"),
    ],
    ids=["stage0", "slice", "whole", "slice-replicas", "whole-replicas"],
)


class Mixed(nn.Module):
    """Ties, frozen parts, buffers, scalars, nothing at all, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 9)
        self.cube = nn.Parameter(torch.randn(3, 1, 3, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.again = nn.Linear(4, 9)
        self.again.weight = self.first.weight
        self.out = nn.Linear(9, 1)
        self.order = nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scalar.dtype)
        hidden = self.frozen(self.first(x))[:, self.order] @ self.cube.sum(0).view(3, 3).repeat(3, 3)
        y: torch.Tensor = self.out(torch.tanh(hidden) * self.scalar + self.again(x))
        return y.float()


TRAINED = ("first.weight", "first.bias", "cube", "scalar", "again.bias", "out.weight", "out.bias")
PARAMETERS = (*TRAINED, "unused", "nothing", "frozen.weight", "frozen.bias", "order")

State = dict[sw.Piece, torch.Tensor]


def states_after(
    num_steps: int, sharding: sw.Sharding, *, optimizer: Optimizers = adamw, compute: str | None = None
) -> list[State]:
    """Every rank's state after so many updates of `Mixed`."""
    plan = sw.Plan(mesh=MESH, sharding=sharding, precision=sw.Precision(compute=compute))

    def run(channel: sw.Channel) -> State:
        engine = sw.parallelize(seeded(Mixed)(), plan, optimizer=optimizer, loss=square_loss, channel=channel)
        for seed in range(num_steps):
            engine.step(share_of(points(seed, 8), channel.rank, channel.size))
        return {piece: value.clone() for piece, value in engine.state().items()}

    return sw.simulate(MESH.size, run)


def whole_tensors(states: list[State]) -> dict[str, torch.Tensor]:
    """Every tensor put together from the pieces of all ranks; replicas have equal values."""
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[sw.Piece, torch.Tensor] = {}
    for state in states:
        for piece, value in state.items():
            assert piece.dtype == str(value.dtype).removeprefix("torch.")
            assert value.numel() == piece.num_elements
            assert piece.run is not None or tuple(value.shape) == piece.global_shape
            if piece in filled:
                assert torch.equal(filled[piece], value)
            filled[piece] = value
            tensor = tensors.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=value.dtype))
            assert piece.offset == (0,) * tensor.ndim
            tensor.view(-1)[piece.elements.start : piece.elements.stop] = value.reshape(-1)
    assert check_cover(filled) == []
    return tensors


@SHARDINGS
@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("optimizer", "keys"), [(adamw, ("exp_avg", "exp_avg_sq", "step")), (sgd, ("momentum_buffer",))]
)
def test_the_pieces_of_all_ranks_cover_every_tensor_exactly_once(
    sharding: sw.Sharding, compute: str | None, optimizer: Optimizers, keys: tuple[str, ...]
) -> None:
    tensors = whole_tensors(states_after(2, sharding, optimizer=optimizer, compute=compute))
    model = Mixed()
    names = {*PARAMETERS, "seen"}
    names |= {f"optimizer/{name}/{key}" for name in TRAINED for key in keys}
    if compute:
        cast = (name for name in PARAMETERS if name not in ("nothing", "order"))
        names |= {f"optimizer/{name}/master" for name in cast}
    assert tensors.keys() == names
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, parameter, key = name.split("/")
            assert tensor.shape == (() if key == "step" else shapes[parameter])
            assert tensor.dtype == torch.float32
        elif name in shapes:
            assert tensor.shape == shapes[name]


@SHARDINGS
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_the_values_are_those_of_one_process(sharding: sw.Sharding, compute: str | None) -> None:
    got = whole_tensors(states_after(3, sharding, compute=compute))
    optimizers: list[torch.optim.Optimizer] = []

    def remembered(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(adamw(parameters))
        return optimizers[-1]

    model = seeded(Mixed)()
    del model.order  # whole numbers are no business of the oracle
    model.register_buffer("order", torch.arange(9))
    oracle = RankOrder(
        model=model,
        make_optimizer=remembered,
        loss_of=lambda model, batch: square_loss(model(batch["x"]), batch),
        num_ranks=4,
        ranks_per_sum=2 if sharding.owners == "dp_shard" else None,
        working=lambda _: torch.bfloat16 if compute else torch.float32,
    )
    expected = oracle.train([points(seed, 8) for seed in range(3)])
    for name, value in expected.parameters.items():
        assert torch.equal(got[name], value), name
    (optimizer,) = optimizers
    masters = optimizer.param_groups[0]["params"]
    for name, master in zip(expected.parameters, masters, strict=True):
        if compute and master.numel():
            assert torch.equal(got[f"optimizer/{name}/master"], master)
        for key, value in optimizer.state.get(master, {}).items():
            assert torch.equal(got[f"optimizer/{name}/{key}"], value)


def test_a_fresh_engine_has_parameters_and_no_optimizer_state() -> None:
    tensors = whole_tensors(states_after(0, sw.Sharding()))
    assert tensors.keys() == {*PARAMETERS, "seen"}
    model = seeded(Mixed)()
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items() if name in tensors)


@pytest.mark.parametrize("partition", ["slice", "whole"])
def test_ranks_hold_optimizer_state_for_what_they_own_and_nothing_else(partition: str) -> None:
    sharding = sw.Sharding(bucket_bytes=200, partition=partition)  # type: ignore[arg-type]
    states = states_after(1, sharding)
    for state in states:
        pieces = [piece for piece in state if piece.name.endswith("/exp_avg")]
        owned = [piece for piece in state if piece.name in TRAINED]
        assert {(piece.name.split("/")[1], piece.elements) for piece in pieces} == {
            (piece.name, piece.elements) for piece in owned
        }
        assert sum(piece.num_elements for piece in pieces) < sum(
            parameter.numel() for parameter in Mixed().parameters() if parameter.requires_grad
        )
        if partition == "whole":
            assert all(piece.run is None for piece in state)


def test_the_state_is_a_view_of_what_trains() -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="bfloat16"))
        engine = sw.parallelize(seeded(Mixed)(), plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 4))
        before = engine.state()
        copies = {piece: value.clone() for piece, value in before.items()}
        engine.step(points(channel.rank, 4))
        after = engine.state()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[piece], after[piece]) for piece in after)
        moments = [piece for piece in after if piece.name.endswith("exp_avg_sq")]
        assert moments
        assert not any(torch.equal(copies[piece], after[piece]) for piece in moments)

    sw.simulate(2, run)


def test_the_state_is_taken_without_traffic() -> None:
    def run(channel: sw.Channel) -> int:
        recorded = sw.Recorded(channel)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(seeded(Mixed)(), plan, optimizer=adamw, loss=square_loss, channel=recorded)
        recorded.clear()
        engine.state()
        return len(recorded.calls)

    assert sw.simulate(2, run) == [0, 0]


def load_plain(model: nn.Module) -> None:
    model.load_state_dict(other_values())


def load_by_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(other_values()[name])


def load_one(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("cube").copy_(other_values()["cube"])


def other_values() -> dict[str, torch.Tensor]:
    """Values that bfloat16 holds: a working copy can give its master no more than it holds itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        values = Mixed().state_dict()
    return {name: value.bfloat16().to(value.dtype) for name, value in values.items()}


@SHARDINGS
@pytest.mark.parametrize("load", [load_plain, load_by_copy, load_one])
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_values_loaded_into_the_model_reach_the_masters(
    sharding: sw.Sharding, load: Callable[[nn.Module], None], compute: str | None
) -> None:
    plan = sw.Plan(mesh=MESH, sharding=sharding, precision=sw.Precision(compute=compute))

    def trained(channel: sw.Channel, *, afterwards: bool) -> State:
        model = seeded(Mixed)()
        if not afterwards:
            load(model)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        if afterwards:
            load(model)
        for seed in range(2):
            engine.step(share_of(points(seed, 8), channel.rank, channel.size))
        return {piece: value.clone() for piece, value in engine.state().items()}

    after = whole_tensors(sw.simulate(4, lambda channel: trained(channel, afterwards=True)))
    before = whole_tensors(sw.simulate(4, lambda channel: trained(channel, afterwards=False)))
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name


def replace_data(model: nn.Module) -> None:
    model.get_parameter("cube").data = torch.zeros(3, 1, 3, 3)


def convert(model: nn.Module) -> None:
    model.double()


@pytest.mark.parametrize("replace", [replace_data, convert])
@pytest.mark.parametrize("method", ["step", "evaluate"])
@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
def test_storage_that_was_replaced_is_refused_on_all_ranks(
    replace: Callable[[nn.Module], None], method: str, on_ranks: tuple[int, ...]
) -> None:
    errors: list[str] = []

    def run(channel: sw.Channel) -> None:
        model = seeded(Mixed)()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        engine.step(points(channel.rank, 4))
        if channel.rank in on_ranks:
            replace(model)
        with pytest.raises(ModelError) as caught:
            getattr(engine, method)(points(channel.rank, 4))
        errors.append(str(caught.value))

    sw.simulate(2, run)
    assert errors[0] == errors[1]
    assert "parameters were given other storage after parallelize, among them '" in errors[0]
    assert "Write values in place (load_state_dict, copy_)" in errors[0]
    assert errors[0].startswith("rank 1: ") == (on_ranks == (1,))
