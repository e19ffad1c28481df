"""Parametrizations that come and go in a forward (adapters of peft do so) write nothing to the weight under them.

register_parametrization    torch: original.set_(original), counted as a write     here: nothing
                            with a right inverse: original.set_(another tensor)    the same
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.utils import parametrize


@functools.cache
def see_parametrizations() -> None:
    """From here on, in this process, a tensor that is set to itself counts as not written."""
    set_to: Callable[[torch.Tensor, torch.Tensor], None] = parametrize._maybe_set

    @functools.wraps(set_to)
    def set_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            set_to(target, source)

    parametrize._maybe_set = set_unless_same  # type: ignore[assignment]
