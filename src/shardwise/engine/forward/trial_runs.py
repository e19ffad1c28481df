"""Runs of a model that leave no trace. `count_work` makes one to find the work of each module."""

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept, random_states, synchronize
from shardwise.engine.forward.aside import kept_attributes
from shardwise.engine.forward.inventory import kind_in
from shardwise.engine.forward.kept_objects import contents_kept, own_generators
from shardwise.engine.forward.observe import Observed, flops_of
from shardwise.engine.forward.outline import named_modules, outline_of
from shardwise.engine.forward.writes import SeenTensor
from shardwise.engine.torch_private import COMPILED_CALL, backward_hooks, compiled_call, gradient_hooks

_NUM_TIMED_RUNS = 3


_NAMES = frozenset({*vars(nn.Module()), "forward", COMPILED_CALL})
"""Attributes of every module, and those in which layers are."""


@contextmanager
def aside(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Inside, a module may run and be changed, and is as before afterwards. Gives what says whether numbers were drawn.

    attributes    all: modes, hooks, layers, parameters, notes of first calls; and what is in the containers and objects
                  that they and hooks hold (`contents_kept`). Only those that every module has where the run wrote to a
                  parameter, in whatever way, which stays written: a forward that rescales its weights once (RWKV) notes
                  that in an attribute
    buffers       forwards write to copies
    weights       packed ones, which kernels may pack in another way
    generators    those of the devices, and those that modules keep
    gradients     of parameters: those of before; no hook sees those of a backward inside
    """
    modules, parameters = list(module.modules()), list(module.parameters())
    held = [*parameters, *module.buffers()]
    devices = list({torch.device("cpu"), *(each.device for each in held if not each.is_meta)})
    own = own_generators(module)
    restore_packed = kind_in(module).kept(module)
    put_back_common, put_back = kept_attributes(modules, names=_NAMES, contents=True), kept_attributes(modules)
    put_back_contents = contents_kept(modules)
    seen = [SeenTensor(each) for each in parameters]

    def states() -> list[torch.Tensor]:
        return [state for device in devices for state in random_states(device, own).values()]

    before = states()
    # A buffer that two modules share stays one: what one writes the other reads.
    copies = {buffer: buffer.clone() for buffer in module.buffers()}
    with torch.no_grad(), random_numbers_kept(*devices, own=own), _without_gradients(parameters):
        try:
            for each in modules:
                each._buffers.update({key: copies[held] for key, held in each._buffers.items() if held is not None})
            yield lambda: not all(map(torch.equal, before, states()))
        finally:
            put_back_common()
            restore_packed()
            if not any(each.is_written(each.tensor) for each in seen):
                put_back()
                put_back_contents()


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters have neither gradients nor hooks of gradients; afterwards they have those of before."""
    gradients = [(each, each.grad) for each in parameters]
    hooks = [(each, list(each.items())) for each in _hooks_of(parameters)]
    try:
        for each, gradient in gradients:
            if gradient is not None:
                each.grad = None
        for of_one, _ in hooks:
            of_one.clear()
        yield
    finally:
        for each, gradient in gradients:
            if each.grad is not gradient:
                each.grad = gradient
        for of_run in _hooks_of(parameters):
            of_run.clear()
        for of_one, before in hooks:
            of_one.update(before)


def _hooks_of(parameters: Sequence[nn.Parameter]) -> list[MutableMapping[int, Any]]:
    return [held for each in parameters for held in (backward_hooks(each), gradient_hooks(each)) if held is not None]


def count_work(
    model: nn.Module, call: Callable[[], object], *, kind: Literal["flops", "seconds"]
) -> tuple[dict[str, float], list[str]]:
    """The work of every module of `model` during `call()`, which runs it once, and the modules in order of first calls.

    `flops`: of one call. `seconds`: the median of three calls, after one to warm up. Both without gradients and in eval
    mode; the model is as before afterwards. A module's work holds that of all modules that it calls; one that is not
    called has 0.
    """
    named = dict(named_modules(model))
    names = [each.name for each in outline_of(model).modules()]
    flops = Observed(flops_of)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def read() -> float:
        if kind == "flops":
            return flops.value
        # Kernels run on after they were issued: without this a module would cost its Python alone.
        synchronize(device)
        return time.perf_counter()

    runs: list[dict[str, float]] = []
    """By how much the reading advances in each module; names in the order of first calls."""
    started: list[float] = []

    def start(name: str) -> None:
        runs[-1].setdefault(name, 0)
        started.append(read())

    def stop(name: str) -> None:
        runs[-1][name] += read() - started.pop()

    with aside(model):
        # Dropout would draw numbers, and batch norm would write its statistics: the batch is for counting only.
        model.eval()
        for name in names:
            watch_calls(named[name], partial(start, name), partial(stop, name))
        # The first run pays for what happens once (compiling, choosing kernels, first allocations).
        for _ in range(1 if kind == "flops" else 1 + _NUM_TIMED_RUNS):
            runs.append({})
            # Compiled modules run uncompiled under a mode.
            with flops if kind == "flops" else nullcontext():
                call()
    counted = runs[-_NUM_TIMED_RUNS:]
    return {name: median(run.get(name, 0) for run in counted) for name in names}, list(counted[0])


def watch_calls(module: nn.Module, start: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `start` before each call of a module that runs aside, and `stop` after it."""
    if (compiled := compiled_call(module)) is None:
        # No layer: modules of torch that look for hooks would take a way around the modules inside.
        module.register_forward_pre_hook(lambda *_: start())
        module.register_forward_hook(lambda *_: stop())
        return

    def watched(*args: Any, **kwargs: Any) -> Any:  # hooks would be compiled too
        start()
        output = compiled(*args, **kwargs)
        stop()
        return output

    vars(module)[COMPILED_CALL] = watched
