"""Settings under the names of a rewrite: which group of an optimizer trains what its tensors have become.

    sources                          rewrite                      outputs
    group 0: q, k, v  (lr 0.1)       q, k, v -> qkv, axis=0       group 0: qkv       all three were trained alike
    group 0: q   group 1: k, v                                    a finding: no group can train qkv as both did

Groups keep their order and settings; parameters stand in the order of the first source of each.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import index
from typing import Any

from shardwise.errors import CheckpointError, in_words
from shardwise.plan.names import STATE_PREFIX, is_state_name, split_state_name
from shardwise.plan.saved_settings import (
    ADDED,
    BEFORE,
    CONFIG,
    DEGREES,
    IDLE,
    LOADED_BY,
    MODEL_FILES,
    NUMBERED,
    ORDER_LOST,
    REWRITE,
    record_in,
    stored_optimizers,
    text_of_record,
)
from shardwise.rewrite import Checked, Rewrite, TensorMeta

_GroupAt = tuple[int, int]
"""The position of an optimizer, and of a group in it."""


def renamed_settings(settings: Mapping[str, Any], checked: Checked) -> tuple[dict[str, Any], list[str]]:
    """The settings of the sources as those of the outputs, with a record of the rewrite.

    And findings about what no group can train: a parameter belongs to the group of the tensors that it is made of.
    Where these are in groups with different settings it belongs to none.
    Raises CheckpointError for settings that are not understood.
    """
    # A save has one record of where its values come from: the newest rewrite replaces an older one.
    renamed = {key: value for key, value in settings.items() if key not in (REWRITE, LOADED_BY)}
    if "ties" in settings:
        renamed["ties"] = dict(checked.ties)
    if checked.added:
        renamed[ADDED] = sorted(checked.added)
    renamed |= _record_of(checked, record_in(settings))
    if isinstance(files := settings.get(MODEL_FILES), Mapping):
        renamed[MODEL_FILES] = with_vocabulary(files, checked)
    if NUMBERED in settings:
        renamed[NUMBERED] = [_renumbered(each, checked) for each in settings[NUMBERED]]
    if not stored_optimizers(settings):
        return renamed, []
    groups = _OptimizerGroups(settings["optimizers"], checked.aliases)
    members: dict[_GroupAt, list[tuple[int, str]]] = {}
    findings = []
    for name in checked.outputs:
        # State follows its parameter by name, so groups list parameters only.
        sources = [] if is_state_name(name) else sorted(checked.sources_of(name))
        # Made of nothing that was trained: it is in no group, as before.
        if not any(each in groups.places for each in sources):
            continue
        if finding := groups.finding(name, sources):
            findings.append(finding)
            continue
        place, position = min(groups.places[each] for each in sources)
        members.setdefault(place, []).append((position, name))
    renamed["optimizers"] = [
        {
            **optimizer,
            "groups": [_with(group, members.get((number, at), ()), checked) for at, group in enumerate(groups_of)],
        }
        for number, optimizer in enumerate(settings["optimizers"])
        for groups_of in (optimizer["groups"],)
    ]
    return renamed, findings


def with_vocabulary(files: Mapping[str, Any], checked: Checked) -> dict[str, Any]:
    """Files that describe a model, whose configuration has the sizes that a rewrite gives to a vocabulary."""
    sizes: dict[int, set[int]] = {}
    uses = Counter(each for name in checked.outputs for each in checked.sources_of(name))
    for name, new in checked.outputs.items():
        sources = list(checked.sources_of(name))
        old = checked.sources[sources[0]].shape if len(sources) == 1 and uses[sources[0]] == 1 else ()
        # Padded or cropped along its first dim, and along no other; not split.
        if old and new.shape and old == (*old[:1], *new.shape[1:]) != new.shape:
            sizes.setdefault(old[0], set()).add(new.shape[0])

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: next(iter(sizes[each]))
            if key.endswith("vocab_size") and type(each) is int and len(sizes.get(each, ())) == 1
            else changed(each)
            for key, each in value.items()
        }

    return {name: changed(each) if name == CONFIG else each for name, each in files.items()}


def _renumbered(optimizer: Mapping[str, Any], checked: Checked) -> dict[str, Any]:
    """A numbered optimizer whose guessed names are of outputs; numbers stay what they are."""
    made: dict[str, list[str]] = {}
    joined = set()
    for name in checked.outputs:
        for each in () if is_state_name(name) else checked.sources_of(name):
            made.setdefault(each, []).append(name)
            if len(checked.sources_of(name)) > 1:
                joined.add(each)
    names = [name for group in optimizer["groups"] for name in group["parameters"]]
    # One output of each, made of nothing else: torch would count them as it counts these.
    is_lost = any(each in joined or len(made.get(each, [each])) > 1 for each in names)
    groups = [
        {
            **group,
            "parameters": list(dict.fromkeys(new for name in group["parameters"] for new in made.get(name, [name]))),
        }
        for group in optimizer["groups"]
    ]
    return {**optimizer, "groups": groups, **({ORDER_LOST: True} if is_lost else {})}


def _with(group: Mapping[str, Any], members: Sequence[tuple[int, str]], checked: Checked) -> dict[str, Any]:
    """A group with other parameters, in the order of their sources."""
    idle = set(group.get(IDLE, ()))
    made = [name for name in checked.outputs if idle.issuperset(found := checked.sources_of(name)) and found]
    parameters = [name for _, name in sorted(members, key=lambda member: member[0])]
    return {**group, "parameters": parameters, **({IDLE: made} if idle else {})}


class _OptimizerGroups:
    """The groups of optimizers in which parameters are."""

    def __init__(self, optimizers: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> None:
        self._optimizers = optimizers
        self.places: dict[str, tuple[_GroupAt, int]] = {}
        """For each parameter its group, and its position there."""
        self._alike: dict[_GroupAt, tuple[int, str]] = {}
        """Equal for groups of one optimizer that say the same."""
        for number, optimizer in enumerate(optimizers):
            for at, group in enumerate(optimizer["groups"]):
                # Two groups of one optimizer that say the same train alike: their tensors may be joined.
                self._alike[number, at] = number, json.dumps(group["settings"], sort_keys=True)
                for position, name in enumerate(group["parameters"]):
                    self.places[aliases.get(name, name)] = (number, at), position

    def finding(self, name: str, sources: Sequence[str]) -> str | None:
        """Why no group trains what is made of these tensors."""
        kinds: dict[object, str] = {}
        for each in sources:
            # None is a kind of its own: joined with a frozen tensor, a trained one would no longer be trained.
            kinds.setdefault(self._alike[self.places[each][0]] if each in self.places else None, each)
        if len(kinds) == 1:
            return None
        one, other = list(kinds.values())[:2]
        return (
            f"{name} is made of {one}, which {self._trainer(one)}, and {other}, which {self._trainer(other)}"
            f"{self._difference(one, other)}; keep tensors apart that are trained apart"
        )

    def _trainer(self, name: str) -> str:
        if name not in self.places:
            return "no optimizer trains"
        number, at = self.places[name][0]
        return f"group {at} of {self._optimizers[number]['kind']} trains"

    def _difference(self, one: str, other: str) -> str:
        """The first setting in which two groups differ."""
        if one not in self.places or other not in self.places:
            return ""
        mine, yours = (
            self._optimizers[number]["groups"][at]["settings"]
            for number, at in (self.places[one][0], self.places[other][0])
        )
        key = next((key for key in {**mine, **yours} if mine.get(key) != yours.get(key)), None)
        return "" if key is None else f" ({key} is {mine.get(key)!r} and {yours.get(key)!r})"


def _record_of(checked: Checked, before: Any) -> dict[str, Any]:
    """What the settings of a save say of the rewrite that made it: its text, and what a text cannot say of its sources.

    Of an inverse the record has the text of what was undone: that says all, and the inverse is not without a record.
    State of optimizers follows its parameters, and is left out unless the rewrite names it. `before`: the record of
    what is rewritten, where that has one.
    """
    every = names_state(checked.rewrite)
    metas = {
        name: [list(meta.shape), meta.dtype]
        for name, meta in checked.sources.items()
        if every or not is_state_name(name)
    }
    # Later saves may be cut in other ways, or not at all: then nothing else would tell.
    degrees = {name: list(each) for name, each in checked.lasting_degrees.items()}
    facts = {DEGREES: degrees, BEFORE: text_of_record(before)}
    known = {key: each for key, each in facts.items() if each}
    return {REWRITE: {**checked.rewrite.to_record(), "sources": metas, **known}}


def rewrite_of_record(settings: Mapping[str, Any]) -> Rewrite | None:
    """The rewrite that made the save with these settings, or what its values were loaded from; None if unknown."""
    record = record_in(settings)
    return Rewrite.from_record(record) if isinstance(record.get("text"), str) else None


def recorded_metas(settings: Mapping[str, Any], rewrite: Rewrite) -> dict[str, TensorMeta]:
    """The tensors to which a rewrite leads back: the sources of the one that a save was made by, if it undoes that."""
    if not any(section.inverted for section in rewrite.stages):
        return {}
    # Sizes and dtypes that a save has on record hold for the way back of that very rewrite, and for no other.
    if rewrite_of_record(settings) != rewrite.inverse(lossy="allow"):
        return {}
    with _understood("rewrite"):
        sources = record_in(settings)["sources"]
        return {name: TensorMeta(tuple(shape), dtype) for name, (shape, dtype) in sources.items()}


def layout_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of settings, what says for how many ranks the tensors of a state are laid out."""
    return {key: settings[key] for key in ("plan", REWRITE, LOADED_BY) if key in settings}


