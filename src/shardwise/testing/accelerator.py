"""The fake device as torch sees it: `load` registers it, `present` shows it, `behind` delays it, `counted` counts.

A process has to load it before its first backward, because autograd makes one thread per device then, once. Where it is
loaded and not present, `torch.accelerator` finds no accelerator, so that other tests of the process notice nothing.
"""

import os
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardwise.testing.library import library

NAME = "fake"

VISIBLE = "FAKE_VISIBLE_DEVICES"
"""Names the devices that a process sees, read by `load`, as CUDA_VISIBLE_DEVICES does: numbers, UUIDs (FAKE-00000001 or
the beginning of one), or one MIG name. What follows a name that no device has is not seen."""

_TORCH = str(Path(torch.__file__).parent)

_shown: list[str] = []
"""Not empty while programs may find the devices."""

_listeners: list[Callable[[str, int, str], None]] = []
"""Who hears of each count, while somebody records."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """What was counted on one device."""

    syncs: int = 0
    """How often the host would have waited: `.item()`, copies to the host, `synchronize`, sizes that depend on data."""
    uploads: int = 0
    """Copies from the host."""
    launches: int = 0
    """Kernels, and copies on the device or from another."""
    allocations: int = 0
    """Pieces of memory that were taken."""
    lines: list[str] = field(default_factory=list)
    """"sync aten::item: FILE:LINE in FUNCTION <- ..." of each of the kinds that were asked for."""


@cache
def load() -> None:
    """Register the device with torch, for the rest of this process. Compiles it where that has not been done."""
    torch.ops.load_library(str(library()))
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _kernels.impl("heard", _tell, "CompositeExplicitAutograd")
    torch.ops.fake_device.see(len(visible()))


@cache
def visible() -> tuple[str, ...]:
    """The UUIDs of the devices that this process sees: fake:0 is the first of them."""
    every = [f"{NAME.upper()}-{number:08d}" for number in range(8)]
    given = os.environ.get(VISIBLE)
    if given is None:
        return tuple(every)
    seen: list[str] = []
    for name in (each.strip() for each in given.split(",")):
        if name.startswith("MIG-"):
            # Of the instances of a device a process sees one, whatever else it names.
            return tuple(seen) or (name,)
        found = [every[int(name)]] if name.isdigit() and int(name) < len(every) else []
        found = found or [uuid for uuid in every if name.startswith(f"{NAME.upper()}-") and uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] in seen:
            return ()  # named twice: the driver shows none
        seen += found
    return tuple(seen)


@contextmanager
def present() -> Iterator[None]:
    """`torch.accelerator` finds the devices, until the outermost of these ends.

    Their generators start from torch's default seed, the counts go on.
    """
    load()
    torch.ops.fake_device.show(True)
    _shown.append(NAME)
    for number in range(num_devices()):
        default_generator(number).manual_seed(torch.initial_seed())
    try:
        yield
    finally:
        _shown.pop()
        if not _shown:
            torch.ops.fake_device.show(False)
            torch.ops.fake_device.set_device(0)


LAST = -2
"""The seed under which nothing runs before the host needs to see it: what a stream does not wait for has not come."""


@contextmanager
def behind(seed: int) -> Iterator[None]:
    """The streams run behind the host, as far as chance will have it: the same for the same seed."""
    torch.ops.fake_device.run_behind(seed)
    try:
        yield
    finally:
        torch.ops.fake_device.run_behind(-1)


@contextmanager
def counted(*kinds: str) -> Iterator[list[Counts]]:
    """Count what happens on each device until the end.

    kinds: "sync", "upload", "launch", "allocation": those that come with lines of Python.
    """
    counts = [Counts() for _ in range(num_devices())]
    before = [torch.ops.fake_device.counts(number) for number in range(num_devices())]

    def hear(kind: str, device: int, name: str) -> None:
        if kind in kinds:
            counts[device].lines.append(f"{kind} {name}: {_callers()}")

    _listeners.append(hear)
    torch.ops.fake_device.record(bool(kinds))
    try:
        yield counts
    finally:
        _listeners.remove(hear)
        torch.ops.fake_device.record(False)
        for number, (of_device, old) in enumerate(zip(counts, before, strict=True)):
            found = [a - b for a, b in zip(torch.ops.fake_device.counts(number), old, strict=True)]
            of_device.syncs, of_device.uploads, of_device.launches, of_device.allocations = found


def num_devices() -> int:
    """How many devices there are."""
    return int(torch.ops.fake_device.device_count())


def num_late() -> int:
    """How many jobs have run behind the host so far."""
    return int(torch.ops.fake_device.num_late())


def default_generator(number: int) -> torch.Generator:
    """The generator of a device, from which operators draw that are given none."""
    generator: torch.Generator = torch.ops.fake_device.default_generator(number)
    return generator


_kernels = torch.library.Library("fake_device", "FRAGMENT")


def _tell(kind: str, device: int, name: str) -> None:
    for listener in _listeners:
        listener(kind, device, name)


def _callers(num_frames: int = 4) -> str:
    """The innermost lines that are not torch's own, innermost first."""
    frames = [
        f"{Path(each.filename).name}:{each.lineno} in {each.name}"
        for each in reversed(traceback.extract_stack())
        if not each.filename.startswith((_TORCH, __file__))
    ]
    return " <- ".join(frames[:num_frames])


def _module() -> Any:
    """`torch.fake`, with what torch asks of the module of a device."""
    # No operator is called in here: torch asks under modes that see operators, too, and may answer for them.
    module: Any = types.ModuleType(f"torch.{NAME}")
    generators = tuple(default_generator(number) for number in range(len(visible())))

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def manual_seed_all(seed: int) -> None:
        # `torch.manual_seed` comes here in tests that have nothing to do with devices, too.
        for generator in generators if _shown else ():
            generator.manual_seed(seed)

    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.is_available = lambda: bool(_shown)
    module.is_initialized = torch.ops.fake_device.is_initialized
    module._initialized = True  # where activation checkpoints look
    module.device_count = num_devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(index_of(device))
    module._is_in_bad_fork = torch.ops.fake_device.is_in_bad_fork
    module.default_generators = generators
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.manual_seed = lambda seed: generators[index_of(None)].manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    module.memory_allocated = lambda device=None: torch.accelerator.memory_allocated(index_of(device))
    module.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated(index_of(device))
    module.reset_peak_memory_stats = lambda device=None: torch.accelerator.reset_peak_memory_stats(index_of(device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module
