"""Reinforcement learning: GRPO for a tiny language model, which answers with its live weights under any plan.

One learns: `engine.generate` and `engine.predict` between updates; a frozen reference as a second engine; rollouts of
any lengths as a list of microbatches; several updates on one set of rollouts. Every plan prints the same numbers.

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --plan stage3        # or pp, or tp
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

PLANS = {
    "alone": sw.Plan(),
    "stage3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
}
NUM_PROMPTS, GROUP, NUM_UPDATES, EPOCHS = 4, 8, 6, 2
LEARNING_RATE, CLIP, KL_WEIGHT = 1e-2, 0.2, 0.04
END, PAD, VOCABULARY = 1, 0, 24
SAMPLING = {"do_sample": True, "num_return_sequences": GROUP, "max_new_tokens": 6}

Rollout = dict[str, torch.Tensor]


def build(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The policy before training, and the reference."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    )
    nn.Module.to(model, dtype)
    return model


def prompt(update: int, number: int) -> torch.Tensor:
    """[1, 2 to 5] tokens: prompts have unlike lengths."""
    numbers = torch.Generator().manual_seed(update * NUM_PROMPTS + number)
    return torch.randint(2, VOCABULARY, (1, 2 + number % 4), generator=numbers)


def roll_out(generate: Any, update: int, numbers: Sequence[int]) -> list[Rollout]:
    """Answers to the prompts of these numbers, with their rewards and advantages."""
    questions = [prompt(update, number) for number in numbers]
    answers = generate(
        [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in questions],
        # One for each prompt: its answers depend neither on the rank nor on the other prompts.
        seed=[update * NUM_PROMPTS + number for number in numbers],
        **SAMPLING,
    )
    return [scored(tokens, each.shape[1]) for tokens, each in zip(answers, questions, strict=True)]


def scored(tokens: torch.Tensor, start: int) -> Rollout:
    """[GROUP, width] tokens, whose answers begin at `start`, as a microbatch."""
    answers = tokens[:, start:]
    ends = (answers == END).long()
    counts = ends.cumsum(1) - ends == 0  # up to the first end, which is part of the answer
    rewards = ((answers % 2 == 0) & counts).sum(1) / counts.sum(1)  # even tokens are good ones
    return {
        "input_ids": tokens,
        "counts": torch.cat([counts.new_zeros(GROUP, start - 1), counts], 1),  # of each token after the first
        "rewards": rewards,
        "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-4),
    }


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, width - 1]: of each token after the first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def loss(output: Any, rollout: Rollout) -> dict[str, torch.Tensor]:
    """The clipped objective of GRPO and its parts: means over the tokens of each answer, then over answers."""
    counts, advantages = rollout["counts"], rollout["advantages"][:, None]
    new = log_probs(output.logits, rollout["input_ids"])
    ratio = (new - rollout["old"]).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    behind = rollout["reference"] - new
    kl = behind.exp() - behind - 1

    def mean(each: torch.Tensor) -> torch.Tensor:
        return ((each * counts).sum(1) / counts.sum(1)).mean()

    return {
        "loss": mean(KL_WEIGHT * kl - gain),
        "kl": mean(kl),
        "clipped": mean((ratio - 1).abs() > CLIP),
        "reward": rollout["rewards"].mean(),
    }


def add_log_probs(engine: sw.Engine, rollouts: Sequence[Rollout], name: str) -> None:
    """Put what the engine's model makes of each rollout, without gradients, into it."""
    found = engine.predict(
        [{"input_ids": each["input_ids"]} for each in rollouts],
        lambda inputs: log_probs(engine.model(**inputs).logits, inputs["input_ids"]),
    )
    for rollout, each in zip(rollouts, found, strict=True):
        rollout[name] = each


def engines(plan: sw.Plan, channel: sw.Channel, dtype: torch.dtype = torch.float32) -> tuple[sw.Engine, sw.Engine]:
    """The policy, and the frozen reference."""
    policy = sw.parallelize(
        build(dtype),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        loss=loss,
        channel=channel,
    )
    return policy, sw.parallelize(build(dtype).requires_grad_(False), plan, optimizer=None, channel=channel)


def update_on(policy: sw.Engine, reference: sw.Engine, rollouts: Sequence[Rollout]) -> sw.StepReport:
    """Train on this data rank's rollouts, each of them a microbatch; the report of the last epoch."""
    add_log_probs(reference, rollouts, "reference")
    return [policy.step(list(rollouts)) for _ in range(EPOCHS)][-1]


def train(channel: sw.Channel, plan: sw.Plan, dtype: torch.dtype = torch.float32) -> tuple[sw.Engine, list[Any]]:
    """Generate, score, update; the policy in the end, and the figures of each update."""
    policy, reference = engines(plan, channel, dtype)
    mine = range(plan.mesh.data_rank(channel.rank), NUM_PROMPTS, plan.mesh.num_data_ranks)
    figures = []
    for update in range(NUM_UPDATES):
        rollouts = roll_out(policy.generate, update, mine)
        add_log_probs(policy, rollouts, "old")
        figures.append(dict(update_on(policy, reference, rollouts).losses))
    return policy, figures


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("--plan", choices=PLANS, default="alone")
    chosen = PLANS[asked.parse_args().plan]
    world = sw.default_channel()
    _, told = train(world, chosen)
    if world.rank == 0:
        for update, each in enumerate(told):
            print(f"update {update}: " + ", ".join(f"{name} {value:.5f}" for name, value in each.items()))
        assert told[-1]["reward"] > told[0]["reward"]
        print("answers got better with each of these updates, in which every plan has the same numbers")
