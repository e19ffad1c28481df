"""Matching: which stored tensor gives each wanted one, and all that does not fit, before a byte of the target changes.

A wanted tensor is looked up under several names. With w tied to v, in the target or in the checkpoint:

    wanted w float32      w, v, optimizer/w/master, optimizer/v/master
                          the first of these that is stored as float32; else a master; else the first

`match` works on names alone. A writer that does not look for ties saves one tensor for each name of a tied parameter.
Such tensors are twins: they fit if their bytes are equal, and `twin_pairs` reads them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from types import MappingProxyType

from shardwise.checkpoint.comparison import StoredPairs
from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.reading import DataFiles
from shardwise.plan.names import AVERAGE, MASTER, is_beside_name, is_state_name, split_state_name, state_name
from shardwise.rewrite.spelling import text_of_name
from shardwise.rewrite.statements import Name, Rest, TextPlace
from shardwise.space import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where everything that is wanted comes from, and all that does not fit, in words."""

    source: dict[tuple[str, str], str] = field(default_factory=dict)
    """For the name and the dtype of each wanted tensor the stored one from which it is read, unless that is missing."""
    missing: list[str] = field(default_factory=list)
    """Wanted, and not stored."""
    unexpected: list[str] = field(default_factory=list)
    """Stored, and not wanted."""
    casts: list[str] = field(default_factory=list)
    """Stored in another dtype than wanted."""
    misfits: list[str] = field(default_factory=list)
    """Stored in another shape than wanted."""
    twins: list[tuple[str, str]] = field(default_factory=list)
    """Stored under a name that the target ties to another: (its name, the tensor that is read for the other). They fit
    if their bytes are equal."""
    notes: list[str] = field(default_factory=list)
    """What is left in the checkpoint and no reason to refuse it, in words."""


def match(
    wanted: Iterable[Piece],
    contents: Contents,
    *,
    aliases: Mapping[str, str],
    accounted: Collection[str],
) -> Match:
    """Find a stored tensor for everything that is wanted by any rank.

    aliases: other names of wanted tensors. accounted: stored names that the target makes without reading.

    A tensor is found under its name, or under one that it is tied to. A parameter and its master stand for each other:
    the one with the wanted dtype is taken, and the other needs no place. What is tied in the target and stored under
    each name is a twin. A target that wants no optimizer state at all may leave it, and any may leave averages.
    """
    names = _StoredNames(contents, aliases)
    whose = "the checkpoint" if contents.stored is contents else "the rewritten checkpoint"
    result = Match()
    # A parameter and its master settle each other: an engine that keeps no masters shall not find them unexpected.
    settled = {each for name in accounted for each in (name, _other(name))}
    has_state = False
    for kind in wanted:
        has_state = has_state or is_state_name(kind.name)
        stored = names.find(kind.name, kind.dtype)
        if stored is None:
            result.missing.append(f"{kind.name}: missing; {whose} has no tensor for it")
            continue
        settled |= {stored.name, _other(stored.name)}
        result.source[kind.name, kind.dtype] = stored.name
        if stored.shape != kind.shape:
            result.misfits.append(
                f"{kind.name}: shape {list(kind.shape)} in the target, {list(stored.shape)} in {whose}"
            )
        # Without elements there is nothing to cast.
        elif 0 in kind.shape or stored.dtype == kind.dtype:
            continue
        elif not _can_be_cast(stored.dtype, kind.dtype):
            result.misfits.append(
                f"{kind.name}: dtype {kind.dtype} in the target, {stored.dtype} in {whose}; a cast would change its "
                "values by more than rounding"
            )
        else:
            result.casts.append(f"{kind.name}: dtype {kind.dtype} in the target, {stored.dtype} in {whose}")
    num_averages = 0
    for name, stored in contents.tensors.items():
        # State of optimizers is not unexpected where the target has
        # no optimizer: that is how weights are taken out of a save.
        if name in settled or is_beside_name(name) or (not has_state and is_state_name(name)):
            continue
        parameter, key = _split(name)
        if key == AVERAGE:
            num_averages += 1
            continue
        if parameter not in aliases:
            result.unexpected.append(f"{name}: unexpected; the target has no place for it")
            continue
        twin = names.find(_named(aliases[parameter], key), stored.dtype)
        if twin is None or twin.name not in settled or (twin.dtype, twin.shape) != (stored.dtype, stored.shape):
            result.unexpected.append(untied(name, aliases[parameter], "are of different shapes or dtypes"))
        else:
            result.twins.append((name, twin.name))
    if num_averages:
        result.notes.append(
            f"{whose} has averages of {num_averages} parameters that the target does not keep; a plan keeps them with "
            "average=sw.Average(...), average.decay in TOML"
        )
    return result


