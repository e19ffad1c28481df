"""Programs for stages, second part: what goes into modules and out of them, and what they do beside."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.engine.formed import formed, linear, several
from tests.oracle.batches import NUM_WORDS
from tests.oracle.pipeline_programs import PIPELINE_PROGRAMS, Block, images, in_blocks, on_chain, row

__all__ = ["PIPELINE_PROGRAMS"]

# -- parameters outside of their modules


def tie(net: Any) -> None:
    net.head.weight = net.embed.weight


PARTS: dict[str, Any] = {
    "embed": functools.partial(nn.Embedding, NUM_WORDS, 7),
    **dict.fromkeys(("early", "parts", "late"), Block),
}
APART = {"embed": 0, "early": 1, "parts": 2, "late": 3}


@row("used outside", APART, words=7, is_bare=True, **PARTS)
def used_outside(net: Any, words: torch.Tensor) -> Any:
    """The embedding's weight is the head, and one block is used by its parts, a method and a bare weight."""
    h = net.early(net.embed(words))
    h = h + F.linear(torch.relu(net.parts.inner(h)), net.parts.outer.weight)
    return F.linear(net.late(h), net.embed.weight)


@row("tied head", {**APART, "head": 3}, tie, words=7, is_bare=True, **PARTS, head=linear(7, NUM_WORDS, bias=False))
def tied_head(net: Any, words: torch.Tensor) -> Any:
    """The head is a module of its own that shares the embedding's weight: a tie of two stages."""
    return net.head(net.late(net.parts(net.early(net.embed(words)))))


def put_buffers(net: Any) -> None:
    net.register_buffer("table", torch.randn(4, 7))
    net.register_buffer("calls", torch.zeros((), dtype=torch.int64))


@row(
    "root parameters",
    {"embed": 0, "positions": 0, "blocks.0": 1, "blocks.1": 2, "gain": 3, "out": 3},
    put_buffers,
    words=7,
    positions=lambda: nn.Parameter(torch.randn(4, 7)),
    blocks=several(Block, 2),
    gain=lambda: nn.Parameter(torch.tensor(1.5)),
)
def root_parameters(net: Any, words: torch.Tensor) -> Any:
    """Parameters and buffers that the root holds itself, one of them written to."""
    net.calls += 1
    h = net.embed(words) + net.positions[: words.shape[1]]
    h = net.blocks[0](h) + net.table
    return net.out(net.gain * net.blocks[1](h) + net.positions.mean())


class Scores(torch.autograd.Function):
    """Reads a weight itself, and writes into parts of a tensor, as fused heads do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: None) -> tuple[torch.Tensor, None]:
        ctx.save_for_backward(hidden, weight)
        made = torch.zeros(len(hidden))
        for at in range(len(hidden)):
            made[at : at + 1].add_((hidden[at : at + 1] @ weight.t()).sum(-1))
        return made, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        each = gradients[0][:, None].expand(-1, len(weight))
        return each @ weight, each.t() @ hidden, None


KEPT_APPLY: Any = Scores.apply  # as models write it, before any engine


@row("custom function", {"first": 0, "second": 1, "last": 1}, second=linear(7, 7))
def custom_function(net: Any, x: torch.Tensor, apply: Any = None) -> Any:
    """Between modules; its input has another use."""
    hidden = net.second(net.first(x).tanh())
    scores, nothing = (apply or Scores.apply)(hidden, net.last.weight, None)
    assert nothing is None
    return scores[:, None] * hidden[:, :3]


@row("custom function, kept", {"first": 0, "second": 1, "last": 0}, second=linear(7, 7))
def custom_function_kept(net: Any, x: torch.Tensor) -> Any:
    """The weight is on the stage before."""
    return custom_function(net, x, KEPT_APPLY)


# -- values that go into modules and out of them


@dataclass
class Halves:
    """Neither a tuple nor known to torch as a tree."""

    left: torch.Tensor
    right: torch.Tensor | None
    note: str


def split(net: Any, x: torch.Tensor) -> Any:
    """A tuple of a tensor, a list with None, and a dict."""
    h = net.layer(x)
    return h, [h[:, :3], None, (h[:, 3:],)], {"sum": h.sum(), "count": 3, "nothing": None}


def join(net: Any, pair: Any, /, parts: Any, *, extra: dict[str, Any], scale: float = 1.0) -> Halves:
    """Takes all that apart again; gives a dataclass."""
    left, nothing, (right,) = parts
    assert nothing is extra["nothing"] is None
    h = net.layer(torch.cat([left, right], 1) * scale + pair) + extra["sum"] / extra["count"]
    return Halves(left=h, right=h.tanh() if scale > 1 else None, note="joined")


def result(**values: Any) -> Any:
    """What models of transformers return; without attentions."""
    from transformers.modeling_outputs import CausalLMOutput  # seconds, which to collect tests does not take

    return CausalLMOutput(**values)


def report(net: Any, halves: Halves, *, factors: list[Any]) -> Any:
    """Takes a dataclass, gives a ModelOutput."""
    assert halves.note == "joined"
    return result(logits=net.layer(halves.left) * factors[1], hidden_states=(halves.left, halves.right))


@row(
    "nested",
    {"first": 0, "splitter": 1, "joiner": 2, "reporter": 3, "last": 3},
    settings={"loss": None},
    splitter=formed(split, layer=linear(7, 7)),
    joiner=formed(join, layer=linear(7, 7)),
    reporter=formed(report, layer=linear(7, 7)),
)
def nested(net: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Arguments and results in every kind of container, with other things between the tensors."""
    whole, parts, extra = net.splitter(net.first(x))
    reported = net.reporter(net.joiner(whole, parts, extra=extra, scale=1.5), factors=["two", 2.0, None])
    assert reported.attentions is None
    logits = net.last(reported[0] + reported.hidden_states[1])
    return result(loss=F.mse_loss(logits, y), logits=logits, hidden_states=(*reported.hidden_states, logits))


