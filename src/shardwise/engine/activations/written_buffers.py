"""Buffers that a forward writes to, for a module that is run again: running statistics move once per microbatch."""

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.aside import items_set
from shardwise.engine.forward.writes import SeenTensor, holds_same, is_on_host, is_small
from shardwise.engine.torch_private import DisableTorchFunction, NormWithStatistics
from shardwise.errors import ModelError


class WrittenBuffers:
    """The buffers inside of one module, and those of them that its forwards write to."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for key, buffer in each.named_buffers(recurse=False):
                if not buffer.is_meta:
                    places.setdefault(id(buffer), []).append((each, key))
        self.places = list(places.values())
        """Of each buffer, wherever it is held."""
        self.written: frozenset[int] | None = None
        """By forwards so far. None: no forward was seen yet, and any buffer may be written to."""

    def buffer(self, at: int) -> torch.Tensor | None:
        """As it is now."""
        module, key = self.places[at][0]
        return module._buffers.get(key)

    def is_statistic(self, at: int) -> bool:
        """Whether torch writes to it in this forward, which leaves no trace in `_version`."""
        return any(isinstance(module, NormWithStatistics) and module.training for module, _ in self.places[at])

    def learn(self, written: Set[int], kept: Set[int]) -> None:
        """Raise ModelError for what a forward wrote to and earlier ones did not."""
        if missing := written - kept:
            module, key = self.places[min(missing)][0]
            raise ModelError(
                f"this forward of {self._name!r} writes to the buffer {key!r} of a {type(module).__name__}, which the "
                "first one did not. It cannot run again in backward as it ran. Leave the module out of "
                "activations.checkpoint"
            )
        self.written = frozenset(written) | (self.written or frozenset())


class KeptBuffers:
    """What a forward finds in the buffers that it may write to."""

    def __init__(self, buffers: WrittenBuffers) -> None:
        """Called before the forward."""
        self._buffers = buffers
        now = [buffers.buffer(at) for at in range(len(buffers.places))]
        with DisableTorchFunction():  # under pp a mode answers for buffers of stages, and notes calls
            # A small one may be written without a count, and a copy costs less than to find out.
            self._copies = {
                at: None if each is None else each.detach().clone()
                for at, each in enumerate(now)
                if buffers.written is None
                or at in buffers.written
                or buffers.is_statistic(at)
                or (each is not None and is_small(each))
            }
            # Of what has no copy, and of large ones, some elements; a device is not waited for.
            self._before = [
                SeenTensor(each, content=is_on_host(each) and at not in self._copies) for at, each in enumerate(now)
            ]
        self._others: dict[int, SeenTensor] = {}
        """What has no copy, as it was after the forward."""

    def settle(self, reads: bool) -> None:
        """The forward has ended: what is large, and it did not write to, needs no copy. reads: it is digested."""
        with DisableTorchFunction():
            written = {at for at, before in enumerate(self._before) if self._is_written(at, before)}
            self._buffers.learn(written, self._copies.keys())
            # A small one costs little, and another forward may write to it before backward.
            self._copies = {at: each for at, each in self._copies.items() if at in written or _is_small(each)}
            others = {at: self._buffers.buffer(at) for at in range(len(self._before)) if at not in self._copies}
            self._others = {at: SeenTensor(each, content=reads and is_on_host(each)) for at, each in others.items()}
        self._before = []

    def changed(self) -> str | None:
        """The name of a large buffer that the forward only read, and that somebody wrote to since."""
        found = (at for at, each in self._others.items() if each.is_written(self._buffers.buffer(at)))
        return next((self._buffers.places[at][0][1] for at in found), None)

    def _is_written(self, at: int, before: SeenTensor) -> bool:
        buffers, now = self._buffers, self._buffers.buffer(at)
        if before.is_written(now) or buffers.is_statistic(at):
            return True
        # The copy shows what torch does not count; of a small one on a device, which is not waited for, it stays.
        kept = self._copies.get(at)
        if now is None or kept is None:
            return False
        is_known = buffers.written is not None and at in buffers.written
        return is_known or (is_small(now) and now.device.type != "cpu") or not holds_same(kept, now)

    def in_place(self) -> AbstractContextManager[None]:
        """Inside, modules hold the buffers as they were before; what is written to them is lost."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        for at, kept in self._copies.items():
            with DisableTorchFunction():
                again = None if kept is None else kept.clone()  # a second backward needs it too
            places += [(module._buffers, key, again) for module, key in self._buffers.places[at]]
        return items_set(places)


def _is_small(copy: torch.Tensor | None) -> bool:
    return copy is None or is_small(copy)
