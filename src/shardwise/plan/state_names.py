"""Names in a state: parameters and buffers have the model's, the optimizer's state is `optimizer/<parameter>/<key>`."""

__all__ = ["MASTER", "STATE_PREFIX", "is_state_name", "split_state_name", "state_name"]

MASTER = "master"
"""The key of a parameter's master, where that is held apart from the working copy."""

STATE_PREFIX = "optimizer/"
"""With this the names of all optimizer state begin."""


def state_name(parameter: str, key: str) -> str:
    """The name of what an optimizer has for a parameter under `key`.

    >>> state_name("layer.weight", "exp_avg")
    'optimizer/layer.weight/exp_avg'
    """
    return f"{STATE_PREFIX}{parameter}/{key}"


def is_state_name(name: str) -> bool:
    """Whether a name is not the model's own."""
    return name.startswith(STATE_PREFIX)


def split_state_name(name: str) -> tuple[str, str] | None:
    """The parameter and the key of a name that `state_name` makes; None for every other. Keys hold no slash.

    >>> split_state_name("optimizer/layer.weight/exp_avg"), split_state_name("layer.weight")
    (('layer.weight', 'exp_avg'), None)
    """
    if not is_state_name(name) or name.count("/") < 2:
        return None
    parameter, _, key = name.removeprefix(STATE_PREFIX).rpartition("/")
    return parameter, key
