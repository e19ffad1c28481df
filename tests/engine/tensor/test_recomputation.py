"""Activation checkpoints inside modules that are changed for their forward, and what backward leaves behind."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.engine.tensor.styles import TensorParallel
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.tensor.cut_models import assert_close, compute_cut, compute_whole
from tests.engine.tensor.test_styles import ATTENTION, CountedHeads, Tokens, run
from tests.engine.tensor.test_sums import RULES, Experts, Mixture
from tests.engine.tensor.test_sums import run as run_mixture


class RecomputedHeads(CountedHeads):
    """Counts its heads when it is computed again in backward, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Around(nn.Module):
    """A checkpoint around another module."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("is_nested", [False, True])
def test_heads_are_counted_for_the_rank_when_they_are_computed_again(is_nested: bool) -> None:
    made: list[CountedHeads] = []

    def make() -> nn.Module:
        heads = RecomputedHeads()
        made.append(heads)
        return Tokens(Around(heads) if is_nested else heads)

    name = "block.block" if is_nested else "block"
    rules = {key.replace("block", name): rule for key, rule in ATTENTION.items()}
    rules |= {f"{name}.q_norm": "replicated_with_grad_allreduce"}
    rules |= {name: "heads(attributes=num_heads+num_key_value_heads+width)"}
    assert_close(compute_cut(make, rules, 2, run), compute_whole(make, run))
    for heads in made:
        assert (heads.num_heads, heads.num_key_value_heads, heads.width) == (6, 3, 24), "as they were"


class RecomputedExperts(Experts):
    """Weights experts by what it computes again."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, weights, use_reentrant=False)
        return out


class RecomputedMixture(Mixture):
    """A router, and experts that are computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = RecomputedExperts()


def test_what_counts_once_counts_once_when_it_is_computed_again() -> None:
    got = compute_cut(RecomputedMixture, RULES, 2, run_mixture)
    assert_close(got, compute_whole(RecomputedMixture, run_mixture))


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_nothing_keeps_the_last_activation_after_backward(is_recomputed: bool) -> None:
    def on_rank(channel: sw.Channel) -> bool:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6))
        plan = plan_tensor(tensor_outline(model), {"1": "column(unit=8)", "2": "row(unit=8)"}, num_ranks=1)
        TensorParallel(model, plan, channel)
        seen: list[weakref.ref[torch.Tensor]] = []

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(weakref.ref(args[0]))

        model[1].register_forward_pre_hook(look)
        x = torch.randn(2, 6)
        out = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
        out.sum().backward()
        del out
        gc.collect()
        assert len(seen) == 1 + is_recomputed
        return all(each() is None for each in seen)

    assert sw.simulate(1, on_rank) == [True]
