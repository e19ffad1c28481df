"""Gradients on the way to their buffers: small ones go together, in one call of torch instead of one each.

    hook of w0, of w1, ..    p.grad is taken, and waits with its place in the buffer
    `flush`                  all of them are copied; those that are added to what is there follow

A call of torch costs the host some microseconds, whatever the size. What waits takes 64 KiB of float32 at most, and is
flushed before anybody reads the buffer.
"""

import torch

MOST_ELEMENTS = 1 << 14
"""Of all that wait together. A gradient of more than a quarter of it is copied at once."""


class GradCopies:
    """Copies into buffers, and additions to them, that have not been made yet."""

    __slots__ = ("_added", "_copied", "_num_elements", "_sums", "_targets", "_terms")

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._terms: list[torch.Tensor] = []
        self._added: set[int] = set()
        self._num_elements = 0

    def put(self, target: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
        """Let `target` have the values of a gradient, or add them to it."""
        if adds:
            # Several tensors are added side by side: two terms of one sum would race.
            if (place := id(target)) in self._added:
                self.flush()
            self._added.add(place)
            self._sums.append(target)
            self._terms.append(gradient)
        else:
            self._targets.append(target)
            self._copied.append(gradient)
        self._num_elements += (num_elements := gradient.numel())
        if self._num_elements > MOST_ELEMENTS or num_elements > MOST_ELEMENTS >> 2:
            self.flush()

    def flush(self) -> None:
        """Make all copies, and then all additions."""
        if not self._num_elements:
            return
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, self._copied)
            if self._sums:
                torch._foreach_add_(self._sums, self._terms)
        self.forget()

    def forget(self) -> None:
        """Make none of them: they belong to an update that was given up."""
        for each in (self._targets, self._copied, self._sums, self._terms, self._added):
            each.clear()
        self._num_elements = 0
