"""Each style against the whole model in one process: outputs and every gradient, on 2 and 3 ranks, uneven sizes."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole


class Block(nn.Module):
    """Two linear maps of odd sizes with an activation between, and a residual."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Tokens(nn.Module):
    """Embedding, one block, head; the head may be tied."""

    def __init__(self, block: nn.Module, *, is_tied: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.block = block
        self.head = nn.Linear(6, 11, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.embedding(words)))
        return out


def linear_block() -> nn.Module:
    return Block(nn.Linear(6, 33), nn.Linear(33, 6))


def run(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(11, (2, 5), generator=generator)
    weights = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    out: torch.Tensor = model(words) * weights
    return out


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {"block.up": "column", "block.down": "row"},
        {"block.up": "colwise", "block.down": "rowwise", "embedding": "vocab", "head": "vocab"},
        {"*.up": "colwise_gather_output", "*.down": "rowwise_split_input"},
        {"*.up": "colwise_rep", "*.down": "rowwise_rep", "embedding": "embedding_rowwise"},
        {"*.up": "column(unit=3)", "*.down": "row(unit=3)", "embedding": "embedding_colwise"},
        {"*.up": "column", "*.down": "row", "block.norm": "sequence", "head": "colwise_gather_output"},
        {"*.up": "packed_colwise(parts=3)", "*.down": "packed_rowwise(parts=3)"},
        {"*.up": "column(parts=9+24)", "*.down": "row(parts=9+24)"},
        {"head": "rowwise_split_input"},
        {"head": "column(parts=5+6)", "block.up": "replicate"},
    ],
    ids=lambda rules: " ".join(rules.values()),
)
def test_a_style_gives_what_the_whole_model_gives(rules: Mapping[str, str], num_ranks: int) -> None:
    def make() -> nn.Module:
        return Tokens(linear_block())

    if rules.get("head", "").startswith("column"):
        rules = {**rules, "head": "colwise_gather_output(parts=5+6)"}
    assert_close(compute_cut(make, rules, num_ranks, run), compute_whole(make, run))


@pytest.mark.parametrize("padding_idx", [None, 0, 7])
def test_a_tied_embedding_is_cut_once_for_both(padding_idx: int | None) -> None:
    def make() -> nn.Module:
        return Tokens(linear_block(), is_tied=True, padding_idx=padding_idx)

    rules = {"embedding": "vocab", "head": "vocab", "*.up": "column", "*.down": "row"}
    assert_close(compute_cut(make, rules, 2, run), compute_whole(make, run))


def transposed(num_outputs: int, num_inputs: int) -> nn.Module:
    """A linear map whose weight is (inputs, outputs)."""
    from transformers.pytorch_utils import Conv1D  # seconds, which to collect tests does not take

    made: nn.Module = Conv1D(num_outputs, num_inputs)  # type: ignore[no-untyped-call]
    return made


