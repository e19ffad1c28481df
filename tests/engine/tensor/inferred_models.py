"""Modules written by hand, each with one thing that a plan has to respect."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 16, 4


class Around(nn.Module):
    """An embedding, one block with a residual, a norm and a head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        result: torch.Tensor = self.head(hidden + self.block(self.norm(hidden)))
        return result


class Feed(nn.Module):
    """Two linear maps with something in between, which subclasses say."""

    def __init__(self, inner: int = 24, narrowed: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(narrowed, WIDTH)
        self.inner = inner

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.between(self.up(hidden)))
        return result


class Centred(Feed):
    """The mean over what would be cut."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden - hidden.mean(-1, keepdim=True))


class CentredInTraining(Feed):
    """The mean over what would be cut, behind dropout, where evaluation shows neither."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(hidden), 0.1, self.training)
        return hidden - hidden.mean(-1, keepdim=True) if self.training else hidden


class Summed(Feed):
    """A running sum over what would be cut."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(-1)


class Scaled(Feed):
    """A scale and a shift for each feature: parameters of the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 24))
        self.shift = nn.Parameter(torch.linspace(-1.0, 1.0, 24))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden * self.scale + self.shift)


class Weighed(Feed):
    """A buffer with a number for each feature, which every rank has whole."""

    weights: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 24))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weights


class Gated(Feed):
    """Gates and values of one map: side by side, or in turns."""

    def __init__(self, *, is_interleaved: bool, is_constant: bool = False) -> None:
        super().__init__(48, 24)
        self.is_interleaved = is_interleaved
        self.is_constant = is_constant

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_interleaved:
            return torch.sigmoid(hidden[..., ::2]) * hidden[..., 1::2]
        if self.is_constant:
            gate, value = hidden[..., : self.inner // 2], hidden[..., self.inner // 2 :]
        else:
            gate, value = hidden.chunk(2, dim=-1)
        return torch.sigmoid(gate) * value


class Reversed(Feed):
    """Features in the other order."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.flip(-1)


class Convolved(Feed):
    """A convolution over positions between the maps."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(24, 24, 3, padding=1)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        return result


class ReadTwice(Feed):
    """What would be cut goes to a linear map and to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.back = nn.LayerNorm(24), nn.Linear(24, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.up(hidden))
        result: torch.Tensor = self.down(inner) + self.back(self.side(inner))
        return result


class TwoReaders(Feed):
    """What is cut goes to two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(24, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.up(hidden))
        result: torch.Tensor = self.down(inner) + self.other(inner)
        return result


class GatedByWhole(Feed):
    """Each position's features are scaled by a number that all ranks compute from the whole input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(hidden) * torch.sigmoid(hidden.mean(-1, keepdim=True)))
        return result


class WholeAdded(Feed):
    """The residual goes into what would be cut."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(hidden) + hidden))
        return result


class Attention(nn.Module):
    """Heads of one fused map, whose outputs lie by query, key and value (p), head (h) and dim of a head (d)."""

    def __init__(self, order: str, *, is_counted: bool = False) -> None:
        super().__init__()
        self.order, self.is_counted = order, is_counted
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        sizes = {"p": 3, "h": self.num_heads if self.is_counted else -1, "d": self.head_dim}
        split = self.qkv(hidden).view(batch, length, *(sizes[each] for each in self.order))
        parts = split.permute(2 + self.order.index("p"), 0, 2 + self.order.index("h"), 1, 2 + self.order.index("d"))
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class Absorbing(nn.Module):
    """Attention whose view lets the positions take what heads lack, without an error."""

    def __init__(self, num_groups: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, num_groups, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, num_groups * self.head_dim) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query = self.q(hidden).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
        key, value = (
            each(hidden).view(batch, -1, self.num_kv_heads, self.head_dim).transpose(1, 2) for each in (self.k, self.v)
        )
        repeats = self.num_heads // self.num_kv_heads
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        weights = (query @ key.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)
        result: torch.Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, length, -1))
        return result


class Sloped(Absorbing):
    """A slope for each head, computed from how many there are: other slopes on each rank."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            each(hidden).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        slopes = 2.0 ** -torch.arange(1, self.num_heads + 1, dtype=hidden.dtype)
        weights = query @ key.transpose(-1, -2) + slopes[:, None, None] * torch.arange(length, dtype=hidden.dtype)
        result: torch.Tensor = self.out((weights.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))
        return result


class Tied(nn.Module):
    """The embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(11, WIDTH), Feed()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        result: torch.Tensor = self.head(hidden + self.block(self.norm(hidden)))
        return result


class ReadByHand(Tied):
    """The model itself reads the weight of its embedding."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        return F.linear(hidden + self.block(self.norm(hidden)), self.embed.weight)


class Shown(nn.Module):
    """What would be cut is given with the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, 11)

    def forward(self, words: torch.Tensor) -> Sequence[torch.Tensor]:
        inner = torch.relu(self.up(self.norm(self.embed(words))))
        return self.down(inner), inner
