"""Ranks compare before they act: equal descriptions, and one verdict.

A rank that raised alone would leave the others in the next collective call until their deadline. So what one rank may
refuse is decided inside `agreed`, on every rank, and ends with one exchange. Only rank 1 has no room on its disk::

    rank 0    decides: yes       gives b"+" + value                             raises CheckpointError: rank 1: no room
    rank 1    decides: refuses   gives b"-" + [kind, text, problems, notes]     raises the same, from its own error
    rank 2    decides: yes       gives b"+" + value                             raises the same
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise, repeat
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from shardwise import errors
from shardwise.comm.channel import Channel
from shardwise.comm.digests import digest_of
from shardwise.comm.hosts import RankNames, names_of, naming_hosts
from shardwise.comm.rank_values import RankValues
from shardwise.errors import (
    CheckpointError,
    MismatchError,
    PeerError,
    PlanError,
    RewriteError,
    ShardwiseError,
    in_words,
)

T = TypeVar("T")

_LARGEST_NUMBER = 1 << 63


@dataclass(slots=True)
class Agreement:
    """What this rank gives to the others with its consent, and what all ranks have given once they have agreed."""

    value: bytes = b""
    """This rank's, set inside `agreed`."""
    values: Sequence[bytes] = ()
    """All ranks', in rank order, there after `agreed`."""
    parts: Sequence[bytes] = ()
    """More values of this rank: `num_parts` of them. Each travels for itself (`RankValues`)."""
    of_parts: Sequence[RankValues] = ()
    """All ranks', by parts."""


def understood(answers: Sequence[bytes], parse: Callable[[bytes], T], *, purpose: str) -> list[T]:
    """What each rank gave in an exchange, as `parse` reads it.

    Raises PeerError, the same on all ranks, that names the first rank whose bytes mean nothing.
    """
    runs = understood_runs(answers, parse, purpose=purpose)
    return [*chain.from_iterable(repeat(found, count) for found, count in runs)]


def understood_runs(answers: Sequence[bytes], parse: Callable[[bytes], T], *, purpose: str) -> list[tuple[T, int]]:
    """As `understood`: what ranks in a row gave alike, and how many they are."""
    found: list[tuple[T, int]] = []
    # What ranks have alike is read once: thousands of them agree on nearly everything.
    for answer, count in answers.runs if isinstance(answers, RankValues) else zip(answers, repeat(1)):
        try:
            found.append((parse(answer), count))
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, struct.error) as error:
            rank = sum(count for _, count in found)
            raise PeerError(
                f"rank {rank} gave {len(answer)} bytes that cannot be read in exchange for {purpose!r} "
                f"({in_words(error)}); its memory is broken, or it runs another version of shardwise",
                rank=rank,
                operation="exchange",
                purpose=purpose,
            ) from error
    return found


def understood_once(texts: Sequence[bytes], parse: Callable[[bytes], T], *, purpose: str) -> list[T]:
    """As `understood`, of different values only: ranks that gave the same have one entry, where the first has it."""
    return [*dict(zip(texts, understood(texts, cache(parse), purpose=purpose), strict=True)).values()]


def exchange_parts(channel: Channel, parts: Sequence[bytes], *, purpose: str) -> list[RankValues]:
    """Give every rank some values of any length, and get those of all, by parts. Each rank gives as many.

    Raises PeerError, the same on all ranks, for a rank that gave other bytes.
    """
    # Not asked of a protocol, which would look through all names of the channel in every step.
    of_channel: Callable[..., list[RankValues]] | None = getattr(channel, "exchange_parts", None)
    if of_channel is not None:
        return of_channel(parts, purpose=purpose)
    lengths = struct.Struct(f"<{len(parts)}I")

    def taken_apart(answer: bytes) -> list[bytes]:
        ends = [*accumulate(lengths.unpack_from(answer), initial=lengths.size)]
        if ends[-1] != len(answer):
            raise ValueError(f"parts that end at {ends[-1]}")
        return [answer[start:end] for start, end in pairwise(ends)]

    answers = channel.exchange(lengths.pack(*map(len, parts)) + b"".join(parts), purpose=purpose)
    of_ranks = understood(answers, taken_apart, purpose=purpose)
    return [RankValues.of(each[number] for each in of_ranks) for number in range(len(parts))]


