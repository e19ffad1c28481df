"""Outermost calls: a program that is no forward calls the model, or parts of it, as often as it likes (`generate`).

    program, on every rank      embed = model.encoder(ids)        loop: logits = model(ids, cache)    ids = cat(ids, ..)
    outermost call              encoder.forward                   model.forward
    inside of it                values of stages, as in a step    the same
    at its end                  tensors are given to all ranks    the same

Between outermost calls the program has plain tensors, and may decide by their values.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm.nested_values import SeenContainers, transform
from shardwise.engine.forward.layers import OfEngine, Place, wrapped
from shardwise.engine.forward.randomness import Stream
from shardwise.engine.pipeline.nested import Opaque
from shardwise.engine.pipeline.stage_tensor import StageTensor
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.transfers import MicrobatchFlow


class OutermostCalls:
    """The calls of one program, which runs in one flow."""

    def __init__(self, flow: MicrobatchFlow, streams: Callable[[int], Stream]) -> None:
        """streams: what the n-th call draws from."""
        self.flow = flow
        self.streams = streams
        self.number = 0
        """Of calls so far."""
        self.is_inside = False

    @contextmanager
    def seen(self, stages: Stages) -> Iterator[None]:
        """The modules of the model that hold placed ones say when they are called."""
        holders = [
            each
            for each in stages.model.modules()
            if each not in stages.modules and any(inner in stages.modules for inner in each.modules())
        ]
        # Placed modules too: a program may call one by itself.
        with ExitStack() as stack:
            for each in [*holders, *(unit.module for unit in stages.units)]:
                stack.enter_context(wrapped(each, _Outermost(self)))
            yield


class _Outermost(OfEngine):
    """Around one of the modules."""

    place = Place.PROGRAM

    def __init__(self, calls: OutermostCalls) -> None:
        self._calls = calls

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls
        if calls.is_inside:
            return self.forward(*args, **kwargs)
        calls.is_inside = True
        calls.number += 1
        try:
            # The loop draws from its own numbers, which no call of a module may change: another rank skips it.
            with calls.streams(calls.number):
                output = self.forward(*args, **kwargs)
            return given_to_all(calls.flow, output)
        finally:
            calls.is_inside = False


def given_to_all(flow: MicrobatchFlow, output: Any) -> Any:
    """The output with plain tensors, without a graph, in the place of values of stages.

    Objects that ranks have in parts (a cache, in a prediction) become None.
    """

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            is_in_parts = isinstance(leaf, Opaque) or id(leaf) in flow.opaque or id(leaf) in flow.given_objects
            return None if is_in_parts and flow.purpose == "prediction" else leaf
        leaf = flow.adopted(leaf)
        return (flow.give_all(leaf) if isinstance(leaf, StageTensor) else leaf).detach()

    return transform(output, given, seen=SeenContainers())
