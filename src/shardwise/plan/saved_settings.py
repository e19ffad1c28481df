"""What a save keeps of a training besides its tensors: JSON settings, and how live optimizers take theirs over.

Settings of the model are those of a `SavedRecord`. Settings of optimizers name parameters and never count them. So a
parameter that was added, frozen or moved to another group is reported, and shifts nothing. For each optimizer:

    {"kind": "AdamW",
     "groups": [{"parameters": ["w", "b"], "settings": {"lr": 0.001, "betas": [0.9, 0.999]}}],
     "plain": {"step": "int"},       state keys that are Python values, saved as 0-d tensors
     "none": {"buffer": true},       state keys that may be None, which is saved by leaving it out
     "made": {"step": true},         settings that the optimizer's steps make; a fresh one has none of them
     "shared": {"k": 3}}             what its state has for all parameters, under keys of its choice

Taken over by name, here with one parameter that moved to another group since the save:

    saved   group 0 (lr 0.1): w, b     group 1 (lr 0.2): scale
    live    group 0: w, scale          group 1: b
    ->      refused: group 0 "was several groups": lr is 0.1 for 'w' and 0.2 for 'scale'; group 1 takes lr 0.1
"""

import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardwise.errors import CheckpointError, MismatchError, OptimizerError, few_of, in_words

CONFIG = "config.json"
"""The file from which `from_pretrained` makes a model."""

MODEL_FILES = "model_files"
"""Under this key the settings of a save have the files that describe the model: file name -> JSON."""

REWRITE = "rewrite"
"""Under this key the settings of a save have the record of the rewrite by which its tensors were made."""

LOADED_BY = "loaded_by"
"""Under this key they have the record of the rewrite by which the values were made that training went on from."""

DEGREES = "degrees"
"""Under this key such a record says for how many ranks dims of fused tensors are laid out: name -> degrees."""

BEFORE = "before"
"""Under this key such a record has the text of the rewrite that had made what was rewritten."""

SEVERAL = "several"
"""Under this key it has the texts of several loads that each left some values as they were."""

KEPT = "kept"
"""Under this key settings name parameters that a load leaves as they are. No save has it, see `ADDED`."""

NUMBERED = "numbered"
"""Under this key settings have optimizers of other programs that number their parameters, and nothing proves which they
are: as under "optimizers", of all numbers, under the names of their state, and a note that says so in words."""

ORDER_LOST, LISTED, GUESSED = "order_lost", "listed", "guessed"
"""Under these keys such an optimizer says that a rewrite has joined or cut its parameters, that it is one of a list,
and that its names are those of parameters in the order of the model."""

IDLE = "idle"
"""Under this key a group of an optimizer has its parameters without state: frozen, or without a gradient so far."""

OF_RUNS = frozenset({"random", "loss_scale", "average", "optimizers", NUMBERED})
"""Keys of what a run goes on with; the other settings are of its model and its plan."""


