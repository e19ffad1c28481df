"""A step of an optimizer on memory that is the engine's.

In a plain loop gradients and values are the optimizer's own: it may keep a gradient, or give a parameter other memory.

    plain loop                          here
    state["last"] = p.grad              gradients of the next step come into the same memory: it gets a copy
    p.data = p.data - lr * p.grad       the master is a part of a buffer: the new values go there, p is it again
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from shardwise.engine.guards.plain_calls import counts_steps
from shardwise.engine.optimizers.doubles import storages
from shardwise.engine.optimizers.traits import OptimizerTraits, is_torchs

Watch: TypeAlias = Callable[[torch.optim.Optimizer], AbstractContextManager[None]]
"""Stands around a step that code of the user sees."""


class OptimizerStep:
    """The step of one optimizer. Torch's own classes write in place and keep no gradient: they cost nothing more."""

    def __init__(self, traits: OptimizerTraits, watch: Watch) -> None:
        """watch: what refuses code of the user that would see a part for the whole."""
        self._optimizer = traits.optimizer
        self._watch = watch
        self._is_trusted = is_torchs(traits.optimizer)
        self._keeps_gradients = traits.keeps_gradients

    def __call__(self) -> None:
        """Step on what is in its groups now."""
        is_seen = counts_steps(self._optimizer)
        if self._is_trusted and not is_seen:  # nor has it code of the user around its step
            self._optimizer.step()
            return
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        before = [each.data for each in parameters]
        if self._keeps_gradients:
            for each in parameters:
                if each.grad is not None:
                    each.grad = each.grad.clone()
        with self._watch(self._optimizer) if is_seen else nullcontext():
            self._optimizer.step()
        for each, values in zip(parameters, before, strict=True):
            if each.data_ptr() != values.data_ptr():
                # What the optimizer kept of the old values, it kept as they were.
                state = self._optimizer.state.get(each, {})
                for key in [key for key, kept in state.items() if storages(kept) & storages(values)]:
                    state[key] = state[key].clone()
                values.copy_(each.detach())
                each.data = values
