"""Checkpoints of real processes, over both transports."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm import Channel
from shardwise.space import Piece
from tests.checkpoint.layouts import LAYOUTS, assembled, engine_of, masters_of, train
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
