"""Names: which tensors of a checkpoint are the model's, which are an optimizer's, and how to show them."""

from shardwise.plan.names import MASTER, is_state_name, split_state_name

__all__ = ["is_model_name", "model_name_of_master", "printable"]

_DCP_STATE = ("optimizer.", "optim.", "optimizers.")
"""What the examples of torch.distributed.checkpoint call the optimizer; its keys are joined by dots."""


def is_model_name(name: str, format_: str) -> bool:
    """Whether a tensor of a checkpoint in this format (`Contents.format`) belongs to the model.

    >>> is_model_name("optimizer/w/exp_avg", "shardwise"), is_model_name("w", "shardwise")
    (False, True)
    """
    return not (is_state_name(name) or (format_ == "dcp" and name.startswith(_DCP_STATE)))


def model_name_of_master(name: str) -> str | None:
    """The parameter whose master this is; None for every other tensor.

    >>> model_name_of_master("optimizer/w/master")
    'w'
    """
    split = split_state_name(name)
    return split[0] if split is not None and split[1] == MASTER else None


def printable(name: str) -> str:
    """The name as one line of a table can hold it: what no terminal shows is escaped.

    >>> print(printable("a name"), printable("two\\nlines"))
    a name two\\nlines
    """
    return name if name.isprintable() else ascii(name)[1:-1]
