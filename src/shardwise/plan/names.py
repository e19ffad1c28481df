"""Names of parameters and of optimizer state: the one matcher of patterns, and the names of entries of state.

A pattern in a plan is a name or glob of modules or parameters (`meant_by`), or the same with all their contents
(`matches`). Or it is a mistyped name (`nearest`). In a state, parameters and buffers have the names of the model.
Optimizer state is named `optimizer/<parameter>/<key>`.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` (a name or a glob with `*`, `?`, `[...]`) means `name` or a module that contains it.

    >>> matches("*norm*", "layers.0.norm.weight"), matches("layers.0", "layers.0.norm.weight")
    (True, True)
    >>> matches("norm", "norms.weight")
    False
    """
    for known in (name, *base_names(name)):
        parts = known.split(".")
        # The name and every module around it, whole names only: "norm" must not mean "norms.weight".
        meant = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        # Equality first: a name may hold brackets itself (keys of a ModuleDict), which a glob would read as a set.
        if any(each == pattern or fnmatchcase(each, pattern) for each in meant):
            return True
    return False


def any_matches(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Whether one of the patterns means one of the names."""
    return any(matches(pattern, name) for pattern in patterns for name in names)


def meant_by(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern means themselves: the one that is written so, else all that it matches as a glob.

    >>> meant_by("layers.?", ["layers", "layers.0", "layers.0.norm"]), meant_by("w[0]", ["w0", "w[0]"])
    (['layers.0'], ['w[0]'])
    """
    if pattern in names:
        return [pattern]
    is_deep = _is_deep(names)
    known = {name: base_names(name, is_deep=is_deep) for name in names}
    if exact := [name for name in names if pattern in known[name]]:
        return exact
    return [name for name in names if any(fnmatchcase(each, pattern) for each in (name, *known[name]))]


_ADAPTED, _TUNED = "base_model.", "base_model.model."
"""What the library peft puts in front of the names of a model, with a prompt and with adapters in its modules."""

BASE_LAYER, ORIGINAL, TOKENS = "base_layer", "original_module", "token_adapter"
_INSIDE_ADAPTERS = frozenset({BASE_LAYER, ORIGINAL, TOKENS})
"""Parts of names that adapters put around what they adapt."""

COPIES = "modules_to_save"
"""With this name adapters hold the modules that they train whole, by the name of the adapter."""


def base_names(name: str, *, is_deep: bool | None = None) -> tuple[str, ...]:
    """The names that a parameter or module with adapters has in the model without them; () where that is its own.

    The module inside an adapter has none: the adapter stands in its place. is_deep: whether the model's own names
    begin after `base_model.model`, not after `base_model`; None: both are tried.

    >>> base_names("base_model.model.up.base_layer.weight", is_deep=True), base_names("up.base_layer"), base_names("up")
    (('up.weight',), (), ())
    """
    if not name.startswith(_ADAPTED) and (_INSIDE_ADAPTERS | {COPIES}).isdisjoint(name.split(".")):
        return ()
    rests = [name]
    if name.startswith(_ADAPTED):
        tried = {None: (_ADAPTED, _TUNED), True: (_TUNED,), False: (_ADAPTED,)}[is_deep]
        rests = [name.removeprefix(each) for each in tried if name.startswith(each)]
    found = []
    for rest in rests:
        parts = rest.split(".")
        if parts[-1] in _INSIDE_ADAPTERS or COPIES in parts[-2:]:
            continue
        copies = {at + 1 for at, part in enumerate(parts) if part == COPIES}
        kept = [
            part
            for at, part in enumerate(parts)
            if part not in _INSIDE_ADAPTERS and part != COPIES and at not in copies
        ]
        found.append(".".join(kept))
    return tuple(each for each in found if each != name)


def _is_deep(names: Iterable[str]) -> bool:
    # Adapters in modules: `base_model` holds nothing but `model`. A prompt alone: `base_model` is the model.
    return all(f"{name}.".startswith(_TUNED) for name in names if name.startswith(_ADAPTED))


def is_exactly(pattern: str, name: str) -> bool:
    """Whether a pattern is a name, or the one that it has without adapters."""
    return pattern == name or pattern in base_names(name)


def nearest(pattern: str, names: Sequence[str]) -> str | None:
    """The name that is spelled most like a pattern; None where there are no names."""
    # A cutoff of 0 always gives a name: a far one still shows what names of this model look like.
    near = difflib.get_close_matches(pattern.strip("*"), names, n=1, cutoff=0.0)
    return near[0] if near else None


def unmatched(patterns: Iterable[str], names: Sequence[str], *, role: str) -> list[str]:
    """One finding for each pattern that means none of the names, with the nearest name."""
    findings = []
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        near = nearest(pattern, names)
        hint = f"; the nearest parameter is {near!r}" if near is not None else "; the model has no parameters"
        findings.append(f"{role}: {pattern!r} matches none of the {len(names)} parameters{hint}")
    return findings


MASTER = "master"
"""The key of a parameter's master, where that is held apart from the working copy."""

AVERAGE = "weight_average"
"""The key of the running average of a parameter."""

WEIGHT_KEYS = frozenset({MASTER, AVERAGE})
"""Keys under which there are values of the parameter itself; no optimizer has them."""

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


_BESIDE_PREFIX = "extra/"


def beside_name(path: str) -> str:
    """The name of a tensor in a file of another program that belongs to no model and no optimizer.

    >>> beside_name("rng_state")
    'extra/rng_state'
    """
    return f"{_BESIDE_PREFIX}{path}"


def is_beside_name(name: str) -> bool:
    """Whether `beside_name` has made a name: a target need not want it."""
    return name.startswith(_BESIDE_PREFIX)


def holds_weights(name: str) -> bool:
    """Whether a name is that of a parameter's master or average.

    >>> holds_weights("optimizer/w/weight_average"), holds_weights("optimizer/w/step"), holds_weights("w")
    (True, False, False)
    """
    split = split_state_name(name)
    return split is not None and split[1] in WEIGHT_KEYS


def split_state_name(name: str) -> tuple[str, str] | None:
    """The parameter and the key of a name that `state_name` makes; None for every other. Keys hold no slash.

    >>> split_state_name("optimizer/layer.weight/exp_avg"), split_state_name("layer.weight")
    (('layer.weight', 'exp_avg'), None)
    """
    if not is_state_name(name) or name.count("/") < 2:
        return None
    # From the right: a parameter's name may hold slashes, and a key may not (`values_of` refuses one).
    parameter, _, key = name.removeprefix(STATE_PREFIX).rpartition("/")
    return parameter, key


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that `torch.compile(module)` and torch's `checkpoint_wrapper` put in."""


def unwrapped(name: str) -> str:
    """The name that a parameter would have without wrappers around modules.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_by_wrappers(stored: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """The stored names that differ from a model's by wrappers only: {parameter as stored: the model's name}.

    own: each name of the model, ties included, and the one under which it has its tensor.

    >>> named_by_wrappers(["a._orig_mod.w", "optimizer/a._orig_mod.w/step", "b"], {"a.w": "a.w", "b": "b"})
    {'a._orig_mod.w': 'a.w'}
    """
    meant: dict[str, set[str]] = {}
    for name, held in own.items():
        meant.setdefault(unwrapped(name), set()).add(held)
    found = {}
    for each in stored:
        name, _ = split_state_name(each) or (each, "")
        # Of two that would have one name without wrappers neither is meant.
        if name not in own and len(names := meant.get(unwrapped(name), set())) == 1:
            (found[name],) = names
    return found


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a model without wrappers around modules, where they are others: {name: plain name}.

    Where two would have one name, both keep theirs.

    >>> plain_names(["a._orig_mod.w", "optimizer/a._orig_mod.w/step", "b", "c._orig_mod", "c"])
    {'a._orig_mod.w': 'a.w', 'optimizer/a._orig_mod.w/step': 'optimizer/a.w/step'}
    """
    plain = {name: _plain_name(name) for name in names}
    counts = Counter(plain.values())
    return {name: each for name, each in plain.items() if each != name and counts[each] == 1}


def _plain_name(name: str) -> str:
    if (split := split_state_name(name)) is None:
        return unwrapped(name)
    parameter, key = split
    return state_name(unwrapped(parameter), key)
