"""Fake tensors: shapes, strides and dtypes without elements, on the device that the real ones have."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from shardwise.engine.pipeline.values import Spec

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
        return made.requires_grad_(spec.requires_grad)

    def input(self, spec: Spec) -> torch.Tensor:
        """A fake value: it may be written to in place though it requires a gradient."""
        made = self.leaf(spec)
        if not spec.requires_grad:
            return made
        with torch.enable_grad():
            return made.clone()
