"""Saves of devices: they load under other layouts, bit for bit, and a save in the background lets training go on."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import AsyncSaver
from shardwise.comm import Channel
from tests.gpu.conftest import Place, runs
from tests.gpu.layouts import engine_of, full, plan_of, share


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def save_and_load(channel: Channel, folder: Path, before: str, after: str) -> bool:
    """Train and save under one layout, load under another; whether every tensor has its bits."""
    plan = plan_of(before, channel.size)
    engine = engine_of(channel, plan)
    for step in range(2):
        engine.step(share(plan, channel.rank, step))
    sw.save(folder, engine)
    saved = full(engine, optimizer=True)
    other = engine_of(channel, plan_of(after, channel.size), seed=5)
    sw.load(folder, other)
    loaded = full(other, optimizer=True)
    other.step(share(plan_of(after, channel.size), channel.rank, 2))
    return same(saved, loaded)


@pytest.mark.parametrize(
    ("place", "size", "before", "after"),
    runs(
        (2, "stage 3", "tp"),
        (1, "stage 1", "stage 3"),
        (4, "pp, tp and stage 3", "stage 1"),
        (4, "stage 3", "pp, tp and stage 3"),
        (2, "pp", "stage 2"),
    ),
    indirect=["place"],
)
def test_a_save_loads_under_another_layout(place: Place, tmp_path: Path, size: int, before: str, after: str) -> None:
    assert all(place.run(size, save_and_load, tmp_path, before, after))


def save_without_waiting(channel: Channel, folder: Path, layout: str) -> tuple[bool, int, int]:
    """Whether a save has the values of its call, and the bytes that were waited for and queued."""
    plan = plan_of(layout, channel.size)
    engine = engine_of(channel, plan)
    engine.step(share(plan, channel.rank, 0))
    with AsyncSaver(folder, channel=channel) as saver:
        expected = full(engine, optimizer=True)
        saver.save(engine)
        for step in range(1, 4):
            engine.step(share(plan, channel.rank, step))
        saver.wait()
        copied = saver.counters
    other = engine_of(channel, plan, seed=5)
    sw.load(folder, other)
    return same(expected, full(other, optimizer=True)), copied.waited_bytes, copied.queued_bytes


@pytest.mark.parametrize(
    ("place", "size", "layout"), runs((2, "pp"), (1, "stage 1"), (2, "stage 3")), indirect=["place"]
)
def test_training_goes_on_while_a_save_is_copied_and_written(
    place: Place, tmp_path: Path, size: int, layout: str
) -> None:
    for has_the_values, num_waited, num_queued in place.run(size, save_without_waiting, tmp_path, layout):
        assert has_the_values
        # On a device the host copies single numbers alone, such as the steps of an optimizer.
        assert num_waited > num_queued == 0 if place.kind == "cpu" else num_queued > 100 * num_waited
