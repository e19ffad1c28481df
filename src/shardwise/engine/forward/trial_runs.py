"""Runs of a model that leave no trace. `count_work` makes one to find the work of each module."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from shardwise.comm.accelerators import random_numbers_kept, synchronize
from shardwise.engine.forward.kept_objects import own_generators
from shardwise.engine.forward.layers import Layer, Place, is_compiled, wrapped
from shardwise.engine.forward.outline import named_modules, outline_of
from shardwise.engine.forward.packed_tensors import PackedPlaces
from shardwise.engine.torch_private import TorchDispatchMode, tree_leaves

_NUM_TIMED_RUNS = 3


class _Flops(TorchDispatchMode):
    """Counts the floating-point operations of this thread; compiled modules run uncompiled meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch counts the others of its kind
            packet = torch.ops.aten._scaled_dot_product_flash_attention
        count = flop_registry.get(packet)
        if count is not None:
            try:
                self.total += count(*args, **kwargs, out_val=out)
            except Exception:  # torch 2.11 has none for attention with fewer heads of keys than of queries
                self.total += sum(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        return out


def count_work(
    model: nn.Module, call: Callable[[], object], *, kind: Literal["flops", "seconds"]
) -> tuple[dict[str, float], list[str]]:
    """The work of every module of `model` during `call()`, which runs it once, and the modules in order of first calls.

    `flops`: of one call. `seconds`: the median of three calls, after one to warm up. Both without gradients and in eval
    mode; random numbers and buffers are as before afterwards. A module's work holds that of all modules that it calls;
    one that is not called has 0.
    """
    named = dict(named_modules(model))
    modules = {each.name: named[each.name] for each in outline_of(model).modules()}
    with torch.no_grad(), unchanged(model):
        # Dropout would draw numbers, and batch norm would write its statistics: the batch is for counting only.
        model.eval()
        if kind == "flops":
            with _Flops() as flops:
                runs = [_metered(modules, call, lambda: flops.total)]
        else:
            read = _clock(next((each.device for each in model.parameters()), torch.device("cpu")))
            # The first run pays for what happens once (compiling, choosing kernels, first allocations).
            runs = [_metered(modules, call, read) for _ in range(1 + _NUM_TIMED_RUNS)][1:]
    work = {name: median(run.get(name, 0) for run in runs) for name in modules}
    return work, list(runs[0])


def _metered(
    modules: Mapping[str, nn.Module], call: Callable[[], object], read: Callable[[], float]
) -> dict[str, float]:
    """By how much the reading advances in each module during `call()`; names in the order of first calls."""
    advanced: dict[str, float] = {}
    started: list[float] = []

    def start(name: str) -> None:
        advanced.setdefault(name, 0)
        started.append(read())

    def stop(name: str) -> None:
        advanced[name] += read() - started.pop()

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(calls_watched(module, partial(start, name), partial(stop, name)))
        call()
    return advanced


@contextmanager
def calls_watched(module: nn.Module, start: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call `start` before each call of the module and `stop` after it."""
    if is_compiled(module):  # hooks would be compiled too
        with wrapped(module, _Watched(start, stop)):
            yield
    else:
        # No layer: modules of torch that look for hooks would take a way around the modules inside.
        before = module.register_forward_pre_hook(lambda *_: start())
        after = module.register_forward_hook(lambda *_: stop())
        try:
            yield
        finally:
            before.remove()
            after.remove()


class _Watched(Layer):
    """Says when a call begins and ends."""

    place = Place.WATCH

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._start = start
        self._stop = stop

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._start()
        output = self.forward(*args, **kwargs)
        self._stop()
        return output


def _clock(device: torch.device) -> Callable[[], float]:
    """Reads the time in seconds, when all that the device was given to do is done."""

    def read() -> float:
        # Kernels run on after they were issued: without this a module would cost its Python alone.
        synchronize(device)
        return time.perf_counter()

    return read


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a forward: modes, buffers, packed weights and the state of random generators."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, key, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
    ]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    packed = PackedPlaces(model)
    with random_numbers_kept(*devices, own=own_generators(model)):
        try:
            yield
        finally:
            packed.restore()
            for module, training in modes:
                module.training = training
            for module, key, buffer, values in buffers:
                # Versions do not tell: batch norm counts no write to its statistics.
                if buffer is not None and values is not None and not torch.equal(buffer, values):
                    buffer.copy_(values)
                module._buffers[key] = buffer
