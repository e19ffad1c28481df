"""Contents that cross stages on devices are received one ahead, whatever comes; the bits of CPU ranks."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Work
from shardwise.engine.pipeline.mailbox import Key, Mailbox, MessageKind
from shardwise.testing.accelerator import LAST, behind
from tests.engine.late_channels import Log, LoggedBlock
from tests.engine.loops import begun
from tests.engine.loops import plan_of as plan_in_a_line
from tests.moving.watched import Watched
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.pipeline_values import PIPELINE_PROGRAMS
from tests.oracle.program import plan_of

WIDTH = 8


class Receiving:
    """A channel that writes down when the receive of a content is called."""

    def __init__(self, channel: Any, log: Log) -> None:
        self._channel, self._log = channel, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def over(self, ranks: Sequence[int]) -> Any:
        return Receiving(self._channel.over(ranks), self._log)

    def summing(self, sums: Any) -> Any:
        return Receiving(self._channel.summing(sums), self._log)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        if tensor.device.type != "cpu":
            self._log.compute(f"receive {purpose}")
        work: Work = self._channel.receive(tensor, source, purpose=purpose)
        return work


def test_the_next_content_is_received_while_the_one_before_is_computed_with(fake: str) -> None:
    def run(channel: sw.Channel) -> list[str]:
        log = Log()

        def blocks() -> nn.Module:
            return nn.Sequential(*(LoggedBlock(log, str(at), WIDTH, WIDTH) for at in range(2))).to(channel.device)

        engine = begun(Receiving(channel, log), blocks, plan_in_a_line("pp=2", k=4))
        for _ in range(3):
            log.events.clear()
            engine.step({"input": torch.ones(8, WIDTH)})
        return [re.sub(r"receive (\w)\w* .*", r"\1", each.what) for each in log.events]

    first, second = sw.simulate(2, run, device=fake)
    # v and g: the receive of a value, of a gradient. Without a list, "v F B v F B ..": each before its own computation.
    assert " ".join(first) == "g F 0 F 0 g B 0 F 0 g B 0 F 0 g B 0 B 0"
    assert " ".join(second) == "v v F 1 B 1 v F 1 B 1 v F 1 B 1 F 1 B 1"


@pytest.mark.parametrize(("on_device", "num_messages"), [(False, 4), (False, 64), (True, 16)])
def test_no_content_stays_with_its_sender_and_one_more_is_held_on_a_device(
    on_device: bool, num_messages: int, fake: str
) -> None:
    num_bytes = 4 << 12

    def run(channel: sw.Channel) -> int:
        watched = Watched(channel)
        mailbox = Mailbox(watched)
        for _ in range(2):
            mailbox.begin(num_messages)
            for number in range(num_messages):
                value, gradient = (Key(kind, number, 0) for kind in (MessageKind.VALUE, MessageKind.GRADIENT))
                sent, taken = (value, gradient) if channel.rank == 0 else (gradient, value)
                if channel.rank == 1:
                    mailbox.take(0, taken)
                mailbox.send(1 - channel.rank, sent, torch.ones(num_bytes // 4, device=channel.device))
                if channel.rank == 0:
                    mailbox.take(1, taken)
            mailbox.settle()
        assert mailbox.num_ahead == (num_messages if on_device else 0)
        return watched.most_under_way

    # This message and the one before, with their headers, the one that is received, and on devices the one after that.
    most = max(sw.simulate(2, run, device=fake if on_device else "cpu"))
    assert most <= (3 + on_device) * (num_bytes + 1024)


def content_of(kind: int, number: int, device: torch.device) -> torch.Tensor | None:
    values = torch.arange(24.0).view(4, 6) + number
    if kind == 0:
        return None
    if kind == 1:
        return values
    moved = values.to(device)
    return (moved, moved.t(), moved[:, ::2], moved.double(), moved[:0])[kind - 2]


def script_of(generator: random.Random, before: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The messages of a step, (sender, kind of content): those of the step before, and mostly a change."""
    script = list(before)
    for _ in range(generator.choice([0, 0, 1, 2])):
        at = generator.randrange(len(script) + 1)
        change = (generator.randrange(2), generator.randrange(7))
        script[at : at + generator.randrange(3)] = [change] * generator.randrange(3)
    return script


@pytest.mark.parametrize("seed", [pytest.param(at, marks=pytest.mark.stress if at > 4 else ()) for at in range(20)])
def test_messages_come_as_they_were_sent_whether_they_are_those_of_the_last_step_or_not(seed: int, fake: str) -> None:
    def run(channel: sw.Channel) -> int:
        mailbox, generator = Mailbox(channel), random.Random(seed)
        script = [(generator.randrange(2), generator.randrange(7)) for _ in range(6)]
        for step in range(12):
            script = script_of(generator, script)
            # The steps may be of another number of microbatches, and evaluations come between them.
            way = generator.choice(["1", "1", "1", "2", "evaluation"])
            if way != "evaluation":
                mailbox.begin(int(way))
            for number, (sender, kind) in enumerate(script):
                key = Key(MessageKind.GRADIENT, 0, number)
                wanted = content_of(kind, 100 * step + number, channel.device)
                if sender == channel.rank:
                    mailbox.send(1 - sender, key, wanted)
                    continue
                got = mailbox.take(sender, key).content
                assert (got is None) == (wanted is None)
                if got is not None and wanted is not None:
                    assert (got.device, got.dtype, got.stride()) == (wanted.device, wanted.dtype, wanted.stride())
                    assert torch.equal(got.cpu(), wanted.cpu())
            mailbox.settle()
            mailbox.forget()
        return mailbox.num_ahead

    with behind(LAST):
        assert sum(sw.simulate(2, run, device=fake)) > 5


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("delays", [LAST], indirect=True)
def test_forwards_that_change_their_paths_train_as_one_process(schedule: str, delays: None) -> None:
    program = PIPELINE_PROGRAMS["turning 9"]
    assert_trains_like_one_process(program, plan_of(program, "pp=2", schedule=schedule, k=3))