def record_in(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the rewrite that made the values of a save with these settings; {} if unknown."""
    # Its own rewrite, or that of the save it went on from: a record is handed on from save to save.
    return a_mapping(settings.get(REWRITE, settings.get(LOADED_BY)))


def a_mapping(value: Any) -> Mapping[str, Any]:
    """A part of settings, which any program may have written; nothing where it is of another kind."""
    return value if isinstance(value, Mapping) else {}


def text_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of the record of a rewrite what says which it was: its text, and which sections go backward."""
    return {key: record[key] for key in ("text", "inverted", BEFORE) if key in record}


class SavedRecord:
    """What saves say of a model besides its tensors. This one says nothing; see `model_records`."""

    def settings(self, model: object) -> dict[str, Any]:
        """The entries of a save's settings."""
        return {}

    def after(self, settings: Mapping[str, Any]) -> Callable[[], None]:
        """Returns what to call when a load of a save with these settings is done: it changes the record."""
        return lambda: None


def settings_apart(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Settings in two: all but the groups of optimizers; and these, which name all parameters and are alike on ranks.

    So that what differs travels without the names. `merge_apart` brings both together again.
    """
    optimizers = settings.get("optimizers", ())
    if not optimizers:
        return [dict(settings), {}]
    others = [{**each, "groups": None} for each in optimizers]
    return [{**settings, "optimizers": others}, {"optimizers": [{"groups": each["groups"]} for each in optimizers]}]


def merge_apart(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """As `merge_settings`, from what all ranks have of each part."""
    merged, named = map(merge_settings, parts)
    ones, others = (each.get("optimizers", ()) for each in (merged, named))
    if len(ones) != len(others):
        raise MismatchError(
            f"ranks have {len(ones)} optimizers, and groups of {len(others)}; give the same optimizers on all ranks"
        )
    pairs = zip(ones, others, strict=True)
    return merged | ({"optimizers": [{**one, **other} for one, other in pairs]} if named else {})


def merge_settings(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that ranks know together. Raises MismatchError where two say different things under one key.

    Ranks that say the same share one object, which is merged once: thousands of ranks differ in a few entries.
    """
    merged: dict[str, Any] = {}
    seen: dict[int, Mapping[str, Any]] = {}
    for rank, settings in enumerate(by_rank):
        if id(settings) not in seen:
            seen[id(settings)] = settings
            merged = _merge(merged, settings, rank, "settings")
    return merged


def _merge(one: Any, other: Any, rank: int, place: str) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            **one,
            **{key: _merge(one.get(key, value), value, rank, f"{place}.{key}") for key, value in other.items()},
        }
    # Lists of one length are merged by position (the groups of an optimizer are lists with settings inside), others
    # must be equal: nothing says how entries of lists of several lengths belong together.
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            _merge(mine, yours, rank, f"{place}[{at}]") for at, (mine, yours) in enumerate(zip(one, other, strict=True))
        ]
    if one != other:
        raise MismatchError(
            f"{place} is {one!r} on the ranks before rank {rank}, and {other!r} there; save equal settings (learning "
            "rates, groups) on all ranks"
        )
    return one


PYTHON_DTYPES: Mapping[str, str] = MappingProxyType({"bool": "bool", "int": "int64", "float": "float64"})
"""The dtype of the 0-d tensor that keeps a Python value of an optimizer's state, by the type's name."""

_HOW_NOT_WHAT = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose between implementations of one update: each run keeps its own."""

_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers note in groups: optimizers never read it, and a scheduler may come after the load."""

ADDED = "added"
"""Under this key settings name parameters for which there is nothing in the checkpoint, and which keep what they have.

No save has it: a rewrite says so of the load that it is given to.
"""

LIVE = "live"
"""Under this key settings name those of groups that the target decides: they are not taken over. No save has it."""

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """A group of an optimizer."""

    parameters: tuple[str, ...]
    """Names of all parameters that it trains, on any rank; frozen ones are left out."""
    settings: Mapping[str, Any]
    """By torch's keys; values of a live optimizer, or of JSON."""
    idle: tuple[str, ...] = ()
    """Further parameters, which it never updated: the target may train them, or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedOptimizer:
    """An optimizer as a checkpoint sees it."""

    kind: str
    """The name of its class; "" where a file of another program does not say it."""
    groups: tuple[OptimizerGroup, ...]
    plain: Mapping[str, str] = field(default_factory=dict)
    """Keys of its state that hold Python values, and the name of their type."""
    none: frozenset[str] = frozenset()
    """Keys of its state under which a parameter may have None."""
    made: frozenset[str] = frozenset()
    """Keys of settings that its steps make, as a count of them."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What its state has for no single parameter, as JSON."""

    def to_json(self) -> dict[str, Any]:
        """The JSON form; settings that JSON cannot hold (functions) and choices of implementation are left out."""
        groups = [
            {"parameters": list(group.parameters), "settings": settings_to_json(group.settings)}
            for group in self.groups
        ]
        return {
            "kind": self.kind,
            "groups": groups,
            "plain": dict(self.plain),
            "none": dict.fromkeys(sorted(self.none), True),
            **({"made": dict.fromkeys(sorted(self.made), True)} if self.made else {}),
            **({"shared": dict(self.shared)} if self.shared else {}),
        }


def stored_optimizers(settings: Mapping[str, Any]) -> tuple[NamedOptimizer, ...]:
    """The optimizers in the settings of a checkpoint; none where nothing is said. Raises CheckpointError."""
    try:
        return tuple(
            NamedOptimizer(
                kind=_text(each["kind"]),
                groups=tuple(
                    OptimizerGroup(
                        parameters=tuple(map(_text, group["parameters"])),
                        settings=_legible(group["settings"]),
                        idle=tuple(map(_text, group.get(IDLE, ()))),
                    )
                    for group in each["groups"]
                ),
                plain={key: _text(kind) for key, kind in each.get("plain", {}).items()},
                none=frozenset(each.get("none", {})),
                made=frozenset(each.get("made", {})),
                shared=_legible(each.get("shared", {})),
            )
            for each in settings.get("optimizers", [])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's settings of optimizers are not understood ({in_words(error)}). Each optimizer needs a "
            "kind and groups, and each group parameters and settings"
        ) from None


