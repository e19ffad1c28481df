"""Full tensors of what ranks hold: in the order of the model, one by one in bounded memory, out of devices too."""

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from shardwise.testing.accelerator import behind, counted
from tests.checkpoint.layouts import odd
from tests.checkpoint.rewritten_tensors import shares_of
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import same, same_tensor

Full = list[tuple[str, torch.Tensor]]


def test_plain_models_and_states_by_name_and_only_the_names_that_are_asked_for() -> None:
    model = odd()
    for state in (TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)), model.state_dict()):
        full = list(sw.full(state))
        assert [name for name, _ in full] == list(model.state_dict())
        assert same(dict(full), dict(model.state_dict()))
        full[0][1].zero_()  # it is the caller's own
        assert model.get_parameter("embedding.weight").abs().sum() > 0
    assert list(sw.full({})) == []
    whole = {name: torch.randn(3, 4) for name in "abc"}
    shares = shares_of(whole, "runs", 3)

    def run(channel: Channel) -> Full:
        return list(sw.full(shares[channel.rank], channel=channel, to=1, names=["c", "a"]))

    others, found, _ = sw.simulate(3, run)
    assert others == []
    assert [name for name, _ in found] == ["c", "a"]
    assert same(dict(found), {name: whole[name] for name in "ca"})


def test_tensors_are_given_one_after_the_other_and_not_kept() -> None:
    """Small ones together; a large one comes in several windows."""
    whole = {f"small.{at}": torch.randn(100) for at in range(30)} | {"large": torch.randn(70, 60)}
    shares = shares_of(whole, "runs", 3)

    def run(channel: Channel) -> int:
        alive: list[weakref.ref[torch.Tensor]] = []
        most = 0
        for name, tensor in sw.full(shares[channel.rank], channel=channel):
            assert same_tensor(tensor, whole[name])
            alive = [each for each in alive if each() is not None]
            most = max(most, sum(each.nbytes for ref in alive if (each := ref()) is not None))
            alive.append(weakref.ref(tensor))
        return most

    with small_limits(4096):
        assert max(sw.simulate(3, run)) <= 400  # the one before, which the loop's own variable keeps


def stopping(channel: Channel, at: Mapping[int, int]) -> int:
    """Take full tensors, and stop after so many on some ranks."""
    whole = {f"t.{number}": torch.full((1 << 20,), float(number)) for number in range(4)}
    seen = 0
    for _ in sw.full(shares_of(whole, "runs", channel.size)[channel.rank], channel=channel):
        seen += 1
        if seen == at.get(channel.rank):
            break
    channel.exchange(b"", purpose="what comes next")  # all are still in step
    return seen


@pytest.mark.parametrize("number", [1, 3, 4])
def test_ranks_that_stop_at_the_same_tensor_go_on_together(number: int) -> None:
    assert sw.simulate(3, lambda channel: stopping(channel, dict.fromkeys(range(3), number))) == [number] * 3


def test_a_rank_that_stops_early_makes_the_others_raise_an_error() -> None:
    def run(channel: Channel) -> str:
        if channel.rank == 1:
            return str(stopping(channel, {1: 2}))
        with pytest.raises(CheckpointError) as caught:
            stopping(channel, {})
        channel.exchange(b"", purpose="what comes next")
        return str(caught.value)

    zero, one, two = sw.simulate(3, run)
    assert one == "2"
    assert zero == two
    assert zero.startswith("rank 1 stopped taking full tensors before the last one, and this rank goes on")
    sw.full({"a": torch.ones(1)}, to=3).close()  # type: ignore[attr-defined]  # nothing happens before the first


# Out of devices: copies are queued, and the host waits once for each buffer of a window.

NUM = 40


def on_device(channel: Channel, dim: int) -> tuple[dict[Piece, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank holds of each tensor, behind kernels of its device, and the whole tensors."""
    whole = {f"w{number}": torch.arange(48.0).view(8, 6) + 100 * number for number in range(NUM)}
    held = shares_of(whole, "rows" if dim == 0 else "columns", channel.size)[channel.rank]
    moved = {piece: tensor.contiguous().to(channel.device).add_(1) for piece, tensor in held.items()}
    return moved, {name: values + 1 for name, values in whole.items()}


def saved(channel: Channel, folder: Path, dim: int) -> int:
    """How often the host waited for its device."""
    held, _ = on_device(channel, dim)
    channel.exchange(b"", purpose="all begin")
    with counted() as counts:
        sw.save(folder, held, layout="whole", channel=channel)
    channel.exchange(b"", purpose="all have saved")
    return counts[channel.device.index or 0].syncs


def test_a_save_of_whole_tensors_waits_for_each_buffer_and_not_for_each_piece(fake: str, tmp_path: Path) -> None:
    """What it puts together for others, and its own file; what comes from others crosses the device in one copy."""
    assert max(sw.simulate(2, lambda channel: saved(channel, tmp_path, 0), device=fake)) <= 3
    # torch waits for a copy whose target is not in one piece: what a rank has of its own file's columns.
    assert max(sw.simulate(2, lambda channel: saved(channel, tmp_path / "b", 1), device=fake)) <= 3 + NUM // 2
    num_windows = NUM * 8 * 6 * 4 // 1024 // 2 + 1
    with small_limits(1024):
        for waits in sw.simulate(2, lambda channel: saved(channel, tmp_path / "c", 0), device=fake):
            assert num_windows / 2 < waits <= 4 * num_windows


@pytest.mark.parametrize(("num_ranks", "dim"), [(1, 0), (2, 0), (2, 1)])
def test_delays_change_no_bit_of_a_save_of_whole_tensors(num_ranks: int, dim: int, fake: str, tmp_path: Path) -> None:
    _, expected = sw.simulate(1, lambda channel: on_device(channel, dim))[0]
    for seed in range(2):
        folder = tmp_path / str(seed)
        with behind(seed), small_limits(1024):
            sw.simulate(num_ranks, partial(saved, folder=folder, dim=dim), device=fake)
        checkpoint = sw.checkpoint.open(folder)
        assert [name for name, values in expected.items() if not torch.equal(checkpoint.read(name), values)] == []
