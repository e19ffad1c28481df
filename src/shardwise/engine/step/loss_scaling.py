"""The scale of losses: a factor that gradients have in backward, so that float16 does not round them to zero.

    loss 2^-3 --backward from the scale 2^16--> gradients * 2^16 --reduce--> sums --/ (2^16 * microbatches)--> means

    "dynamic"    step 1     2^16    not finite: skipped     halved
                 step 2     2^15    finite                  1 in a row
                 step 2001  2^15    finite                  2000 in a row: doubled

The arithmetic is that of `torch.amp.GradScaler`. The scale is on the device, and no host waits for it. All ranks find
the same steps not finite, so they have the same scale without a message.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from shardwise.engine.step.figures import Figures
from shardwise.errors import CheckpointError

INITIAL = 65536.0
LARGEST = 2.0**127
"""The last power of two in float32."""
GROWTH_INTERVAL = 2000
"""So many finite steps in a row double the scale."""

State = tuple[float, int]
"""A scale, and the finite steps in a row under it."""


class LossScale:
    """The scale of the losses of an engine."""

    def __init__(self, setting: float | Literal["dynamic"], device: torch.device) -> None:
        scale = torch.tensor(INITIAL if setting == "dynamic" else setting, dtype=torch.float32)
        self.fixed = None if setting == "dynamic" else float(scale)
        """The number that the plan gives, as `value` has it; None where it changes with the steps."""
        self.value = scale.to(device)
        """The scale of the step that goes on, or comes next. A tensor of its own for each change."""
        self._in_a_row = torch.zeros((), dtype=torch.float32, device=device)

    def gradient_of(self, loss: torch.Tensor) -> torch.Tensor:
        """What its backward begins with: as if it had been multiplied."""
        return self.value.to(loss.dtype)

    def learn(self, figures: Figures) -> None:
        """A step had these figures."""
        if self.fixed is not None:
            return
        wrong = figures.found_inf  # 1 or 0
        if wrong is None:
            wrong = torch.tensor(float(not figures.is_finite), device=self.value.device)
        # Sums and products of 0 and 1 in the place of choices: a kernel each, and few of them.
        in_a_row = (self._in_a_row + 1) * (1 - wrong)
        factor = torch.rsub(wrong, 1, alpha=0.5) + (in_a_row == GROWTH_INTERVAL)
        self._in_a_row = in_a_row.remainder(GROWTH_INTERVAL)
        self.value = (self.value * factor).clamp(max=LARGEST)

    def state(self) -> State:
        """What a checkpoint keeps."""
        return float(self.value), int(self._in_a_row)

    def restore(self, state: State) -> None:
        """Go on from a checkpoint. A number that the plan gives stays."""
        if self.fixed is None:
            self.value = torch.full_like(self.value, state[0])
            self._in_a_row = torch.full_like(self._in_a_row, state[1])


def to_settings(scale: LossScale | None) -> dict[str, Any]:
    """The entry of a checkpoint's settings, where the scale is dynamic."""
    if scale is None or scale.fixed is not None:
        return {}
    value, in_a_row = scale.state()
    return {"loss_scale": {"scale": value, "in_a_row": in_a_row}}


def of_settings(settings: Mapping[str, Any]) -> State | None:
    """The scale of a checkpoint; None where it has none."""
    if "loss_scale" not in settings:
        return None
    entry = settings["loss_scale"]
    match [entry.get(key) for key in ("scale", "in_a_row")] if isinstance(entry, dict) else []:
        case [float(scale), int(in_a_row)] if scale > 0 and in_a_row >= 0:
            return scale, in_a_row
    raise CheckpointError(
        f"the checkpoint's settings have loss_scale={entry!r}, which is not a scale and a number of steps. No engine "
        "wrote it, or it was changed since"
    )