def stored_ties(settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Other names of parameters in the settings of a checkpoint, alias -> name. Raises CheckpointError."""
    ties = settings.get("ties", {})
    if not isinstance(ties, Mapping) or not all(isinstance(name, str) for name in ties.values()):
        raise CheckpointError(f"the checkpoint's ties are not understood: {ties!r:.100}; they map names to names")
    return ties


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value


def _legible(settings: Any) -> dict[str, Any]:
    """The settings of a group, whose values `_from_json` understands."""
    legible = dict(settings)
    # Only tried: values stay JSON, to be compared with a live group as JSON. What cannot be read raises here, on every
    # rank alike, and not later in the middle of a load.
    for value in legible.values():
        _from_json(value)
    return legible


def settings_to_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that a checkpoint keeps, as JSON values."""
    kept = {
        key: _to_json(value)
        for key, value in settings.items()
        if key not in _HOW_NOT_WHAT and key not in ("params", "param_names")
    }
    return {key: value for key, value in kept.items() if value is not _MISSING}


def _to_json(value: Any) -> Any:
    """`_MISSING` for what JSON cannot hold. Numbers that are not finite become {"float": "inf"}: JSON has none."""
    # A tensor (a learning rate may be one, so that a compiled step need not be compiled anew), or a number of numpy.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        values = [_to_json(each) for each in value]
        return _MISSING if any(each is _MISSING for each in values) else values
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    # Exact types: a subclass (an enum, say) would come back as something else.
    return value if value is None or type(value) in (bool, int, float, str) else _MISSING


def _from_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_from_json(each) for each in value]
    if isinstance(value, Mapping) and "dict" in value:
        return {key: _from_json(each) for key, each in value["dict"].items()}
    return float(value["float"]) if isinstance(value, Mapping) else value


def shared_to_json(kind: str, state: Mapping[Any, Any]) -> dict[str, Any]:
    """What the state of an optimizer has for no single parameter, as JSON.

    Raises OptimizerError for what is no number, no text, and no list or dict of them.
    """

    def json_of(value: Any) -> Any:
        if type(value) is not dict:
            return _to_json(value)
        values = {key: json_of(each) for key, each in value.items()}
        can = all(type(key) is str and each is not _MISSING for key, each in values.items())
        return {"dict": values} if can else _MISSING

    found = {key: json_of(value) for key, value in state.items() if not hasattr(key, "shape")}
    for key, value in found.items():
        if type(key) is not str or value is _MISSING:
            raise OptimizerError(
                f"{kind} keeps {key!r:.60} in its state for all parameters, of type {type(state[key]).__name__}; a "
                "checkpoint keeps numbers, texts, and lists and dicts of them under texts"
            )
    return found


def take_over_shared(state: MutableMapping[Any, Any], shared: Mapping[str, Any] | None) -> None:
    """Put what a checkpoint has for no single parameter into a live state; None: it is of another optimizer."""
    if shared is not None:
        for key in [key for key in state if not hasattr(key, "shape") and key not in shared]:
            del state[key]
        for key, value in shared.items():
            state[key] = _in_the_form_of(state[key], _from_json(value)) if key in state else _from_json(value)


