"""Backwards out of the ordinary: reductions that start in the middle, hooks of the user, activations computed again."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.forward.counters import Counters
from shardwise.errors import ModelError
from tests.covering import covering
from tests.engine.channels import GoesOnAlone
from tests.engine.loops import begun, plan_of
from tests.oracle.batches import points, share_of, square_loss, word_batch, word_loss
from tests.oracle.by_other_ways import one_expert, twice
from tests.oracle.one_process import values_of
from tests.oracle.places import put_together, train_on
from tests.oracle.program import adamw
from tests.oracle.program import plan_of as plan_for
from tests.oracle.programs import on_words
from tests.oracle.rank_order import in_rank_order
from tests.oracle.words import Words


def trained_words(
    plan: sw.Plan, *, alone: bool, microbatches: Sequence[int | None] = (None, None, None)
) -> tuple[dict[str, torch.Tensor], Counters]:
    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], Counters]:
        given = GoesOnAlone(channel) if alone else channel
        engine = begun(given, Words, plan, optimizer=adamw, loss=word_loss)
        for seed, k in enumerate(microbatches):
            engine.step(share_of(word_batch(seed, 24), channel.rank, channel.size), microbatches=k)
        return values_of(engine.model), engine.counters

    return sw.simulate(plan.mesh.size, run)[0]


PRECISIONS = {
    "float32": sw.Precision(),
    "bfloat16": sw.Precision(compute="bfloat16", keep=("norm", "scale")),
    "sums in bfloat16": sw.Precision(compute="bfloat16", reduce="bfloat16", keep=("norm", "narrow")),
}


@pytest.mark.parametrize(
    ("mesh", "precision", "owners", "partition", "k"),
    covering(
        ["dp_shard=3", "dp_replicate=2,dp_shard=2", "single"],
        list(PRECISIONS),
        ["all", "dp_shard"],
        ["slice", "whole"],
        [1, 3],
        strength=2,
    ),
)
def test_reductions_that_start_within_backward_change_no_bit(
    mesh: str, precision: str, owners: str, partition: str, k: int
) -> None:
    sharding = {"bucket_bytes": 300, "owners": owners, "partition": partition}
    plan = plan_of(mesh, k=k, sharding=sharding, precision=PRECISIONS[precision], clip_grad_norm=0.5)
    late, of_late = trained_words(plan, alone=False, microbatches=(None, 2, None))
    early, of_early = trained_words(plan, alone=True, microbatches=(None, 2, None))
    assert all(torch.equal(early[name], late[name]) for name in late)
    assert of_late.early_reductions == 0
    assert of_early.reduce_scatters == of_late.reduce_scatters


def test_reductions_start_within_backward_up_to_the_first_bucket_that_is_not_complete() -> None:
    """`Words` has a module that is never used: it ends what can start early, and the rest follows after backward."""
    plan = plan_of("dp_shard=2", sharding={"bucket_bytes": 1})
    _, counters = trained_words(plan, alone=True)
    assert counters.early_reductions == 0  # its bucket is the first

    def run(channel: sw.Channel) -> tuple[int, int]:
        make = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))  # noqa: E731
        engine = begun(GoesOnAlone(channel), make, plan, loss=square_loss)
        engine.step(points(channel.rank, 4), microbatches=2)
        return engine.counters.early_reductions, engine.counters.reduce_scatters

    assert sw.simulate(2, run) == [(4, 4), (4, 4)]


TWICE = on_words(twice)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_gradient_that_comes_after_its_bucket_was_reduced_is_refused(bucket_bytes: int) -> None:
    """In one bucket it comes before."""

    def run(channel: sw.Channel) -> None:
        engine = TWICE.engine(plan_for(TWICE, "dp_shard=2", bucket_bytes=bucket_bytes), GoesOnAlone(channel))
        engine.step(share_of(TWICE.batches[0], channel.rank, 2))

    words = "got a gradient twice in one backward, after its bucket was reduced; use non"
    with pytest.raises(ModelError, match=words) if bucket_bytes == 1 else nullcontext():
        sw.simulate(2, run)


@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize("mesh", ["single", "dp_shard=2", "dp_replicate=2"])
def test_gradients_have_the_same_bits_and_hooks_see_one_microbatch_whenever_they_come(
    mesh: str, compute: str | None
) -> None:
    """Small gradients without a hook stay in `p.grad` to the end of the step; with one they leave at once."""
    batch = {name: torch.cat([each] * 3) for name, each in points(0, 4).items()}

    def trained(hooked_from: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
            make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
            plan = plan_of(mesh, k=3, compute=compute, clip_grad_norm=0.1)
            engine = begun(channel, make, plan, optimizer=adamw, loss=square_loss)
            seen: list[torch.Tensor] = []
            for step in range(4):
                if step == hooked_from:
                    for each in engine.model.parameters():
                        each.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
                engine.step(batch)
                assert all(each.grad is None for each in engine.model.parameters())
            return values_of(engine.model), seen

        return sw.simulate(plan_of(mesh).mesh.size, run)[0]

    plain, _ = trained(4)
    for hooked_from in (0, 2):
        values, seen = trained(hooked_from)
        assert all(torch.equal(values[name], plain[name]) for name in plain)
        assert len(seen) == (4 - hooked_from) * 3 * 4
        # Backward finishes the four parameters in one order in each microbatch, all of which have the same rows.
        of_step = seen[:12]
        assert all(torch.equal(one, other) for one, other in zip(of_step[:8], of_step[4:], strict=True))


@pytest.mark.parametrize("mesh", ["single", "dp_shard=2"])
def test_between_microbatches_no_gradient_waits_where_a_forward_may_clear_it_or_hook_it(mesh: str) -> None:
    """A loop that was half converted may call `zero_grad` in its loss; a model may hook a parameter in a forward."""
    batch = {name: torch.cat([each] * 3) for name, each in points(0, 4).items()}

    def trained(meddles: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
            seen: list[torch.Tensor] = []

            def meddle(*_: object) -> None:
                if not seen:
                    model[0].weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
                    seen.append(torch.zeros(()))
                model.zero_grad()

            if meddles:
                model.register_forward_pre_hook(meddle)
            engine = begun(channel, lambda: model, plan_of(mesh, k=3), optimizer=adamw, loss=square_loss)
            engine.step(batch)
            return values_of(model), seen[1:]

        return sw.simulate(plan_of(mesh).mesh.size, run)[0]

    (plain, _), (values, seen) = trained(False), trained(True)
    assert all(torch.equal(values[name], plain[name]) for name in plain)
    assert len(seen) == 3
    assert all(torch.equal(each, seen[0]) for each in seen)  # of the same rows


@pytest.mark.parametrize("stage", [0, 1])
def test_after_an_error_gradients_are_the_users_again(stage: int) -> None:
    def run(channel: sw.Channel) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        calls: list[int] = []

        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ValueError("no more")

        model.register_forward_pre_hook(fail)
        engine = begun(channel, lambda: model, plan_of("single", stage=stage, k=2), optimizer=adamw, loss=square_loss)
        batch = points(0, 4)
        with pytest.raises(ValueError, match="no more"):
            engine.step(batch)
        assert all(each.grad is None for each in model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        assert all(each.grad is not None for each in model.parameters())
        engine.step(batch)

    sw.simulate(1, run)


def test_hooks_of_the_user_on_gradients_and_modules_run_once_each() -> None:
    def run(channel: sw.Channel) -> None:
        make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
        engine = begun(channel, make, plan_of("dp_shard=2"), loss=square_loss)
        model, seen = engine.model, list[str]()

        def double(gradient: torch.Tensor) -> torch.Tensor:
            seen.append("gradient")
            return gradient * 2

        before = {name: each.clone() for name, each in model.state_dict().items()}
        norm = engine.step(points(0, 4)).grad_norm
        model.load_state_dict(before)
        for parameter in model.parameters():
            parameter.register_hook(double)
        model[-1].register_forward_hook(lambda *_: seen.append("forward"))
        model[-1].register_full_backward_hook(lambda *_: seen.append("backward"))
        assert engine.step(points(0, 4)).grad_norm == pytest.approx(2 * norm, rel=1e-6)
        assert sorted(seen) == ["backward", "forward", *["gradient"] * 4]

    sw.simulate(2, run)


def in_turns(*, by_rank: bool) -> list[dict[str, torch.Tensor]]:
    """Batches that ask for one expert after the other; `by_rank`: in each update some rank uses each."""
    batches = [word_batch(seed, 8) for seed in range(6)]
    for number, batch in enumerate(batches):
        batch["words"][:, 0] = number % 2 + 2
        if by_rank:
            batch["words"][4:6, 0], batch["words"][6:, 0] = 3, 2  # with k = 2 it uses both
    return batches


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("wrapped", [lambda channel: channel, GoesOnAlone], ids=["", "goes on alone"])
def test_gradients_of_what_no_rank_used_before_come_late_and_whole(
    k: int, by_rank: bool, wrapped: type[GoesOnAlone]
) -> None:
    """After their bucket has left. A late sum is added per rank first: with k = 2, one rounding more of each term."""
    program = replace(on_words(one_expert), batches=in_turns(by_rank=by_rank))
    for bucket_bytes in (1, 1 << 20):
        plan = plan_for(program, "dp_shard=2", stage=2, k=k, bucket_bytes=bucket_bytes, clip=0.3)
        wanted = in_rank_order(program, plan)

        def run(channel: sw.Channel, plan: sw.Plan = plan) -> object:
            return train_on(wrapped(channel), program, plan)

        got = put_together(sw.simulate(2, run))
        for name, value in wanted.parameters.items():
            torch.testing.assert_close(got.states[-1][name], value, rtol=0, atol=2**-22 if k > 1 else 0)
