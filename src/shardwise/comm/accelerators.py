"""What torch names differently per kind of device: random numbers, the wait for kernels, rounded products.

    asked for                 CPU                        device d of any other kind K
    generators                torch.default_generator    and torch.K.default_generators[d]; where there are none,
                                                         torch.K.get_rng_state(d), set_rng_state, manual_seed
    wait for kernels          nothing                    torch.accelerator.synchronize(d)
    most memory so far        -                          torch.accelerator.max_memory_allocated(d), or torch.K's;
                                                         0 where both raise
    empty the cache           -                          torch.K.empty_cache(), or torch.accelerator's
    rounded convolutions      never                      as the backend of K says; of an unknown kind they may be

Which device is a rank's own, and what moves tensors between devices, is in `devices`.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, cast

import torch

from shardwise.comm.torch_private import guard_cuda_devices

_CONVOLUTIONS = {"cuda": "cudnn", "xpu": "mkldnn"}
"""Kind of device -> the part of `torch.backends` that says whether its convolutions round float32 (to TF32)."""


class RandomSource(Protocol):
    """What is used of `torch.Generator`."""

    def get_state(self) -> torch.Tensor:
        """A copy of the state, bytes on the CPU."""

    def set_state(self, state: torch.Tensor, /) -> object:
        """Go on from there."""

    def manual_seed(self, seed: int, /) -> object:
        """Begin anew."""


class _ModuleSource:
    """The generator of a device whose module shows states, and no generators."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        # Of kinds with one device per host (MPS) the functions take no device in some versions of torch.
        self._which = (device,) if inspect.signature(module.get_rng_state).parameters else ()

    def get_state(self) -> torch.Tensor:
        return cast("torch.Tensor", self._module.get_rng_state(*self._which))

    def set_state(self, state: torch.Tensor, /) -> None:
        self._module.set_rng_state(state, *self._which)

    def manual_seed(self, seed: int, /) -> None:
        with torch.accelerator.device_index(self._device.index):
            self._module.manual_seed(seed)


def random_sources(device: torch.device) -> dict[str, RandomSource]:
    """Where operations on `device` draw from: kind of device -> generator; the CPU's first, for operations there."""
    sources: dict[str, RandomSource] = {"cpu": torch.default_generator}
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if hasattr(module, "init"):
            module.init()  # there are no generators before
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        generators = getattr(module, "default_generators", None)
        sources[device.type] = (
            _ModuleSource(module, torch.device(device.type, index)) if generators is None else generators[index]
        )
    return sources


def random_states(device: torch.device, own: Sequence[torch.Generator] = ()) -> dict[str, torch.Tensor]:
    """The states of the generators of `random_sources`: equal before and after what draws nothing; own: of more."""
    states = {kind: source.get_state() for kind, source in random_sources(device).items()}
    return states | {f"own {at}": each.get_state() for at, each in enumerate(own)}


def set_random_states(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Go on from states that `random_states` gave."""
    sources = random_sources(device)
    for kind, state in states.items():
        sources[kind].set_state(state)


@contextmanager
def random_numbers_kept(*devices: torch.device, own: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """What the body draws, on the CPU, on these devices or from `own`, changes no number that is drawn later."""
    # Not `torch.random.fork_rng`, which wants the kind of device and one kind alone.
    states = [(device, random_states(device)) for device in (torch.device("cpu"), *devices)]
    kept_own = [(each, each.get_state()) for each in own]
    try:
        yield
    finally:
        for device, kept in states:
            set_random_states(device, kept)
        for each, state in kept_own:
            each.set_state(state)


def outlive_threads() -> None:
    """Make here, before threads begin that this one outlives, what torch 2.11 ties to the first thread that asks.

    There FakeTensorMode and torch.compile put a guard for CUDA into a global place where torch was built for CUDA and
    finds no GPU. The guard is freed with the thread that entered first, and the next entry anywhere is a SIGSEGV.
    """
    # The count first: it loads no driver where it can ask NVML, so that processes may still be forked.
    if torch.backends.cuda.is_built() and not torch.cuda.device_count():
        guard_cuda_devices()


def synchronize(device: torch.device) -> None:
    """Wait until everything is done that `device` was given to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that the allocator of `device` has given away at a time; 0 where it does not count."""
    found = peak_counter(device.type)
    return 0 if found is None else int(found(device))


@cache
def peak_counter(kind: str) -> Callable[[torch.device], int] | None:
    """What counts the memory of a kind of devices; None where nothing does."""
    # `torch.accelerator` has its function (torch 2.9) for every kind. Where the allocator of one has no statistics (mps
    # before torch 2.13), it raises, and nothing but a call says so.
    for module in (torch.accelerator, torch.get_device_module(kind)):
        found: Callable[[torch.device], int] | None = getattr(module, "max_memory_allocated", None)
        if found is not None:
            with contextlib.suppress(RuntimeError):
                found(torch.device(kind))
                return found
    return None


def empty_cache(device: torch.device) -> None:
    """Give memory back that the allocator of `device` holds for later."""
    # The kind's own first: that of `torch.accelerator` asks an allocator that some kinds do not have.
    found = getattr(torch.get_device_module(device), "empty_cache", torch.accelerator.empty_cache)
    found()


def rounds_convolutions(device: torch.device) -> bool:
    """Whether convolutions of float32 on `device` may take their products in fewer digits (TF32)."""
    if device.type == "cpu":
        return False
    backend = getattr(torch.backends, _CONVOLUTIONS.get(device.type, ""), None)
    if backend is None:
        return True
    # The setting of convolutions alone. `allow_tf32` raises where those of recurrent layers differ.
    precision = backend.conv.fp32_precision
    return bool(backend.allow_tf32 if precision == "none" else precision != "ieee")