def take_over(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Put stored settings (JSON) into a live group: the same dict, tensors in place, tuples as tuples.

    Schedulers hold the dict, and compiled steps the tensors.
    """
    for key, value in settings.items():
        if value is _MISSING:  # made by a step that the checkpoint was not after
            group.pop(key, None)
        else:
            group[key] = _in_the_form_of(group.get(key), _from_json(value))


def _in_the_form_of(live: Any, value: Any) -> Any:
    # In place: a compiled step has this very tensor among its inputs.
    if hasattr(live, "new_tensor"):
        return live.copy_(live.new_tensor(value))
    if isinstance(value, dict):
        held = live if isinstance(live, dict) else {}
        return {key: _in_the_form_of(held.get(key), each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    # JSON has no tuples, and optimizers expect theirs (betas): a list becomes a tuple unless the live value is a list.
    old = live if isinstance(live, list | tuple) and len(live) == len(value) else [None] * len(value)
    values = [_in_the_form_of(*pair) for pair in zip(old, value, strict=True)]
    return values if isinstance(live, list) else tuple(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOver:
    """What a live model and its optimizers take over from the settings of a checkpoint."""

    has_groups: bool
    """Whether the checkpoint says which optimizer trained what; one of plain weights does not."""
    settings: tuple[tuple[Mapping[str, Any], ...], ...]
    """For each live optimizer and each of its groups."""
    shared: tuple[Mapping[str, Any] | None, ...]
    """For each live optimizer what the state of the stored one had for all parameters; None: there is none."""
    source: Mapping[str, tuple[str, NamedOptimizer]]
    """For each live parameter that an optimizer of the same kind trained: its name then, and that optimizer."""
    added: frozenset[str]
    """Live parameters that keep what they have."""
    findings: tuple[str, ...]
    """What does not fit."""


def plan_take_over(live: Sequence[NamedOptimizer], ties: Mapping[str, str], settings: Mapping[str, Any]) -> TakeOver:
    """Find for each live group what the checkpoint says of its parameters.

    ties: other names of live parameters, alias -> name. Raises CheckpointError for settings that are not understood.
    """
    stored = stored_optimizers(settings)
    then_tied = stored_ties(settings)
    places = {
        name: (optimizer, group)
        for optimizer in stored
        for group in optimizer.groups
        for name in (*group.parameters, *group.idle)
    }
    names = [name for optimizer in live for group in optimizer.groups for name in group.parameters]
    then = stored_names(names, ties, places, then_tied)
    added = frozenset(ties.get(name, name) for name in settings.get(ADDED, ()))
    expected = [name for name in names if name not in added]
    # A checkpoint of plain weights says nothing of optimizers, and a model without one asks nothing: no findings then.
    findings = _findings_of_parameters(expected, ties, places, then) if places and live else []
    taken = []
    shared: list[Mapping[str, Any] | None] = []
    source: dict[str, tuple[str, NamedOptimizer]] = {}
    for optimizer in live:
        mine = [name for group in optimizer.groups for name in group.parameters if name in then]
        # Files of torch have the state of an optimizer without its class: settings and state must do.
        others = [name for name in mine if places[then[name]][0].kind not in ("", optimizer.kind)]
        if others:
            kinds = " and ".join(dict.fromkeys(places[then[name]][0].kind for name in others))
            findings.append(
                f"{optimizer.kind} trains {few_of(others)} here, but {kinds} trained it in the checkpoint; build the "
                "same optimizer, or load without its state"
            )
        source |= {name: (then[name], places[then[name]][0]) for name in mine if name not in others}
        # A file of torch says nothing of it.
        divided = _divided(optimizer, source, places)
        live_keys = {*settings.get(LIVE, ())}
        findings += [finding for key, finding in divided.items() if key not in live_keys]
        shared.append(next((source[name][1].shared for name in mine if name in source and source[name][1].kind), None))
        groups = []
        for group in optimizer.groups:
            sources = {name: places[then[name]][1].settings for name in group.parameters if name in source}
            # What the steps before the save made in the groups of these parameters.
            made_then = frozenset[str]().union(*(source[name][1].made for name in sources))
            found, misfits = _of_group(optimizer, group, sources, made_then, live_keys, divided)
            groups.append(found)
            findings += misfits
        taken.append(tuple(groups))
    return TakeOver(
        has_groups=bool(places),
        settings=tuple(taken),
        shared=tuple(shared),
        source=source,
        added=added,
        findings=tuple(findings),
    )


def stored_names(
    names: Sequence[str], ties: Mapping[str, str], stored: Mapping[str, Any], then_tied: Mapping[str, str]
) -> dict[str, str]:
    """What the parameters `names` are called in `stored`, through the ties of both sides; without those not there."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ties.items():
        aliases.setdefault(name, []).append(alias)
    found = {}
    for name in names:
        # A tied parameter has one state, under the name that came first when it was saved. The live model may register
        # its modules in another order, or the tie may be of another name by now: every name of both sides is tried.
        called = (name, *aliases.get(name, ()))
        candidates = [*called, *(then_tied[each] for each in called if each in then_tied)]
        if (first := next((each for each in candidates if each in stored), None)) is not None:
            found[name] = first
    return found


def _findings_of_parameters(
    names: Sequence[str], ties: Mapping[str, str], places: Mapping[str, Any], then: Mapping[str, str]
) -> list[str]:
    findings = []
    if added := [name for name in names if name not in then]:
        findings.append(
            f"{len(added)} parameters are trained here, but were frozen in the checkpoint: {few_of(added)}; freeze "
            "them, or let them start without optimizer state"
        )
    known = {*then.values(), *(alias for alias, name in ties.items() if name in then)}
    if gone := [name for name, (_, group) in places.items() if name not in known and name not in group.idle]:
        findings.append(
            f"{len(gone)} parameters were trained in the checkpoint, but are not here: {few_of(gone)}; train them "
            "here too, or let their optimizer state go"
        )
    return findings


def _of_group(
    optimizer: NamedOptimizer,
    group: OptimizerGroup,
    sources: Mapping[str, Mapping[str, Any]],
    made_then: frozenset[str],
    live_keys: Collection[str],
    divided: Collection[str],
) -> tuple[dict[str, Any], list[str]]:
    """The settings that a group takes, as the saved groups of its parameters agree on them; and what does not fit.

    sources: the saved settings by parameter. Where they disagree, and under the keys `divided`, the live value stays.
    """
    if not sources:
        return {}, []
    taken = {key: _MISSING for key in optimizer.made if not any(key in settings for settings in sources.values())}
    findings = []
    known = group.settings.keys() | optimizer.made | made_then | _OF_SCHEDULERS | _HOW_NOT_WHAT
    what = f"the group of {optimizer.kind} with {few_of(group.parameters)}"
    # Compared as JSON on both sides, so that tuples and lists, tensors and numbers do not differ by their form.
    here = settings_to_json(group.settings)
    for key in dict.fromkeys(key for settings in sources.values() for key in settings if key not in live_keys):
        first, *others = ((name, settings.get(key, _MISSING)) for name, settings in sources.items())
        if other := next((each for each in others if each[1] != first[1]), None):
            findings.append(
                f"{what} was several groups in the checkpoint: {key} is {_shown(first[1])} for {first[0]!r} and "
                f"{_shown(other[1])} for {other[0]!r}; make the same groups"
            )
        elif key not in known:
            findings.append(f"{what} has no setting {key!r}, which the checkpoint has ({_shown(first[1])})")
        elif hasattr(group.settings.get(key), "new_tensor") and not _alike(here.get(key), first[1]):
            findings.append(f"{what} has a tensor as {key!r}, and the checkpoint {_shown(first[1])}")
        elif key not in _HOW_NOT_WHAT and key not in divided:
            taken[key] = first[1]
    if unknown := [
        key
        for key in here
        if key not in _OF_SCHEDULERS | optimizer.made | {*live_keys}
        and not any(key in settings for settings in sources.values())
    ]:
        findings.append(f"{what} has settings that the checkpoint does not have: {few_of(unknown)}")
    return taken, findings


def _divided(optimizer: NamedOptimizer, source: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, str]:
    """Settings in which live groups differ that were one group in the checkpoint: key -> finding.

    The checkpoint does not say which value each is to have, so live values stay.
    """
    groups: dict[int, dict[int, OptimizerGroup]] = {}
    for group in optimizer.groups:
        for name in group.parameters:
            if name in source:
                groups.setdefault(id(places[source[name][0]][1]), {})[id(group)] = group
    found: dict[str, str] = {}
    for first, *others in (list(each.values()) for each in groups.values()):
        here = settings_to_json(first.settings)
        for other in others:
            for key, value in settings_to_json(other.settings).items():
                if key not in _OF_SCHEDULERS and here.get(key, value) != value:
                    found[key] = (
                        f"the groups of {optimizer.kind} with {few_of(first.parameters)} and with "
                        f"{few_of(other.parameters)} were one group in the checkpoint. Here {key} is "
                        f"{_shown(here[key])} and {_shown(value)}: make one group, or keep both with strict=False"
                    )
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether both are one number, or lists of so many."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(*pair) for pair in zip(one, other, strict=True))
    return _is_number(one) and _is_number(other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Mapping) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return "not set" if value is _MISSING else repr(_from_json(value))
