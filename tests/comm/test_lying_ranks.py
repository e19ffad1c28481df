"""One of two ranks says something else than it should, once: the other one gets an error of shardwise, or goes on.

What ranks gather as texts travels by digests, and is replaced before these are taken.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.moving import piece_exchange
from tests.comm.hostile import mutated
from tests.engine.channels import GoesOnAlone
from tests.engine.loops import begun, plan_of, rows

BODIES = (b"", b"5", b"null", b"[]", b"{}", b"[[1]]", b"[1, 2]", b"\xff\xfe", b"+", b"-", b'["done", null, 3]')
OF_SETTINGS = (
    b'{"optimizers": 5}',
    b'{"optimizers": [5]}',
    b'{"optimizers": [{"groups": 5}]}',
    b'{"optimizers": [{}]}',
)
Say = Callable[[str, bytes], bytes]
"""f(purpose, what the rank would say) -> what it says."""


class Lying(GoesOnAlone):
    """The channel of a rank, which says what `say` makes of its words."""

    progresses_alone = False

    def __init__(self, channel: sw.Channel, say: Say) -> None:
        super().__init__(channel)
        self.say = say

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Lying(self._channel.over(ranks), self.say)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        return self._channel.exchange(self.say(purpose, value), purpose=purpose)


def in_gatherings(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = piece_exchange.Gathering.agreed

    @contextmanager
    def lying(self: Any, channel: Any) -> Iterator[Any]:
        with agreed(self, channel) as gathered:
            yield gathered
            if isinstance(channel, Lying):
                gathered.own = [
                    channel.say(f"text {at} of {self._purpose}", each) for at, each in enumerate(gathered.own)
                ]

    monkeypatch.setattr(piece_exchange.Gathering, "agreed", lying)


def engine_of(channel: Any, stage: int = 3) -> Any:
    return begun(channel, lambda: nn.Linear(4, 3), plan_of("dp_shard=2", stage), optimizer=torch.optim.Adam)


def saving(channel: Any, folder: Path) -> None:
    engine = engine_of(channel, 1)
    sw.save(folder / "saved", engine, rewrite=sw.Rewrite("bias -> offset"))
    sw.load(folder / "saved", engine, rewrite=sw.Rewrite("offset -> bias"), shared=False)


def skipping(channel: Any, _: Path) -> None:
    engine_of(channel).step([rows(seed) for seed in range(1 + channel.rank)])


def wholly(channel: Any, _: Path) -> None:
    engine = engine_of(channel)
    with engine.whole(optimizer=True), torch.no_grad():
        engine.model.weight.fill_(1.0)
    sw.relayout(engine, plan_of("dp_shard=2", 1))


def streaming(channel: Any, _: Path) -> None:
    """From the one that lies: it has the rewrite, too."""
    piece = sw.Piece(name="v", dtype="float32", global_shape=(4, 4))
    if channel.rank == 1:
        sw.stream({"w": torch.ones(4, 4)}, None, channel=channel, rewrite=sw.Rewrite("w -> v"))
    else:
        sw.stream(None, {piece: torch.empty(4, 4)}, channel=channel)


FLOWS = {each.__name__: each for each in (saving, skipping, wholly, streaming)}


def errors_of(flow: str, folder: Path, say: Say) -> list[BaseException | None]:
    """What each rank raises."""
    folder.mkdir()

    def run(channel: sw.Channel) -> BaseException | None:
        try:
            FLOWS[flow](Lying(channel, say) if channel.rank == 1 else channel, folder)
        except Exception as error:
            return error
        return None

    return sw.simulate(2, run, timeout_seconds=60)


def once(purpose: str, left: list[bytes], now: str, own: bytes) -> bytes:
    """What a rank says: something else at the first time for this purpose."""
    return left.pop() if now == purpose and left else own


@pytest.mark.parametrize("num_bodies", [1, pytest.param(30, marks=pytest.mark.stress)])
@pytest.mark.parametrize("flow", FLOWS)
def test_what_a_peer_may_say_ends_in_errors_of_shardwise(
    flow: str, num_bodies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_gatherings(monkeypatch)
    good: dict[str, bytes] = {}
    assert errors_of(flow, tmp_path / "good", lambda purpose, value: good.setdefault(purpose, value) and value) == [
        None,
        None,
    ]
    refused = 0
    for number, (purpose, value) in enumerate(good.items()):
        # Of a lie in digests of its own texts the rank itself would not find what it has said.
        if purpose.startswith("digests of"):
            continue
        chance = random.Random(number)
        bodies = [*OF_SETTINGS] * ("settings" in purpose) + chance.sample(BODIES, min(num_bodies, len(BODIES)))
        bodies += [value[:1] + each[1:] for each in (mutated(value, chance) for _ in range(num_bodies))]
        for at, body in enumerate(bodies):
            error, _ = errors_of(flow, tmp_path / f"{number} {at}", partial(once, purpose, [body]))
            assert error is None or isinstance(error, ShardwiseError), (purpose, body, error)
            refused += error is not None
    assert refused > len(good) // 4
