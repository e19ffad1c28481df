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

    __slots__ = ("_copied", "_num_elements", "_sums", "_targets", "_terms")

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._terms: list[torch.Tensor] = []
        self._num_elements = 0

    def copy(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Let `target` have the values of a gradient."""
        self._targets.append(target)
        self._copied.append(gradient)
        self._num_elements += (num_elements := gradient.numel())
        if self._num_elements > MOST_ELEMENTS or num_elements > MOST_ELEMENTS >> 2:
            self.flush()

    def add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient to `target`."""
        self._sums.append(target)
        self._terms.append(gradient)
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
            # Several tensors are added side by side: two terms of one sum would race.
            if len(set(map(id, self._sums))) < len(self._sums):
                for target, gradient in zip(self._sums, self._terms, strict=True):
                    target.add_(gradient)
            elif self._sums:
                torch._foreach_add_(self._sums, self._terms)
        self.forget()

    def forget(self) -> None:
        """Make none of them: they belong to an update that was given up."""
        for each in (self._targets, self._copied, self._sums, self._terms):
            each.clear()
        self._num_elements = 0
