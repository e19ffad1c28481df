"""Which device is a rank's own: by what the process sees, by its number on the host, or by its process group."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.devices import backend_of, group_device, named_device, only_device, own_device
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


@pytest.mark.parametrize(("local_rank", "says"), [(None, "the launcher does not say which"), (2, "LOCAL_RANK is 2")])
def test_a_rank_whose_device_is_not_known_is_refused(chosen: list[int], local_rank: int | None, says: str) -> None:
    with pytest.raises(PlanError, match=rf"2 devices of type cuda are visible, and {says}.*\. Export LOCAL_RANK"):
        own_device(None, local_rank)
    assert chosen == []


def test_a_host_without_accelerators_computes_on_its_cpu() -> None:
    assert own_device(None, 0) == CPU
    # A build of torch for devices that this host does not have is refused alike.
    for of in (own_device, lambda asked, rank: only_device(asked), lambda asked, rank: group_device(asked)):
        with pytest.raises(PlanError, match=r"'cuda' was asked for, but torch .* sees (no accelerator|8 of fake) on"):
            of(torch.device("cuda"), 0)


def test_a_device_for_which_torch_names_gloo_has_no_backend(chosen: list[int]) -> None:
    assert [backend_of(torch.device(kind)) for kind in ("cuda", "xpu")] == ["nccl", "xccl"]
    with pytest.raises(PlanError, match="a channel for mps was asked for"):
        backend_of(torch.device("mps"))


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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", "sees 2 of cuda on this host, and knows no device of that name; give auto, cpu or cuda"),
        ("xpu", "sees 2 of cuda on this host; give auto, cpu or cuda, or install a build of torch for such devices"),
        ("cuda:2", "sees 2 of cuda on this host, and numbers begin at 0; give auto, cpu or cuda"),
    ],
)
def test_a_setting_of_a_device_that_is_not_there_is_refused(chosen: list[int], name: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        named_device(name)
    assert str(refused.value) == f"{name!r} was asked for, but torch {torch.__version__} {says}"


def test_without_accelerators_a_setting_may_name_the_cpu_alone() -> None:
    assert named_device("cpu") == CPU
    with pytest.raises(
        PlanError, match=r"'cuda' was asked for, but torch .* sees no accelerator .*; give auto or cpu, or"
    ):
        named_device("cuda")


def test_the_only_process_stays_on_the_current_device_unless_a_number_is_given(chosen: list[int]) -> None:
    assert only_device(None) == torch.device("cuda", 1)
    assert only_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert only_device(CPU) == CPU
    assert chosen == [1, 0]


def test_without_accelerators_the_only_process_computes_on_the_cpu() -> None:
    assert only_device(None) == CPU
