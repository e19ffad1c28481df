"""Regions of torch.autocast around steps: forwards and losses run inside of them, and everything else outside.

    with torch.autocast("cuda"):      a plain loop                the engine
        engine.step(batch)            with autocast:              leaves the caller's region
                                          loss = f(model(x))      a region like it for each microbatch
                                      loss.backward()             no region: dtypes are those of the forward's kernels
                                      optimizer.step()            no region; then the caller's again

At the end of a region torch drops the casts of weights that it has kept. So each forward casts the weights as the last
update left them, and no cast of one microbatch enters the graph of another.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch

from shardwise.errors import AutocastWarning, ModelError

Given = ParamSpec("Given")
Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class Region:
    """What torch.autocast does in a thread."""

    casts: tuple[tuple[str, bool, torch.dtype], ...]
    """For each kind of device whether operations on it are cast, and the dtype, also where they are not."""
    depth: int
    """The regions that are open, one in another."""
    caches: bool
    """Whether casts of weights are kept to the end of the outermost region."""

    @staticmethod
    def here(kinds: tuple[str, ...]) -> "Region":
        """The one in which this thread is."""
        return Region(
            tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
            _depth(),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def is_none(self) -> bool:
        """Whether no region is open."""
        return self.caches and not self.depth and not any(is_cast for _, is_cast, _ in self.casts)

    def outside(self) -> "Region":
        """Outside of it."""
        return Region(tuple((kind, False, dtype) for kind, _, dtype in self.casts), 0, True)

    def take_place(self) -> None:
        """Make it the one in which this thread is."""
        for kind, is_cast, dtype in self.casts:
            torch.set_autocast_enabled(kind, is_cast)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches)
        # torch asks for the depth where a region ends: the casts that it keeps belong to the outermost one.
        while _depth() > self.depth:
            torch.autocast_decrement_nesting()
        while _depth() < self.depth:
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In one like it, from outside of all."""
        with ExitStack() as stack:
            for kind, is_cast, dtype in self.casts:
                if is_cast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.caches))
            yield

    def __str__(self) -> str:
        regions = [f'torch.autocast("{kind}", dtype={dtype})' for kind, is_cast, dtype in self.casts if is_cast]
        return " and ".join(regions) or ("torch.autocast(..., enabled=False)" if self.depth else "no torch.autocast")


def _depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """The kinds of devices that a model on `device` may compute on."""
    kinds = dict.fromkeys(("cpu", device.type))
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


class AutocastRegions:
    """The caller's region of an engine's steps, and the forwards in it."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = kinds_of(device)
        self._callers = Region.here(self._kinds).outside()
        """That of the step, evaluation or prediction that goes on."""
        self._marked: Region | None = None
        """The caller's, as it has been since the last one."""
        self._has_warned = False

    @contextmanager
    def left(self, *, steps: bool = False, warns: bool = False) -> Iterator[None]:
        """Outside of all regions. Raises ModelError for one that is entered inside and not left.

        steps: weights are updated inside. warns: say so, once, if the region has been open since the last step.
        """
        here = Region.here(self._kinds)
        if here.is_none:
            self._callers, self._marked = here, None
            yield
            _refuse_others(here, "a hook of a backward or of an optimizer")
            return
        is_same = here == self._marked
        self._callers = replace(here, caches=True) if is_same else here
        outside = here.outside()
        outside.take_place()
        try:
            if is_same and steps and warns:
                self._warn_of_open()
            yield
            _refuse_others(outside, "a hook of a backward or of an optimizer")
        finally:
            # The mark of a region that had a step: torch keeps no casts in the rest of it. The mark goes where the
            # region is left, and the next region has none.
            if steps:
                here = replace(here, caches=False)
                self._marked = here if self._callers.caches else None
            here.take_place()

    def described(self) -> str:
        """The region that the caller is in now."""
        return str(Region.here(self._kinds))

    def inside(self, compute: Callable[Given, Output]) -> Callable[Given, Output]:
        """`compute` in a region like the caller's, in any thread. Raises ModelError for one that it does not leave."""

        def compute_inside(*args: Given.args, **kwargs: Given.kwargs) -> Output:
            with nullcontext() if self._callers.is_none else self._callers.entered():
                before = Region.here(self._kinds)
                output = compute(*args, **kwargs)
                _refuse_others(before, "the forward, or the loss,")
            return output

        return compute_inside

    def _warn_of_open(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._callers} has been open since the last step. A plain loop would go on with casts of the old "
            "weights there; the engine casts the new ones. Open the region around each step, or give "
            "precision.compute instead",
            AutocastWarning,
            stacklevel=2,
        )


def _refuse_others(expected: Region, who: str) -> None:
    """Raise ModelError where this thread is in another region."""
    found = Region.here(tuple(kind for kind, _, _ in expected.casts))
    if found == expected:
        return
    expected.take_place()
    raise ModelError(
        f"{who} entered a region of torch.autocast and did not leave it: it began in {expected} and ended in {found}. "
        "What comes next would silently run in that region. Write `with torch.autocast(...):` around the code that it "
        "is for"
    )
