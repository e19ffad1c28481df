"""Shipped: the rewrites that come with the library, as files in `shardwise/rewrites`."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType

from shardwise.errors import RewriteError
from shardwise.rewrite.rewrites import Rewrite

__all__ = ["find_rewrite", "shipped", "shipped_names", "shipped_text"]

_SUFFIX = ".rewrite"


def shipped_names() -> tuple[str, ...]:
    """The names of all rewrites that `shipped` knows.

    >>> "llama-qkv" in shipped_names()
    True
    """
    names = (each.name for each in _folder().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def shipped_text(name: str) -> str:
    """The text of a rewrite that comes with the library, with its comments. Raises RewriteError for an unknown name."""
    if not isinstance(name, str):
        raise RewriteError(f"a rewrite that comes with shardwise has a name, not {name!r:.100}")
    known = shipped_names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RewriteError(f"no rewrite named {name!r} comes with shardwise{hint}; there are {', '.join(known)}")
    return (_folder() / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def shipped(name: str, *, parameters: Mapping[str, int | str] = MappingProxyType({})) -> Rewrite:
    """A rewrite that comes with the library, by the name of its file without `.rewrite`; see `shipped_names`.

    parameters: values for what stands in braces in its text, such as `num_attention_heads`. Imports, exports and
        conversions take those that are not given from the model's `config.json`.
    Raises RewriteError for an unknown name.
    """
    return Rewrite(shipped_text(name), parameters=parameters)


def find_rewrite(where: str, *, parameters: Mapping[str, int | str] = MappingProxyType({})) -> Rewrite:
    """The rewrite in the file `where`, or the one of this name that comes with the library.

    Raises RewriteError where there is neither, and for a file that is no rewrite.
    """
    if not isinstance(where, str | os.PathLike) or os.path.exists(where):
        return Rewrite.file(where, parameters=parameters)
    name = os.fspath(where)
    try:
        text = shipped_text(name)
    except RewriteError as error:
        raise RewriteError(f"there is no file {name}, and {error}") from None
    return Rewrite(text, parameters=parameters)


def _folder() -> Traversable:
    return files("shardwise") / "rewrites"
