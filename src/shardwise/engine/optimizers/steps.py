"""A step of an optimizer on memory that is the engine's.

In a plain loop gradients and values are the optimizer's own: it may keep a gradient, or give a parameter other memory.

    plain loop                          here
    state["last"] = p.grad              gradients of the next step come into the same memory: it gets a copy
    p.data = p.data - lr * p.grad       the master is a part of a buffer: the new values go there, p is it again
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias

import torch

from shardwise.comm.accelerators import random_numbers_kept
from shardwise.engine.guards.plain_calls import counts_steps
from shardwise.engine.optimizers.doubles import Case, cases_of, run_double, trial_tensors
from shardwise.engine.torch_private import tree_leaves

_STEPS = 12
"""Some look back every few steps only."""


Watch: TypeAlias = Callable[[torch.optim.Optimizer], AbstractContextManager[None]]
"""Stands around a step that code of the user sees."""


class OptimizerStep:
    """The step of one optimizer. Torch's own classes write in place and keep no gradient: they cost nothing more."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, watch: Watch) -> None:
        """device: that of the masters. Its parameters have no gradients now. watch: what refuses code of the user
        that would see a part for the whole."""
        self._optimizer = optimizer
        self._watch = watch
        self._is_trusted = _is_torchs(optimizer)
        self._keeps_gradients = _keeps_gradients(optimizer, device)

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
                for key in [key for key, kept in state.items() if _storages(kept) & _storages(values)]:
                    state[key] = state[key].clone()
                values.copy_(each.detach())
                each.data = values


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _keeps_gradients(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether what it keeps after a step has memory of a gradient; also where no trial tells."""
    if _is_torchs(optimizer):
        return False
    # A step of one that wraps another steps that one, and not a double of it.
    if inner := [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]:
        return any(_keeps_gradients(each, device) for each in inner)
    try:
        with random_numbers_kept(device):
            return any(_keeps_them(case) for case in cases_of(optimizer, device))
    except Exception:  # it wants other shapes than these
        return True


def _keeps_them(case: Case) -> bool:
    kept = False

    def step(double: torch.optim.Optimizer) -> None:
        nonlocal kept
        gradients = [each.grad for each in double.param_groups[0]["params"]]
        double.step()
        own = {name: each for name, each in vars(double).items() if name not in ("state", "param_groups")}
        kept |= bool(_storages([*double.state.values(), own]) & _storages(gradients))

    run_double(case, [trial_tensors((4, 6), 2)], num_steps=_STEPS, late=False, step=step)
    return kept


def _storages(values: Any) -> set[int]:
    """The memory of all tensors in a nesting."""
    found: set[int] = set()
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            with suppress(RuntimeError, NotImplementedError):  # a subclass around tensors has none
                found.add(each.untyped_storage().data_ptr())
    return found - {0}
