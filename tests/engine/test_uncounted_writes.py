"""Writes that torch does not count (`_version`): every way to write, in every place, under every plan."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import shardwise as sw
from shardwise.errors import MismatchError, ModelError, PeerError
from tests.covering import covering
from tests.engine.oracle import share_of

WIDTH = 8
LIMIT = 0.05


@torch.no_grad()
def in_place(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """The one way that torch counts."""
    tensor.copy_(new)


def by_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data.copy_(new)


def by_numpy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # A fresh tensor, which views the memory: `numpy()` of the tensor itself would keep it from being resized.
    tensor.data.view(bits).numpy()[...] = new.view(bits).numpy()


def by_dlpack(tensor: torch.Tensor, new: torch.Tensor) -> None:
    given = tensor.detach()
    from_dlpack(given.view(torch.uint8) if given.dtype == torch.bool else given).copy_(new)


def by_storage(tensor: torch.Tensor, new: torch.Tensor) -> None:
    memory = torch.empty(0, dtype=tensor.dtype)
    memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()).copy_(new)


def by_kernel(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """As kernels of others do: by the address."""
    laid_out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(new)
    ctypes.memmove(tensor.data_ptr(), laid_out.data_ptr(), tensor.numel() * tensor.element_size())


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    each.__name__: each for each in (in_place, by_data, by_numpy, by_dlpack, by_storage, by_kernel)
}
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "stage 0": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=0)},
    "stage 1": {"mesh": sw.Mesh(dp_shard=2)},
    "stage 2": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=2)},
    "stage 3": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=3)},
    "tp": {"mesh": sw.Mesh(tp=2), "tensor": sw.Tensor(rules={"first": "column", "last": "row"})},
    "pp": {"mesh": sw.Mesh(pp=2), "pipeline": sw.Pipeline(stages={"first": 0, "last": 1})},
}
COMPUTES = (None, "bfloat16")


def test_the_ways_but_one_are_not_counted() -> None:
    for name, write in WAYS.items():
        tensor = torch.zeros(2, 3)
        before = tensor._version
        write(tensor, torch.ones(2, 3))
        assert torch.equal(tensor, torch.ones(2, 3))
        assert (tensor._version != before) == (name == "in_place")


class Net(nn.Module):
    """Two layers between which something may be done; buffers of many kinds."""

    first: Any  # whose weight is written to

    def __init__(self, *, buffers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.within: Callable[[Net, torch.Tensor], None] = lambda *_: None
        kinds = {
            "number": torch.zeros(()),
            "vector": torch.zeros(3),
            "matrix": torch.zeros(2, 3),
            "transposed": torch.zeros(3, 2, dtype=torch.float64).T,
            "count": torch.zeros(2, 1, dtype=torch.int64),
            "flags": torch.zeros(2, 2, dtype=torch.bool),
            "large": torch.zeros(300, 200),
        }
        for name, each in kinds.items() if buffers else ():
            self.register_buffer(name, each)
        if buffers:
            self.also = nn.Module()
            self.also.register_buffer("matrix", self.get_buffer("matrix"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        self.within(self, x)
        y: torch.Tensor = self.last(h)
        return y


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), batch["y"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(8, WIDTH), "y": torch.randn(8, WIDTH)}


def engine_of(model: nn.Module, channel: sw.Channel, plan: str, compute: str | None = None, **more: Any) -> sw.Engine:
    precision = sw.Precision(compute=compute, **more.pop("precision", {}))
    made = sw.Plan(**PLANS[plan], precision=precision, **more)
    return sw.parallelize(model, made, optimizer=sgd, loss=loss, channel=channel)


def share(channel: sw.Channel, plan: str, seed: int) -> dict[str, torch.Tensor]:
    """Ranks along tp and pp have the same rows."""
    ranks = PLANS[plan].get("mesh", sw.Mesh()).num_data_ranks
    return share_of(batch_of(seed), channel.rank if ranks > 1 else 0, ranks)


# Buffers --------------------------------------------------------------------------------------------------------------


def next_values(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if buffer.dtype == torch.bool:
        return ~buffer if x.sum() > 0 else buffer.clone()
    if not buffer.is_floating_point():
        return buffer + len(x) + int(x.sum() > 0)
    if buffer.numel() < 1000:
        return buffer * 0.9 + x.float().mean().to(buffer.dtype)
    new = buffer.clone()
    new[: len(x)] += x.float().mean().to(buffer.dtype)  # a queue: few rows of many
    return new


def move_buffers(model: nn.Module, x: torch.Tensor, write: Callable[..., None]) -> None:
    for buffer in model.buffers():
        write(buffer, next_values(buffer, x.detach()))


def place_in(model: Net, where: str, write: Callable[..., None]) -> None:
    """Let a step write to the buffers, once in each forward of a microbatch."""
    if where.endswith("forward"):
        model.within = lambda net, x: move_buffers(net, x, write)
    elif where == "pre-hook":
        model.register_forward_pre_hook(lambda net, args: move_buffers(net, args[0], write))
    elif where == "hook":
        model.register_forward_hook(lambda net, args, output: move_buffers(net, args[0], write))
    else:
        seen: list[torch.Tensor] = []
        model.register_forward_pre_hook(lambda net, args: seen.append(args[0]))
        model.last.register_full_backward_hook(lambda *_: move_buffers(model, seen.pop(), write))


@pytest.mark.parametrize(
    ("way", "where", "plan", "compute"),
    covering(
        list(WAYS),
        ["forward", "recomputed forward", "pre-hook", "hook", "backward hook"],
        ["stage 0", "stage 1", "stage 2", "stage 3"],
        COMPUTES,
        strength=2,
    ),
)
def test_buffers_move_once_and_are_those_of_data_rank_zero(
    way: str, where: str, plan: str, compute: str | None
) -> None:
    write = WAYS[way]

    def values(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in model.named_buffers()}

    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        model = Net(buffers=True)
        place_in(model, where, write)
        held = nn.Sequential()
        held.add_module("net", model)
        more = {"activations": sw.Activations(checkpoint=("net",))} if where.startswith("recomputed") else {}
        engine = engine_of(held, channel, plan, compute, merge=sw.Merge(microbatches=2), **more)
        found = []
        for seed in range(4):
            batch = share(channel, plan, seed)
            engine.step({"input": batch["x"], "y": batch["y"]})
            found.append(values(model))
        return found

    plain = Net(buffers=True)
    expected = []
    for seed in range(4):
        mine = share_of(batch_of(seed), 0, 2)
        for at in range(2):
            x = share_of(mine, at, 2)["x"]
            move_buffers(plain, x, in_place)
        expected.append(values(plain))
    for of_rank in sw.simulate(2, run):
        for got, wanted in zip(of_rank, expected, strict=True):
            for name, each in wanted.items():
                assert torch.equal(got[name], each), name


# Parameters at rest ---------------------------------------------------------------------------------------------------


def clamped(way: str, plan: str, compute: str | None, kind: str) -> list[Any]:
    """Losses and weights of a loop that clamps all weights between steps."""

    def run(channel: sw.Channel) -> Any:
        model = Net()
        if kind == "frozen":
            model.first.requires_grad_(False)
        precision = {"keep": ("last",)} if kind == "kept" else {}
        engine = engine_of(model, channel, plan, compute, precision=precision)
        losses = []
        for seed in range(4):
            losses.append(engine.step(share(channel, plan, seed)).loss)
            for each in model.parameters():
                if not each.is_meta:
                    WAYS[way](each, each.detach().clamp(-LIMIT, LIMIT))
        losses.append(engine.evaluate(share(channel, plan, 9)).loss)
        return losses, sw.full_state_dict(engine)

    return sw.simulate(PLANS[plan].get("mesh", sw.Mesh()).size, run)


@pytest.mark.parametrize(
    ("way", "plan", "compute", "kind"),
    covering(
        [each for each in WAYS if each != "in_place"],
        [each for each in PLANS if each != "stage 3"],
        COMPUTES,
        ["trained", "frozen", "kept"],
        strength=2,
    ),
)
def test_parameters_written_between_steps_are_those_of_counted_writes(
    way: str, plan: str, compute: str | None, kind: str
) -> None:
    got, expected = clamped(way, plan, compute, kind), clamped("in_place", plan, compute, kind)
    for (losses, state), (losses_of_counted, state_of_counted) in zip(got, expected, strict=True):
        assert losses == losses_of_counted
        for name, each in state.items():
            assert torch.equal(each, state_of_counted[name]), name
            assert each.abs().max() <= LIMIT + 1e-3


def test_one_element_of_a_large_parameter_is_found_again_once_writes_were_seen() -> None:
    """Some elements are compared in each step; everything in the first ones, and ever after a write was found."""

    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, WIDTH))
        engine = engine_of(model, channel, "stage 1", "bfloat16")
        weight = next(model.parameters())
        found = []
        for at in range(5):
            engine.step({"input": torch.zeros(2, 600), "y": torch.zeros(2, WIDTH)})  # no gradient for the weights
            found.append(float(weight[123, 45].detach()))
            weight.data[123, 45] = at + 1
        full = sw.full_state_dict(engine)
        assert channel.rank or float(full["0.weight"][123, 45]) == 5
        return found[1:]

    assert sw.simulate(2, run) == [[1, 2, 3, 4]] * 2


# Parameters while a step goes on --------------------------------------------------------------------------------------


class Writing(nn.Linear):
    """Writes to its weight in each forward, or whenever it is told to."""

    write: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    factor: Callable[[torch.Tensor], float] = staticmethod(lambda _: 0.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.write is not None and self.weight.data_ptr():  # stages run it on shapes, too
            self.scale(self.write, float(self.factor(input)))
        return super().forward(input)

    def scale(self, write: Callable[[torch.Tensor, torch.Tensor], None], factor: float = 0.5) -> None:
        write(self.weight, self.weight.detach() * factor)


def writing(way: str | None) -> Net:
    model = Net()
    weight = model.first.weight.detach()
    model.first = Writing(WIDTH, WIDTH)
    model.first.write = WAYS.get(way or "")
    with torch.no_grad():
        model.first.weight.copy_(weight)
    return model


def size_of(plan: str) -> int:
    return int(PLANS[plan].get("mesh", sw.Mesh()).size)


def writes_in_steps(
    way: str, plan: str, compute: str | None, *, where: str = "forward", unlike: bool = False, evaluates: bool = False
) -> tuple[list[str], list[float]]:
    """What each rank refused in three steps with a write to a weight in each, and the losses of rank 0."""

    def run(channel: sw.Channel) -> tuple[str, list[float]]:
        model = writing(way if where == "forward" and not evaluates else None) if plan != "tp" else Net()
        if plan == "tp":  # which cuts plain layers only
            model.within = lambda net, _: WAYS[way](net.first.weight, net.first.weight.detach() * 0.5)
        if unlike:
            model.first.factor = lambda x: float(x.mean())
        more = {"activations": sw.Activations(checkpoint=("first",))} if where == "recomputed" else {}
        engine = engine_of(model, channel, plan, compute, **more)
        if where == "gradient hook":
            model.first.weight.register_post_accumulate_grad_hook(lambda _: model.first.scale(WAYS[way]))
        losses: list[float] = []
        try:
            for seed in range(3):
                if where == "recomputed" or (evaluates and seed):
                    model.first.write = WAYS[way]
                if evaluates and seed:
                    engine.evaluate(share(channel, plan, seed))
                losses.append(engine.step(share(channel, plan, seed)).loss)
        except (ModelError, PeerError) as error:
            return str(error), losses
        return "", losses

    said = sw.simulate(size_of(plan), run)
    return [text for text, _ in said], said[0][1]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("plan", ["one rank", "stage 0", "stage 1", "stage 2", "tp", "pp"])
def test_a_cast_of_a_master_that_is_written_to_in_a_step_is_refused_on_all_ranks(way: str, plan: str) -> None:
    for where in ("forward", "gradient hook") if plan in ("one rank", "stage 1") else ("forward",):
        said, losses = writes_in_steps(way, plan, "bfloat16", where=where)
        assert all("wrote to parameter 'first.weight': it is a cast of a master" in each for each in said), said
        assert not losses


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_gathered_parameter_that_a_forward_writes_to_is_refused_on_all_ranks(way: str, compute: str | None) -> None:
    said, losses = writes_in_steps(way, "stage 3", compute)
    assert all("a forward wrote to parameter 'first.weight'" in each for each in said), said
    assert not losses


@pytest.mark.parametrize("way", [each for each in WAYS if each != "in_place"])
@pytest.mark.parametrize("plan", ["one rank", "stage 0", "stage 1", "stage 2"])
def test_a_parameter_that_all_ranks_write_alike_is_kept(way: str, plan: str) -> None:
    said, losses = writes_in_steps(way, plan, None)
    assert not any(said)
    assert losses == writes_in_steps("in_place", plan, None)[1]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("plan", ["stage 0", "stage 1", "stage 2"])
def test_a_parameter_that_ranks_write_unlike_is_refused_on_all(way: str, plan: str) -> None:
    said, losses = writes_in_steps(way, plan, None, unlike=True)
    assert all("'first.weight': it has other values on other ranks now" in each for each in said), said
    assert not losses


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("plan", ["one rank", "stage 1", "stage 3"])
def test_a_parameter_that_a_recomputed_forward_writes_to_is_refused(way: str, plan: str) -> None:
    said, losses = writes_in_steps(way, plan, None, where="recomputed")
    assert all("writes to a parameter, and would do so twice" in each for each in said), said
    assert not losses


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("plan", ["stage 1", "stage 3"])
def test_a_parameter_that_an_evaluation_writes_to_is_refused_where_it_is_counted_or_lost(way: str, plan: str) -> None:
    said, losses = writes_in_steps(way, plan, None, evaluates=True)
    if plan == "stage 3" or way == "in_place":
        assert all("a forward wrote to parameter 'first.weight'" in each for each in said), said
        assert len(losses) == 1
    else:
        assert not any(said)
        assert losses == pytest.approx(writes_in_steps(way, "one rank", None, evaluates=True)[1], rel=1e-6)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("way", [each for each in WAYS if each != "in_place"])
def test_what_ranks_write_unlike_in_an_evaluation_is_refused_by_what_follows(way: str, compute: str | None) -> None:
    def run(channel: sw.Channel) -> str:
        model = writing(None)
        engine = engine_of(model, channel, "stage 1", compute)
        engine.step(share(channel, "stage 1", 0))
        model.first.write, model.first.factor = WAYS[way], lambda x: float(x.mean())
        engine.evaluate(share(channel, "stage 1", 1))
        model.first.write = None
        with pytest.raises(MismatchError) as caught:
            engine.evaluate(share(channel, "stage 1", 1))
        return str(caught.value)

    assert all("first.weight" in each for each in sw.simulate(2, run))


@pytest.mark.parametrize("way", [by_data, by_numpy, by_dlpack])
def test_a_copy_of_a_parameter_at_rest_that_is_written_to_is_refused(way: Callable[..., None]) -> None:
    def run(channel: sw.Channel) -> None:
        model = Net()
        model.within = lambda net, _: way(net.first.weight.detach(), torch.zeros(WIDTH, WIDTH))
        engine_of(model, channel, "stage 3").step(share(channel, "stage 3", 0))

    with pytest.raises(ModelError, match=r"a forward wrote to parameter 'first\.weight', which is a copy"):
        sw.simulate(2, run)


# After a refusal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_after_a_refused_step_the_next_one_begins_with_what_was_written(way: str) -> None:
    """That step updated nothing: the values are those that a write between steps would have left."""

    def run(channel: sw.Channel, *, in_forward: bool) -> list[float]:
        model = Net()
        engine = engine_of(model, channel, "one rank", "bfloat16")

        def write(*_: Any) -> None:
            WAYS[way](model.first.weight, model.first.weight.detach() * 0.5)

        if in_forward:
            hook = model.register_forward_pre_hook(write)
            with pytest.raises(ModelError, match="it is a cast of a master"):
                engine.step(share(channel, "one rank", 0))
            hook.remove()
        else:
            write()
        # The number of the step differs, on which nothing here depends.
        return [engine.step(share(channel, "one rank", seed)).loss for seed in range(2)]

    assert sw.simulate(1, partial(run, in_forward=True)) == sw.simulate(1, partial(run, in_forward=False))


def test_a_step_that_is_refused_on_several_ranks_ends_the_run_of_all() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(writing("by_data"), channel, "stage 1", "bfloat16")
        with pytest.raises(ModelError, match="it is a cast of a master"):
            engine.step(share(channel, "stage 1", 0))
        with pytest.raises(PeerError, match="it is a cast of a master"):
            engine.step(share(channel, "stage 1", 1))

    sw.simulate(2, run)
