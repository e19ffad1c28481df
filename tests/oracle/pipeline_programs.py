"""Programs for stages: each has one way in which values flow between modules. Most widths are odd."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.engine.formed import formed, linear, one_after_another, several
from tests.oracle.batches import NUM_WORDS, Batch
from tests.oracle.program import Program, seeded

ROWS = 12
"""Even microbatches where k divides it: what a stage infers of modules elsewhere, it infers for each shape."""


def vectors(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """[rows, 5] points and [rows, 3] values."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 5, generator=generator), "y": torch.randn(rows, 3, generator=generator)}


def sentences(seed: int, length: int = 4) -> dict[str, torch.Tensor]:
    """[ROWS, length] words, as many targets, and [ROWS] lengths."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "words": torch.randint(0, NUM_WORDS, (ROWS, length), generator=generator),
        "lengths": torch.randint(1, length + 1, (ROWS,), generator=generator),
        "targets": torch.randint(0, NUM_WORDS, (ROWS, length), generator=generator),
    }


def images(seed: int) -> dict[str, torch.Tensor]:
    """[ROWS, 1, 8, 8] pictures and [ROWS, 3] values."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(ROWS, 1, 8, 8, generator=generator), "y": torch.randn(ROWS, 3, generator=generator)}


VECTORS = [vectors(seed) for seed in range(3)]
SENTENCES = [sentences(seed) for seed in range(3)]


