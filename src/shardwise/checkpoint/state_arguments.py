"""Arguments: what calls are given is of the kind that they take, before anything is read or written."""

import os
from collections.abc import Mapping

from shardwise.errors import CheckpointError
from shardwise.rewrite import Rewrite

__all__ = ["check_arguments", "wrong_rewrite"]


def wrong_rewrite(rewrite: object) -> list[str]:
    """What is wrong with what was given as a rewrite: nothing for a rewrite, and for None."""
    if rewrite is None or isinstance(rewrite, Rewrite):
        return []
    return [f"rewrite is a {type(rewrite).__name__}; give sw.Rewrite(text)"]


def check_arguments(
    *,
    rewrite: object = None,
    config: object = None,
    step: object = None,
    max_shard_bytes: object = 1,
    flags: Mapping[str, object],
) -> None:
    """Raise CheckpointError, with all that is wrong, unless these can be the arguments of a conversion.

    flags: by name, what is to be True or False.
    """
    problems = wrong_rewrite(rewrite)
    if config is not None and not isinstance(config, str | os.PathLike):
        problems.append(f"config is a {type(config).__name__}; give the path of a folder or a file, or None")
    if step is not None and type(step) is not int:
        problems.append(f"step is {step!r}, a {type(step).__name__}; give a whole number or None")
    if type(max_shard_bytes) is not int:
        what = f"{max_shard_bytes!r}, a {type(max_shard_bytes).__name__}"
        problems.append(f"max_shard_bytes is {what}; give a whole number")
    elif max_shard_bytes < 1:
        problems.append(f"files of {max_shard_bytes} bytes were asked for; give at least 1")
    problems += [f"{name} is {value!r}; give True or False" for name, value in flags.items() if type(value) is not bool]
    if problems:
        raise CheckpointError(*problems)
