"""Hand-written nets, each with one way in which values flow between modules. Most widths are odd."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.engine.expected import seeded
from tests.engine.oracle import Batch
from tests.engine.pipeline.oracle import Case

ROWS = 10
NUM_WORDS = 11


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


VECTORS = [vectors(seed) for seed in range(5)]
SENTENCES = [sentences(seed) for seed in range(5)]
IMAGES = [images(seed) for seed in range(5)]


def square(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(output, batch["y"])


def word_entropy(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of [rows, length, words]."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


class Block(nn.Module):
    """Two layers, their sizes odd."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 2)
        self.outer = nn.Linear(width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


class Chain(nn.Module):
    """Blocks one after another, with skips."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        out: torch.Tensor = self.last(torch.relu(h))
        return out


CHAIN = {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3, "last": 3}


class MultiLoss(Chain):
    """Every layer adds to the loss, which the model computes itself and returns among other things."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        h = self.first(x)
        hidden = [h]
        penalty: Any = 0.0
        for block in self.blocks:
            h = torch.relu(block(h))
            hidden.append(h)
            penalty = penalty + 0.01 * h.square().mean()
        assert y is not None
        return {"loss": F.mse_loss(self.last(h), y) + penalty, "penalty": penalty, "hidden": hidden}


class SeveralLosses(Chain):
    """Three outputs, from three stages; the loss function adds what it makes of them."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        early = self.blocks[0](h)
        late = self.blocks[2](self.blocks[1](early))
        return self.last(self.blocks[3](late)), {"early": early.abs().mean(), "late": [late]}


def several_losses(output: Any, batch: Batch) -> torch.Tensor:
    """Of all stages."""
    logits, others = output
    loss: torch.Tensor = square(logits, batch) + 0.1 * others["early"] + 0.1 * others["late"][0].square().sum(1).mean()
    return loss


class ConvNorm(nn.Sequential):
    """Convolution, running statistics, relu in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips over all stages, popped from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 3, 3, padding=1)
        self.down = nn.ModuleList([ConvNorm(3, 4), ConvNorm(4, 5)])
        self.pool = nn.MaxPool2d(2)
        self.middle = ConvNorm(5, 5)
        self.up = nn.ModuleList([ConvNorm(9, 4), ConvNorm(7, 3)])
        self.leave = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(h)
            h = down(self.pool(h))
            if len(skips) == 1:
                skips[0] = 1.5 * skips[0]
        skips[1] = F.interpolate(skips[1], scale_factor=1.0)
        h = self.middle(h)
        for up in self.up:
            h = up(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1))
        out: torch.Tensor = self.leave(h.mean((2, 3)))
        return out


UNET = {"enter": 0, "down.0": 0, "down.1": 1, "middle": 1, "up.0": 2, "up.1": 3, "leave": 3}


class Recurrent(nn.Module):
    """Two cells called once per word. With `returns` the upper one's state goes down again: the stages take turns."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 5)
        self.lower = nn.GRUCell(5, 5)
        self.upper = nn.GRUCell(5, 5)
        self.out = nn.Linear(5, NUM_WORDS)
        self.returns = returns

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(words)
        low = high = torch.zeros(len(words), 5)
        outputs = []
        for at in range(words.shape[1]):
            low = self.lower(embedded[:, at], high if self.returns else low)
            high = self.upper(low, high)
            outputs.append(high)
        out: torch.Tensor = self.out(torch.stack(outputs, 1))
        return out


RECURRENT = {"embed": 0, "lower": 1, "upper": 2, "out": 3}


class Feedback(nn.Module):
    """Stages 0 -> 1 -> .. -> last -> 0 -> loss, where stage 0 runs the same module again and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = start = self.again(torch.tanh(self.first(x)))
        for block in self.blocks:
            h = block(h)
        out: torch.Tensor = self.last(torch.tanh(self.again(h) + start))
        return out


FEEDBACK = {"first": 0, "again": 0, "last": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3}


class Selecting(nn.Module):
    """Which rows and elements go on depends on their values, in glue and inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.pick = PositiveRows()
        self.middle = nn.Linear(7, 7)
        self.late = Block()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        positive = torch.masked_select(h, h > 0)
        large = h[h.abs() > 1]
        rows = (h.sum(1) > 0).nonzero().squeeze(1)
        h = h.index_add(0, rows, self.middle(h[rows]))
        picked, where = self.pick(h)
        h = h.index_copy(0, where, self.late(picked))
        out: torch.Tensor = self.last(h) + 0.1 * positive.sum() + 0.1 * large.square().sum()
        return out


class PositiveRows(nn.Module):
    """Rows with a positive sum, and which they are; sizes that only the values tell."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((7,), 1.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.nonzero((x * self.scale).sum(1) > 0).squeeze(1)
        return x[rows] * self.scale, rows


