"""Rewrites among real processes: save, load and full tensors, over both transports, and the DTensors of FSDP2."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.fused_models import (
    FUSING,
    Apart,
    Fused,
    Whole,
    engine_of,
    fused,
    model_of,
    plan_of,
    train,
    wholes,
)
from tests.checkpoint.small_states import same, same_tensor
from tests.checkpoint.test_matrix import masters_of
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport

State = dict[Piece, torch.Tensor]

both_transports = pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])


def copied(engine: sw.Engine) -> State:
    return {piece: tensor.clone() for piece, tensor in engine.state().items()}


def save_and_give(channel: Channel, path: str) -> tuple[State, Whole]:
    engine = engine_of(Apart, plan_of(Apart, channel.size, compute="bfloat16"), channel)
    train(engine, channel, range(2))
    sw.save(path, engine, rewrite=sw.Rewrite(FUSING), layout="whole", channel=channel)
    return copied(engine), dict(sw.full(engine, sw.Rewrite(FUSING), channel=channel))


def load_fused(channel: Channel, path: str) -> State:
    engine = engine_of(Fused, plan_of(Fused, channel.size), channel, seed=5)
    sw.load(path, engine, channel=channel)
    return copied(engine)


def load_apart(channel: Channel, path: str, partition: str) -> State:
    engine = engine_of(Apart, plan_of(Apart, channel.size, partition=partition), channel, seed=5)  # type: ignore[arg-type]
    sw.load(path, engine, rewrite=sw.Rewrite(FUSING).inverse(), channel=channel)
    return copied(engine)


@both_transports
def test_engines_save_load_and_give_through_a_rewrite(transport: Transport, pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, save_and_give, str(tmp_path), transport=transport)
    state = wholes(held for held, _ in results)
    expected = fused(state)
    catalogue = checkpoint.open(tmp_path)
    assert all(same_tensor(catalogue.read(name), tensor.contiguous()) for name, tensor in expected.items())
    for _, full in results:
        assert full.keys() == model_of(Fused).state_dict().keys()
        assert all(same_tensor(full[name], expected[name].contiguous()) for name in full if name != "logits.weight")
    masters = masters_of(state)
    for got, wanted in (
        (wholes(pool.run(3, load_fused, str(tmp_path), transport=transport)), fused(masters)),
        (wholes(pool.run(2, load_apart, str(tmp_path), "whole", transport=transport)), masters),
    ):
        assert same(got, {name: tensor.contiguous() for name, tensor in wanted.items()})


def full_of_dtensors(channel: Channel) -> tuple[Whole, Whole]:
    model = model_of(Apart)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (channel.size,)))
    return plain, dict(sw.full(model.state_dict(), channel=channel))


def test_the_dtensors_of_fsdp_are_given_as_whole_tensors(pool: Pool) -> None:
    for plain, full in pool.run(2, full_of_dtensors):
        assert same(full, plain)


def stop_early(channel: Channel) -> str:
    state = {f"t.{number}": torch.ones(3 << 20) for number in range(3)}
    try:
        for name, _ in sw.full(state, channel=channel):
            if channel.rank == 1 and name == "t.1":
                break
    except CheckpointError as error:
        return str(error)
    return "stopped"


@both_transports
def test_a_rank_that_stops_early_is_told_to_the_others_at_once(transport: Transport, pool: Pool) -> None:
    zero, one = pool.run(2, stop_early, transport=transport)
    assert one == "stopped"
    assert zero.startswith("rank 1 stopped taking full tensors before the last")
