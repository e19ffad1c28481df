"""Saves of whole tensors out of devices: copies are queued, and the host waits once for each buffer of a window."""

from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import windows
from shardwise.testing.accelerator import behind, counted

NUM = 40


def state_of(channel: sw.Channel, cut: str) -> tuple[dict[sw.Piece, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank holds of each tensor, behind kernels of its device, and the whole tensors."""
    dim = {"rows": 0, "columns": 1}[cut]
    width = (8, 6)[dim] // channel.size
    held, whole = {}, {}
    for number in range(NUM):
        values = torch.arange(48.0).view(8, 6) + 100 * number
        whole[f"w{number}"] = values + 1
        offset = tuple(width * channel.rank if at == dim else 0 for at in range(2))
        part = values.narrow(dim, width * channel.rank, width)
        piece = sw.Piece(
            name=f"w{number}", dtype="float32", global_shape=(8, 6), offset=offset, shape=tuple(part.shape), run=None
        )
        held[piece] = part.contiguous().to(channel.device).add_(1)
    return held, whole


def saved(channel: sw.Channel, folder: Path, cut: str) -> int:
    """How often the host waited for its device."""
    held, _ = state_of(channel, cut)
    channel.exchange(b"", purpose="all begin")
    with counted() as counts:
        sw.save(folder, held, layout="whole", channel=channel)
    channel.exchange(b"", purpose="all have saved")
    return counts[channel.device.index or 0].syncs


def test_a_save_of_whole_tensors_waits_for_each_buffer_and_not_for_each_piece(fake: str, tmp_path: Path) -> None:
    """What it puts together for others, and its own file; what comes from others crosses the device in one copy."""
    assert max(sw.simulate(2, lambda channel: saved(channel, tmp_path, "rows"), device=fake)) <= 3
    found = sw.simulate(2, lambda channel: saved(channel, tmp_path / "columns", "columns"), device=fake)
    # torch waits for a copy whose target is not in one piece: what a rank has of its own file's columns.
    assert max(found) <= 3 + NUM // 2


def test_each_window_is_waited_for(fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1024)
    num_windows = NUM * 8 * 6 * 4 // 1024 // 2 + 1
    for waits in sw.simulate(2, lambda channel: saved(channel, tmp_path, "rows"), device=fake):
        assert num_windows / 2 < waits <= 4 * num_windows


@pytest.mark.parametrize(("num_ranks", "cut"), [(1, "rows"), (2, "rows"), (2, "columns")])
def test_delays_change_no_bit_of_a_save_of_whole_tensors(
    num_ranks: int, cut: str, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1024)
    _, expected = sw.simulate(1, lambda channel: state_of(channel, cut))[0]
    for seed in range(2):
        folder = tmp_path / str(seed)
        with behind(seed):
            sw.simulate(num_ranks, partial(saved, folder=folder, cut=cut), device=fake)
        checkpoint = sw.checkpoint.open(folder)
        assert [name for name, values in expected.items() if not torch.equal(checkpoint.read(name), values)] == []
