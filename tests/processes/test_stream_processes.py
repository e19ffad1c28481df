"""Weights of trainers to receivers between real processes: two groups, programs of their own, a rank that dies."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from examples import grpo_two_groups, train_and_serve
from examples.inference_receiver import Sizes, target_of, tensors_of
from shardwise.comm import Channel, Work
from tests.forks.programs import started
from tests.processes.pool import TCP, Pool, RankError, Transport

ROOT = Path(__file__).parents[2]

PIECE = sw.Piece(name="w", dtype="float32", global_shape=(1 << 14, 64))


def test_a_trainer_of_four_ranks_serves_two_servers_of_one_and_of_four(pool: Pool) -> None:
    tensors = pool.run(9, train_and_serve.take_part)
    train_and_serve.compare(tensors)
    assert torch.equal(tensors[0]["model.norm.weight"], tensors[8]["model.norm.weight"])


def dies_on_the_way(channel: Channel, victim: int) -> None:
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
    sw.stream(source, target, channel=Dying(channel) if channel.rank == victim else channel)


@pytest.mark.parametrize(("victim", "transport"), [(1, Transport()), (2, TCP)])
def test_a_rank_that_dies_on_the_way_is_named_by_all(pool: Pool, victim: int, transport: Transport) -> None:
    with pytest.raises(RankError) as error:
        pool.run(4, dies_on_the_way, victim, transport=transport, lost=[victim])
    assert sorted(error.value.failures) == sorted({0, 1, 2, 3} - {victim})
    for failure in error.value.failures.values():
        assert failure.kind == "PeerError"
        assert f"rank {victim} is gone (its process died)" in failure.message
        assert "stream" in failure.message


def learns_from_answers(channel: Channel, num_updates: int = 2) -> list[dict[str, float]]:
    """GRPO on two ranks, with answers of the third one."""
    vars(grpo_two_groups)["NUM_UPDATES"] = num_updates
    return grpo_two_groups.take_part(channel, 1)[1]


def dies_while_others_wait(channel: Channel, victim: int) -> None:
    """The first rollouts have come; then the victim is killed, in its own work."""
    names = vars(grpo_two_groups)
    name = {1: "update_on", 2: "roll_out"}[victim]
    work = names[name]

    def once(*arguments: Any) -> Any:
        names[name] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments)

    if channel.rank == victim:
        names[name] = once
    learns_from_answers(channel, 3)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_trainer_or_generator_is_named_to_both_groups(pool: Pool, victim: int) -> None:
    with pytest.raises(RankError) as error:
        pool.run(3, dies_while_others_wait, victim, lost=[victim])
    assert sorted(error.value.failures) == sorted({0, 1, 2} - {victim})
    for failure in error.value.failures.values():
        assert failure.kind == "PeerError"
        assert f"rank {victim} is gone (its process died)" in failure.message


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(["-c", text], environment={**world, "RANK": str(rank)}))
            for rank, text in enumerate((TRAINER, receiver))
        ]
        (_, error), (told, other) = [each.communicate(timeout=100) for each in ranks]
    assert (error, other) == ("", "")
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
