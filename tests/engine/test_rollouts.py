"""What loops of reinforcement learning do between updates: lists of prompts and inputs, frozen engines, inner calls."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelError
from tests.covering import covering
from tests.engine.generating import SHORT, Apart, in_one_process, llama, mesh, named, prompts, under
from tests.engine.loops import mean_square
from tests.engine.tower import TP, on_ranks, tower
from tests.oracle.program import sgd

PLANS = [mesh("single"), mesh("dp_shard=2", 3), mesh("pp=2,dp_shard=2", 3), mesh("tp=2", tp=True)]
SHARES = ([[0, 1, 2], [3]], [[0, 1, 2, 3], []])
"""Which of four prompts each of two data ranks has."""
SAMPLING: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}


def prompt(number: int) -> dict[str, torch.Tensor]:
    """Prompts of unlike lengths and numbers of rows."""
    return {name: rows[:, : 3 + number % 3] for name, rows in prompts(number, rows=1 + number % 2).items()}


@pytest.fixture(scope="module")
def wanted() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens of each prompt in one process, and the model's logits for them."""
    tokens = [in_one_process(llama(), prompt(number), seed=number, **SAMPLING) for number in range(4)]
    with torch.no_grad():
        return [(each, llama().eval()(each).logits) for each in tokens]


@pytest.mark.parametrize(
    ("plan", "share", "gather", "is_apart"),
    covering(PLANS, SHARES, ("each", "once"), (False, True), strength=2),
    ids=lambda each: named(each) if isinstance(each, sw.Plan) else str(each),
)
def test_data_ranks_have_unlike_numbers_of_prompts_and_of_inputs(
    plan: sw.Plan, share: Sequence[Sequence[int]], gather: Any, is_apart: bool, wanted: Any
) -> None:
    """`is_apart`: no rank can read what another has, so that all gather together."""

    def run(channel: sw.Channel) -> list[int]:
        engine = under(plan, llama().train(), Apart(channel) if is_apart else channel)
        mine = list(range(4) if plan.mesh.num_data_ranks == 1 else share[plan.mesh.data_rank(channel.rank)])
        state = torch.get_rng_state()
        tokens = engine.generate([prompt(number) for number in mine], seed=mine, gather=gather, **SHORT, **SAMPLING)
        logits = engine.predict(
            [{"input_ids": each} for each in tokens], lambda inputs: engine.model(inputs["input_ids"]).logits
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in engine.model.modules())
        assert len(tokens) == len(logits) == len(mine)
        for number, found, other in zip(mine, tokens, logits, strict=True):
            assert torch.equal(found.cpu(), wanted[number][0])
            assert torch.allclose(other.cpu(), wanted[number][1], atol=1e-12)
        return mine

    assert {each for mine in sw.simulate(plan.mesh.size, run) for each in mine} == {0, 1, 2, 3}


def test_one_seed_goes_on_over_all_prompts() -> None:
    model: Any = llama().eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = [model.generate(**prompt(number), **SHORT, **SAMPLING) for number in range(2)]
    engine = under(sw.Plan(), llama(), sw.comm.alone())
    first, none, last = engine.generate([prompt(0), None, prompt(1)], seed=3, **SHORT, **SAMPLING)
    assert torch.equal(first, expected[0])
    assert torch.equal(last, expected[1])
    assert none.shape == (0, 0)


@pytest.mark.parametrize(
    ("plan", "call"),
    [
        *[(mesh("dp_shard=2", 0), call) for call in ("generate", "predict", "evaluate", "step")],
        *[(mesh("dp_shard=2", 3), "predict"), (mesh("pp=2"), "generate")],
    ],
    ids=named,
)
def test_a_call_inside_of_a_loss_is_right_or_refused(plan: sw.Plan, call: str) -> None:
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}

    def run(channel: sw.Channel, *, is_inside: bool = True) -> float:
        calls: list[Any] = []

        def loss(output: Any, _: Any) -> torch.Tensor:
            if calls:
                calls.pop()()
            found: torch.Tensor = output.loss
            return found

        engine = sw.parallelize(llama(), plan, optimizer=sgd, loss=loss, channel=channel)
        inner: dict[str, Any] = {
            "generate": lambda: engine.generate({"input_ids": batch["input_ids"]}, seed=1, **SHORT)
        }
        calls += [inner.get(call, lambda: getattr(engine, call)(batch))] if is_inside else []
        engine.step(batch)
        return engine.evaluate(batch).loss

    if call != "step" and plan.sharding.stage == 0:
        assert sw.simulate(2, run) == sw.simulate(2, partial(run, is_inside=False))
        return
    # By a fault of the program, as any error in a forward: it stops the ranks.
    with pytest.raises(ModelError, match=f"engine.{call} was called inside of engine.step.* make the inner call first"):
        sw.simulate(2, run)


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_a_frozen_model_needs_no_optimizer(plan: sw.Plan, tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> None:
        asked = sw.Plan(mesh=plan.mesh, sharding=plan.sharding, tensor=TP if plan.mesh.tp > 1 else sw.Tensor())
        model = tower().requires_grad_(False)
        engine = sw.parallelize(model, asked, optimizer=None, loss=mean_square, channel=channel)
        assert engine.optimizers == ()
        rows = {"input": torch.ones(2, 4)}
        before, loss = engine.predict(rows), engine.evaluate(rows).loss
        sw.save(tmp_path / "save", engine)
        sw.load(tmp_path / "save", engine)
        assert torch.equal(engine.predict(rows), before)
        assert engine.evaluate(rows).loss == loss

    on_ranks(plan, run)
