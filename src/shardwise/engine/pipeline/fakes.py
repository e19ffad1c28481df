"""Fake tensors: shapes, strides and dtypes without elements, on the device that the real ones have."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.pipeline.nested import tensors_in
from shardwise.engine.pipeline.stage_values import Spec

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


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share their memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()._cdata
    assert isinstance(storage, int)
    return storage


_UNLIKE_THEIR_FAKES = frozenset({"aten::_native_multi_head_attention"})
"""Operations that give other tensors than their fake kernels do: an empty one for none."""


class Trial(TorchDispatchMode):
    """Sees what operations write to; versions of tensors do not show writes through `.data`, and of batch norm."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        """Memories."""
        self._alive: list[torch.Tensor] = []
        """What was written to: another memory must not get the number of one that was given back."""
        self.kept: set[int] = set()
        """Memories of parameters and buffers."""

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        self._alive += tensors
        self.written.update(map(storage_of, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in _UNLIKE_THEIR_FAKES:
            raise NotImplementedError(schema.name)
        if schema.is_mutable:
            given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
            for each in schema.arguments:
                if each.alias_info is not None and each.alias_info.is_write:
                    self._note(tensors_in(given.get(each.name)))
        return func(*args, **kwargs)


class Fakes:
    """Makes fake tensors, and runs what takes them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # An operation without a fake kernel would run on zeros, and might give what it gives of no other numbers.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @contextmanager
    def trying(self) -> Iterator[Trial]:
        """Operations give fake tensors, draw no random numbers that count, compile nothing, and are watched."""
        state = torch.default_generator.get_state()
        was_disabled, _LOG.disabled = (
            _LOG.disabled,
            True,
        )  # an operation that has no fake kernel is no news for the user
        try:
            # An activation checkpoint around must not count what is saved here.
            with saved_tensors_hooks(_same, _same), self._mode, Trial() as self._trial:
                yield self._trial
        finally:
            _LOG.disabled = was_disabled
            torch.default_generator.set_state(state)

    def leaf(self, spec: Spec) -> torch.Tensor:
        """A fake parameter or buffer."""
        made = self._plain(spec).requires_grad_(spec.requires_grad)
        self._trial.kept.add(storage_of(made))
        return made

    def input(self, spec: Spec) -> torch.Tensor:
        """A fake value, which may be written to in place where the real one may."""
        if spec.is_leaf:
            return self._plain(spec).requires_grad_(spec.requires_grad)
        anchor = torch.empty(0, device=self._device, requires_grad=True)
        with torch.enable_grad():
            made: torch.Tensor = _Computed.apply(anchor, [self._plain(spec)])  # type: ignore[no-untyped-call]
        return made

    def _plain(self, spec: Spec) -> torch.Tensor:
        return spec.flagged(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device))