class Projection(nn.Linear):
    """A linear map whose author wrote the forward himself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input.unsqueeze(-2) * self.weight).sum(-1) + self.bias


@pytest.mark.parametrize("kind", ["transposed", "own"])
def test_the_orientation_of_a_weight_is_found_out(kind: str) -> None:
    def make() -> nn.Module:
        if kind == "transposed":
            return Tokens(Block(transposed(33, 6), transposed(6, 33)))
        return Tokens(Block(Projection(6, 33), Projection(33, 6)))

    got = compute_cut(make, {"*.up": "column", "*.down": "row"}, 2, run)
    assert got.plan is not None
    assert got.plan.cuts["block.up.weight"].dim == (1 if kind == "transposed" else 0)
    assert_close(got, compute_whole(make, run))


def test_a_square_transposed_weight_is_not_taken_for_the_other() -> None:
    def make() -> nn.Module:
        return Tokens(Block(transposed(6, 6), transposed(6, 6)))

    assert_close(compute_cut(make, {"*.up": "column", "*.down": "row"}, 2, run), compute_whole(make, run))


def test_one_reduction_serves_all_columns_that_read_one_value() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(self.one(x) * self.two(x))
            return out

    def make() -> nn.Module:
        return Tokens(Parallel())

    got = compute_cut(make, {"block.one": "column", "block.two": "column", "block.down": "row"}, 2, run)
    assert_close(got, compute_whole(make, run))
    # The output of `down` forward, the input of both columns backward: a reduce-scatter and an all-gather each.
    for calls in got.calls:
        assert [call.operation for call in calls] == ["reduce_scatter", "all_gather"] * 2


class LocalNorm(nn.Module):
    """Attention over heads with a norm of each head, and a scale per head."""

    def __init__(self, num_heads: int = 6, num_key_value_heads: int = 3) -> None:
        super().__init__()
        self.head_dim = 4
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.q = nn.Linear(6, num_heads * 4)
        self.k = nn.Linear(6, num_key_value_heads * 4)
        self.v = nn.Linear(6, num_key_value_heads * 4)
        self.q_norm = nn.RMSNorm(4)
        self.scale = nn.Parameter(torch.randn(num_heads))
        self.o = nn.Linear(num_heads * 4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (each(x).view(rows, length, -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        q = self.q_norm(q) * self.scale[:, None, None]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: torch.Tensor = self.o(out.transpose(1, 2).reshape(rows, length, -1))
        return x + projected


ATTENTION = {"block.q": "column", "block.k": "column", "block.v": "column", "block.o": "row", "block.scale": "column"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_heads_are_cut_in_whole_groups_and_norms_of_heads_are_summed(num_ranks: int) -> None:
    def make() -> nn.Module:
        return Tokens(LocalNorm())

    rules = {**ATTENTION, "block.q_norm": "replicated_with_grad_allreduce"}
    got = compute_cut(make, rules, num_ranks, run)
    assert_close(got, compute_whole(make, run))
    assert got.plan is not None
    assert got.plan.summed == {"block.q_norm.weight"}
    if num_ranks == 2:  # three groups of two heads of four outputs: two groups and one
        assert got.plan.cuts["block.q.weight"].ranges == (((0, 16),), ((16, 24),))
        assert got.plan.cuts["block.k.weight"].ranges == (((0, 8),), ((8, 12),))
        assert got.plan.cuts["block.scale"].ranges == (((0, 4),), ((4, 6),))


class CountedHeads(LocalNorm):
    """The same, by an author who wrote all sizes of the views."""

    def __init__(self) -> None:
        super().__init__()
        self.width = self.num_heads * self.head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.num_heads, 4).transpose(1, 2)
        k, v = (each(x).view(rows, length, self.num_key_value_heads, 4).transpose(1, 2) for each in (self.k, self.v))
        out = functional.scaled_dot_product_attention(self.q_norm(q) * self.scale[:, None, None], k, v, enable_gqa=True)
        projected: torch.Tensor = self.o(out.transpose(1, 2).reshape(rows, length, self.width))
        return x + projected


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_module_that_counts_its_heads_counts_those_of_the_rank(num_ranks: int) -> None:
    def make() -> nn.Module:
        return Tokens(CountedHeads())

    counts = "heads(attributes=num_heads+num_key_value_heads+width)"
    rules = {**ATTENTION, "block.q_norm": "replicated_with_grad_allreduce", "block": counts}
    assert_close(compute_cut(make, rules, num_ranks, run), compute_whole(make, run))


class SequenceModel(nn.Module):
    """What goes between blocks is cut along the positions, as in sequence parallelism of Megatron-LM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(linear_block() for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def run_six(model: nn.Module) -> torch.Tensor:
    words = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    out: torch.Tensor = model(words).square()
    return out


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("embedding", ["vocab(scatter=1)", "split"])
def test_values_between_blocks_may_be_cut_along_the_positions(num_ranks: int, embedding: str) -> None:
    rules = {
        "*norm": "sequence_parallel",
        "*.up": "column(gather=1)",
        "*.down": "row(scatter=1)",
        "head": "vocab(gather=1)",
    }
    rules |= {"embedding": embedding} if embedding != "split" else {"blocks.0": "split"}
    got = compute_cut(SequenceModel, rules, num_ranks, run_six)
    assert_close(got, compute_whole(SequenceModel, run_six))


def test_ranks_may_have_no_position_of_a_sequence() -> None:
    def run_one(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(torch.tensor([[3], [4]])).square()
        return out

    rules = {"*norm": "sequence", "*.up": "column", "*.down": "row"}
    assert_close(compute_cut(SequenceModel, rules, 3, run_one), compute_whole(SequenceModel, run_one))
