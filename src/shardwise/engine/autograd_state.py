"""What autograd does at the moment."""

from collections.abc import Callable

import torch


def in_backward() -> bool:
    """Whether autograd is at work in this thread; a forward meanwhile runs again for an activation checkpoint."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(do: Callable[[], None]) -> None:
    """Call it when the backward ends that goes on in this thread; one inside of another has an end of its own."""
    torch.autograd.Variable._execution_engine.queue_callback(do)