def with_degrees(metas: Mapping[str, TensorMeta], settings: Mapping[str, Any]) -> dict[str, TensorMeta]:
    """Tensors of a state with these settings: what was fused by a rewrite stays laid out as it was, however it is cut.

    Raises CheckpointError for settings that are not understood.
    """
    if DEGREES not in (record := record_in(settings)):
        return dict(metas)
    with _understood("degrees"):
        known = {name: tuple(map(index, degrees)) for name, degrees in record[DEGREES].items()}
        if any(each < 0 for degrees in known.values() for each in degrees):
            raise ValueError("a degree below 0")
    made = {}
    for name, meta in metas.items():
        degrees = known.get(name, known.get((split_state_name(name) or ("",))[0], ()))
        made[name] = meta._replace(degrees=degrees, recorded=True) if len(degrees) == len(meta.shape) else meta
    return made


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """Say of a record that it is not understood: it is part of settings, which any program may have written."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's record of its {what} is not understood ({in_words(error)})") from None


def names_state(rewrite: Rewrite) -> bool:
    """Whether a rewrite has statements on the state of optimizers itself, which else follows its parameters."""
    names = chain.from_iterable((*each.left, *each.right) for each in rewrite.statements)
    return any(isinstance(name.parts[0], str) and name.parts[0].startswith(STATE_PREFIX) for name in names)