def square(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(output, batch["y"])


def word_entropy(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of [rows, length, words]."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


Way = Callable[..., Any]
PIPELINE_PROGRAMS: dict[str, Program] = {}


def add(name: str, make: Callable[[], nn.Module], stages: Mapping[str, int], **settings: Any) -> Program:
    """A net on vectors with a squared loss, unless told otherwise."""
    given = {"batches": VECTORS, "loss": square, "num_stages": 1 + max(stages.values()), **settings}
    PIPELINE_PROGRAMS[name] = program = Program(make=seeded(make), stages=stages, **given)
    return program


def row(
    name: str,
    stages: Mapping[str, int],
    *prepare: Callable[[Any], object],
    base: type[nn.Module] = nn.Module,
    words: int = 0,
    is_bare: bool = False,
    settings: Mapping[str, Any] = {},
    **parts: Any,
) -> Callable[[Way], Way]:
    """The function below is the forward of a net with these parts.

    It has a first layer and a last one too, or those of `base`; `is_bare`: no others. words: it predicts words, and
    embeds them so wide.
    """

    def put(way: Way) -> Way:
        around: dict[str, Any] = {"first": linear(5, 7), "last": linear(7, 3)}
        given: dict[str, Any] = {}
        if words:
            around = {"embed": functools.partial(nn.Embedding, NUM_WORDS, words), "out": linear(words, NUM_WORDS)}
            given = {"batches": SENTENCES, "loss": word_entropy}
        if is_bare or base is not nn.Module:
            around = {}
        add(name, formed(way, *prepare, base=base, **around, **parts), stages, **{**given, **settings})
        return way

    return put


# -- chains: a first layer, four blocks with skips, and a last one


class Block(nn.Module):
    """Two layers, their sizes odd."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 9)
        self.outer = nn.Linear(9, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


class Chain(nn.Module):
    """Blocks one after another, with skips."""

    def __init__(self, num_blocks: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        out: torch.Tensor = self.last(torch.relu(h))
        return out


CHAIN = {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3, "last": 3}
ONE_BY_ONE = {"first": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "blocks.3": 4, "last": 4}
"""For five stages: every block gets its input from another one."""


def on_chain(name: str, *prepare: Callable[[Any], object], **settings: Any) -> Callable[[Way], Way]:
    """The function below is another forward of a chain."""
    return row(name, settings.pop("stages", CHAIN), *prepare, base=Chain, settings=settings)


def in_blocks(make: Callable[[], nn.Module]) -> Callable[[Any], object]:
    """Other blocks."""
    return lambda net: setattr(net, "blocks", several(make, 4)())


def frozen(*names: str) -> Callable[[Any], object]:
    """Some of its modules."""
    return lambda net: [net.get_submodule(name).requires_grad_(False) for name in names]


def compiled(net: Any) -> None:
    """Blocks that are compiled themselves, and wrapped ones."""
    for at, block in enumerate(net.blocks):
        if at % 2:
            block.compile(backend="aot_eager")
        else:
            net.blocks[at] = torch.compile(block, backend="eager")


add("chain", Chain, CHAIN)
add("eight blocks", lambda: Chain(8), {"first": 0, **{f"blocks.{at}": at for at in range(8)}, "last": 7})
for _name, _prepare in {
    "first frozen": frozen("first", "blocks.0"),
    "middle frozen": frozen("blocks.1", "blocks.2"),
    "compiled": compiled,
}.items():
    on_chain(_name, _prepare)(Chain.forward)


@on_chain("multi-loss", loss=None)
def multi_loss(net: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Every layer adds to the loss, which the model computes itself and returns among other things."""
    hidden = [net.first(x)]
    for block in net.blocks:
        hidden.append(torch.relu(block(hidden[-1])))
    penalty = sum(0.01 * each.square().mean() for each in hidden[1:])
    return {"loss": F.mse_loss(net.last(hidden[-1]), y) + penalty, "penalty": penalty, "hidden": hidden}


def loss_of_collected(output: Any, batch: Batch) -> torch.Tensor:
    logits, hidden = output
    return square(logits, batch) + 0.1 * torch.stack([each.square().mean() for each in hidden]).sum()


def collecting_in_order(net: Any, x: torch.Tensor) -> Any:
    """With the additions of its stages: the next stage's two gradients of a value come as their sum."""
    return collecting(net, x, lambda h: h.view_as(h))


@on_chain(
    "collecting",
    stages=ONE_BY_ONE,
    loss=loss_of_collected,
    make_oracle=seeded(formed(collecting_in_order, base=Chain)),
)
def collecting(net: Any, x: torch.Tensor, crossed: Callable[[torch.Tensor], torch.Tensor] = lambda h: h) -> Any:
    """The loss has a term for every layer's input, which is also the skip past the layer."""
    h, hidden = net.first(x), []
    for block in net.blocks:
        hidden.append(h)
        h = crossed(h)
        h = h + block(h)
    return net.last(torch.relu(h)), hidden


@on_chain("in place")
def in_place(net: Any, x: torch.Tensor) -> Any:
    """Values are written to, whole and in part, before and after they went to the next stage."""
    h = net.first(x)
    h += 1
    h[:, 0] = 0
    kept = h
    a = net.blocks[0](h)
    a += kept
    a[:, 1:3] *= 2
    a.relu_()
    b = net.blocks[1](a)
    b[:, 2], b[:, 3] = x[:, 2], a[:, 3]
    b.add_(kept, alpha=0.5)
    column = b[:, 4]
    column.mul_(3)
    with torch.no_grad():
        b.view(-1).mul_(0.5)  # a view that torch follows no more afterwards
    memory = torch.zeros(len(x), 7)
    memory[:, :3] = b[:, :3]
    c = net.blocks[2](b) + memory
    c -= b.mean()
    return net.last(net.blocks[3](c).clamp_(min=-1).masked_fill_(c > 2, 0.0))


@on_chain("input written", in_blocks(formed(lambda net, x: net.layer(x.relu_()), layer=linear(7, 7))))
def input_written(net: Any, x: torch.Tensor) -> Any:
    """Modules write to what they got from another stage; one of those values is used again afterwards."""
    h = net.blocks[0](net.first(x))
    a = net.blocks[1](h)
    return net.last(net.blocks[3](net.blocks[2](a + h)))


FLAGS: list[dict[str, Any]] = [
    {**VECTORS[0], "mode": "power", "power": 2, "rate": torch.tensor(0.5)},
    {**VECTORS[1], "mode": "relu", "power": 2, "rate": torch.tensor(1.5), "shift": 0.25},
    {**VECTORS[2], "mode": "power", "power": 3, "rate": torch.tensor(0.5), "shift": None, "deep": False},
]


@on_chain("flags", batches=FLAGS)
def flags(
    net: Any, x: torch.Tensor, mode: str, power: int, rate: torch.Tensor, shift: float | None = None, deep: bool = True
) -> Any:
    """Batch entries of every kind; some decide what is computed."""
    h = net.blocks[0](net.first(x) * rate)
    h = h**power if mode == "power" else h.relu()
    h = h if shift is None else h + shift
    return net.last(net.blocks[3](net.blocks[2](net.blocks[1](h)) if deep else h))


def put_hooks(net: Any) -> None:
    net.seen = []
    for block in net.blocks:
        for each in (block, block.inner):
            each.register_forward_hook(lambda module, args, output: net.seen.append(output))
    net.last.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    net.blocks[1].register_forward_hook(lambda module, args, output: output + 1)


@on_chain("hooked", put_hooks)
def hooked(net: Any, x: torch.Tensor) -> Any:
    """Outputs of modules, and of modules inside placed ones, are collected by hooks and go into the output."""
    net.seen.clear()
    out = Chain.forward(net, x)
    assert len(net.seen) == 2 * len(net.blocks)
    return out + torch.stack([each.square().mean() for each in net.seen]).sum()


@on_chain("checkpointed")
def checkpointed(net: Any, x: torch.Tensor) -> Any:
    """Activations are computed again in backward: of a module, and of glue that follows one."""
    h = net.first(x)
    for at, block in enumerate(net.blocks):
        way = block if at % 2 else lambda v, block=block: torch.tanh(v + block(v)) * 2
        h = checkpoint(way, h, use_reentrant=False)
    return net.last(h)


@on_chain("checkpointed over stages")
def checkpointed_over_stages(net: Any, x: torch.Tensor) -> Any:
    """Regions that are computed again as a whole, over two blocks of one stage or of two, and glue on either side."""

    def two(first: nn.Module, second: nn.Module, v: torch.Tensor) -> Any:
        return second(torch.tanh(first(v * 2) + v)) - v

    h = checkpoint(two, net.blocks[0], net.blocks[1], net.first(x), use_reentrant=False)
    return net.last(checkpoint(two, net.blocks[2], net.blocks[3], h, use_reentrant=False))


@on_chain("autocast")
def autocast(net: Any, x: torch.Tensor) -> Any:
    """The forward switches autocast on and off."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net.blocks[1](net.blocks[0](net.first(x)))
        with torch.autocast("cpu", enabled=False):
            h = net.blocks[2](h.float())
        return net.last(net.blocks[3](h)).float()


ONE_FOR_ALL = formed(lambda net, x: torch.tanh(x))()
"""An activation of which a process has one object, as libraries keep them."""


@on_chain("one activation", lambda net: setattr(net, "activation", ONE_FOR_ALL))
def sharing(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    for block in net.blocks:
        h = h + net.activation(block(h))
    return net.last(h)


# -- paths: again and again, back, only some of them, or not always


CELLS: dict[str, Any] = dict.fromkeys(("lower", "upper"), functools.partial(nn.GRUCell, 5, 5))
EMBED, OUT = functools.partial(nn.Embedding, NUM_WORDS, 5), linear(5, NUM_WORDS)


def turns_in_order(net: Any, words: torch.Tensor) -> Any:
    """With the additions of its stages.

    The lower cell uses the state twice, and then the upper one does: one process adds the lower cell's two gradients
    to the others one by one, a stage gets their sum.
    """
    return turns(net, words, lambda high: high.view_as(high))


@row(
    "recurrent, returning",
    {"embed": 0, "lower": 1, "upper": 2, "out": 3},
    words=5,
    **CELLS,
    settings={"make_oracle": seeded(formed(turns_in_order, embed=EMBED, out=OUT, **CELLS))},
)
def turns(net: Any, words: torch.Tensor, crossed: Callable[[torch.Tensor], torch.Tensor] = lambda high: high) -> Any:
    """Two cells called once per word; the upper one's state goes down again: two stages take turns, word by word."""
    embedded = net.embed(words)
    high, outputs = torch.zeros(len(words), 5), []
    for at in range(words.shape[1]):
        low = net.lower(embedded[:, at], crossed(high))
        high = net.upper(low, high)
        outputs.append(high)
    return net.out(torch.stack(outputs, 1))


FEEDBACK = {"first": 0, "again": 0, "last": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3}


@row("feedback", FEEDBACK, again=linear(7, 7), blocks=several(Block, 3))
def feedback(net: Any, x: torch.Tensor) -> Any:
    """Stages 0 -> 1 -> .. -> last -> 0 -> loss, where stage 0 runs the same module again and one of its own."""
    start = net.again(torch.tanh(net.first(x)))
    h = one_after_another(net.blocks, start)
    return net.last(torch.tanh(net.again(h) + start))


add(
    "feedback over three",
    PIPELINE_PROGRAMS["feedback"].make,
    {**FEEDBACK, "blocks.2": 2},
)


def positive_rows(net: Any, x: torch.Tensor) -> Any:
    """Rows with a positive sum, and which they are; sizes that only the values tell."""
    rows = torch.nonzero((x * net.scale).sum(1) > 0).squeeze(1)
    return x[rows] * net.scale, rows


@row(
    "selecting",
    {"first": 0, "middle": 1, "pick": 1, "late": 2, "last": 3},
    pick=formed(positive_rows, scale=lambda: nn.Parameter(torch.full((7,), 1.5))),
    middle=linear(7, 7),
    late=Block,
)
def selecting(net: Any, x: torch.Tensor) -> Any:
    """Which rows and elements go on depends on their values, in glue and inside a module."""
    h = net.first(x)
    positive, large = torch.masked_select(h, h > 0), h[h.abs() > 1]
    rows = (h.sum(1) > 0).nonzero().squeeze(1)
    h = h.index_add(0, rows, net.middle(h[rows]))
    picked, where = net.pick(h)
    h = h.index_copy(0, where, net.late(picked))
    return net.last(h) + 0.1 * positive.sum() + 0.1 * large.square().sum()


SIDES: dict[str, Any] = dict.fromkeys(("side", "unused", "main"), Block)
USES = ([2] * 12, [0, 0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0], [0] * 12, [1] * 12, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2])


@row(
    "sometimes",
    {"first": 0, "side": 1, "unused": 2, "main": 2, "last": 3},
    settings={"num_stages": 4, "batches": [{**vectors(at), "use": torch.tensor(use)} for at, use in enumerate(USES)]},
    **SIDES,
)
def sometimes(net: Any, x: torch.Tensor, use: torch.Tensor) -> Any:
    """A side branch that some microbatches use, some only look at, and some leave out; and one that none uses."""
    h = net.first(x)
    side = net.side(h)
    net.unused(side)
    if bool((use > 1).any()):
        h = h + side
    elif bool((use > 0).any()):
        h = h.detach() + side.detach()
    return net.last(net.main(h))


@row("under no_grad", {"first": 0, "teacher": 1, "student": 2, "last": 3}, teacher=Block, student=Block)
def under_no_grad(net: Any, x: torch.Tensor) -> Any:
    """A target computed by a stage without a gradient, an input cut off, and gradients switched off by hand."""
    h = net.first(x)
    with torch.no_grad():
        target = net.teacher(h)
    with torch.set_grad_enabled(False):
        scale = h.abs().mean() + 1
    return net.last(net.student(h.detach()) / scale + target) + net.last(h * target.mean())


@row("ignored", {"first": 0, "ignored": 1, "last": 2}, ignored=Block)
def ignored(net: Any, x: torch.Tensor) -> Any:
    """A stage computes on what the loss needs, and its result is dropped."""
    h = net.first(x)
    net.ignored(h)
    return net.last(h.detach())


@row(
    "variable lengths",
    {"embed": 0, "mixers.0": 1, "mixers.1": 2, "out": 3},
    words=6,
    mixers=lambda: nn.ModuleList([nn.LSTM(6, 6, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)]),
    settings={"batches": [sentences(seed, 3 + seed % 3) for seed in range(4)], "loss": None},
)
def variable(net: Any, words: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each microbatch is cut to its longest sentence."""
    longest = int(lengths.max())
    words, targets = words[:, :longest], targets[:, :longest]
    h, (memory, _) = net.mixers[0](net.embed(words))
    h = h + memory[-1][:, None]
    padded = torch.arange(longest)[None] >= lengths[:, None]
    mixed, _ = net.mixers[1](h, h, h, key_padding_mask=padded, need_weights=False)
    return F.cross_entropy(net.out(h + mixed).flatten(0, 1), targets.masked_fill(padded, -100).flatten())


ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (0, 1, 0, 2, 3), (1, 3))


def turning(seed: int) -> Program:
    """Blocks in an order that the first row of a microbatch says: straight on at first, then any way."""

    def any_way(net: Any, x: torch.Tensor, way: torch.Tensor) -> Any:
        return net.last(one_after_another([net.blocks[number] for number in ORDERS[int(way[0])]], net.first(x)))

    generator = torch.Generator().manual_seed(seed)
    straight = torch.zeros(ROWS, dtype=torch.long)
    ways = [straight, *(torch.randint(len(ORDERS), (ROWS,), generator=generator) for _ in range(3)), straight]
    batches = [{**vectors(number), "way": way} for number, way in enumerate(ways)]
    return add("turning" if not seed else f"turning {seed}", formed(any_way, base=Chain), CHAIN, batches=batches)


for _seed in (0, 9, 12, 28):
    turning(_seed)
