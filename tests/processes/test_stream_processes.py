"""State that moves between real processes: a receiver that is a program of its own, and a rank that dies on the way."""

import os
import re

import pytest
import torch

import shardwise as sw
from examples.inference_receiver import Sizes, target_of, tensors_of
from shardwise.comm import Channel, Work
from tests.forks.programs import ROOT
from tests.processes.as_started import ended
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, RankError, Transport

PIECE = sw.Piece(name="w", dtype="float32", global_shape=(1 << 14, 64))


def dies_on_the_way(channel: Channel, way: str, victim: int) -> None:
    """Ranks 0 and 1 give, 2 and 3 take; one of them is gone when the elements begin to travel."""

    class Dying(sw.Recorded):
        def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
            os._exit(1)

        def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
            os._exit(1)

    rows = 1 << 13
    half = sw.Piece(
        name="w",
        dtype="float32",
        global_shape=PIECE.global_shape,
        offset=(rows * (channel.rank % 2), 0),
        shape=(rows, 64),
    )
    source = {half: torch.ones(rows, 64)} if channel.rank < 2 else None
    target = {PIECE: torch.zeros(PIECE.global_shape)} if channel.rank >= 2 else None
    used: Channel = Dying(channel) if channel.rank == victim else channel
    if way == "stream":
        sw.stream(source, target, channel=used)
    else:
        sw.reshard(source or {}, dict.fromkeys(target or {}), used)


@pytest.mark.parametrize(
    ("way", "victim", "transport"),
    [("stream", 1, SHARED_MEMORY), ("stream", 2, TCP), ("reshard", 1, SHARED_MEMORY)],
)
def test_a_rank_that_dies_on_the_way_is_named_by_all(pool: Pool, way: str, victim: int, transport: Transport) -> None:
    with pytest.raises(RankError) as error:
        pool.run(4, dies_on_the_way, way, victim, transport=transport, lost=[victim])
    found = set(error.value.failures)
    # In a reshard rank 0 only gives: it waits for nobody once its elements are taken, which may be before the loss.
    assert found - ({0} if way == "reshard" else set()) == ({2, 3} if way == "reshard" else {0, 1, 2, 3} - {victim})
    for failure in error.value.failures.values():
        assert failure.kind == "PeerError"
        assert f"rank {victim} is gone (its process died)" in failure.message
        assert way in failure.message


TRAINER = """
import torch
import shardwise as sw
from examples.inference_receiver import Sizes, target_of, tensors_of
channel = sw.processes(device=torch.device("cpu"))
weights = target_of(tensors_of(Sizes(), 0, 1, torch.bfloat16), Sizes(), 0, 1)
for update in range(3):
    for tensor in weights.values():
        tensor.fill_(min(update, 1))
    sw.stream(weights, None, channel=channel, delta=True)
channel.close()
"""


def test_the_receiver_is_a_program_of_its_own() -> None:
    receiver = "import runpy, sys; sys.argv = ['receiver', '--first-rank', '1', '--tp', '1']; "
    receiver += f"runpy.run_path({str(ROOT / 'examples' / 'inference_receiver.py')!r}, run_name='__main__')"
    (code, _, error), (other_code, told, other) = ended([["-c", TRAINER], ["-c", receiver]])
    assert (code, other_code, error, other) == (0, 0, "", "")
    needed = 2 * sum(
        piece.num_elements for piece in target_of(tensors_of(Sizes(), 0, 1, torch.bfloat16), Sizes(), 0, 1)
    )
    found = [
        re.fullmatch(rf"tp=1: (\d+) bytes for {needed}, digest ([0-9a-f]{{32}})", line) for line in told.splitlines()
    ]
    sent, digests = zip(*[each.groups() for each in found if each is not None], strict=True)
    assert [int(each) >= needed for each in sent] == [
        False,
        True,
        False,
    ]  # zeros are there, and ones need not come twice
    assert digests[0] != digests[1] == digests[2]
