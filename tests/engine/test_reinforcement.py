"""GRPO by engines, as in `examples`, against a plain loop of PyTorch: answers, losses and weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import shardwise as sw
from examples import grpo, grpo_two_groups
from examples.grpo import EPOCHS, LEARNING_RATE, NUM_PROMPTS, PLANS, Rollout, log_probs
from shardwise.errors import PeerError

NUM_UPDATES = 2
DOUBLE = torch.float64

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(grpo.SAMPLING, "max_new_tokens", 4)
        for module in (grpo, grpo_two_groups):
            patch.setattr(module, "NUM_UPDATES", NUM_UPDATES)
        yield


def plain(apart: int) -> tuple[list[dict[str, float]], Weights]:
    """The figures and the weights of one process, with answers of weights that are so many updates older."""
    policy, reference, answering = (grpo.build(DOUBLE) for _ in range(3))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    older = [{name: each.clone() for name, each in policy.state_dict().items()}] * apart

    def generate(prompts: Sequence[Rollout], *, seed: Sequence[int], **kwargs: Any) -> list[torch.Tensor]:
        found = []
        for each, number in zip(prompts, seed, strict=True):
            torch.manual_seed(number)
            found.append(answering.generate(**each, **kwargs))
        return found

    figures = []
    for update in range(NUM_UPDATES):
        older.append({name: each.clone() for name, each in policy.state_dict().items()})
        answering.load_state_dict(older.pop(0))
        rollouts = grpo.roll_out(generate, update, range(NUM_PROMPTS))
        with torch.no_grad():
            for each in rollouts:
                each["old"] = log_probs(answering(each["input_ids"]).logits, each["input_ids"])
                each["reference"] = log_probs(reference(each["input_ids"]).logits, each["input_ids"])
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            losses = [grpo.loss(policy(each["input_ids"]), each) for each in rollouts]
            sum(each["loss"] for each in losses).div(NUM_PROMPTS).backward()  # type: ignore[union-attr]
            optimizer.step()
        figures.append({name: sum(each[name].item() for each in losses) / NUM_PROMPTS for name in losses[0]})
    return figures, policy.state_dict()


@pytest.fixture(scope="module")
def expected(_small: None) -> list[tuple[list[dict[str, float]], Weights]]:
    with torch.random.fork_rng(devices=[]):
        return [plain(apart) for apart in (0, 1)]


def assert_equal(engine: Weights, figures: Sequence[Any], wanted: tuple[list[dict[str, float]], Weights]) -> None:
    assert [each.keys() for each in figures] == [each.keys() for each in wanted[0]]
    for found, each in zip(figures, wanted[0], strict=True):
        assert found == pytest.approx(each, abs=1e-8)
        assert found["reward"] == pytest.approx(each["reward"], abs=1e-12)  # the same answers
    assert engine.keys() == wanted[1].keys()
    for name, tensor in engine.items():
        # AdamW divides by gradients of any size, which stages sum up in another order.
        assert torch.allclose(tensor, wanted[1][name], atol=1e-6), name


@pytest.mark.parametrize("name", PLANS)
def test_answers_losses_and_weights_are_those_of_a_plain_loop(name: str, expected: Any) -> None:
    assert expected[0][0][0]["clipped"] > 0
    assert expected[0][0][-1]["kl"] > 1e-3

    def run(channel: sw.Channel) -> tuple[Weights, Any]:
        engine, figures = grpo.train(channel, PLANS[name], DOUBLE)
        return dict(sw.full(engine)), figures

    ranks = sw.simulate(PLANS[name].mesh.size, run)
    assert_equal(*ranks[0], expected[0])
    assert all(figures == ranks[0][1] for _, figures in ranks)


@pytest.mark.parametrize(("num_ranks", "apart"), [(3, 0), (4, 1)])
def test_other_ranks_answer_with_the_weights_of_each_update(num_ranks: int, apart: int, expected: Any) -> None:
    def run(channel: sw.Channel) -> tuple[Weights, Any, sw.checkpoint.StreamReport]:
        is_trainer = channel.rank in grpo_two_groups.TRAINERS
        engine, figures = grpo_two_groups.take_part(channel, apart, DOUBLE)
        ends = (engine, None) if is_trainer else (None, engine)
        report = sw.stream(*ends, channel=channel)
        return dict(sw.full(engine)), figures, report

    ranks = sw.simulate(num_ranks, run)
    assert_equal(*ranks[0][:2], expected[apart])
    answering = ranks[2][0]
    assert all(torch.equal(answering[name], tensor) for name, tensor in ranks[0][0].items())
    # Each element once for each rank that wants it, and digests.
    assert ranks[0][2].sent_bytes <= 1.01 * ranks[0][2].needed_bytes


@pytest.mark.parametrize(("victim", "apart"), [(2, 0), (2, 1), (1, 0), (1, 1)])
def test_a_rank_that_fails_is_named_to_both_groups(victim: int, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, PeerError] = {}

    def run(channel: sw.Channel) -> None:
        if channel.rank == victim:
            channel = Failing(channel)
        try:
            grpo_two_groups.take_part(channel, apart)
        except PeerError as error:
            told[channel.rank] = error
            raise

    class Failing(sw.Recorded):
        def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
            if purpose == "rollouts" and sum(call.purpose == "rollouts" for call in self.calls):
                raise RuntimeError("the second rollouts")
            return super().exchange(value, purpose=purpose)

    with pytest.raises(RuntimeError, match="the second rollouts"):
        sw.simulate(3, run)
    assert told.keys() == {0, 1, 2} - {victim}
    assert all(error.rank == victim and "the second rollouts" in str(error) for error in told.values())