def spectrum(net: Any, x: torch.Tensor) -> Any:
    """Gives complex values, whole numbers, truths and float64, one of its inputs as it is, and other strides."""
    h = net.layer(x)
    return torch.fft.rfft(h), h.argsort(1), h > 0, h.double().cumsum(1), x, h.mean(1, keepdim=True).expand(-1, 7)


@row(
    "kinds",
    {"first": 0, "spectra.0": 0, "spectra.1": 1, "spectra.2": 2, "last": 3},
    spectra=several(formed(spectrum, layer=linear(7, 7)), 3),
)
def kinds(net: Any, x: torch.Tensor) -> Any:
    """Values of many dtypes cross stages."""
    h = net.first(x)
    for each in net.spectra:
        waves, order, positive, sums, same, mean = each(h)
        h = torch.fft.irfft(waves * 1.5, n=7).gather(1, order) + sums.float() * positive + same + mean
    return net.last(h)


TWO = {"first": 0, "one": 0, "two": 1, "last": 1}
FOUR = {"first": 0, "one": 1, "two": 2, "last": 3}


def both(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Two modules of a kind."""
    return {"one": make, "two": make}


@row("packed sequences", TWO, **both(functools.partial(nn.GRU, 7, 7, batch_first=True)))
def packed(net: Any, x: torch.Tensor) -> Any:
    """A packed sequence between two recurrent layers."""
    h = net.first(x).unsqueeze(1).expand(-1, 3, -1)
    sequence = pack_padded_sequence(h, torch.arange(len(x)) % 3 + 1, batch_first=True, enforce_sorted=False)
    sequence, _ = net.two(net.one(sequence)[0])
    return net.last(pad_packed_sequence(sequence, batch_first=True)[0].sum(1))


# -- what modules do beside returning values


def fill(net: Any, x: torch.Tensor, seen: dict[str, Any], penalties: list[Any]) -> Any:
    """Reads and fills a dict and a list that it is given."""
    out = Block.forward(net, x)
    out = out + seen["before"][0] if "before" in seen else out
    seen["before"] = (out * 2, None)
    penalties += [out.square().mean(), 0.25]
    return out


@row("filled containers", TWO, **both(formed(fill, base=Block)))
def filled(net: Any, x: torch.Tensor) -> Any:
    seen: dict[str, Any] = {}
    penalties: list[Any] = []
    h = net.two(net.one(net.first(x), seen, penalties), seen, penalties)
    assert len(penalties) == 4
    return net.last(h + 0.1 * seen["before"][0]) + penalties[0] + penalties[2] * penalties[3]


def count(net: Any, x: torch.Tensor) -> Any:
    """Returns numbers and texts that change from call to call."""
    net.num_calls += 1
    return Block.forward(net, x), 1.0 / net.num_calls, ("odd", "even")[net.num_calls % 2]


@row("numbers and texts", FOUR, **both(formed(count, base=Block, num_calls=lambda: 0)))
def counted(net: Any, x: torch.Tensor) -> Any:
    h, factor, parity = net.one(net.first(x))
    h, _, _ = net.two(h * factor)
    return net.last(h if parity == "odd" else h * 3)


def borrow(net: Any, x: torch.Tensor, other: Any = None) -> Any:
    """Is handed a module of another stage, which brings its parameters along."""
    out = Block.forward(net, x) + net.own.weight.mean()
    return out if other is None else out @ other.weight[:, :1].expand(7, 7)


BORROWING = both(formed(borrow, base=Block, own=linear(5, 7)))


@row("borrowed", FOUR, **BORROWING)
def borrowed(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x)), net.first))


@row("borrowed tie", FOUR, lambda net: setattr(net.two.own, "weight", net.first.weight), **BORROWING)
def borrowed_tie(net: Any, x: torch.Tensor) -> Any:
    """The stage that is handed the module has its weight by another name, too."""
    return borrowed(net, x)


def weigh(net: Any, x: torch.Tensor) -> Any:
    """Gives a number along, and a shape that depends on values."""
    out = Block.forward(net, x)
    return out[out.sum(1) > -1e9], 0.5


@row("recomputed", TWO, **both(formed(weigh, base=Block)))
def recomputed(net: Any, x: torch.Tensor) -> Any:
    """A recomputation announces nothing."""
    h = net.first(x)
    for block in (net.one, net.two):
        with set_checkpoint_early_stop(False):  # so that a module is computed again to its end
            given, factor = checkpoint(block, h, use_reentrant=False)
        h = given * factor
    return net.last(h)


class Parcel:
    """A class that nobody can look into."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


@row(
    "parcels",
    {"first": 0, "packing": 1, "unpacking": 1, "last": 1},
    packing=formed(lambda net, x: Parcel(Block.forward(net, x)), base=Block),
    unpacking=formed(lambda net, parcel: Block.forward(net, parcel.content), base=Block),
)
def handing(net: Any, x: torch.Tensor) -> Any:
    """One module hands the next an object of a class of its own."""
    return net.last(net.unpacking(net.packing(net.first(x))))


# -- objects that are gone, and others at their address


class Repeated:
    """A callable object that cannot be hashed, and gives bound methods."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repeated)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.parts)


class Slotted(Repeated):
    __slots__ = ()


CALLABLES: list[Callable[[int], Any]] = [
    lambda parts: lambda x: torch.cat([x] * parts),
    lambda parts: functools.partial(Repeated.__call__, Repeated(parts)),
    *(Repeated, Slotted),
    lambda parts: Repeated(parts).__call__,
]


@on_chain("callables", in_blocks(formed(lambda net, x, way: way(Block.forward(net, x)), base=Block)))
def passing(net: Any, x: torch.Tensor) -> Any:
    """Hands a new callable to each of its modules, and lets go of it; writes to tensors that it lets go of."""
    h = net.first(x)
    for at, make in enumerate(CALLABLES):
        for parts in (1, 2):
            h = net.blocks[at % 4](h, make(parts))[: len(h)]  # what they are given has one shape
            room = torch.zeros(h.shape)
            room[:, 0] = h[:, 0].detach()
            del room
            h = h + torch.zeros(h.shape)
    return net.last(h)


def convolution(inputs: int, outputs: int) -> nn.Module:
    """Convolution, running statistics, relu in place."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


@row(
    "u-net",
    {"enter": 0, "down.0": 0, "down.1": 1, "middle": 1, "up.0": 2, "up.1": 3, "leave": 3},
    settings={"batches": [images(seed) for seed in range(3)]},
    is_bare=True,
    enter=lambda: nn.Conv2d(1, 3, 3, padding=1),
    down=lambda: nn.ModuleList([convolution(3, 4), convolution(4, 5)]),
    pool=lambda: nn.MaxPool2d(2),
    middle=lambda: convolution(5, 5),
    up=lambda: nn.ModuleList([convolution(9, 4), convolution(7, 3)]),
    leave=linear(3, 3),
)
def unet(net: Any, x: torch.Tensor) -> Any:
    """Skips over all stages, popped from a list."""
    h, skips = net.enter(x), []
    for down in net.down:
        skips.append(h)
        h = down(net.pool(h))
        if len(skips) == 1:
            skips[0] = 1.5 * skips[0]
    skips[1] = F.interpolate(skips[1], scale_factor=1.0)
    h = net.middle(h)
    for up in net.up:
        h = up(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1))
    return net.leave(h.mean((2, 3)))