def a_list(answer: bytes) -> list[Any]:
    """For `understood`: a list in JSON."""
    return list(_of_kind(json.loads(answer), list))


def a_table(answer: bytes) -> dict[str, Any]:
    """For `understood`: an object in JSON."""
    return dict(_of_kind(json.loads(answer), dict))


def texts_in(answer: bytes) -> list[str]:
    """For `understood`: a list of texts in JSON."""
    return [_of_kind(each, str) for each in a_list(answer)]


@cache
def json_as(form: Any) -> Callable[[bytes], Any]:
    """For `understood`: a value in JSON of a form, such as `list[tuple[str, int]]`.

    form: of bool, int, float and str, `None`, lists, dicts, and tuples, which are lists of so many.
    """
    read = _reader(form)
    return lambda answer: read(json.loads(answer))


def of_form(value: Any, form: Any) -> Any:
    """A value of JSON, for a parser of `understood`. Raises TypeError or ValueError where it has another form.

    Numbers may be whole where `form` is float.
    """
    return _reader(form)(value)


@cache
def _reader(form: Any) -> Callable[[Any], Any]:
    """What reads a form, which is taken apart once: some values are said in each step, others have very many rows."""
    origin, inner = get_origin(form), get_args(form)
    if form is Any:
        return lambda value: value
    if origin is UnionType:
        (some,) = (_reader(each) for each in inner if each is not NoneType)
        return lambda value: None if value is None else some(value)
    parts = [*map(_reader, inner)]
    if origin is tuple:
        return lambda value: tuple([read(each) for read, each in zip(parts, _of_kind(value, list), strict=True)])
    if origin is list:
        return lambda value: [*map(parts[0], _of_kind(value, list))]
    if origin is dict:
        return lambda value: {key: parts[1](each) for key, each in _of_kind(value, dict).items()}

    def plain(value: Any) -> Any:
        if form is float:
            float(value if type(value) is int else _of_kind(value, float))  # there may be no float of it
        elif type(value) is not form or (form is int and abs(value) >= _LARGEST_NUMBER):
            raise TypeError(f"{value!r:.60} instead of a {form.__name__}")
        return value

    return plain


