"""Which device is a rank's own: by what the process sees, by its number on the host, or by its process group."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.device.kinds import backend_of, group_device, named_device, only_device, own_device
from shardwise.errors import PlanError

CPU = torch.device("cpu")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host with two accelerators; the second is current. Gives the numbers that the process chooses."""
    numbers: list[int] = []
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend in ("gloo", "nccl", "xccl"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", numbers.append)
    return numbers


def test_the_number_on_the_host_chooses_among_several_devices(chosen: list[int]) -> None:
    assert own_device(None, 1) == torch.device("cuda", 1)
    assert own_device(torch.device("cuda", 1), 0) == torch.device("cuda", 1)
    assert own_device(CPU, 1) == CPU
    assert chosen == [1, 1]


def test_the_one_device_that_is_seen_is_taken_whatever_the_number(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert own_device(None, 3) == torch.device("cuda", 0)
    assert own_device(None, None) == torch.device("cuda", 0)


def test_a_host_without_accelerators_computes_on_its_cpu() -> None:
    assert own_device(None, 0) == only_device(None) == CPU


def test_torch_names_the_backend_of_a_device(chosen: list[int]) -> None:
    assert [backend_of(torch.device(kind)) for kind in ("cuda", "xpu")] == ["nccl", "xccl"]


@pytest.fixture
def gloo_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_group_for_the_cpu_keeps_tensors_there_unless_a_device_is_asked_for(
    gloo_group: None, chosen: list[int]
) -> None:
    assert group_device(None) == CPU
    assert group_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert group_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert chosen == []


def test_a_process_group_of_devices_says_which(
    gloo_group: None, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert group_device(None) == torch.device("cuda", 1)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    assert group_device(None) == torch.device("cuda", 0)
    assert group_device(CPU) == CPU


def test_a_setting_names_the_device_of_the_host_the_cpu_or_a_device_that_is_seen(chosen: list[int]) -> None:
    assert named_device("auto") is None
    assert named_device("cpu") == named_device("cpu:0") == CPU
    assert named_device("cuda") == torch.device("cuda")
    assert named_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == []


def test_the_only_process_stays_on_the_current_device_unless_a_number_is_given(chosen: list[int]) -> None:
    assert only_device(None) == torch.device("cuda", 1)
    assert only_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert only_device(CPU) == CPU
    assert chosen == [1, 0]


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: own_device(None, None),
        "2 devices of type cuda are visible, and the launcher does not say which.*Export L",
    ),
    (lambda: own_device(None, 2), "2 devices of type cuda are visible, and LOCAL_RANK is 2.*Export LOCAL_RANK"),
    (lambda: backend_of(torch.device("mps")), "a channel for mps was asked for"),
    (lambda: named_device("gpu"), "2 of cuda on this host, and knows no device of that name; give auto, cpu or cuda"),
    (lambda: named_device("xpu"), "2 of cuda on this host; give auto, cpu or cuda, or install a build of torch for"),
    (lambda: named_device("cuda:2"), "2 of cuda on this host, and numbers begin at 0; give auto, cpu or cuda"),
]


@pytest.mark.parametrize(("call", "says"), REFUSALS)
def test_a_device_that_is_not_there_is_refused(chosen: list[int], call: Callable[[], object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        call()
    assert chosen == []


@pytest.mark.parametrize(
    "of", [lambda asked: own_device(asked, 0), only_device, group_device, lambda _: named_device("cuda")]
)
def test_a_device_of_a_build_of_torch_for_other_hosts_is_refused_alike(of: Callable[[torch.device], object]) -> None:
    with pytest.raises(PlanError, match=r"'cuda' was asked for, but torch .* sees (no accelerator|8 of fake) on"):
        of(torch.device("cuda"))
