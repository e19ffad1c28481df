"""Hand-written nets, each with one path that values take: again and again, back, only some of them, or not always."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.engine.expected import seeded
from tests.engine.pipeline.models import NUM_WORDS, ROWS, Block, case, on_words, sentences, vectors
from tests.engine.pipeline.oracle import Case


class Recurrent(nn.Module):
    """Two cells called once per word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 5)
        self.lower = nn.GRUCell(5, 5)
        self.upper = nn.GRUCell(5, 5)
        self.out = nn.Linear(5, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(words)
        low = high = torch.zeros(len(words), 5)
        outputs = []
        for at in range(words.shape[1]):
            low = self.lower(embedded[:, at], self.state_of_lower(low, high))
            high = self.upper(low, high)
            outputs.append(high)
        out: torch.Tensor = self.out(torch.stack(outputs, 1))
        return out

    def state_of_lower(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """What the lower cell goes on from."""
        return low


class Returning(Recurrent):
    """The upper cell's state goes down again: two stages take turns, word by word."""

    def state_of_lower(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return high


class ReturningInOrder(Recurrent):
    """`Returning` with the additions of its stages.

    The lower cell uses the state twice, and then the upper one does: one process adds the lower cell's two gradients
    to the others one by one, a stage gets their sum.
    """

    def state_of_lower(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return high.view_as(high)


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
    for use in (
        [2] * ROWS,
        [0, 0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
        [0] * ROWS,
        [1] * ROWS,
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2],
    )
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


class Turning(nn.Module):
    """Blocks in an order that the first row of a microbatch says."""

    ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (0, 1, 0, 2, 3), (1, 3))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for number in self.ORDERS[int(way[0])]:
            h = self.blocks[number](h)
        out: torch.Tensor = self.last(h)
        return out


TURNING = {"first": 0, **{f"blocks.{number}": number for number in range(4)}, "last": 3}


def turning(seed: int) -> Case:
    """Straight on at first; then each of twelve rows says which way."""
    generator = torch.Generator().manual_seed(seed)
    straight = torch.zeros(ROWS, dtype=torch.long)
    ways = [straight, *(torch.randint(len(Turning.ORDERS), (ROWS,), generator=generator) for _ in range(3)), straight]
    return case(Turning, TURNING, batches=[{**vectors(number), "way": way} for number, way in enumerate(ways)])


CASES: dict[str, Case] = {
    "recurrent": on_words(Recurrent, RECURRENT),
    "recurrent, returning": on_words(Returning, RECURRENT, make_oracle=seeded(ReturningInOrder)),
    "feedback": case(Feedback, FEEDBACK),
    "feedback over three": case(
        Feedback,
        {"first": 0, "again": 0, "last": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 2},
        num_stages=3,
    ),
    "selecting": case(Selecting, SELECTING),
    "sometimes": case(
        Sometimes,
        SOMETIMES,
        batches=[{**vectors(seed), "use": use} for seed, use in enumerate(USES)],
    ),
    "turning": turning(0),
    "under no_grad": case(UnderNoGrad, UNDER_NO_GRAD),
    "variable lengths": case(
        Variable, VARIABLE, batches=[sentences(seed, 3 + seed % 3) for seed in range(4)], loss=None
    ),
}
