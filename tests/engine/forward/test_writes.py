"""Writes that torch does not count (`_version`): every way to write, in every place, under every plan."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.engine.forward.writes import Content
from shardwise.errors import MismatchError, ModelError, PeerError
from tests.covering import covering
from tests.engine.loops import sgd, share
from tests.engine.tower import on_ranks
from tests.oracle.batches import share_of

WIDTH = 8
LIMIT = 0.05
Write = Callable[[torch.Tensor, torch.Tensor], object]


def by_numpy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # A fresh tensor, which views the memory: `numpy()` of the tensor itself would keep it from being resized.
    tensor.data.view(bits).numpy()[...] = new.view(bits).numpy()


def by_kernel(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """As kernels of others do: by the address."""
    laid_out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(new)
    ctypes.memmove(tensor.data_ptr(), laid_out.data_ptr(), tensor.numel() * tensor.element_size())


WAYS: dict[str, Write] = {
    "in place": torch.no_grad()(lambda tensor, new: tensor.copy_(new)),  # the one way that torch counts
    "data": lambda tensor, new: tensor.data.copy_(new),
    "numpy": by_numpy,
    "kernel": by_kernel,
}
UNCOUNTED = [each for each in WAYS if each != "in place"]
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    **{f"stage {at}": {"mesh": sw.Mesh(dp_shard=2), "sharding": sw.Sharding(stage=at)} for at in (0, 1, 2, 3)},
    "tp": {"mesh": sw.Mesh(tp=2), "tensor": sw.Tensor(rules={"first": "column", "last": "row"})},
    "pp": {"mesh": sw.Mesh(pp=2), "pipeline": sw.Pipeline(stages={"first": 0, "last": 1})},
}
COMPUTES = (None, "bfloat16")


class Writing(nn.Linear):
    """Writes to its weight in each forward when it is told how."""

    write: Write | None = None
    factor: Callable[[torch.Tensor], float] = staticmethod(lambda _: 0.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.write is not None and self.weight.data_ptr():  # stages run it on shapes, too
            halve(self, self.write, float(self.factor(input)))
        return super().forward(input)


def halve(module: Any, write: Write, factor: float = 0.5) -> None:
    write(module.weight, module.weight.detach() * factor)


class Net(nn.Module):
    """Two layers between which something may be done; buffers of many kinds."""

    def __init__(self, kind: Any = nn.Linear, *, buffers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first: Any = kind(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.within: Callable[[Net, torch.Tensor], object] = lambda *_: None
        kinds = {
            "number": torch.zeros(1),
            "transposed": torch.zeros(3, 2, dtype=torch.float64).T,
            "large": torch.zeros(300, 200),
        }
        for name, each in kinds.items() if buffers else ():
            self.register_buffer(name, each)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(input))
        self.within(self, input)
        y: torch.Tensor = self.last(h)
        return y


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, WIDTH, generator=generator) for name in ("input", "y")}


def engine_of(model: nn.Module, channel: sw.Channel, plan: str, compute: str | None = None, **more: Any) -> sw.Engine:
    precision = sw.Precision(compute=compute, **more.pop("precision", {}))
    return sw.parallelize(
        model,
        sw.Plan(**PLANS[plan], precision=precision, **more),
        optimizer=sgd,
        loss=lambda output, batch: nn.functional.mse_loss(output.float(), batch["y"]),
        channel=channel,
    )


def step(engine: sw.Engine, seed: int) -> float:
    return engine.step(share(engine, batch_of(seed))).loss


def on(plan: str, run: Callable[[sw.Channel], Any]) -> list[Any]:
    return on_ranks(sw.Plan(**PLANS[plan]), run)


# Buffers --------------------------------------------------------------------------------------------------------------


def move_buffers(model: nn.Module, x: torch.Tensor, write: Write) -> None:
    for buffer in model.buffers():
        new = buffer.clone()
        new[..., :1] += x.detach().float().mean()  # few elements of many
        write(buffer, new)


def place_in(model: Net, where: str, write: Write) -> None:
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
    def values(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in model.named_buffers()}

    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        model = Net(buffers=True)
        place_in(model, where, WAYS[way])
        held = nn.Sequential()
        held.add_module("net", model)
        again = sw.Activations(checkpoint=("net",) if where.startswith("recomputed") else None)
        engine = engine_of(held, channel, plan, compute, merge=sw.Merge(microbatches=2), activations=again)
        found = []
        for seed in range(4):
            step(engine, seed)
            found.append(values(model))
        return found

    plain, expected = Net(buffers=True), []
    for seed in range(4):
        mine = share_of(batch_of(seed), 0, 2)
        for at in range(2):
            move_buffers(plain, share_of(mine, at, 2)["input"], WAYS["in place"])
        expected.append(values(plain))
    for of_rank in on(plan, run):
        for got, wanted in zip(of_rank, expected, strict=True):
            assert [name for name, each in wanted.items() if not torch.equal(got[name], each)] == []


# Parameters between steps ---------------------------------------------------------------------------------------------


@cache
def clamped(way: str, plan: str, compute: str | None, kind: str) -> list[Any]:
    """Losses and weights of a loop that clamps all weights between steps."""

    def run(channel: sw.Channel) -> Any:
        model = Net()
        model.first.requires_grad_(kind != "frozen")
        engine = engine_of(model, channel, plan, compute, precision={"keep": ("last",)} if kind == "kept" else {})
        losses = []
        for seed in range(4):
            losses.append(step(engine, seed))
            for each in model.parameters():
                if not each.is_meta:
                    WAYS[way](each, each.detach().clamp(-LIMIT, LIMIT))
        losses.append(engine.evaluate(share(engine, batch_of(9))).loss)
        return losses, sw.full_state_dict(engine)

    return on(plan, run)


@pytest.mark.parametrize(
    ("way", "plan", "compute", "kind"),
    [
        case
        for case in covering(
            UNCOUNTED,
            [each for each in PLANS if each != "stage 3"],
            COMPUTES,
            ["trained", "frozen", "kept"],
            strength=2,
        )
        if case[0] != "numpy" or case[1] not in ("tp", "pp")  # refused of parts
    ],
)
def test_parameters_written_between_steps_are_those_of_counted_writes(
    way: str, plan: str, compute: str | None, kind: str
) -> None:
    got, expected = clamped(way, plan, compute, kind), clamped("in place", plan, compute, kind)
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


def writes_in_steps(
    way: str, plan: str, compute: str | None, *, where: str = "forward"
) -> tuple[list[str], list[float]]:
    """What each rank refused in three steps with a write to a weight in each, and the losses of rank 0."""

    def run(channel: sw.Channel) -> tuple[str, list[float]]:
        model = Net(nn.Linear if plan == "tp" else Writing)  # tp cuts plain layers only
        if plan == "tp":
            model.within = lambda net, _: halve(net.first, WAYS[way])
        elif where in ("forward", "unlike"):
            model.first.write = WAYS[way]
        if where == "unlike":
            model.first.factor = lambda x: float(x.mean())
        again = sw.Activations(checkpoint=("first",) if where == "recomputed" else None)
        engine = engine_of(model, channel, plan, compute, activations=again)
        if where == "gradient hook":
            model.first.weight.register_post_accumulate_grad_hook(lambda _: halve(model.first, WAYS[way]))
        losses: list[float] = []
        try:
            for seed in range(3):
                if where == "recomputed" or (where == "evaluation" and seed):
                    model.first.write = WAYS[way]
                if where == "evaluation" and seed:
                    engine.evaluate(share(engine, batch_of(seed)))
                losses.append(step(engine, seed))
        except (ModelError, PeerError) as error:
            return str(error), losses
        return "", losses

    said = on(plan, run)
    return [text for text, _ in said], said[0][1]


CAST = "wrote to parameter 'first.weight': it is a cast of a master"
LOST = "a forward wrote to parameter 'first.weight'"
UNLIKE = "'first.weight': it has other values on other ranks now"
TWICE = "writes to a parameter, and would do so twice"
REFUSED: list[tuple[str, str, str | None, str]] = [
    *(("forward", plan, "bfloat16", CAST) for plan in PLANS if plan != "stage 3"),
    *(("gradient hook", plan, "bfloat16", CAST) for plan in ("one rank", "stage 1")),
    *(("forward", "stage 3", compute, LOST) for compute in COMPUTES),
    *(("unlike", plan, None, UNLIKE) for plan in ("stage 0", "stage 1", "stage 2")),
    *(("recomputed", plan, None, TWICE) for plan in ("one rank", "stage 1", "stage 3")),
    ("evaluation", "stage 3", None, LOST),
]


@pytest.mark.parametrize(
    ("where", "plan", "compute", "words", "way"),
    [
        (*case, way)
        for at, case in enumerate(REFUSED)
        # Of copies that are their own masters, unlike values show by the count alone.
        for way in ("in place", *([] if case[3] == UNLIKE else [UNCOUNTED[at % 3]]))
    ],
)
def test_a_write_to_what_is_no_master_is_refused_on_all_ranks(
    where: str, plan: str, compute: str | None, words: str, way: str
) -> None:
    said, losses = writes_in_steps(way, plan, compute, where=where)
    assert all(words in each for each in said), said
    assert len(losses) == (where == "evaluation")


@pytest.mark.parametrize(
    ("where", "plan", "way"),
    [
        *[("forward", "one rank", "data"), ("forward", "stage 0", "numpy"), ("forward", "stage 1", "kernel")],
        *[("forward", "stage 2", "data"), ("evaluation", "stage 1", "numpy")],
    ],
)
def test_a_parameter_that_all_ranks_write_alike_is_kept(where: str, plan: str, way: str) -> None:
    said, losses = writes_in_steps(way, plan, None, where=where)
    assert not any(said)
    if where == "forward":
        assert losses == writes_in_steps("in place", plan, None)[1]
    else:
        assert losses == pytest.approx(writes_in_steps(way, "one rank", None, where=where)[1], rel=1e-6)


def test_what_ranks_write_alike_is_told_in_digests_alone() -> None:
    def run(channel: sw.Channel) -> set[str]:
        recorded = sw.Recorded(channel)
        engine = engine_of(model := Net(Writing), recorded, "stage 1")
        model.first.write = WAYS["in place"]
        step(engine, 0)
        return {each.purpose for each in recorded.calls if "forwards wrote to" in each.purpose}

    assert on("stage 1", run) == [{"digests of parameters that forwards wrote to"}] * 2


@pytest.mark.parametrize("way", UNCOUNTED)
def test_what_ranks_write_unlike_in_an_evaluation_is_refused_by_what_follows(way: str) -> None:
    def run(channel: sw.Channel) -> None:
        model = Net(Writing)
        engine = engine_of(model, channel, "stage 1", "bfloat16")
        step(engine, 0)
        model.first.write, model.first.factor = WAYS[way], lambda x: float(x.mean())
        engine.evaluate(share(engine, batch_of(1)))
        model.first.write = None
        with pytest.raises(MismatchError, match=r"first\.weight"):
            engine.evaluate(share(engine, batch_of(1)))

    on("stage 1", run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("plan", "kind", "writes_at", "found_at"),
    [
        ("stage 0", "trained", 1, 1),
        ("stage 0", "trained", 3, 63),
        ("stage 2", "trained", 1, 1),
        ("stage 1", "frozen", 3, 63),
    ],
)
def test_what_one_rank_writes_to_its_own_masters_is_refused_in_looks_that_compare_everything(
    way: str, plan: str, kind: str, writes_at: int, found_at: int
) -> None:
    """Between them, values of trained parameters are those of their owners again after an update, but at stage 0."""

    def run(channel: sw.Channel) -> tuple[int, str]:
        model = Net()
        model.first.requires_grad_(kind != "frozen")
        engine = engine_of(model, channel, plan)
        for at in range(66):
            if at == writes_at and channel.rank:
                halve(model.first, WAYS[way])
            try:
                step(engine, 0)
            except MismatchError as error:
                return at, str(error)
        return 66, ""

    for at, said in on(plan, run):
        assert at == (writes_at if way == "in place" else found_at)
        assert "parameter 'first.weight' was written to after parallelize" in said


class Operators(TorchDispatchMode):
    """Notes what is carried out inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_a_look_at_a_large_tensor_copies_nothing_and_goes_by_the_order_of_rows() -> None:
    large = torch.randn(512, 512)
    for view in (
        large,
        large.T,
        large[:1, :9].expand(3, 9),
        large[:, :300],
        large[:1].expand(4000, 512),
        large.view(64, 8, 512).movedim(0, 2),
    ):
        with Operators() as seen:
            content = Content(view)
        assert seen.names <= {"aten::detach"} or view.numel() < 100
        assert content.holds_for(view)
        assert content.holds_for(view.clone(memory_format=torch.contiguous_format))
        view[(0,) * view.ndim] += 1
        assert not content.holds_for(view)