def prefix_hint(wanted: Iterable[Piece], contents: Contents, found: Match) -> str:
    """Say which statement gives all that is missing its name, if names differ by what they begin with; else ""."""
    lacking = (kind for kind in wanted if (kind.name, kind.dtype) not in found.source)
    shapes = {kind.name: kind.shape for kind in lacking if not is_state_name(kind.name)}
    used = {*found.source.values()}
    left = [each for each in contents.tensors if not (each in used or is_state_name(each) or is_beside_name(each))]
    first = next(iter(shapes), None)
    if first is None:
        return ""
    end = first.rpartition(".")[2]
    pairs = dict.fromkeys(_beginnings(first, name) for name in left if name.rpartition(".")[2] == end)
    for ours, theirs in pairs:
        stored = (contents.tensors.get(theirs + name.removeprefix(ours)) for name in shapes)
        fits = (each is not None and each.shape == shape for each, shape in zip(stored, shapes.values(), strict=True))
        begins = all(name.startswith(ours) for name in shapes) and all(name.startswith(theirs) for name in left)
        if begins and all(fits):
            nowhere = TextPlace(1, 1, 1)
            sides = [Name((*filter(None, [each]), Rest()), False, nowhere) for each in (theirs, ours)]
            statement = " -> ".join(text_of_name(each, right=each is sides[1]) for each in sides)
            return f"; rewrite=sw.Rewrite({statement!r}) (--rewrite FILE) gives all names the beginning that is wanted"
    return ""


def _beginnings(name: str, other: str) -> tuple[str, str]:
    """What two names begin with, before the words in which both end."""
    words, others = name.split("."), other.split(".")
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words[::-1], others[::-1], strict=False)))
    heads = [each[: len(each) - alike] for each in (words, others)]
    ours, theirs = (f"{'.'.join(each)}." if each else "" for each in heads)
    return ours, theirs


def untied(name: str, twin: str, how: str) -> str:
    """The finding that what the target has as one tensor is stored as two."""
    return (
        f"{name}: unexpected. The target ties it to {twin}, but in the checkpoint the two {how}. Ignore it with "
        f'strict=False, or drop it with a rewrite, sw.Rewrite("{name} -> _") (shardwise ckpt convert --rewrite FILE)'
    )


_NUMBERS = ("bool", "int", "float", "complex")
"""Kinds of numbers; each has those of the kinds before it, rounded."""


def _can_be_cast(stored: str, wanted: str) -> bool:
    """Whether values keep their meaning, rounded at most. The two numbers in an element of float4 are never cast."""
    one, other = _kind(stored), _kind(wanted)
    return {one, other} <= {*_NUMBERS} and _NUMBERS.index(one) <= _NUMBERS.index(other)


def _kind(dtype: str) -> str:
    """The kind of numbers of a dtype; float4 has its own kind."""
    kinds = {"bool": "bool", "uint": "int", "int": "int", "float4": "float4", "float": "float", "bfloat": "float"}
    return next((kind for prefix, kind in kinds.items() if dtype.startswith(prefix)), "complex")


_STANDS_FOR: Mapping[str | None, str | None] = MappingProxyType({None: MASTER, MASTER: None})
"""A parameter, which has no key, and its master: the same values in two dtypes. Either is found for the other."""


class _StoredNames:
    """Stored tensors by every name under which they can be wanted."""

    def __init__(self, contents: Contents, aliases: Mapping[str, str]) -> None:
        self._tensors = contents.tensors
        # Names in one group mean one tensor. Both tables count: a target without ties loads a checkpoint with them.
        ties: dict[str, set[str]] = {}
        for table in (contents.aliases, aliases):
            for alias, name in table.items():
                group = ties.get(alias, {alias}) | ties.get(name, {name})
                for each in group:
                    ties[each] = group
        self._ties = ties

    def find(self, name: str, dtype: str) -> StoredTensor | None:
        """The stored tensor for a wanted one: the first of its dtype if there is one, else a master, else the first."""
        found = [self._tensors[each] for each in self._candidates(name) if each in self._tensors]
        # The wanted dtype first, since that is no cast. Then a master,
        # which a cast rounds once; a working copy is rounded already.
        alike = (each for each in found if each.dtype == dtype)
        masters = (each for each in found if _split(each.name)[1] == MASTER)
        return next(chain(alike, masters, found), None)

    def _candidates(self, name: str) -> Iterator[str]:
        """Names to look under: its own and those that it is tied to, then those that can stand for them."""
        parameter, key = _split(name)
        tied = [parameter, *sorted(self._ties.get(parameter, set()) - {parameter})]
        for each in dict.fromkeys((key, _STANDS_FOR.get(key, key))):
            yield from (_named(name, each) for name in tied)


def _split(name: str) -> tuple[str, str | None]:
    """The parameter and the key; the name itself and None, where it is the model's."""
    return split_state_name(name) or (name, None)


def _named(parameter: str, key: str | None) -> str:
    """The reverse of `_split`."""
    return parameter if key is None else state_name(parameter, key)


def _other(name: str) -> str:
    """The master of a parameter, and the parameter of a master."""
    parameter, key = _split(name)
    return _named(parameter, _STANDS_FOR.get(key, key))


def twin_pairs(files: DataFiles, contents: Contents, twins: Sequence[tuple[str, str]]) -> StoredPairs:
    """Twins, which are to be compared."""
    return StoredPairs(
        files=files,
        contents=contents,
        pairs=twins,
        say=lambda at, elements: untied(*twins[at], "have different values"),
        purpose="tensors that the target ties",
        about=f"{contents.location} does not fit the target",
    )
