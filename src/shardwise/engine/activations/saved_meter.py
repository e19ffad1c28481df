"""What autograd saves in the forward of one microbatch, by storage: inside of modules that have a choice, and outside.

    forward    embedding | block 0     | glue    | block 1     | head, loss
    hooks      outside   | of the call | outside | of the call | outside
    found      {e}       | {e, a, b}   | {}      | {b, c, d}   | {logits}      e and b: held whatever is chosen

Storages are known by weak references, which keep their numbers apart and no memory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.accelerators import synchronize
from shardwise.comm.nested_values import tensors_in
from shardwise.engine.forward.layers import Forward, in_backward
from shardwise.engine.forward.passes import Passes, unpack
from shardwise.engine.torch_private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    is_transformed,
    storage_id,
    top_saved_hooks,
)
from shardwise.plan.activation_budget import Choice, MeasuredCall


@dataclass(kw_only=True, slots=True, eq=False)
class ForwardRecord:
    """One forward of a module."""

    module: str
    kind: str
    """Of the module's class."""
    choices: tuple[Choice, ...]
    inputs: set[int]
    saved: set[int] = field(default_factory=set)
    kept_bytes: int = 0
    """Of outputs that the module keeps for its second run."""
    seconds: list[float] = field(default_factory=list)
    """Of its runs."""


def storages_of(model: nn.Module) -> frozenset[int]:
    """The numbers of the storages that parameters and buffers view."""
    with DisableTorchFunctionSubclass():  # at rest
        tensors = [*model.parameters(), *model.buffers()]
        return frozenset(storage_id(each.untyped_storage()) for each in tensors if each.layout == torch.strided)


class SavedMeter:
    """Measures one microbatch of one rank."""

    def __init__(
        self,
        device: torch.device,
        passes: Passes,
        parameters: frozenset[int],
        *,
        smallest: int,
        counts: Callable[[], bool],
    ) -> None:
        """parameters: storages that count for nothing. smallest: bytes below which a storage stays on the device.
        counts: whether this rank works on the microbatch that is measured."""
        self._device = device
        self.passes = passes
        self._parameters = parameters
        self._smallest = smallest
        self._counts = counts
        self._sizes: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        self._outside: list[tuple[int, set[int]]] = []
        """Calls before, and what was saved there."""
        self._calls: list[ForwardRecord] = []
        self.is_inside = False
        """A module with a choice runs: what it saves itself counts as its."""

    def begin(self, module: str, kind: str, choices: tuple[Choice, ...], values: Any) -> ForwardRecord | None:
        """A module with a choice is called. None: not in the microbatch that is measured."""
        if self.is_inside or in_backward() or not self._counts():
            return None
        inputs: set[int] = set()
        for each in tensors_in(values):
            self._note(each, inputs)
        self._calls.append(record := ForwardRecord(module=module, kind=kind, choices=choices, inputs=inputs))
        return record

    def run(self, record: ForwardRecord, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own forward, for the first time or again."""
        synchronize(self._device)
        begun = time.perf_counter()
        try:
            is_plain = in_backward() or is_transformed()
            return forward(*args, **kwargs) if is_plain else self._first_run(record, forward, args, kwargs)
        finally:
            synchronize(self._device)
            record.seconds.append(time.perf_counter() - begun)

    def _first_run(self, record: ForwardRecord, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        around = top_saved_hooks(True)

        def pack(tensor: torch.Tensor) -> object:
            if isinstance(kept := self.passes.pack_saved(tensor), torch.Tensor):
                self._note(tensor, record.saved)
            return kept if around is None else around[0](tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack if around is None else around[1]):
            return forward(*args, **kwargs)

    def pack(self, tensor: torch.Tensor) -> object:
        """The hook of what is saved outside of such modules."""
        kept = self.passes.pack_saved(tensor)
        if isinstance(kept, torch.Tensor) and not self.is_inside and self._counts():
            if not self._outside or self._outside[-1][0] != len(self._calls):
                self._outside.append((len(self._calls), set()))
            self._note(tensor, self._outside[-1][1])
        return kept

    def _note(self, tensor: torch.Tensor, found: set[int]) -> None:
        if tensor.device != self._device or tensor.layout != torch.strided:
            return
        with DisableTorchFunction():
            reference = StorageWeakRef(storage := tensor.untyped_storage())
        key = reference.cdata
        if key not in self._parameters:
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self._alive.append(reference)
            found.add(key)

    def calls(self) -> tuple[list[MeasuredCall], int]:
        """What was measured, and the bytes that are saved after the last call."""
        users: dict[int, list[int]] = {}
        """Of each storage the calls that have it; of what is outside, the position, twice, as it is held anyway."""
        for at, keys in self._outside:
            for key in keys:
                users.setdefault(key, []).extend((at, at))
        for at, record in enumerate(self._calls):
            for key in record.saved | record.inputs:
                users.setdefault(key, []).append(at)
        before = [0] * (len(self._calls) + 1)
        for key, found in users.items():
            if len(found) > 1:
                before[min(found)] += self._sizes[key]
        alone = {key for key, found in users.items() if len(found) == 1}
        seconds = self._seconds()
        calls = [
            MeasuredCall(
                module=record.module,
                before_bytes=before[at],
                saved_bytes=self._bytes(record.saved & alone),
                inputs_bytes=self._bytes(record.inputs & alone) + record.kept_bytes,
                again_bytes=self._bytes(record.saved - record.inputs),
                fixed_bytes=self._bytes({key for key in record.saved & alone if self._sizes[key] < self._smallest}),
                seconds=seconds[at],
                choices=record.choices,
            )
            for at, record in enumerate(self._calls)
        ]
        return calls, before[-1]

    def _seconds(self) -> list[float]:
        """Of a run of each call; of calls that are alike, the least of all, which nothing disturbed."""
        alike: dict[tuple[str, int, int], float] = {}
        keys = [(each.kind, self._bytes(each.saved), self._bytes(each.inputs)) for each in self._calls]
        for key, record in zip(keys, self._calls, strict=True):
            alike[key] = min([alike.get(key, float("inf")), *record.seconds])
        return [alike[key] for key in keys]

    def _bytes(self, keys: set[int]) -> int:
        return sum(self._sizes[key] for key in keys)