def _of_kind(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


@contextmanager
def aborting(channel: Channel, doing: str) -> Iterator[None]:
    """An error inside that the ranks have not agreed on aborts the channel, with what this rank was `doing`.

    Errors of shardwise name the host of each rank that they name.
    """
    try:
        with naming_hosts(channel):
            yield
    except ShardwiseError:
        # The ranks have agreed on it, or know of it: an abort would put another error in its place.
        raise
    except BaseException as error:
        channel.abort(f"{type(error).__name__} in {doing}: {error}")
        raise


@contextmanager
def agreed(
    channel: Channel, *, purpose: str, doing: str | None = None, only: int | None = None, num_parts: int = 0
) -> Iterator[Agreement]:
    """Decide inside; where one rank raises a ShardwiseError, every rank raises the same one, with all its problems.

    Costs one exchange. Other errors leave at once, without it. The peers wait then until somebody aborts the channel:
    this does, where it is given what the rank is `doing`; else a caller does.
    only: the rank that decides for all, so that its error need not name it. num_parts: those that each rank gives
    besides its value, where it gives its consent.
    """
    agreement = Agreement()
    refusal: ShardwiseError | None = None
    try:
        yield agreement
    except ShardwiseError as error:
        refusal = error
    except BaseException as error:
        # A fault of the program, such as a KeyError: nobody can promise that the rank still reaches an exchange.
        if doing is not None:
            channel.abort(f"{type(error).__name__} in {doing}: {error}")
        raise
    mine = b"+" + agreement.value if refusal is None else b"-" + _packed(refusal)
    answers: Sequence[bytes]
    if num_parts:
        parts = agreement.parts if refusal is None else [b""] * num_parts
        answers, *agreement.of_parts = exchange_parts(channel, [mine, *parts], purpose=purpose)
    else:
        answers = channel.exchange(mine, purpose=purpose)
    if any(verdict for verdict, _ in understood_runs(answers, _verdict, purpose=purpose)):
        verdicts = understood(answers, _verdict, purpose=purpose)
        refusals = {rank: each for rank, each in enumerate(verdicts) if each is not None}
        # Each rank builds the error from the same answers: nothing of its own goes in, so the texts cannot differ.
        names_ranks = only is None and len(refusals) < channel.size
        raise _joined(refusals, names_of(channel), names_ranks=names_ranks) from refusal
    agreement.values = understood(answers, lambda answer: answer[1:], purpose=purpose)


def _packed(error: ShardwiseError) -> bytes:
    # The nearest class that `shardwise.errors` has: a subclass from elsewhere may be unknown to other ranks.
    kind = next(each.__name__ for each in type(error).__mro__ if vars(errors).get(each.__name__) is each)
    problems, notes = getattr(error, "problems", ()), getattr(error, "__notes__", ())
    return json.dumps([kind, str(error), problems, notes]).encode()


Refusal = tuple[str, str, list[str], list[str]]
"""The name of a class of `shardwise.errors`, its text, its problems, and its notes."""


def _verdict(answer: bytes) -> Refusal | None:
    """What a rank refuses with, None for its consent. Raises ValueError or TypeError where it says neither."""
    if answer[:1] == b"+":
        return None
    if answer[:1] != b"-":
        raise ValueError("neither consent nor refusal")
    # Only errors of ours are made of what a peer says, and of texts alone.
    refusal: Refusal = json_as(Refusal)(answer[1:])
    found = vars(errors).get(refusal[0])
    if not (isinstance(found, type) and issubclass(found, ShardwiseError)):
        raise ValueError(f"{refusal[0]} is no error of shardwise")
    return refusal


def _joined(refusals: Mapping[int, Refusal], names: RankNames, *, names_ranks: bool) -> ShardwiseError:
    """One error for all that ranks refuse with. Where not all say the same, each line says which rank does."""
    names_ranks = names_ranks or len({text for _, text, _, _ in refusals.values()}) > 1
    # Ranks that say the same are one line. Where all do, none is named: the refusal is not about a rank.
    lines: dict[str, None] = {}  # keys of dicts keep each text once, in the order of the ranks
    problems: dict[str, None] = {}
    notes: dict[str, None] = {}
    for rank, (_, text, own_problems, own_notes) in refusals.items():
        label = f"rank {names[rank]}: " if names_ranks else ""
        lines[label + text] = None
        problems |= dict.fromkeys(label + each for each in own_problems or [text])
        notes |= dict.fromkeys(label + each for each in own_notes)
    kind = next(kind for kind, _, _, _ in refusals.values())
    error: ShardwiseError = getattr(errors, kind)("\n".join(lines))
    if isinstance(error, PlanError | CheckpointError | RewriteError):
        error.problems = tuple(problems)
    for note in notes:
        error.add_note(note)
    return error


def where_unlike(
    channel: Channel, mine: object, parse: Callable[[bytes], T], *, subject: str, groups: Sequence[Sequence[int]] = ()
) -> list[T] | None:
    """What all ranks have, each a value for JSON, where some have another one; None where all have the same.

    groups: ranks that have to have the same; (): all.
    """
    # Two steps: 16 bytes where all agree, which is nearly always; the values only where they have to be shown.
    value = json.dumps(mine).encode()
    digests = channel.exchange(digest_of(value), purpose=f"digest of {subject}")
    if all(digests[rank] == digests[ranks[0]] for ranks in groups or [range(len(digests))] for rank in ranks):
        return None
    purpose = f"lines of {subject}"
    return understood(channel.exchange(value, purpose=purpose), parse, purpose=purpose)


def compare(channel: Channel, lines: Sequence[str], *, subject: str, hint: str) -> None:
    """Raise MismatchError on every rank unless all have the same lines; it names who differs, and where."""
    texts = where_unlike(channel, list(lines), texts_in, subject=subject) or []
    different = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if not different:
        return
    position, rank = min((_first_difference(texts[0], texts[rank]), rank) for rank in different)
    names = names_of(channel)
    listed = f"rank{'' if len(different) == 1 else 's'} " + ", ".join(names[each] for each in different)
    raise MismatchError(
        f"{listed} and rank {names[0]} were given different {subject}; first difference: rank {names[0]} has "
        f"{_line(texts[0], position)}, rank {names[rank]} has {_line(texts[rank], position)}. {hint}"
    )


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)  # one may be a beginning of the other
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _line(lines: Sequence[str], position: int) -> str:
    return lines[position] if position < len(lines) else "nothing there"
