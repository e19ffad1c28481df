"""Modules that compute a part of a sum from bare parameters: experts, and what counts once among them."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole


class Experts(nn.Module):
    """All experts on all tokens, weighted; gates and values lie interleaved, each expert has a bias at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 6, 14))
        self.gate_up_bias = nn.Parameter(torch.randn(3, 14))
        self.down = nn.Parameter(torch.randn(3, 7, 6))
        self.down_bias = nn.Parameter(torch.randn(3, 6))
        self.scale = nn.Parameter(torch.randn(3, 1, 1))
        self.idle = nn.Identity()

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up = torch.einsum("ti,eio->eto", x, self.gate_up) + self.gate_up_bias[:, None]
        hidden = functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
        outs = self.scale * (hidden @ self.down) + self.down_bias[:, None]
        summed = torch.einsum("eto,te->to", outs, weights[:, :3])
        out: torch.Tensor = summed + self.idle(x) * weights[:, 3:]
        return out


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, weights=self.router(x).softmax(-1))
        return out


def run(model: nn.Module) -> torch.Tensor:
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
def test_experts_are_cut_over_all_ranks(num_ranks: int) -> None:
    got = compute_cut(Mixture, RULES, num_ranks, run)
    assert_close(got, compute_whole(Mixture, run))
    assert got.plan is not None
    # What counts once has its gradient on the first rank; the scale of a part of a sum has a part of its own.
    assert got.plan.summed == {"experts.down_bias", "experts.scale"}


class WritingExperts(Experts):
    """Writes in place to what counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(6, 6)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        once = self.idle(x)
        once *= weights[:, 3:]
        out: torch.Tensor = super().forward(x, weights) + once
        return out


class WritingMixture(Mixture):
    """A router, and experts that write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = WritingExperts()


def test_what_counts_once_may_be_written_to_in_place() -> None:
    rules = {**RULES, "experts.idle": "once"}
    assert_close(compute_cut(WritingMixture, rules, 2, run, is_completed=True), compute_whole(WritingMixture, run))


@pytest.mark.parametrize("left_out", ["experts.down_bias", "experts.idle"])
def test_what_should_count_once_counts_twice_without_the_rule(left_out: str) -> None:
    rules = {name: rule for name, rule in RULES.items() if name != left_out}
    got = compute_cut(Mixture, rules, 2, run)
    assert not torch.allclose(got.output, compute_whole(Mixture, run).output)


class Latent(nn.Module):
    """Keys are expanded from what is compressed, and every head also reads the last of it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.down = nn.Linear(6, 5 + 2)
        self.norm = nn.RMSNorm(5)
        self.last_norm = nn.RMSNorm(2)
        self.up = nn.Linear(5, 4 * 3)
        self.out = nn.Linear(4 * 5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest, last = self.down(x).split([5, 2], dim=-1)
        keys = self.up(self.norm(rest)).view(*x.shape[:-1], -1, 3)
        last = self.last_norm(last).unsqueeze(-2).expand(*keys.shape[:-1], 2)
        out: torch.Tensor = self.out(torch.cat([keys, last], -1).square().flatten(-2))
        return out


LATENT: Mapping[str, str] = {"down": "mla_kv_a_proj(size=2)", "up": "column", "out": "row"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_last_outputs_are_read_by_the_heads_of_all_ranks(num_ranks: int) -> None:
    got = compute_cut(Latent, {**LATENT, "last_norm": "replicated_with_grad_allreduce"}, num_ranks, run)
    assert_close(got, compute_whole(Latent, run))


def test_a_norm_whose_gradient_nobody_sums_is_found_in_the_graph() -> None:
    got = compute_cut(Latent, LATENT, 2, run, is_completed=True)
    assert got.plan is not None
    assert got.plan.summed == {"last_norm.weight"}
    assert_close(got, compute_whole(Latent, run))


def test_a_rule_that_sums_what_is_whole_already_sums_nothing() -> None:
    got = compute_cut(Latent, {**LATENT, "norm": "replicated_with_grad_allreduce"}, 2, run, is_completed=True)
    assert got.plan is not None
    assert got.plan.summed == {"last_norm.weight"}
    assert_close(got, compute_whole(Latent, run))


def test_a_value_that_is_shared_without_a_rule_is_refused() -> None:
    rules = {name: rule for name, rule in LATENT.items() if name != "down"}
    with pytest.raises(ModelError, match=r"made with 'down.weight', 'down.bias' are read by all ranks alike"):
        compute_cut(Latent, rules, 2, run, is_completed=True)
