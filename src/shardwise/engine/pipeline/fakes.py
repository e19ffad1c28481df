"""Fake tensors: shapes, strides and dtypes without elements, on the device that the real ones have."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from shardwise.engine.pipeline.values import Spec

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Computed(torch.autograd.Function):
    """A tensor as if it had been computed: `clone` would give a slice or an expanded tensor other strides."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, None


class Fakes:
    """Makes fake tensors, and runs what takes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Operations give fake tensors, draw no random numbers that count, and compile nothing."""
        state = torch.default_generator.get_state()
        was_disabled, _LOG.disabled = (
            _LOG.disabled,
            True,
        )  # an operation that has no fake kernel is no news for the user
        try:
            # An activation checkpoint around must not count what is saved here.
            with saved_tensors_hooks(_same, _same), self._mode:
                yield
        finally:
            _LOG.disabled = was_disabled
            torch.default_generator.set_state(state)

    def leaf(self, spec: Spec) -> torch.Tensor:
        """A fake parameter or buffer."""
        return self._plain(spec).requires_grad_(spec.requires_grad)

    def input(self, spec: Spec) -> torch.Tensor:
        """A fake value, which may be written to in place where the real one may."""
        if spec.is_leaf:
            return self.leaf(spec)
        anchor = torch.empty(0, device=self._device, requires_grad=True)
        with torch.enable_grad():
            made: torch.Tensor = _Computed.apply(anchor, [self._plain(spec)])  # type: ignore[no-untyped-call]
        return made

    def _plain(self, spec: Spec) -> torch.Tensor:
        return spec.flagged(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device))
