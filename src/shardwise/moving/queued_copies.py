"""Copies from devices to the host that are queued one behind the other, and waited for together.

copy at once      put, wait   put, wait   put, wait    the device rests while the host lists the next piece
queued            put   put   put              wait
"""

import torch

from shardwise.moving.copies import put


class QueuedCopies:
    """Fills memory of the host out of tensors on a device, or on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """device: where most sources are."""
        self._locks = device.type != "cpu"
        self._queued: set[torch.device] = set()
        """Devices whose copies are still to be waited for."""

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host: page-locked where copies out of a device go into it, unless the system gives no more."""
        if self._locks and num_bytes:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:
                self._locks = False
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, or queue the copy; the target is in `room`, and holds the values after `wait`."""
        # torch copies into what is not in one piece by way of other memory, for which it waits.
        queued = self._locks and source.device.type != "cpu" and target.is_contiguous()
        put(target, source, queued=queued)
        if queued:
            self._queued.add(source.device)

    def wait(self) -> None:
        """Wait for what is queued."""
        for device in self._queued:
            torch.accelerator.current_stream(device).record_event().synchronize()
        self._queued.clear()
