"""Saved tensors on the host: the same bits whatever a stream is behind, few bytes there, no wait of the host."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.activations import saved_on_host
from shardwise.errors import ModelError
from shardwise.testing.accelerator import LAST, behind, counted
from tests.engine.activations.nets import (
    ACTIVATION,
    DROPPING,
    ROWS,
    SAVED,
    assert_changes_nothing,
    blocks,
    program,
    square,
)
from tests.engine.formed import formed, linear
from tests.oracle.comparison import assert_same
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of

WIDTH = 64
OFFLOAD = sw.Activations(offload="blocks")
BOTH = sw.Activations(offload="blocks", checkpoint="blocks")
PARTS = sw.Activations(offload=("*.up", "*.attention"), checkpoint=("*.attention",))


@pytest.mark.usefixtures("on_fake")
@pytest.mark.parametrize(
    ("activations", "settings"),
    [
        (OFFLOAD, {"mesh": "pp=2", "k": 2, "schedule": "interleaved"}),
        (BOTH, {"mesh": "dp_shard=2,tp=2", "stage": 3, "k": 2}),
        (PARTS, {"mesh": "dp_shard=2", "stage": 2}),
        (sw.Activations(offload=(".",)), {"mesh": "pp=2", "k": 2}),
    ],
)
def test_every_plan_has_the_bits_that_it_has_without(
    monkeypatch: pytest.MonkeyPatch, activations: sw.Activations, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(saved_on_host, "LEAST_BYTES", 64)
    moved = []
    for engine in assert_changes_nothing(DROPPING, plan_of(DROPPING, **settings), activations):
        assert engine.activations.transfers is not None
        moved.append(engine.activations.transfers.num_bytes)
        said = f"activations.offload: {moved[-1]} bytes copied to the host" in engine.activations.report()
        assert said == (moved[-1] > 0)
    assert max(moved) > 0


def test_on_the_cpu_saved_tensors_stay_where_they_are() -> None:
    case = program(blocks(2), [{"input": torch.ones(4, WIDTH)}])
    assert [each.activations.transfers for each in assert_changes_nothing(case, plan_of(case), OFFLOAD)] == [None]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a step that is none of the first."""

    peak_bytes: int
    syncs: int
    pinned_bytes: int
    moved_bytes: int


def cost_of(activations: sw.Activations, num_blocks: int, device: str) -> Cost:
    def on_rank(channel: sw.Channel) -> Cost:
        torch.manual_seed(0)
        engine = sw.parallelize(
            blocks(num_blocks)(),
            sw.Plan(activations=activations),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=square,
            channel=channel,
        )
        batch = {"input": torch.ones(ROWS, WIDTH, device=channel.device)}
        for _ in range(2):
            engine.step(batch)
        transfers = engine.activations.transfers
        before = 0 if transfers is None else transfers.num_bytes
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(channel.device)
        rest = torch.accelerator.memory_allocated(channel.device)
        with counted() as counts:
            engine.step(batch)
        return Cost(
            peak_bytes=torch.accelerator.max_memory_allocated(channel.device) - rest,
            syncs=counts[0].syncs,
            pinned_bytes=0 if transfers is None else transfers.blocks.num_bytes,
            moved_bytes=0 if transfers is None else transfers.num_bytes - before,
        )

    [cost] = sw.simulate(1, on_rank, device=device)
    return cost


def test_the_device_has_the_saved_tensors_of_two_modules_whatever_their_number(fake: str) -> None:
    plain, few, many = cost_of(sw.Activations(), 8, fake), cost_of(OFFLOAD, 4, fake), cost_of(OFFLOAD, 8, fake)
    assert plain.peak_bytes >= 8 * SAVED
    # The figures of norms are too small to be moved, and stay for each block.
    assert few.peak_bytes <= many.peak_bytes <= few.peak_bytes + 4 * 2 * ROWS * 4
    # Backward has the gradients of the wide activation and of what is around it, too.
    assert many.peak_bytes <= 2 * SAVED + 7 * ACTIVATION
    # Of all blocks but the last, each storage once: the last one's backward comes first.
    assert many.moved_bytes == 7 * 10 * ACTIVATION
    assert many.moved_bytes == many.pinned_bytes, "blocks are used again in each step"
    assert many.syncs == plain.syncs


def test_of_checkpointed_modules_the_inputs_move(fake: str) -> None:
    kept, moved = cost_of(sw.Activations(checkpoint="blocks"), 8, fake), cost_of(BOTH, 8, fake)
    assert moved.moved_bytes == 7 * ACTIVATION
    assert moved.peak_bytes <= kept.peak_bytes - 4 * ACTIVATION


@pytest.mark.usefixtures("anywhere_fake")
@pytest.mark.parametrize("seed", [LAST, 1])
@pytest.mark.parametrize("activations", [OFFLOAD, BOTH])
def test_streams_behind_the_host_change_nothing(seed: int, activations: sw.Activations) -> None:
    batch = {"input": torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))}
    case = program(blocks(4), [batch] * 3)
    with behind(seed):
        got = train(case, plan_of(case, k=2, activations=activations))
    assert_same(got, train(case, plan_of(case, k=2)))


def aside(net: Any, x: torch.Tensor) -> Any:
    """Its first module gives what the user keeps, and no loss reads."""
    net.kept = net.aside(x)
    return net.blocks(x)


@pytest.mark.usefixtures("anywhere_fake")
def test_what_comes_back_and_is_not_used_is_in_nobodys_way() -> None:
    def on_rank(channel: sw.Channel) -> int:
        plan = sw.Plan(activations=sw.Activations(offload=("aside", "blocks.?")))
        model: Any = formed(aside, aside=lambda: blocks(1)()[0], blocks=blocks(2))()  # type: ignore[index]
        engine = sw.parallelize(model, plan, optimizer=torch.optim.SGD, loss=square, channel=channel)
        engine.step({"x": torch.ones(ROWS, WIDTH, device=channel.device)})
        moved = engine.activations.transfers
        assert moved is not None
        assert moved.num_bytes > 10 * ACTIVATION
        model.kept = None  # what was saved goes with its graph, and its memory to those that come now
        others = [torch.full((ROWS, WIDTH), 7.0, device=channel.device) for _ in range(20)]
        torch.accelerator.synchronize(channel.device)
        return sum(bool((each != 7.0).any()) for each in others)

    with behind(LAST):
        assert sw.simulate(1, on_rank) == [0]


def written_later(writes: Callable[[Any, torch.Tensor], Any]) -> Program:
    """A module writes to what the one before it has saved, or does so while that is on its way to the host."""
    writing = formed(writes, up=linear(WIDTH, WIDTH))
    return program(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), writing(), *blocks(1)().children()),
        [{"input": torch.ones(32, WIDTH)}],
    )


@pytest.mark.usefixtures("anywhere_fake")
@pytest.mark.parametrize("writes", [lambda net, x: x.mul_(2.0), lambda net, x: net.up(x.mul_(2.0).clone())])
@pytest.mark.parametrize("names", [("0",), ("0", "1", "2")])
def test_a_write_to_a_saved_tensor_is_found_as_torch_finds_it(names: tuple[str, ...], writes: Any) -> None:
    case = written_later(writes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(case, plan_of(case))
    with pytest.raises(ModelError, match="saved for backward was written to in place afterwards"):
        train(case, plan_of(case, activations=sw.Activations(offload=names)))
