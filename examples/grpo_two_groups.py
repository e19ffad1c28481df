"""GRPO where other ranks generate: weights go to them by `sw.stream`, and rollouts come back by `sw.exchange`.

One learns: engines on some ranks of a world; an engine as the target of a stream; values of any nesting for all ranks;
training and generation one update apart.

    python -m examples.grpo_two_groups                                          # four simulated ranks
    torchrun --nproc-per-node 3 -m examples.grpo_two_groups --apart 1

ranks 0, 1    train on rollouts 0    train on rollouts 1        with --apart 1 both do this at once
ranks 2, ...  make rollouts 1        make rollouts 2            with weights that are one update older
"""

import argparse
from typing import Any

import torch

import shardwise as sw
from examples.grpo import NUM_PROMPTS, NUM_UPDATES, PLANS, add_log_probs, build, engines, roll_out, update_on

TRAINERS = range(2)


def train(world: sw.Channel, apart: int, dtype: torch.dtype = torch.float32) -> tuple[sw.Engine, list[Any]]:
    """What a training rank does; the policy in the end, and the figures of each update."""
    plan = PLANS["stage3"]
    policy, reference = engines(plan, world.over(TRAINERS), dtype)
    number, count = plan.mesh.data_rank(policy.channel.rank), plan.mesh.num_data_ranks
    report, rollouts, figures = None, None, []
    for update in range(NUM_UPDATES + apart):
        report = sw.stream(policy, None, channel=world, delta=True, last=report)
        if apart and rollouts is not None:  # others generate meanwhile
            figures.append(dict(update_on(policy, reference, rollouts[number::count]).losses))
        rollouts = sw.exchange(None, channel=world, purpose="rollouts")[TRAINERS.stop]
        if not apart:
            figures.append(dict(update_on(policy, reference, rollouts[number::count]).losses))
        if world.rank == 0:
            print(f"stream {update}: {report.sent_bytes} bytes for {report.needed_bytes}, digest {report.digest}")
    return policy, figures


def generate(world: sw.Channel, apart: int, dtype: torch.dtype = torch.float32) -> sw.Engine:
    """What a generating rank does: its model is cut along tp, over all ranks that generate."""
    ranks = range(TRAINERS.stop, world.size)
    plan = sw.Plan(mesh=sw.Mesh(tp=len(ranks)), tensor=sw.Tensor(rules="auto"))
    model = build(dtype).requires_grad_(False)
    answering = sw.parallelize(model, plan, optimizer=None, channel=world.over(ranks))
    report = None
    for update in range(NUM_UPDATES + apart):
        report = sw.stream(None, answering, channel=world, delta=True, last=report)
        rollouts = roll_out(answering.generate, update, range(NUM_PROMPTS if update < NUM_UPDATES else 0))
        add_log_probs(answering, rollouts, "old")  # the policy may have gone on when it trains on them
        # All ranks along tp have the same.
        sw.exchange(rollouts if world.rank == ranks[0] else None, channel=world, purpose="rollouts")
    return answering


def take_part(world: sw.Channel, apart: int = 0, dtype: torch.dtype = torch.float32) -> tuple[sw.Engine, list[Any]]:
    """What each rank of the world does."""
    return train(world, apart, dtype) if world.rank in TRAINERS else (generate(world, apart, dtype), [])


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("--apart", type=int, choices=(0, 1), default=0, help="how many updates generation is behind")
    chosen = asked.parse_args().apart
    channel = sw.default_channel()
    if channel.size == 2:
        asked.error("two ranks train, and the others generate: start three processes or more")
    told = (
        take_part(channel, chosen)[1]
        if channel.size > 1
        else sw.simulate(4, lambda each: take_part(each, chosen))[0][1]
    )
    if channel.rank == 0:
        for update, each in enumerate(told):
            print(f"update {update}: " + ", ".join(f"{name} {value:.5f}" for name, value in each.items()))
        assert told[-1]["reward"] > told[0]["reward"]
        print("answers of other ranks got better, with the weights of each update to the bit")
