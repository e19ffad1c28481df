"""Plans of tensor parallelism that are wrong, each in one way, and plans that are right, for blocks of a small net."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from tests.engine.formed import formed, linear
from tests.oracle.program import adamw

WIDTH, WIDE = 8, 24
Rules = Mapping[str, str]


def between(change: Callable[[torch.Tensor], torch.Tensor], *, parts: int = 1) -> type[nn.Module]:
    """Two linear maps with a function between, which may mix what is cut."""

    def between(net: Any, x: torch.Tensor) -> Any:
        return net.down(net.change(net.up(x)))

    change_of = (lambda: change) if not isinstance(change, type) else change
    return formed(between, up=linear(WIDTH, WIDE * parts), down=linear(WIDE, WIDTH), change=change_of)


def heads(net: Any, x: torch.Tensor) -> Any:
    """Attention whose view takes whatever is left for positions, as that of OPT does."""
    shape = (len(x), -1, net.num_heads, WIDTH // 4)
    q, k, v = (each(x).view(shape).transpose(1, 2) for each in (net.q, net.k, net.v))
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return net.out(mixed.transpose(1, 2).reshape(len(x), x.shape[1], -1))


MAPS: dict[str, Any] = dict.fromkeys(("q", "k", "v", "out"), linear(WIDTH, WIDTH))
HEADS = formed(heads, num_heads=lambda: 4, **MAPS)


def experts(*, alternate: bool = False) -> type[nn.Module]:
    """Two experts in bare parameters, and a bias that begins as zeros."""

    def both_experts(net: Any, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = net.bias.expand_as(x)
        for first, last in zip(net.gate_up, net.down, strict=True):
            both = functional.linear(x, first)
            gate, up = (both[..., 0::2], both[..., 1::2]) if alternate else both.chunk(2, -1)
            total = total + functional.linear(torch.sigmoid(gate) * up, last)
        return total

    return formed(
        both_experts,
        gate_up=lambda: nn.Parameter(torch.randn(2, 2 * WIDE, WIDTH) / 3),
        down=lambda: nn.Parameter(torch.randn(2, WIDTH, WIDE) / 5),
        bias=lambda: nn.Parameter(torch.zeros(WIDTH)),
    )


def in_training(change: Callable[[torch.Tensor], torch.Tensor]) -> type[nn.Module]:
    """Computes something else while it is trained, behind dropout of two kinds."""

    def training(net: Any, x: torch.Tensor) -> Any:
        h = functional.dropout(net.drop(net.up(x)), 0.3, net.training)
        return net.down(change(h) if net.training else h)

    return formed(training, up=linear(WIDTH, WIDE), down=linear(WIDE, WIDTH), drop=nn.Dropout)


def shifted() -> nn.Module:
    """What is cut, behind what mixes positions."""
    shift = formed(lambda net, x: x + x.roll(1, 1))
    return nn.Sequential(
        formed(
            lambda net, x: net.down(torch.tanh(net.up(net.shift(x)))),
            up=linear(WIDTH, WIDE),
            down=linear(WIDE, WIDTH),
            shift=shift,
        )()
    )


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.sigmoid(gate) * up


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


softmax = partial(torch.softmax, dim=-1)
CUT = {"block.up": "column", "block.down": "row"}
EXPERTS = {"block": "sum", "block.down": "row", "block.bias": "once"}
ATTENTION = {"block.[qkv]": "column", "block.out": "row"}

FAULTS: dict[str, tuple[Callable[[], nn.Module], Rules]] = {
    "order of fused parts": (between(gated, parts=2), CUT),
    "order of alternating parts": (experts(alternate=True), {**EXPERTS, "block.gate_up": "packed_colwise"}),
    "order of bare parts": (experts(), {**EXPERTS, "block.gate_up": "column"}),
    "missing heads": (HEADS, ATTENTION),
    "softmax": (between(softmax), CUT),
    "missing sum": (experts(), {"block.gate_up": "packed_colwise", "block.down": "row"}),
    "bias that counts twice": (
        experts(),
        {"block": "sum", "block.gate_up": "packed_colwise", "block.down": "row"},
    ),
    "mean in training": (in_training(centred), CUT),
    "wrong sequence": (
        shifted,
        {"block.0.up": "column", "block.0.down": "row", "block.0.shift": "sequence"},
    ),
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], Rules]] = {
    "fused parts": (between(gated, parts=2), {"block.up": "column(parts=2)", "block.down": "row"}),
    "alternating parts": (experts(alternate=True), {**EXPERTS, "block.gate_up": "column(unit=2)"}),
    "bare parts": (experts(), {**EXPERTS, "block.gate_up": "packed_colwise"}),
    "heads": (HEADS, {**ATTENTION, "block": "heads"}),
    "softmax of what is gathered": (
        between(softmax),
        {"block.up": "colwise_gather_output", "block.down": "rowwise_split_input"},
    ),
    "training": (in_training(torch.tanh), CUT),
    "noise in training": (in_training(lambda h: h + torch.randn_like(h)), CUT),
}

# What may stand between two maps: how many features are to stay together, 0 for all of them.


def whole_net(block: Callable[[], nn.Module]) -> nn.Module:
    """The block between an embedding and a head."""

    def words_to_words(net: Any, words: torch.Tensor) -> Any:
        x = net.norm(net.embedding(words))
        return net.head(x + net.block(x))

    embedding, norm = partial(nn.Embedding, 11, WIDTH), partial(nn.LayerNorm, WIDTH)
    return formed(words_to_words, embedding=embedding, norm=norm, block=block, head=linear(WIDTH, 11))()


def plan_of(rules: Rules | None, mesh: str = "tp=2", *, compute: str | None = None, **others: Any) -> sw.Plan:
    """A plan with these rules, which are proved unless told otherwise."""
    return sw.Plan(
        mesh=sw.Mesh.parse(mesh) if mesh else sw.Mesh(),
        tensor=sw.Tensor(rules=rules, prove=others.pop("prove", True)),
        precision=sw.Precision(compute=compute),
        **others,
    )


def loss_of_words(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """In float32 at least."""
    logits = output.flatten(0, 1)
    return functional.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), batch["words"].flatten()
    )


def train(
    channel: sw.Channel,
    make: Callable[[], nn.Module],
    plan: sw.Plan,
    *,
    double: bool = False,
    steps: int = 2,
    act: Callable[[sw.Engine], object] = lambda _: None,
    **settings: Any,
) -> list[float]:
    """The losses; `act` is given the engine before the first step."""
    torch.manual_seed(0)
    model = whole_net(make)
    model = model.double() if double else model
    engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss_of_words, channel=channel, **settings)
    act(engine)
    words = torch.arange(48).view(8, 6) * 3
    return [engine.step({"words": (words + at) % 11}).loss for at in range(steps)]
