"""Kernels that a step launches, against a plain loop with the same clip and optimizer.

A step may have 1.03 of its launches, one more, and one for each collective.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import simulated
from shardwise.comm.device.sums import ExactSum
from shardwise.testing.accelerator import Counts, counted
from tests.fake_device.words import batch_of, fused, loss_of, plan, words

NUM_BLOCKS = 10


def deep(device: torch.device) -> nn.Module:
    return words(device, num_blocks=NUM_BLOCKS)


def of_plain_loop(k: int, *, bf16: bool, optimizer: Any) -> Counts:
    """The launches of one step."""
    device = torch.device("fake", 0)
    model = deep(device).to(torch.bfloat16 if bf16 else torch.float32)
    made = optimizer(list(model.parameters()))
    for step in range(3):
        ids = batch_of(step, device)["ids"]
        with counted() as counts:
            for part in ids.chunk(k):
                loss = loss_of(model(part), {"ids": part})
                (loss / k if k > 1 else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
            made.zero_grad()
    return counts[0]


class Collectives:
    """Counts launches of simulated collectives: what a backend of devices does in one, they do in many.

    The addition in rank order belongs to the collective. It is one kernel for each rank, and none with sums="backend".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: Counter[int] = Counter()
        for owner, name in ((simulated, "gather"), (simulated, "hand_over_parts"), (ExactSum, "finish")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, run: Callable[..., None]) -> Callable[..., None]:
        def counting(*arguments: Any) -> None:
            with counted() as found:
                run(*arguments)
            self.launches.update({number: each.launches for number, each in enumerate(found)})

        return counting


def of_engine(channel: sw.Channel, asked: sw.Plan, optimizer: Any, inside: Collectives) -> tuple[int, int]:
    """The launches of one step outside of collectives, and how many may be there for them."""
    engine = sw.parallelize(deep(channel.device), asked, optimizer=optimizer, loss=loss_of, channel=channel)
    counters, at = engine.counters, asked.mesh.data_rank(channel.rank)
    number = channel.device.index or 0
    for step in range(3):
        batch = batch_of(10 * step + at, channel.device)
        before, before_inside = counters.reduce_scatters + counters.all_gathers, inside.launches[number]
        channel.exchange(b"", purpose="all ranks begin")
        with counted() as counts:
            engine.step(batch)
            channel.exchange(b"", purpose="all collectives are done")
    # The figures of the step are a collective too.
    collectives = counters.reduce_scatters + counters.all_gathers - before + 1
    outside = counts[number].launches - (inside.launches[number] - before_inside)
    return outside, collectives + 1


CASES = {
    f"{'alone' if stage is None else f'stage {stage}'}, {'bf16' if bf16 else 'float32'}, k={k}, {name}": (
        plan(k, bf16=bf16) if stage is None else plan(k, stage=stage, bf16=bf16, dp_shard=2),
        optimizer,
    )
    for stage in (None, 0, 1, 2, 3)
    for bf16 in (False, True)
    for k in (1, 4)
    for name, optimizer in (("fused", fused), ("foreach", torch.optim.AdamW))
    if name == "fused" or stage is None
}


QUICK = (
    *("alone, float32, k=1, fused", "alone, bf16, k=4, foreach", "stage 0, float32, k=1, fused"),
    *("stage 1, bf16, k=1, fused", "stage 2, float32, k=1, fused", "stage 3, bf16, k=4, fused"),
)


@pytest.mark.parametrize(
    "case", [each if each in QUICK else pytest.param(each, marks=pytest.mark.stress) for each in CASES]
)
def test_a_step_launches_little_more_than_a_plain_loop(case: str, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, optimizer = CASES[case]
    k, bf16 = asked.merge.microbatches, asked.precision.compute is not None
    plain = of_plain_loop(k, bf16=bf16, optimizer=optimizer).launches
    inside = Collectives(monkeypatch)
    found = sw.simulate(asked.mesh.size, lambda each: of_engine(each, asked, optimizer, inside), device=fake)
    for launches, more in found:
        assert 0 < launches <= 1.03 * plain + more, f"{launches} against {plain} of the plain loop, and {more}"
