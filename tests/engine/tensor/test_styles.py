"""Each style against the whole model in one process: outputs and every gradient, on 2 and 3 ranks, uneven sizes."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.engine.formed import formed, linear
from tests.engine.tensor.cut_models import Rules, assert_cut_is_right, compute
from tests.engine.tensor.nets import Projection, SequenceModel, Tokens, linear_block, run, run_six, transposed
from tests.refusals import Refusals

EXACT: dict[str, Rules] = {
    "column and row": {"block.up": "column", "block.down": "row"},
    "vocabulary": {"block.up": "colwise", "block.down": "rowwise", "embedding": "vocab", "head": "vocab"},
    "gathered": {"*.up": "colwise_gather_output", "*.down": "rowwise_split_input"},
    "replicated": {"*.up": "colwise_rep", "*.down": "rowwise_rep", "embedding": "embedding_rowwise"},
    "units": {"*.up": "column(unit=3)", "*.down": "row(unit=3)", "embedding": "embedding_colwise"},
    "sequence": {"*.up": "column", "*.down": "row", "block.norm": "sequence", "head": "colwise_gather_output"},
    "packed": {"*.up": "packed_colwise(parts=3)", "*.down": "packed_rowwise(parts=3)"},
    "parts": {"*.up": "column(parts=9+24)", "*.down": "row(parts=9+24)"},
    "split inputs": {"head": "rowwise_split_input"},
    "gathered parts": {"head": "colwise_gather_output(parts=5+6)", "block.up": "replicate"},
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_a_style_gives_what_the_whole_model_gives(name: str, num_ranks: int) -> None:
    assert_cut_is_right(lambda: Tokens(linear_block()), EXACT[name], run, num_ranks)


TIED = {"embedding": "vocab", "head": "vocab", "*.up": "column", "*.down": "row"}


@pytest.mark.parametrize("padding_idx", [None, 0, 7])
def test_a_tied_embedding_is_cut_once_for_both(padding_idx: int | None) -> None:
    assert_cut_is_right(lambda: Tokens(linear_block(), is_tied=True, padding_idx=padding_idx), TIED, run)


@pytest.mark.parametrize(
    ("make", "sizes", "dim"),
    [(transposed, ((33, 6), (6, 33)), 1), (transposed, ((6, 6), (6, 6)), 1), (Projection, ((6, 33), (33, 6)), 0)],
    ids=["transposed", "square", "own forward"],
)
def test_the_orientation_of_a_weight_is_found_out(make: Any, sizes: Any, dim: int) -> None:
    up, down = (partial(make, *each) for each in sizes)
    got = assert_cut_is_right(lambda: Tokens(linear_block(up, down)), EXACT["column and row"], run)
    assert got.decision.plan.cuts["block.up.weight"].dim == dim


def test_one_reduction_serves_all_columns_that_read_one_value() -> None:
    parts: dict[str, Any] = {"one": linear(6, 8), "two": linear(6, 8), "down": linear(8, 6)}
    parallel = formed(lambda net, x: x + net.down(net.one(x) * net.two(x)), **parts)
    rules = {"block.one": "column", "block.two": "column", "block.down": "row"}
    # The output of `down` forward, the input of both columns backward: a reduce-scatter and an all-gather each.
    calls = assert_cut_is_right(lambda: Tokens(parallel()), rules, run).calls
    of_values = [call.operation for call in calls if call.purpose.startswith("tensor parallelism of")]
    assert of_values == ["reduce_scatter", "all_gather"] * 2


# -- heads


def heads(net: Any, x: torch.Tensor, *, is_counted: bool = False) -> Any:
    """Attention over heads with a norm of each head, and a scale per head; is_counted: with all sizes of the views."""
    rows, length, _ = x.shape
    counts = (net.num_heads, net.num_key_value_heads, net.num_key_value_heads) if is_counted else (-1, -1, -1)
    q, k, v = (
        each(x).view(rows, length, count, 4).transpose(1, 2)
        for each, count in zip((net.q, net.k, net.v), counts, strict=True)
    )
    q = net.q_norm(q) * net.scale[:, None, None]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + net.o(out.transpose(1, 2).reshape(rows, length, net.width if is_counted else -1))


def counted(net: Any, x: torch.Tensor) -> Any:
    return heads(net, x, is_counted=True)


def recomputed(net: Any, x: torch.Tensor) -> Any:
    """Counts its heads when it is computed again in backward, too."""
    return checkpoint(partial(counted, net), x, use_reentrant=False)


PARTS: dict[str, Any] = {
    **{"num_heads": lambda: 6, "num_key_value_heads": lambda: 3, "width": lambda: 24},
    **{"q": linear(6, 24), "k": linear(6, 12), "v": linear(6, 12), "o": linear(24, 6)},
    **{"q_norm": partial(nn.RMSNorm, 4), "scale": lambda: nn.Parameter(torch.randn(6))},
}
ATTENTION = {
    **{"block.q": "column", "block.k": "column", "block.v": "column", "block.o": "row", "block.scale": "column"},
    "block.q_norm": "replicated_with_grad_allreduce",
}
COUNTS = {"block": "heads(attributes=num_heads+num_key_value_heads+width)"}
AROUND = formed(lambda net, x: checkpoint(net.block, x, use_reentrant=False), block=formed(recomputed, **PARTS))
INSIDE = {name.replace("block", "block.block"): rule for name, rule in {**ATTENTION, **COUNTS}.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_heads_are_cut_in_whole_groups_and_norms_of_heads_are_summed(num_ranks: int) -> None:
    plan = assert_cut_is_right(lambda: Tokens(formed(heads, **PARTS)()), ATTENTION, run, num_ranks).decision.plan
    if num_ranks == 2:  # three groups of two heads of four outputs: two groups and one
        assert plan.cuts["block.q.weight"].ranges == (((0, 16),), ((16, 24),))
        assert plan.cuts["block.k.weight"].ranges == (((0, 8),), ((8, 12),))
        assert plan.cuts["block.scale"].ranges == (((0, 4),), ((4, 6),))


@pytest.mark.parametrize(
    ("way", "rules", "num_ranks"),
    [
        (formed(counted, **PARTS), {**ATTENTION, **COUNTS}, 2),
        (formed(counted, **PARTS), {**ATTENTION, **COUNTS}, 3),
        (formed(recomputed, **PARTS), {**ATTENTION, **COUNTS}, 2),
        (AROUND, INSIDE, 2),
    ],
    ids=["2", "3", "computed again", "computed again twice"],
)
def test_a_module_that_counts_its_heads_counts_those_of_the_rank(way: Any, rules: Rules, num_ranks: int) -> None:
    made: list[Tokens] = []

    def make() -> nn.Module:
        made.append(Tokens(way()))
        return made[-1]

    assert_cut_is_right(make, rules, run, num_ranks)
    for model in made:
        block: Any = getattr(model.block, "block", model.block)
        assert (block.num_heads, block.num_key_value_heads, block.width) == (6, 3, 24), "as they were"


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_nothing_keeps_the_last_activation_after_backward(is_recomputed: bool) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(model: nn.Module) -> torch.Tensor:
        model[1].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))  # type: ignore[index]
        x = torch.randn(2, 6, dtype=torch.float64)
        out: torch.Tensor = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
        return out

    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6))  # noqa: E731
    compute(make, look, 2, {"1": "column", "2": "row"})
    gc.collect()
    assert len(seen) == 2 * (1 + is_recomputed)
    assert all(each() is None for each in seen)


# -- positions


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("embedding", [{"embedding": "vocab(scatter=1)"}, {"blocks.0": "split"}], ids=str)
def test_values_between_blocks_may_be_cut_along_the_positions(num_ranks: int, embedding: Rules) -> None:
    rules = {
        "*norm": "sequence_parallel",
        "*.up": "column(gather=1)",
        "*.down": "row(scatter=1)",
        "head": "vocab(gather=1)",
    }
    assert_cut_is_right(SequenceModel, {**rules, **embedding}, run_six, num_ranks)


def test_ranks_may_have_no_position_of_a_sequence() -> None:
    rules = {"*norm": "sequence", "*.up": "column", "*.down": "row"}
    assert_cut_is_right(SequenceModel, rules, partial(run, length=1), 3)


# -- sums of bare parameters


def experts(net: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
    """All experts on all tokens, weighted; gates and values lie interleaved, each expert has a bias at its end."""
    gate_up = torch.einsum("ti,eio->eto", x, net.gate_up) + net.gate_up_bias[:, None]
    hidden = functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
    outs = net.scale * (hidden @ net.down) + net.down_bias[:, None]
    once = net.idle(x)
    if isinstance(net.idle, nn.Linear):  # writes in place to what counts once
        once *= weights[:, 3:]
    else:
        once = once * weights[:, 3:]
    return torch.einsum("eto,te->to", outs, weights[:, :3]) + once


def experts_again(net: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
    return checkpoint(partial(experts, net), x, weights, use_reentrant=False)


def mixture(way: Callable[..., Any] = experts, idle: Callable[[], nn.Module] = nn.Identity) -> type[nn.Module]:
    """A router and experts."""
    sizes = {"gate_up": (3, 6, 14), "gate_up_bias": (3, 14), "down": (3, 7, 6), "down_bias": (3, 6), "scale": (3, 1, 1)}
    bare: dict[str, Any] = {
        name: partial(lambda size: nn.Parameter(torch.randn(size)), size) for name, size in sizes.items()
    }
    route: Any = lambda net, x: net.experts(x, weights=net.router(x).softmax(-1))  # noqa: E731
    return formed(route, router=linear(6, 4), experts=formed(way, idle=idle, **bare))


def run_rows(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return out.square()


RULES = {
    "experts": "moe_tp_experts",
    "experts.gate_up": "column(dim=2, unit=2)",
    "experts.gate_up_bias": "column(dim=1, unit=2)",
    "experts.down": "row(dim=1)",
    "experts.down_bias": "once",
    "experts.idle": "moe_identity_expert",
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", [experts, experts_again])
def test_experts_are_cut_over_all_ranks(way: Callable[..., Any], num_ranks: int) -> None:
    # What counts once has its gradient on the first rank; the scale of a part of a sum has a part of its own.
    assert_cut_is_right(mixture(way), RULES, run_rows, num_ranks)


def test_what_counts_once_may_be_written_to_in_place_and_counts_twice_without_the_rule() -> None:
    writing = {**RULES, "experts.idle": "once"}
    assert_cut_is_right(mixture(idle=linear(6, 6)), writing, run_rows)
    for left_out in ("experts.down_bias", "experts.idle"):
        rules = {name: rule for name, rule in RULES.items() if name != left_out}
        assert compute(mixture(), run_rows, 2, rules).loss != pytest.approx(compute(mixture(), run_rows).loss)


def latent(net: Any, x: torch.Tensor) -> Any:
    """Keys are expanded from what is compressed, and every head also reads the last of it as it is."""
    rest, last = net.down(x).split([5, 2], dim=-1)
    keys = net.up(net.norm(rest)).view(*x.shape[:-1], -1, 3)
    last = net.last_norm(last).unsqueeze(-2).expand(*keys.shape[:-1], 2)
    return net.out(torch.cat([keys, last], -1).square().flatten(-2))


NORMS: dict[str, Any] = {"norm": partial(nn.RMSNorm, 5), "last_norm": partial(nn.RMSNorm, 2)}
LATENT = formed(latent, num_heads=lambda: 4, down=linear(6, 7), **NORMS, up=linear(5, 12), out=linear(20, 6))
COMPRESSED = {"down": "mla_kv_a_proj(size=2)", "up": "column", "out": "row"}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("named", ["last_norm", "norm", None])
def test_the_last_outputs_are_read_by_the_heads_of_all_ranks(named: str | None, num_ranks: int) -> None:
    """A norm whose gradient no rule sums is found in the graph, and a rule that sums what is whole sums nothing."""
    rules = {**COMPRESSED, **({named: "replicated_with_grad_allreduce"} if named else {})}
    assert_cut_is_right(LATENT, rules, run_rows, num_ranks)


REFUSED = Refusals(
    "engine.shared_values",
    {"a value that is shared without a rule": lambda: compute(LATENT, run_rows, 2, {"up": "column", "out": "row"})},
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_shared_without_a_rule_is_refused(case: str) -> None:
    REFUSED.check(case)
