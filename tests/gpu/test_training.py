"""Training on devices: every layout gives the numbers of a plain loop, and a steady step never makes the host wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.testing.channels import run_all
from tests.gpu.conftest import Place, runs
from tests.gpu.layouts import CELLS, LAYOUTS, STEPS, engine_of, full, plain, plan_of, share


# On CPU processes `tests/processes` does the same.
@pytest.mark.gpu
@pytest.mark.parametrize(("place", "size"), [("device", size) for size in (2, 4, 8)], indirect=["place"])
def test_the_channel_fulfils_its_contract(place: Place, size: int) -> None:
    place.run(size, run_all)


def train(channel: Channel, layout: str) -> tuple[str, str]:
    """The kinds of device on which this rank computed, where its channel is and where its parameters are."""
    plan = plan_of(layout, channel.size)
    engine = engine_of(channel, plan)
    losses = [engine.step(share(plan, channel.rank, step)).loss for step in range(STEPS)]
    expected_losses, expected = plain(channel.device)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    got = full(engine)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(got[name], values, rtol=1e-4, atol=1e-6), name
    here = {each.device.type for each in engine.model.parameters() if not each.is_meta}
    assert len(here) == 1
    return channel.device.type, here.pop()


@pytest.mark.parametrize(("place", "size", "layout"), runs((2, "stage 2"), *CELLS, (4, "tp")), indirect=["place"])
def test_every_layout_gives_the_numbers_of_a_plain_loop(place: Place, size: int, layout: str) -> None:
    for of_channel, of_parameters in place.run(size, train, layout):
        assert of_channel == of_parameters
        assert (of_channel == "cpu") == (place.kind == "cpu")


def learn_in_half_precision(channel: Channel) -> tuple[float, float, int]:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        precision=sw.Precision(compute="bfloat16", keep=("*norm*",)),
    )
    engine = engine_of(channel, plan)
    losses = [engine.step(share(plan, channel.rank, 0)).loss for _ in range(20)]
    return losses[0], losses[-1], engine.counters.cast_elements


@pytest.mark.parametrize(("place", "size"), runs((2,), (1,)), indirect=["place"])
def test_bfloat16_holds_masters_and_learns(place: Place, size: int) -> None:
    for first, last, num_cast in place.run(size, learn_in_half_precision):
        assert last < 0.7 * first
        assert num_cast > 0


def recompute(channel: Channel) -> list[float]:
    """The norms of gradients without recomputation, with it, and from another seed."""
    plan = plan_of("stage 2", channel.size)
    norms = []
    for recomputed, seed in ((False, 0), (True, 0), (True, 1)):
        engine = engine_of(channel, plan, dropout=0.5, recomputed=recomputed, seed=seed)
        norms.append(engine.step(share(plan, channel.rank, 0)).grad_norm)
    return norms


@pytest.mark.parametrize(("place", "size"), runs((1,), (2,)), indirect=["place"])
def test_dropout_draws_the_same_masks_in_the_recomputation(place: Place, size: int) -> None:
    for without, recomputed, of_another_seed in place.run(size, recompute):
        assert recomputed == pytest.approx(without, rel=1e-6)
        assert abs(of_another_seed - without) > 1e-3 * without


def train_from_the_host(channel: Channel, stage: Literal[0, 1, 2, 3], offload: Any) -> None:
    """Losses of a plain loop, with what is on the host named by the tensors themselves."""
    sharding = sw.Sharding(stage=stage, bucket_bytes=32 << 10, offload=offload)
    plan = replace(plan_of(f"stage {stage}", channel.size), sharding=sharding)
    is_on_device = channel.device.type != "cpu"
    gc.collect()  # of earlier tests
    before = torch.accelerator.memory_allocated(channel.device) if is_on_device else 0
    engine = engine_of(channel, plan)
    losses = [engine.step(share(plan, channel.rank, step)).loss for step in range(STEPS)]
    if is_on_device:
        planned = engine.footprint()
        assert planned.master_bytes == 0 < planned.host_bytes
        assert (planned.working_bytes == 0) == (offload == "parameters")
        held = planned.working_bytes + planned.gradient_bytes + planned.reducing_bytes
        # Allocators round, and a step leaves some numbers.
        assert torch.accelerator.memory_allocated(channel.device) - before <= held + (64 << 10)
    expected_losses, expected = plain(channel.device)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    got = full(engine)
    for name, values in expected.items():
        assert torch.allclose(got[name], values, rtol=1e-4, atol=1e-6), name
    masters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    state = [each for entries in engine.optimizer.state.values() for each in entries.values()]
    assert {each.device.type for each in (*masters, *state) if torch.is_tensor(each)} <= {"cpu"}


@pytest.mark.parametrize(
    ("place", "size", "stage", "offload"),
    runs(
        (1, 1, "state"),
        *((size, stage, "state") for stage in range(4) for size in (1, 2)),
        *((size, 3, "parameters") for size in (1, 2)),
    ),
    indirect=["place"],
)
def test_masters_on_the_host_give_the_numbers_of_a_plain_loop(
    place: Place, size: int, stage: Literal[0, 1, 2, 3], offload: Any
) -> None:
    place.run(size, train_from_the_host, stage, offload)


def step_steadily(channel: Channel, layout: str) -> float:
    """The loss of a step in which a wait of the host for the device is an error, where torch can make it one."""
    plan = plan_of(layout, channel.size)
    engine = engine_of(channel, plan)
    batches = [
        {name: rows.to(channel.device) for name, rows in share(plan, channel.rank, step).items()} for step in range(5)
    ]
    for batch in batches[:4]:  # what is found out once is found out here
        engine.step(batch)
    with waits_forbidden(channel.device):
        report = engine.step(batches[4])
    return report.loss


@contextmanager
def waits_forbidden(device: torch.device) -> Iterator[None]:
    """The host waits for no device inside, where that can be found out."""
    if device.type == "fake":
        from shardwise.testing.accelerator import counted

        with counted("sync") as counts:
            yield
        assert counts[device.index].syncs == 0, "\n".join(counts[device.index].lines)
        return
    forbid: Any = getattr(torch.get_device_module(device), "set_sync_debug_mode", None)
    if forbid is not None:
        forbid("error")
    try:
        yield
    finally:
        if forbid is not None:
            forbid("default")


EACH_LAYOUT = [(max(2, least), layout) for layout, (least, _) in LAYOUTS.items()]


@pytest.mark.parametrize(("place", "size", "layout"), runs(*EACH_LAYOUT), indirect=["place"])
def test_a_steady_step_does_not_make_the_host_wait(place: Place, size: int, layout: str) -> None:
    losses = place.run(size, step_steadily, layout)
    assert len(set(losses)) == 1
    assert losses[0] > 0


def peak_at_start(channel: Channel, layout: str) -> tuple[int, int] | None:
    """The most bytes on the device while parallelize ran, and those of the footprint; None where none are counted."""
    if channel.device.type == "cpu":
        return None
    engine_of(channel, plan_of(layout, channel.size))  # the trials of an optimizer take half a MiB, once
    gc.collect()  # of earlier tests: memory that is let go meanwhile would count as less
    torch.accelerator.reset_peak_memory_stats(channel.device)
    before = torch.accelerator.memory_allocated(channel.device)
    held = engine_of(channel, plan_of(layout, channel.size)).footprint()
    # Of a unit that is cut, the whole is there while its values are taken over.
    expected = held.working_bytes + held.master_bytes + held.gathered_bytes
    return torch.accelerator.max_memory_allocated(channel.device) - before, expected


@pytest.mark.parametrize(("place", "size", "layout"), runs(*EACH_LAYOUT), indirect=["place"])
def test_a_model_is_cut_before_it_moves(place: Place, size: int, layout: str) -> None:
    for measured in place.run(size, peak_at_start, layout):
        assert (measured is None) == (place.kind == "cpu")
        if measured is not None:
            peak, held = measured
            assert peak <= held + (64 << 10)  # allocators round, and small trials take a few KiB
