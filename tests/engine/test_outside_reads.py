"""Stage 3: parameters that a forward reads outside of their module are gathered for that, and change no bit."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.loops import mean_square
from tests.oracle.batches import share_of, word_batch, word_loss
from tests.oracle.comparison import assert_same, assert_trains_like_one_process
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of, seeded

WIDTH = 6
BATCHES = [word_batch(seed, 24) for seed in range(2)]


class Scale(torch.autograd.Function):
    """Keeps a parameter for its backward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).flatten(0, -2).sum(0)


class Block(nn.Module):
    """May read what its neighbour has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, neighbour: "Block | None" = None) -> torch.Tensor:
        x = x + torch.tanh(self.up(self.norm(x)))
        if neighbour is not None:
            x = nn.functional.layer_norm(
                nn.functional.linear(x, neighbour.up.weight.T), (WIDTH,), neighbour.norm.weight, self.norm.bias
            )
        return x


class Net(nn.Module):
    """Blocks between an embedding and a head; `kind` says what is read from outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        if kind == "frozen":
            self.embedding.requires_grad_(False)
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedding = self.embedding.weight
        x = nn.functional.embedding(words, embedding) if self.kind == "functional" else self.embedding(words)
        x = self.norm(self.through_blocks(self.with_reads(x)))
        if self.kind == "autoencoder":
            x = nn.functional.linear(x, self.head.weight) @ self.head.weight
        if self.kind == "tied":
            return self.head(x) + x @ self.head.weight.T  # type: ignore[no-any-return]
        return nn.functional.linear(x, self.embedding.weight, self.head.bias)

    def with_reads(self, x: torch.Tensor) -> torch.Tensor:
        positions, norm = self.positions.weight, self.norm.weight
        match self.kind:
            case "slice":
                x = x + positions[1 : 1 + x.shape[1]]
            case "columns":
                x = x + nn.functional.linear(x, positions[:WIDTH, :WIDTH].T)
            case "expanded":
                x = x + positions[None, : x.shape[1]].expand(len(x), -1, -1)
            case "before its call":
                x = x * norm + self.head.bias.sum()
            case "no gradient":
                with torch.no_grad():
                    x = x * (1 + norm.square().mean())
                x = x + self.head.weight.detach()[:WIDTH].mean(0)
            case "view without gradient":
                with torch.no_grad():
                    row = positions[:1]
                x = x + row
            case "iterated":
                x = x + sum(row.tanh() for row in positions) + torch.stack(positions.unbind()[:1])
            case "function":
                x = Scale.apply(x, norm)  # type: ignore[no-untyped-call]
            case "listed":
                x = x + torch.cat([norm, positions[0], self.head.bias[:WIDTH]]).view(3, -1).sum(0)
        return x

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            if self.kind.startswith("checkpointed"):

                def reads(x: torch.Tensor, block: Any = block) -> torch.Tensor:
                    return block(x) + nn.functional.linear(block(x) @ self.positions.weight[:WIDTH], block.up.weight.T)  # type: ignore[no-any-return]

                x = checkpoint(reads, x, use_reentrant=self.kind != "checkpointed")
            else:
                x = block(x, other if self.kind == "neighbour" else None)
        return x


KINDS = (
    *(
        "",
        "tied",
        "frozen",
        "functional",
        "slice",
        "columns",
        "expanded",
        "before its call",
        "no gradient",
        "neighbour",
    ),
    *("view without gradient", "iterated", "function", "listed", "autoencoder"),
    *("checkpointed", "checkpointed reentrant"),
)


OF_ONE_STAGE = ("function", "checkpointed", "checkpointed reentrant")
"""Refused between stages, whatever they read."""


