"""Parametrizations that come and go in a forward (adapters of peft do so) write nothing to the weight under them.

register_parametrization    torch: original.set_(original), counted as a write     here: nothing
                            with a right inverse: original.set_(another tensor)    the same
"""

import functools

import torch

from shardwise.engine.torch_private import SetValues, stand_around_set


@functools.cache
def see_parametrizations() -> None:
    """From here on, in this process, a tensor that is set to itself counts as not written."""
    stand_around_set(_unless_same)


def _unless_same(set_to: SetValues) -> SetValues:
    @functools.wraps(set_to)
    def set_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            set_to(target, source)

    return set_unless_same
