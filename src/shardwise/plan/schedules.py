"""The order in which each rank of a pipeline runs the forwards and backwards of its stages: a value with a text form.

Stage `s` is on rank `s % num_ranks` (a rank's pp coordinate). In every schedule made here the forwards, and the
backwards, of one stage go in ascending microbatches: the order in which one process adds its gradients. With forwards
of 1 s and backwards of 2 s ("3--" is the forward of microbatch 3, "3==" its backward, "." idle):

    1f1b, 3 ranks, 5 microbatches: 21 s, bubble 28.6%, rank 0 holds activations of 3 microbatches, rank 2 of 1
    rank 0  0--1--2--............0=====3--1=====4--2=====...3=====...4=====
    rank 1  ...0--1--......0=====2--1=====3--2=====4--3=====...4=====......
    rank 2  ......0--0=====1--1=====2--2=====3--3=====4--4=====............

    interleaved, 2 ranks, 2 chunks, 4 microbatches: 27 s, bubble 11.1% (1f1b with stages twice as long: 30 s, 20.0%)
    rank 0  0--1--0--1--2--...0=====3--1=====2--0=====3--1=====...2=====...3=====2=====3=====
    rank 1  ...0--1--0--0=====1--1=====2--0=====3--1=====2--2=====3--3=====2=====3=====......
    stages  (rank 0) F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Literal, Self

from shardwise.errors import PlanError, plural


def split_rows(num_rows: int, num_microbatches: int) -> list[range]:
    """Cut rows into microbatches whose sizes differ by one at most, larger ones first.

    >>> split_rows(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    small, num_larger = divmod(num_rows, num_microbatches)
    starts = [index * small + min(index, num_larger) for index in range(num_microbatches + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


_ACTION = re.compile(r"([FB])([0-9]{1,9})\.([0-9]{1,9})")
_HEADING = re.compile(r"(.+): ([0-9]{1,9}) stages?, ([0-9]{1,9}) ranks?, ([0-9]{1,9}) microbatch(?:es)?")


@dataclass(frozen=True, slots=True)
class Action:
    """The forward ("F") or backward ("B") of one microbatch through one stage."""

    kind: Literal["F", "B"]
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which actions every rank runs, in which order. `schedule_check.check` says whether that can be run.

    Raises PlanError when the stages cannot be dealt out evenly to the ranks, or the name has no text form.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    """One order for each rank."""

    def __post_init__(self) -> None:
        problems = []
        if not self.name.isprintable() or self.name != self.name.strip() or not self.name:
            problems.append(f"schedule: the name {self.name!r} is not a line of text")
        if self.num_microbatches < 1:
            problems.append(f"schedule: {self.num_microbatches} microbatches; at least 1 is needed")
        if not self.orders or self.num_stages < 1 or self.num_stages % len(self.orders):
            ranks = plural(len(self.orders), "rank")
            problems.append(f"schedule: {self.num_stages} stages cannot be dealt out evenly to {ranks}")
        if problems:
            raise PlanError(*problems)

    @property
    def num_ranks(self) -> int:
        """How many ranks (pp coordinates) run it."""
        return len(self.orders)

    @property
    def num_chunks(self) -> int:
        """How many stages each rank has."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """The rank that has `stage`."""
        return stage % self.num_ranks

    def text(self) -> str:
        """A heading and a line per rank: `F3.0` is the forward of microbatch 3 through stage 0. `parse` reads it."""
        stages, ranks = plural(self.num_stages, "stage"), plural(self.num_ranks, "rank")
        lines = [f"{self.name}: {stages}, {ranks}, {plural(self.num_microbatches, 'microbatch')}"]
        lines += [f"rank {rank}: {' '.join(map(str, order))}".rstrip() for rank, order in enumerate(self.orders)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The schedule written in `text`; blank lines and indentation do not count. PlanError names every bad line."""
        # Numbers count the lines as the user sees them, blank ones too.
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        number, first = lines[0] if lines else (1, "")
        heading = _HEADING.fullmatch(first)
        if heading is None:
            example = "1f1b: 4 stages, 4 ranks, 8 microbatches"
            raise PlanError(f"schedule, line {number}: {first!r} is not a heading such as {example!r}")
        num_stages, num_ranks, num_microbatches = map(int, heading.groups()[1:])
        problems: list[str] = []
        orders = []
        for rank, (number, line) in enumerate(lines[1:]):
            start, colon, words = line.partition(":")
            if not colon or start.split() != ["rank", str(rank)]:
                problems.append(
                    f"schedule, line {number}: {line[:40]!r} is not the line of rank {rank}, 'rank {rank}: ...'"
                )
            orders.append(tuple(_actions(words, number, problems)))
        if len(orders) != num_ranks:
            problems.append(f"schedule: the heading says {plural(num_ranks, 'rank')}, and {len(orders)} have a line")
        if problems:
            raise PlanError(*problems)
        return cls(heading[1], num_stages, num_microbatches, tuple(orders))


def _actions(words: str, number: int, problems: list[str]) -> Iterable[Action]:
    for word in words.split():
        found = _ACTION.fullmatch(word)
        if found is None:
            problems.append(
                f"schedule, line {number}: {word[:40]!r} is not an action such as F3.0 (microbatch 3, stage 0)"
            )
        else:
            yield Action("F" if found[1] == "F" else "B", int(found[2]), int(found[3]))


def make_schedule(name_or_text: str, *, num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """The schedule of that name ("fthenb", "1f1b", "interleaved"), or the one written in a text (of several lines).

    A written schedule that bears one of those names is called "1f1b as written", since it is not ours to change.
    Raises PlanError for an unknown name, a text that is no schedule, or one for another number of ranks, chunks (stages
    per rank) or microbatches.
    """
    asked = {"ranks": num_ranks, "chunks": num_chunks, "microbatches": num_microbatches}
    if problems := [f"schedule: {size} {what} asked; at least 1 is needed" for what, size in asked.items() if size < 1]:
        raise PlanError(*problems)
    if "\n" in name_or_text:
        return _fitting(Schedule.parse(name_or_text), num_ranks, num_chunks, num_microbatches)
    if name_or_text not in _BUILDERS:
        near = get_close_matches(name_or_text.lower(), _BUILDERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(SCHEDULES)}"
        raise PlanError(f"schedule: {name_or_text!r} is neither a name nor a text of several lines; {hint}")
    if name_or_text == "1f1b" and num_chunks > 1:
        raise PlanError(
            f"schedule: '1f1b' runs 1 chunk of stages per rank, and chunks={num_chunks} is asked; "
            "write schedule='interleaved' or chunks=1"
        )
    orders = _BUILDERS[name_or_text](num_ranks, num_chunks, num_microbatches)
    return Schedule(name_or_text, num_ranks * num_chunks, num_microbatches, tuple(map(tuple, orders)))


def warmed_up(forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int) -> list[Action]:
    """One rank's order: so many forwards first (or all), then forward and backward in turns, then what is left."""
    num_warmup = min(num_warmup, len(forwards))
    pairs = zip(forwards[num_warmup:], backwards, strict=False)
    left = backwards[len(forwards) - num_warmup :]
    return [*forwards[:num_warmup], *(action for pair in pairs for action in pair), *left]


def _fitting(schedule: Schedule, num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    sizes = [
        ("pp", schedule.num_ranks, "mesh", num_ranks),
        ("chunks", schedule.num_chunks, "plan", num_chunks),
        ("k (microbatches)", schedule.num_microbatches, "batch", num_microbatches),
    ]
    problems = [
        f"schedule: {schedule.name!r} is written for {what} = {needed}, the {giver} gives {given}; change one of them"
        for what, needed, giver, given in sizes
        if needed != given
    ]
    if problems:
        raise PlanError(*problems)
    # `adapt` changes schedules that have one of our names. What the user wrote must not look like one of those.
    name = f"{schedule.name} as written" if schedule.name in _BUILDERS else schedule.name
    return Schedule(name, schedule.num_stages, schedule.num_microbatches, schedule.orders)


def _passes(kind: Literal["F", "B"], stages: Sequence[int], groups: Iterable[Sequence[int]]) -> list[Action]:
    """Group after group of microbatches through these stages, one stage after the other."""
    return [Action(kind, microbatch, stage) for group in groups for stage in stages for microbatch in group]


def _fthenb(num_ranks: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (GPipe: Huang et al., 2019, arXiv:1811.06965).

    With chunks all microbatches go through one before the next (Lamy-Poirier, 2022, arXiv:2211.05953).
    """
    groups = [range(num_microbatches)]
    stages = [range(rank, num_ranks * num_chunks, num_ranks) for rank in range(num_ranks)]
    return [_passes("F", local, groups) + _passes("B", local[::-1], groups) for local in stages]


def _one_forward_one_backward(num_ranks: int, num_chunks: int, num_microbatches: int) -> list[list[Action]]:
    """As few forwards ahead as keep all ranks busy (Narayanan et al., 2021, arXiv:2104.04473; one chunk: "1F1B").

    With chunks the paper sends `num_ranks` microbatches at a time through all chunks. If they do not divide the
    microbatches, the groups here are larger, never smaller. The bubble stays the paper's for any number of at least
    `num_ranks`.
    """
    # 7 microbatches on 3 ranks with 2 chunks: groups of 4 and 3, bubble 12.5%. Groups of 3, 3 and 1 have 23.6%: the
    # last one is too short to keep all ranks busy until it comes round to the next chunk.
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [-(-group * num_microbatches // num_groups) for group in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(bounds)]
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        # One chunk: a forward for each rank behind this one, which all need one before a backward comes back. Several:
        # the first group through all chunks but the last, and twice the distance, for the way out and the way back. One
        # fewer leaves ranks idle (with chunks: once transfers take time). One more holds more activations for nothing.
        later_ranks = num_ranks - rank - 1
        warmup = later_ranks if num_chunks == 1 else 2 * later_ranks + (num_chunks - 1) * len(groups[0])
        orders.append(warmed_up(_passes("F", stages, groups), _passes("B", stages[::-1], groups), warmup))
    return orders


_BUILDERS: dict[str, Callable[[int, int, int], list[list[Action]]]] = {
    "fthenb": _fthenb,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
}

SCHEDULES = tuple(_BUILDERS)
"""The names of the schedules that `make_schedule` makes."""
