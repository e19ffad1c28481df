"""Which device is a rank's own. All that this room knows of kinds of devices is here and in torch's own table.

one device to be seen                 that one, whatever LOCAL_RANK says: the launcher has chosen already
several                               the one of the rank's number on this host; of its number, where it is simulated
a process group bound to a device     that one
a process group of a device's kind    the current device of the process
"""

import torch
import torch.distributed as dist

from shardwise.errors import PlanError

_CPU = torch.device("cpu")
_WAY_OUT = "give cpu, or install a build of torch with a backend for these devices"


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed that moves tensors between devices of this type, such as nccl.

    Raises PlanError where this torch has none.
    """
    kind = _backend(device.type)
    if kind is None:
        raise PlanError(
            f"a channel for {device} was asked for, but this torch has no backend that moves its tensors; {_WAY_OUT}"
        )
    return kind


def named_device(name: str) -> torch.device | None:
    """The device that a setting names, such as "cpu" or "cuda:1"; None for "auto", the accelerator of this host.

    Raises PlanError for one that torch does not know or does not see.
    """
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        says, ways = _what_is_seen(name)
        raise PlanError(f"{says}, and knows no device of that name; give {ways}") from error
    if device.type == "cpu":
        return _CPU
    _refuse_unseen(device)
    return device


def only_device(asked: torch.device | None) -> torch.device:
    """The device of a program that is one process, which becomes the current one: no tensor moves to another."""
    device = _accelerator() if asked is None else asked
    if device.type != "cpu":
        _refuse_unseen(device)
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(device.index)
    return device


def own_device(asked: torch.device | None, local_rank: int | None) -> torch.device:
    """The device of this rank, which becomes the current one of the process.

    asked: None for the accelerator of this host, or the CPU where it has none. local_rank: the rank among those of this
    host, where somebody says it.
    """
    device = _accelerator() if asked is None else asked
    if device.type == "cpu":
        return device
    _refuse_unseen(device)
    backend_of(device)
    if device.index is None:
        device = torch.device(device.type, _own_number(device, local_rank))
    torch.accelerator.set_device_index(device.index)
    return device


def group_device(asked: torch.device | None) -> torch.device:
    """The device of this rank, where the program has made a process group and chosen a device before."""
    group = dist.group.WORLD
    bound = None if group is None else group.bound_device_id
    if asked is None:
        # The group says whether the program computes on devices: one for the CPU alone has a backend of its own.
        kinds = str(dist.get_backend_config()).replace(":", ",").split(",")
        asked = bound if bound is not None else _accelerator()
        if _backend(asked.type) not in kinds:
            return _CPU
    if asked.type != "cpu":
        _refuse_unseen(asked)
        backend_of(asked)
        if asked.index is None:
            return torch.device(asked.type, torch.accelerator.current_device_index())
    return asked


def simulated_devices(kind: str, num_ranks: int) -> list[torch.device]:
    """The devices of so many simulated ranks, in rank order. Raises PlanError unless each rank can have its own."""
    way_out = "leave device out, and ranks compute on the CPU"
    asked = f"simulate({num_ranks}, ..., device={kind!r})"
    if kind == "cpu":
        return [torch.device("cpu")] * num_ranks
    if ":" in kind:
        raise PlanError(
            f"{asked}: rank r has the device of number r; give the kind alone, as in {kind.split(':')[0]!r}"
        )
    found = _seen()
    if found is None or found.type != kind:
        has = "has no accelerator" if found is None else f"has devices of the kind {found.type!r} only"
        raise PlanError(f"{asked}: torch {has}; {way_out}")
    if num_ranks > (num_seen := torch.accelerator.device_count()):
        raise PlanError(
            f"{asked}: {num_seen} devices of this kind are visible, and each rank needs another. Simulate at most "
            f"{num_seen} ranks, or {way_out}"
        )
    return [torch.device(kind, number) for number in range(num_ranks)]


def make_current(device: torch.device) -> None:
    """Make it the current device of this thread."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def _seen() -> torch.device | None:
    """The kind of accelerator of this host. A build of torch for one that is not here sees none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _what_is_seen(name: str) -> tuple[str, str]:
    """What a refusal of a device says first, and what could be asked for."""
    found = _seen()
    seen = "no accelerator" if found is None else f"{torch.accelerator.device_count()} of {found.type}"
    says = f"{name!r} was asked for, but torch {torch.__version__} sees {seen} on this host"
    return says, "auto or cpu" if found is None else f"auto, cpu or {found.type}"


def _refuse_unseen(device: torch.device) -> None:
    found = _seen()
    says, ways = _what_is_seen(str(device))
    if found is None or device.type != found.type:
        raise PlanError(f"{says}; give {ways}, or install a build of torch for such devices")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise PlanError(f"{says}, and numbers begin at 0; give {ways}")


def _accelerator() -> torch.device:
    """The kind of device of this host between which tensors can move, else the CPU."""
    found = _seen()
    return _CPU if found is None or _backend(found.type) is None else torch.device(found.type)


def _backend(kind: str) -> str | None:
    try:
        backend = dist.get_default_backend_for_device(kind)
    except (ValueError, RuntimeError):  # none is registered, or torch does not know the kind
        return None
    # Where torch names gloo for another device than the CPU, tensors would go through the host.
    return backend if backend != "gloo" and dist.is_backend_available(backend) else None


def _own_number(device: torch.device, local_rank: int | None) -> int:
    num_seen = torch.accelerator.device_count()
    if num_seen == 1:
        return 0
    if local_rank is None or local_rank >= num_seen:
        says = (
            "the launcher does not say which belongs to this rank"
            if local_rank is None
            else f"LOCAL_RANK is {local_rank}"
        )
        raise PlanError(
            f"{num_seen} devices of type {device.type} are visible, and {says}. Export LOCAL_RANK (the rank within "
            "this host, from 0) to each process, or let each see one device"
        )
    return local_rank