def program(kind: str, **settings: Any) -> Program:
    return Program(make=seeded(lambda: Net(kind)), batches=BATCHES, **{"loss": word_loss, **settings})


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "kept": {"keep_gathered": True},
    "whole": {"partition": "whole"},
    "blocks": {"units": ("blocks.*",)},
    "nested": {"units": (".", "blocks.*", "blocks.*.up")},
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("kind", "settings", "k"), [(kind, each, k) for kind in KINDS for at, each in enumerate(SETTINGS) for k in (1, 3)
    if at == 0 or (k == 1) == ((at + KINDS.index(kind)) % 2 == 0)]
)  # fmt: skip
def test_reads_outside_of_a_module_change_no_bit(kind: str, settings: str, k: int) -> None:
    made = program(kind)
    if kind == "checkpointed reentrant" and k > 1:  # which gives gradients several times in one backward
        k = 1
    assert_trains_like_one_process(made, plan_of(made, "dp_shard=2", stage=3, k=k, clip=0.3, **SETTINGS[settings]))


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in OF_ONE_STAGE])
def test_reads_between_stages_change_no_bit_in_steps_and_evaluations(kind: str) -> None:
    made = program(kind)
    two, three = (train(made, plan_of(made, "pp=2,dp_shard=2", stage=stage, k=2)) for stage in (2, 3))
    assert_same(three, two)


def test_microbatches_that_only_some_ranks_compute_may_read() -> None:
    batches = [{name: value.clone() for name, value in batch.items()} for batch in BATCHES]
    for batch in batches:
        batch["targets"][:4] = -100
        batch["targets"][20:] = -100
    weight = lambda batch: float((batch["targets"] != -100).sum())  # noqa: E731
    made = Program(make=seeded(lambda: Net("slice")), batches=batches, loss=word_loss, loss_weight=weight)
    assert_trains_like_one_process(made, plan_of(made, "dp_shard=2", stage=3, k=3))


def decayed(model: nn.Module) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """A loss that reads all parameters."""
    return lambda batch: (
        word_loss(model(batch["words"]), batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())
    )


def test_the_loss_may_read_all_parameters() -> None:
    made = program("", loss=None, loss_with=decayed)
    assert_trains_like_one_process(made, plan_of(made, "dp_shard=2", stage=3))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["slice", "no gradient"])
def test_the_traffic_that_is_foretold_counts_reads(kind: str, keeps: bool, k: int) -> None:
    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        made = program(kind)
        plan = plan_of(made, "dp_shard=2", stage=3, k=k, keep_gathered=keeps, bucket_bytes=1 << 20)
        engine = made.engine(plan, recorded)
        rows = share_of(BATCHES[0], channel.rank, channel.size)
        engine.step(rows)
        foretold = engine.traffic()
        recorded.clear()
        before = engine.counters.all_gathers
        engine.step(rows)
        assert recorded.bytes_sent("all_gather") == foretold.gather_bytes
        assert recorded.bytes_sent("reduce_scatter") == foretold.reduce_bytes
        assert engine.counters.all_gathers - before == sum(each.operation == "all_gather" for each in recorded.calls)

    sw.simulate(2, run)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "through a view": lambda weight: weight[1:].mul_(0.5),
    "through a detached tensor": lambda weight: weight.detach().clamp_(-0.1, 0.1),
    "through its data": lambda weight: weight.data.mul_(0.5),
    "by a new storage": lambda weight: setattr(weight, "data", weight.detach() * 2),
    "through numpy": lambda weight: weight.requires_grad_(False).numpy(),
}


@pytest.mark.parametrize("way", WRITES)
def test_writes_and_what_reaches_memory_unseen_are_refused(way: str) -> None:
    class Writes(Net):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                WRITES[way](self.norm.weight)
            return super().forward(words)

    def run(channel: sw.Channel) -> None:
        made = program("")
        engine = made.engine(plan_of(made, "dp_shard=2", stage=3), channel)
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    made = Program(make=seeded(lambda: Writes("slice")), batches=BATCHES, loss=word_loss)
    with pytest.raises(ModelError, match=r"'norm.weight'.* (the values are lost|after detach)"):
        train(made, plan_of(made, "dp_shard=2", stage=3))


class Mapped(nn.Module):
    """Uses a map once for each row."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = (lambda row: self.map.weight @ row) if self.is_read else self.map
        mapped: torch.Tensor = torch.vmap(each)(x)
        return mapped


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("units", [None, (".",)])
def test_parameters_inside_of_a_transformation_change_no_bit(*, is_read: bool, units: Any) -> None:
    batches = [{"x": torch.ones(2, WIDTH)}] * 2
    made = Program(make=seeded(lambda: Mapped(is_read=is_read)), batches=batches, loss=mean_square)
    assert_trains_like_one_process(made, plan_of(made, "dp_shard=2", stage=3, units=units))
