"""Checkpoints of real processes: every layout, both transports, storage that one rank sees, savers that meet."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm import Channel
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.layouts import LAYOUTS, Whole, assembled, engine_of, masters_of, train
from tests.checkpoint.small_states import loaded, rubbish, same, whole_state
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport

State = dict[Piece, torch.Tensor]


def save_engine(channel: Channel, path: str, name: str, file_layout: Literal["pieces", "whole"]) -> State:
    engine = engine_of(LAYOUTS[name], channel)
    train(engine, channel, range(2))
    sw.save(path, engine, extra={"name": name}, layout=file_layout, channel=channel)
    return {piece: tensor.clone() for piece, tensor in engine.state().items()}


def load_engine(channel: Channel, path: str, name: str) -> tuple[dict[str, Any], State]:
    engine = engine_of(LAYOUTS[name], channel, seed=5)
    extra = dict(sw.load(path, engine, channel=channel))
    return extra, {piece: tensor.clone() for piece, tensor in engine.state().items()}


@pytest.mark.parametrize(
    ("source", "target", "file_layout", "transport"),
    [
        ("two-slice", "three-whole-bf16", "pieces", SHARED_MEMORY),
        ("three-slice-fine", "two-whole", "whole", TCP),
        ("two-slice-bf16", "two-stage0", "whole", SHARED_MEMORY),
    ],
)
def test_engines_load_each_others_saves(
    source: str, target: str, file_layout: str, transport: Transport, pool: Pool, tmp_path: Path
) -> None:
    path = str(tmp_path)
    size = LAYOUTS[source].mesh.size
    expected = masters_of(assembled(pool.run(size, save_engine, path, source, file_layout, transport=transport)))
    results = pool.run(LAYOUTS[target].mesh.size, load_engine, path, target, transport=transport)
    assert [extra for extra, _ in results] == [{"name": source}] * len(results)
    got = masters_of(assembled(state for _, state in results))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
    assert checkpoint.verify(tmp_path).good


def load_from_own_place(channel: Channel, folder: str, verify: bool) -> Whole:
    """A state of some MB, which only rank 1's place has."""
    target = {"w": torch.zeros(700, 1000), "v": torch.zeros(3, dtype=torch.bfloat16)}
    sw.load(f"{folder}/{channel.rank}", target, shared=False, verify=verify, channel=channel)
    return target


@pytest.mark.parametrize(("verify", "transport"), [(True, SHARED_MEMORY), (False, TCP)])
def test_storage_that_one_rank_sees_is_read_for_all(
    verify: bool, transport: Transport, pool: Pool, tmp_path: Path
) -> None:
    state = {"w": torch.arange(700_000.0).view(700, 1000), "v": torch.ones(3).bfloat16()}
    checkpoint.save(tmp_path / "1", state)
    for found in pool.run(3, load_from_own_place, str(tmp_path), verify, transport=transport):
        assert same(found, state)


def save_alone(channel: Channel, path: str, num_rounds: int) -> list[str | None]:
    """Every rank saves for itself, all at once; per round None or the error."""
    outcomes: list[str | None] = []
    for turn in range(num_rounds):
        seed = 10 * turn + channel.rank
        channel.exchange(b"", purpose="all begin together")
        try:
            sw.save(path, whole_state(seed), extra={"state": seed}, channel=alone())
            outcomes.append(None)
        except CheckpointError as error:
            outcomes.append(str(error))
    return outcomes


def test_of_programs_that_save_to_one_folder_one_wins_each_number(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.run(3, save_alone, str(tmp_path), 8)
    won = [10 * turn + rank for turn in range(8) for rank in range(3) if outcomes[rank][turn] is None]
    for lost in (each for rank in range(3) for each in outcomes[rank] if each is not None):
        assert f"another program saved to {tmp_path} at the same time and committed save-" in lost
    found = [loaded(folder) for folder in sorted(tmp_path.iterdir())]
    assert sorted(extra["state"] for _, extra in found) == won  # type: ignore[type-var]
    assert all(same(state, whole_state(extra["state"])) for state, extra in found)  # type: ignore[arg-type]
    checkpoint.save(tmp_path, whole_state(0))
    assert rubbish(tmp_path) == []
