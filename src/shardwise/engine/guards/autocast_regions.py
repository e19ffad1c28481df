"""Regions of torch.autocast around steps: forwards and losses run inside of them, and everything else outside.

    with torch.autocast("cuda"):      a plain loop                the engine
        engine.step(batch)            with autocast:              leaves the caller's region
                                          loss = f(model(x))      a region like it for each microbatch
                                      loss.backward()             no region: dtypes are those of the forward's kernels
                                      optimizer.step()            no region; then the caller's again

At the end of a region torch drops the casts of weights that it has kept. So each forward casts the weights as the last
update left them, and no cast of one microbatch enters the graph of another.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Output = TypeVar("Output")


def casts_of(device: torch.device) -> list[tuple[str, torch.dtype]]:
    """The kinds of devices, of those that a model on `device` may compute on, whose operations are cast; to what."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """Outside of all regions of this thread, which are open again after the body."""
    kinds = [kind for kind, _ in casts_of(device)]
    caches, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() - 1
    _turn(kinds, to=False, caches=True)
    # torch drops its casts where the outermost region ends. So in the body it does at the end of each.
    while torch.autocast_decrement_nesting():
        pass
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        _turn(kinds, to=True, caches=caches)
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()


def _turn(kinds: list[str], *, to: bool, caches: bool) -> None:
    for kind in kinds:
        torch.set_autocast_enabled(kind, to)
    torch.set_autocast_cache_enabled(caches)


class AutocastRegions:
    """The caller's region of an engine's steps, and the forwards in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._casts: list[tuple[str, torch.dtype]] = []
        """Of the step, evaluation or prediction that goes on."""
        self._caches = True

    @contextmanager
    def left(self) -> Iterator[None]:
        """Outside of all regions: a step, say."""
        self._casts, self._caches = casts_of(self._device), torch.is_autocast_cache_enabled()
        with outside_autocast(self._device):
            yield

    def described(self) -> str:
        """The region that the caller is in now."""
        casts = casts_of(self._device)
        return " and ".join(f'torch.autocast("{kind}", dtype={dtype})' for kind, dtype in casts) or "no torch.autocast"

    def inside(self, compute: Callable[Given, Output]) -> Callable[Given, Output]:
        """`compute` in a region like the caller's, in any thread."""

        def compute_inside(*args: Given.args, **kwargs: Given.kwargs) -> Output:
            with ExitStack() as stack:
                for kind, dtype in self._casts:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches))
                return compute(*args, **kwargs)

        return compute_inside
