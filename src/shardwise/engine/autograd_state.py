"""What autograd does at the moment."""

import torch


def in_backward() -> bool:
    """Whether autograd is at work in this thread; a forward meanwhile runs again for an activation checkpoint."""
    return torch._C._current_graph_task_id() != -1
