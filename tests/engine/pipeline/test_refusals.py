"""What stages cannot do is said on every rank, with the module, the stage and the user's line; nothing hangs."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import MismatchError, PeerError
from tests.engine.formed import formed, linear
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import Batch
from tests.oracle.pipeline_programs import ROWS, Block, Chain, square, vectors
from tests.oracle.pipeline_values import Parcel
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

STAGES = {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "last": 2}
"""Of three; the second makes what is read."""
TWO = {"first": 0, "one": 0, "two": 1, "last": 1}
Make = Callable[[], nn.Module]


def engine_of(channel: sw.Channel, model: nn.Module, stages: Any = STAGES, **settings: Any) -> sw.Engine:
    pipeline = sw.Pipeline(stages=stages, **settings)
    plan = sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=2), pipeline=pipeline)
    return sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel)


Told = list[tuple[BaseException, str]]


def told_in_step(make: Callable[[int], nn.Module], stages: Mapping[str, int] = STAGES, **settings: Any) -> Told:
    """What every rank raises in its first step, with the notes."""

    def run(channel: sw.Channel) -> tuple[BaseException, str]:
        engine = engine_of(channel, seeded(lambda: make(channel.rank))(), stages, **settings)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            engine.step(vectors(0))
        return caught.value, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    return sw.simulate(1 + max(stages.values()), run)


def refused(make: Make, stages: Mapping[str, int] = STAGES) -> Callable[[], None]:
    """A call that raises what the first rank says that is not told of another one; those quote it."""

    def call() -> None:
        told = told_in_step(lambda rank: make(), stages)
        error = next(error for error, _ in told if not isinstance(error, PeerError))
        said = re.sub(r"rank \d", "rank R", str(error))
        assert all(said.splitlines()[0] in re.sub(r"rank \d", "rank R", text) for _, text in told)
        raise type(error)(said)

    return call


def between(act: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    """Something is done with what the second block gave; the third gets the tensor that comes out of it."""

    def way(net: Any, x: torch.Tensor) -> Any:
        h = net.blocks[1](net.blocks[0](net.first(x)))
        made = act(h)
        return net.last(net.blocks[3](net.blocks[2](made if isinstance(made, torch.Tensor) else h)))

    return formed(way, base=Chain)


def two(way: Callable[..., Any], *prepare: Callable[[Any], object], block: Make = Block) -> Callable[[], None]:
    """Two blocks on two stages are given to `way` with the value before them."""
    make = formed(way, *prepare, first=linear(5, 7), one=block, two=block, last=linear(7, 3))
    return refused(make, TWO)


def blocks(way: Callable[..., Any], **parts: Any) -> type[nn.Module]:
    return formed(way, base=Block, **parts)


def with_hook(put: Callable[[Any], object]) -> Callable[[], None]:
    """A chain whose module `blocks.1` is given to `put`."""
    return refused(formed(Chain.forward, lambda net: put(net.blocks[1]), base=Chain))


def in_view(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], None]:
    def way(net: Any, x: torch.Tensor) -> Any:
        h, memory = net.one(net.first(x)), torch.zeros(len(x), 7)
        read = write(memory, h)
        return net.last(net.two(h) + memory + (0 if read is None else read))

    return two(way)


def read_through_an_old_view(memory: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    old = memory[:, :1]
    memory[:, :3] = h[:, :3]
    return old


def take(net: Any, x: torch.Tensor, items: list[int]) -> Any:
    items.pop()
    return Block.forward(net, x)


def taking(net: Any, x: torch.Tensor) -> Any:
    items = [1, 2]
    return net.last(net.two(net.one(net.first(x), items), items))


def change(net: Any, parcel: Any) -> Any:
    parcel.content = Block.forward(net, parcel.content)
    return parcel


def changing(net: Any, x: torch.Tensor) -> Any:
    parcel = Parcel(x.new_ones(len(x), 7) * x.sum(1, keepdim=True))
    return net.last(net.two(net.one(parcel)).content) + net.first(x).sum() * 0


def centred(net: Any, x: torch.Tensor) -> Any:
    h = net.two(net.one(net.first(x)))
    with torch.no_grad():
        net.centre.mul_(0.9).add_(0.1 * h.mean(0))
    return net.last(h)


def replaced(net: Any, x: torch.Tensor) -> Any:
    h = net.one(net.first(x))
    net.centre = 0.9 * net.centre + 0.1 * h.detach().mean(0)
    return net.last(net.two(h))


def put_centre(net: Any) -> None:
    net.register_buffer("centre", torch.zeros(7))


def following(net: Any, x: torch.Tensor) -> Any:
    """A frozen block follows one of a later stage."""
    with torch.no_grad():
        for slow, fast in zip(net.one.parameters(), net.two.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    return net.last(net.two(net.one(net.first(x))))


def plain(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x))))


def leave(net: Any, x: torch.Tensor) -> Any:
    net.penalty = x.square().mean()
    return Block.forward(net, x)


def leaving(net: Any, x: torch.Tensor) -> Any:
    """Every block leaves a penalty in an attribute."""
    return plain(net, x) + net.one.penalty + net.two.penalty


def borrow(net: Any, x: torch.Tensor) -> Any:
    out = Block.forward(net, x)
    return out @ net.others[0].weight[:, :1].expand(7, 7) if net.others else out


@torch.no_grad()
def doubled(_: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(2)


@torch.no_grad()
def doubled_input(_: nn.Module, args: Any, output: torch.Tensor) -> None:
    args[0].mul_(2)


def put_anew(block: Any) -> None:
    """A hook puts a buffer."""
    block.register_buffer("mean", torch.zeros(7))
    block.register_forward_pre_hook(
        lambda each, args: setattr(each, "mean", each.mean * 0.9 + args[0].detach().mean(0))
    )


def keep_value(block: Any) -> None:
    """A hook keeps a value where a module looks for it."""
    block.register_forward_pre_hook(lambda each, args: setattr(each, "kept", {"gain": args[0].detach().mean()}))
    block.forward = lambda x: block.inner(x)[:, :7] * block.kept["gain"]


def batch_of(other: Batch) -> Callable[[], None]:
    """One rank is given another batch; all go on with the next."""

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, seeded(Chain)())
        engine.step(vectors(5))
        try:
            engine.step(other if channel.rank == 1 else vectors(0))
        finally:
            assert not engine.step(vectors(6)).skipped

    def call() -> None:
        raise same_error_everywhere(3, run)

    return call


def placed(stages: Any, make: Make = Chain, *, size: int = 3, **settings: Any) -> Callable[[], None]:
    """A placement that cannot hold, on some ranks or on all; nothing is touched."""

    def run(channel: sw.Channel) -> None:
        model = seeded(make)()
        try:
            engine_of(channel, model, stages(channel.rank) if callable(stages) else stages, **settings)
        finally:
            assert not any(each.is_meta for each in model.parameters())

    def call() -> None:
        raise same_error_everywhere(size, run)

    return call


def after(act: Callable[[sw.Channel, sw.Engine], object], make: Make = Chain) -> Callable[[], None]:
    """What is done with an engine of three stages."""

    def call() -> None:
        raise same_error_everywhere(3, lambda channel: act(channel, engine_of(channel, seeded(make)())))

    return call


def use_a_kept_value(channel: sw.Channel) -> None:
    kept: list[torch.Tensor] = []
    engine_of(channel, seeded(between(kept.append))()).step(vectors(0))
    kept[0] + 1


def kept_value() -> None:
    raise same_error_everywhere(3, use_a_kept_value)


def freeze_on_one(channel: sw.Channel, engine: sw.Engine) -> None:
    engine.model.last.requires_grad_(channel.rank == 0)
    engine.step(vectors(0))


def uneven(channel: sw.Channel, engine: sw.Engine) -> None:
    engine.step({**vectors(0), "y": torch.ones(5 if channel.rank == 1 else ROWS, 3)})


def scripted() -> nn.Module:
    model = Chain()
    model.blocks[1] = torch.jit.script(Block())
    return model


HANDED = formed(
    lambda net, x: net.last(net.two(net.one(net.first(x)))),
    first=linear(5, 7),
    one=blocks(lambda net, x: Parcel(Block.forward(net, x))),
    two=blocks(lambda net, parcel: Block.forward(net, parcel.content)),
    last=linear(7, 3),
)

REFUSED = Refusals(
    "engine.stages",
    {
        "the address of a value": refused(between(lambda h: h.data_ptr())),
        "the storage of a value": refused(between(lambda h: h.untyped_storage())),
        "a deep copy of a value": refused(between(lambda h: copy.deepcopy(h.detach()))),
        "backward of a value": refused(between(lambda h: h.sum().backward())),
        "the graph of a value": refused(between(lambda h: h.grad_fn)),
        "a reentrant checkpoint": refused(between(lambda h: checkpoint(torch.tanh, h, use_reentrant=True))),
        "a value after its forward": kept_value,
        "a call outside of a step": after(lambda channel, engine: engine.model(vectors(0)["x"])),
        "a value in an attribute": two(leaving, block=blocks(leave)),
        "a value put into a buffer": two(replaced, put_centre),
        "a value added to a buffer": two(centred, put_centre),
        "a value in a parameter of another stage": two(following, lambda net: net.one.requires_grad_(False)),
        "a view behind a value": in_view(lambda memory, h: memory[:, :3].copy_(h[:, :3])),
        "an old view behind a value": in_view(read_through_an_old_view),
        "items out of a list": two(taking, block=blocks(take)),
        "an object that is changed": two(changing, block=blocks(change)),
        "an object of another stage": refused(HANDED, TWO),
        "a module of another stage": two(
            plain, lambda net: vars(net.two).update(others=(net.first,)), block=blocks(borrow, others=tuple)
        ),
        "a buffer that a hook puts": with_hook(put_anew),
        "a value that a hook keeps": with_hook(keep_value),
        "an output that a hook writes to": with_hook(lambda block: block.inner.register_forward_hook(doubled)),
        "an input that a hook writes to": with_hook(lambda block: block.inner.register_forward_hook(doubled_input)),
        "an output that a hook replaces": with_hook(
            lambda block: block.inner.register_forward_hook(lambda _, args, output: output * 2)
        ),
        "other values": batch_of({**vectors(0), "y": vectors(0)["y"] + 1}),
        "no row": batch_of({name: value[:0] for name, value in vectors(0).items()}),
        "uneven rows": after(uneven),
        "frozen on one rank": after(freeze_on_one),
        "a parameter nowhere": placed({name: at for name, at in STAGES.items() if name != "last"}),
        "other stages on another rank": placed(lambda rank: {**STAGES, "blocks.0": int(rank == 2)}),
        "flops without a sample": placed(None, balance="flops"),
        "a script": placed(None, scripted),
        "a script on one rank": placed(None, scripted, size=1),
    },
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_stages_cannot_do_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_shapes_dtypes_and_devices_of_values_may_be_read() -> None:
    seen: list[Any] = []

    def look(h: torch.Tensor) -> None:
        seen.append((h.shape, len(h), h.ndim, h.dtype, h.device.type, h.numel(), h.requires_grad, h.is_contiguous()))

    sw.simulate(3, lambda channel: engine_of(channel, seeded(between(look))()).step(vectors(0)))
    assert set(seen) == {((6, 7), 6, 2, torch.float32, "cpu", 42, True, True)}


def straying(way: str, *, strays: bool) -> nn.Module:
    def forward(net: Any, x: torch.Tensor) -> Any:
        h = net.blocks[0](net.first(x))
        if way == "leaves out a module" and strays:
            return net.last(net.blocks[3](net.blocks[1](h)))
        h = net.blocks[1](h)
        for _ in range(2 if way == "calls a module twice" and strays else 1):
            h = net.blocks[2](h)
        if way == "computes something else" and strays:
            h = h * 2
        h = h * (0.5 if way == "computes with another number" and strays else 0.25)
        if way == "sends another value" and strays:
            h = h + net.first(x) * 0
        return net.last(net.blocks[3](h))

    return formed(forward, base=Chain)()


@pytest.mark.parametrize(
    ("way", "schedule"),
    [
        *(("leaves out a module", "1f1b"), ("calls a module twice", "fthenb"), ("computes something else", "1f1b")),
        *(("computes with another number", "fthenb"), ("sends another value", "1f1b")),
    ],
)
def test_a_forward_that_differs_between_ranks_is_found(way: str, schedule: str) -> None:
    told = told_in_step(lambda rank: straying(way, strays=rank == 1), schedule=schedule)
    assert all(isinstance(error, sw.ShardwiseError) for error, _ in told)
    if way == "sends another value":  # which nobody sends: the ranks wait for each other, and say for what
        assert "waiting for the value of microbatch 0 from stage 0" in told[1][1]
    else:
        assert any(isinstance(error, MismatchError) and "forward" in text for error, text in told)


def failing(where: str) -> nn.Module:
    """The second call raises: of a forward of `blocks.1`, of a backward in it, or of the code between modules."""
    model: Any = Chain()
    calls: list[object] = []

    def count(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise FloatingPointError("the pressure is too high")

    if where == "forward":
        model.blocks[1].outer.register_forward_pre_hook(count)
    elif where == "backward":
        model.blocks[1].inner.weight.register_hook(count)
    return between(count)() if where == "between" else model


@pytest.mark.parametrize(("where", "schedule"), [("forward", "fthenb"), ("backward", "1f1b")])
def test_an_exception_of_one_stage_is_told_once_and_stops_all(where: str, schedule: str) -> None:
    told = told_in_step(lambda rank: failing(where), schedule=schedule)
    error, text = told[1]
    assert type(error) is FloatingPointError
    assert error.__traceback__ is not None
    for words in ("rank 1", "stage 1", "microbatch 1", "blocks.1" if where == "forward" else "backward"):
        assert words in text
    assert text.count("the pressure is too high") == 1
    for error, text in (told[0], told[2]):
        assert isinstance(error, PeerError)
        assert error.rank == 1
        assert "the pressure is too high" in text


def test_an_exception_between_modules_is_every_ranks_own() -> None:
    for error, text in told_in_step(lambda rank: failing("between")):
        assert isinstance(error, FloatingPointError | PeerError)
        assert "the pressure is too high" in text
