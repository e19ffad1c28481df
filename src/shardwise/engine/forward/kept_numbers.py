"""Memory for the few numbers that each step makes on a device, used again by the next step: steady steps take none."""

from collections.abc import Sequence

import torch


class KeptNumbers:
    """Places by name. A step writes to one behind the kernels of the last step that read it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._places: dict[str, torch.Tensor] = {}

    def place(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The place of this name, whose values mean nothing yet; a new one where shape or dtype differ from before."""
        found = self._places.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = self._places[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return found

    def one(self, dtype: torch.dtype) -> torch.Tensor:
        """The number 1; nobody writes to it."""
        name = f"one {dtype}"
        if name not in self._places:
            self._places[name] = torch.ones((), dtype=dtype, device=self.device)
        return self._places[name]


def divide_on_device(
    parts: Sequence[torch.Tensor], divisor: int, scale: torch.Tensor | None, kept: KeptNumbers
) -> None:
    """Divide gradients in place, by the number and by the scale of the losses if there is one."""
    if not parts:  # a stage that trains nothing; torch refuses empty lists
        return
    if scale is not None:
        place = kept.place("divisor", dtype=scale.dtype)
        torch._foreach_div_(list(parts), torch.mul(scale, divisor, out=place))
    elif divisor > 1:
        torch._foreach_div_(list(parts), divisor)