SELECTING = {"first": 0, "middle": 1, "pick": 1, "late": 2, "last": 3}


class Sometimes(nn.Module):
    """A side branch that some microbatches use, some only look at, and some leave out; and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.side = Block()
        self.unused = Block()
        self.main = Block()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        side = self.side(h)
        self.unused(side)
        if bool((use > 1).any()):
            h = h + side
        elif bool((use > 0).any()):
            h = h.detach() + side.detach()
        out: torch.Tensor = self.last(self.main(h))
        return out


SOMETIMES = {"first": 0, "side": 1, "unused": 2, "main": 2, "last": 3}
USES = [
    torch.tensor(use, dtype=torch.float32)
    for use in ([2] * 10, [0, 0, 0, 2, 2, 2, 1, 1, 0, 0], [0] * 10, [1] * 10, [1, 1, 1, 0, 0, 0, 0, 0, 2, 2])
]


class UnderNoGrad(nn.Module):
    """A target computed by a stage without a gradient, an input cut off, and gradients switched off by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.teacher = Block()
        self.student = Block()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            target = self.teacher(h)
        with torch.set_grad_enabled(False):
            scale = h.abs().mean() + 1
        out: torch.Tensor = self.last(self.student(h.detach()) / scale + target) + self.last(h * target.mean())
        return out


UNDER_NO_GRAD = {"first": 0, "teacher": 1, "student": 2, "last": 3}


class Variable(nn.Module):
    """Each microbatch is cut to its longest sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 6)
        self.mixers = nn.ModuleList([nn.LSTM(6, 6, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)])
        self.out = nn.Linear(6, NUM_WORDS)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        words, targets = words[:, :longest], targets[:, :longest]
        h, (memory, _) = self.mixers[0](self.embed(words))
        h = h + memory[-1][:, None]
        padded = torch.arange(longest)[None] >= lengths[:, None]
        mixed, _ = self.mixers[1](h, h, h, key_padding_mask=padded, need_weights=False)
        logits = self.out(h + mixed)
        return F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(padded, -100).flatten())


VARIABLE = {"embed": 0, "mixers.0": 1, "mixers.1": 2, "out": 3}


def frozen(model: Chain, *names: str) -> Chain:
    """`model` with some of its modules frozen."""
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def case(make: Callable[[], nn.Module], stages: Mapping[str, int], **settings: Any) -> Case:
    """A net on vectors with a squared loss, unless told otherwise."""
    return Case(make=seeded(make), stages=stages, **{"batches": VECTORS, "loss": square, **settings})


def on_words(make: Callable[[], nn.Module], stages: Mapping[str, int]) -> Case:
    """A net that predicts words."""
    return case(make, stages, batches=SENTENCES, loss=word_entropy)


CASES: dict[str, Case] = {
    "chain": case(Chain, CHAIN),
    "eight blocks": case(
        lambda: Chain(8),
        {"first": 0, **{f"blocks.{at}": at for at in range(8)}, "last": 7},
        num_stages=8,
    ),
    "multi-loss": case(MultiLoss, CHAIN, loss=None),
    "several losses": case(SeveralLosses, CHAIN, loss=several_losses),
    "u-net": case(UNet, UNET, batches=IMAGES),
    "recurrent": case(lambda: Recurrent(returns=False), RECURRENT, batches=SENTENCES, loss=word_entropy),
    "recurrent, returning": case(lambda: Recurrent(returns=True), RECURRENT, batches=SENTENCES, loss=word_entropy),
    "feedback": case(Feedback, FEEDBACK),
    "feedback over three": case(
        Feedback,
        {"first": 0, "again": 0, "last": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 2},
        num_stages=3,
    ),
    "selecting": case(Selecting, SELECTING),
    "first frozen": case(lambda: frozen(Chain(), "first", "blocks.0"), CHAIN),
    "middle frozen": case(lambda: frozen(Chain(), "blocks.1", "blocks.2"), CHAIN),
    "sometimes": case(
        Sometimes,
        SOMETIMES,
        batches=[{**batch, "use": use} for batch, use in zip(VECTORS, USES, strict=True)],
    ),
    "under no_grad": case(UnderNoGrad, UNDER_NO_GRAD),
    "variable lengths": case(
        Variable, VARIABLE, batches=[sentences(seed, 3 + seed % 3) for seed in range(5)], loss=None
    ),
}
