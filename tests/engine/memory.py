"""Bytes of tensors: those that are alive, and the most at one time."""

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def tensor_bytes_alive() -> int:
    """Bytes of all tensors that the interpreter can reach, each storage once."""
    return sum(storage.nbytes() for storage in _storages_alive().values())


def counted_from_now() -> Callable[[], int]:
    """Call it for the bytes of tensors that were not alive before. Whatever earlier tests left is kept until then."""
    gc.collect()
    gc.freeze()  # and not undone, which would undo that of tests/conftest.py: what is alive is looked through once
    return lambda: sum(storage.nbytes() for storage in _storages_alive().values())


def _storages_alive() -> dict[int, torch.UntypedStorage]:
    """Of what garbage collection knows: not of what is frozen."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    # What torch.func wraps, and an error of an earlier test may hold, has no storage; other layouts have none either.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    storages = [each.untyped_storage() for each in tensors if not wrapped(each) and each.layout == torch.strided]
    return {storage.data_ptr(): storage for storage in storages}


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated at one time."""
    gc.collect()  # of earlier tests: memory that is let go meanwhile would count as less
    often = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # as in the programs of users; tests collect less often
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
    finally:
        gc.set_threshold(*often)
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
