"""Random programs of transfers, in flight together and waited for in any order, against what each must give."""

import random

import pytest
import torch

from shardwise.comm import Channel, Work, simulate
from tests.comm.boards import on_threads

SIZES = (0, 1, 700, 5_000, 300_000, 1_300_000)
NUM_RANKS = 3
GROUPS = ((0, 1, 2), (2, 0), (1, 2), (2, 1, 0))


def values(channel: Channel, *key: object, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key) % (1 << 31))
    return torch.randint(-40, 40, (count,), generator=generator).to(dtype).to(channel.device)


Step = tuple[int, str, tuple[int, ...], list[int], torch.dtype]


class Program:
    """The same steps on every rank; each begins and waits for them in an order of its own where it may."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.steps: list[Step] = []
        for number in range(12):
            kind = chance.choice(("gather", "reduce", "send", "send"))
            group = chance.choice(GROUPS)
            counts = [chance.choice(SIZES[:4] if number % 3 else SIZES) for _ in group]
            self.steps.append(
                (number, kind, group, counts, chance.choice((torch.float32, torch.bfloat16, torch.int32)))
            )
        self.chance = chance.randrange(1 << 30)

    def run(self, channel: Channel) -> None:
        chance = random.Random(self.chance + channel.rank)
        # Sends and receives of one pair keep their order, as do the collectives of one channel; all else may be mixed.
        lanes: dict[object, list[Step]] = {}
        for step in self.steps:
            if channel.rank in step[2]:
                kind, group = step[1], step[2]
                lanes.setdefault(("pairs", group[:2]) if kind == "send" else ("all", group), []).append(step)
        checks: list[tuple[Work, torch.Tensor, torch.Tensor]] = []
        while lanes:
            lane = chance.choice(sorted(lanes, key=repr))
            checks += self._begin(channel, *lanes[lane].pop(0))
            if not lanes[lane]:
                del lanes[lane]
        chance.shuffle(checks)
        for work, got, expected in checks:
            work.wait()
            assert torch.equal(got, expected)

    def _begin(
        self,
        channel: Channel,
        number: int,
        kind: str,
        group: tuple[int, ...],
        counts: list[int],
        dtype: torch.dtype,
    ) -> list[tuple[Work, torch.Tensor, torch.Tensor]]:
        part = channel.over(group)
        purpose = f"step {number}"
        total = sum(counts)
        if kind == "gather":
            output = torch.zeros(total, dtype=dtype, device=part.device)
            own = values(part, number, part.rank, count=counts[part.rank], dtype=dtype)
            work = part.all_gather(output, own, purpose=purpose, counts=counts)
            expected = torch.cat([values(part, number, r, count=count, dtype=dtype) for r, count in enumerate(counts)])
            return [(work, output, expected)]
        if kind == "reduce":
            output = torch.zeros(counts[part.rank], dtype=dtype, device=part.device)
            work = part.reduce_scatter(
                output, values(part, number, part.rank, count=total, dtype=dtype), purpose=purpose, counts=counts
            )
            inputs = [values(part, number, r, count=total, dtype=dtype) for r in range(part.size)]
            return [(work, output, sum(inputs[1:], inputs[0]).split(counts)[part.rank])]
        message = values(part, number, count=counts[0], dtype=dtype)
        if part.rank == 0:
            return [(part.send(message.clone(), 1, purpose=purpose), message, message)]
        if part.rank == 1:
            got = torch.zeros_like(message)
            return [(part.receive(got, 0, purpose=purpose), got, message)]
        return []


@pytest.mark.parametrize("remote", [(), (0, 1, 2), (1,)], ids=["shared", "bytes", "mixed"])
@pytest.mark.parametrize("seed", range(5))
def test_any_program_completes_with_the_plain_results(seed: int, remote: tuple[int, ...]) -> None:
    on_threads(NUM_RANKS, Program(seed).run, remote=remote)


@pytest.mark.parametrize("seed", range(8))
def test_simulated_ranks_complete_any_program(seed: int) -> None:
    simulate(NUM_RANKS, Program(seed).run)
