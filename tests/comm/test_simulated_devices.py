"""Simulated ranks with a device each: the contract of channels, and what is refused."""

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from tests.contracts.channel_cases import CASES
from tests.contracts.channel_oracles import Case


def test_rank_r_has_the_device_of_number_r_as_its_current_one(fake: str) -> None:
    def run(channel: sw.Channel) -> tuple[torch.device, torch.device, torch.device, int]:
        part = channel.over([channel.rank])
        return channel.device, channel.allocate(8).device, part.device, torch.accelerator.current_device_index()

    for rank, found in enumerate(sw.simulate(3, run, device=fake)):
        assert found == (*[torch.device(fake, rank)] * 3, rank)
    assert torch.accelerator.current_device_index() == 0


def test_without_a_device_ranks_stay_on_the_cpu(fake: str) -> None:
    assert sw.simulate(2, lambda channel: channel.device.type) == ["cpu"] * 2


def test_messages_on_the_cpu_travel_and_are_matched_apart(fake: str) -> None:
    def run(channel: sw.Channel) -> list[list[float]]:
        other = 1 - channel.rank
        here, there = torch.zeros(2, device=channel.device), torch.zeros(2)
        if channel.rank == 0:
            first = channel.send(torch.full((2,), 5.0, device=channel.device), other, purpose="device")
            channel.send(torch.full((2,), 7.0), other, purpose="host").wait()
            first.wait()
        else:
            channel.receive(there, other, purpose="host").wait()
            channel.receive(here, other, purpose="device").wait()
        return [here.tolist(), there.tolist()]

    assert sw.simulate(2, run, device=fake)[1] == [[5.0, 5.0], [7.0, 7.0]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", [1, 3])
def test_devices_fulfil_the_contract(fake: str, case: Case, size: int) -> None:
    sw.simulate(size, case, timeout_seconds=30, device=fake)


@pytest.mark.parametrize(
    ("num_ranks", "device", "refusal"),
    [
        (1, "cuda", "device='cuda'.*: torch has devices of the kind 'fake' only; leave device out, and ranks compute"),
        (1, "nonsense", "device='nonsense'.*: torch has devices of the kind 'fake' only"),
        (2, "fake:1", "rank r has the device of number r; give the kind alone, as in 'fake'"),
        (9, "fake", "8 devices of this kind are visible.*Simulate at most 8 ranks, or leave device out"),
    ],
)
def test_devices_that_are_not_there_are_refused(fake: str, num_ranks: int, device: str, refusal: str) -> None:
    with pytest.raises(PlanError, match=refusal):
        sw.simulate(num_ranks, lambda channel: None, device=device)


def test_a_machine_without_an_accelerator_has_only_the_cpu() -> None:
    if torch.accelerator.is_available():
        return
    with pytest.raises(PlanError, match=r"device='fake'.*: torch has no accelerator; leave device out"):
        sw.simulate(1, lambda channel: None, device="fake")
