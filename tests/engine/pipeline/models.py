"""Hand-written nets, each with one way in which values flow between modules. Most widths are odd."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.engine.expected import seeded
from tests.engine.oracle import Batch
from tests.engine.pipeline.oracle import Case

ROWS = 12
"""Even microbatches where k divides it: what a stage infers of modules elsewhere, it infers for each shape."""
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


VECTORS = [vectors(seed) for seed in range(3)]
SENTENCES = [sentences(seed) for seed in range(3)]
IMAGES = [images(seed) for seed in range(3)]


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


ONE_BY_ONE = {"first": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "blocks.3": 4, "last": 4}
"""For five stages: every block gets its input from another one."""


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


class Collecting(Chain):
    """The loss has a term for every layer's input, which is also the skip past the layer."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        hidden = []
        for block in self.blocks:
            hidden.append(h)
            h = self.crossed(h)
            h = h + block(h)
        return self.last(torch.relu(h)), hidden

    def crossed(self, h: torch.Tensor) -> torch.Tensor:
        """What the next stage gets."""
        return h


class CollectingInOrder(Collecting):
    """`Collecting` with the additions of its stages: the next stage's two gradients of a value come as their sum."""

    def crossed(self, h: torch.Tensor) -> torch.Tensor:
        return h.view_as(h)


def loss_of_collected(output: Any, batch: Batch) -> torch.Tensor:
    """With the terms of all layers."""
    logits, hidden = output
    return square(logits, batch) + 0.1 * torch.stack([each.square().mean() for each in hidden]).sum()


def frozen(model: Chain, *names: str) -> Chain:
    """`model` with some of its modules frozen."""
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def case(make: Callable[[], nn.Module], stages: Mapping[str, int], **settings: Any) -> Case:
    """A net on vectors with a squared loss, unless told otherwise."""
    return Case(make=seeded(make), stages=stages, **{"batches": VECTORS, "loss": square, **settings})


def on_words(make: Callable[[], nn.Module], stages: Mapping[str, int], **settings: Any) -> Case:
    """A net that predicts words."""
    return case(make, stages, batches=SENTENCES, loss=word_entropy, **settings)


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
    "collecting": case(
        Collecting, ONE_BY_ONE, num_stages=5, loss=loss_of_collected, make_oracle=seeded(CollectingInOrder)
    ),
    "first frozen": case(lambda: frozen(Chain(), "first", "blocks.0"), CHAIN),
    "middle frozen": case(lambda: frozen(Chain(), "blocks.1", "blocks.2"), CHAIN),
}
