"""The report of a hang: who waits for whom and for what, over all ranks, with the lines of their programs.

Ranks in the same place share a line. The first ranks are those that all others wait for::

    shardwise: nothing has moved for 60 s. Where the 4 ranks are:
      rank 2 on node-b is in no call; its last one, 61 s ago, was exchange for 'figures of a step'
          train.py:31 in read: row = source.read(at)
          train.py:57 in main: batch = read(at)
      ranks 0-1, 3 wait for rank 2 in exchange for 'figures of a step', for 60 s
          train.py:58 in main: engine.step(batch)
"""

import functools
import json
import os
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

MAX_LINES = 40
"""Of a report: one screen."""

_MAX_FRAMES = 3
_MAX_COLUMNS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where one rank is."""

    rank: int
    host: str = ""
    call: str = ""
    """The call that it is in or, if it waits for no rank, its last one; empty where it made none."""
    awaited: tuple[int, ...] = ()
    """The ranks that it waits for."""
    seconds: float = 0.0
    """Since it waits, or since its last call."""
    lines: tuple[str, ...] = ()
    """Of its program, the innermost last."""
    note: str = ""
    """What else is known of a rank that is in no call; it stands instead of its last call."""

    def packed(self) -> bytes:
        """As bytes for another rank."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def parsed(cls, data: bytes) -> "Whereabouts":
        """From the bytes of `packed`; raises ValueError or TypeError for other bytes."""
        rank, host, call, awaited, seconds, lines, note = json.loads(data)
        numbers, texts = [rank, *awaited], [host, call, note, *lines]
        if not all(type(each) is int for each in numbers) or not all(isinstance(each, str) for each in texts):
            raise TypeError("no whereabouts")
        return cls(
            rank=rank,
            host=host,
            call=call,
            awaited=tuple(awaited),
            seconds=float(seconds),
            lines=tuple(lines[-MAX_LINES:]),
            note=note,
        )


def report(places: Sequence[Whereabouts], *, waited_seconds: float) -> str:
    """The report in at most `MAX_LINES` lines; `places` has one entry per rank."""
    alike: dict[object, list[Whereabouts]] = {}
    for place in places:
        alike.setdefault((place.call, place.awaited, place.lines, place.note), []).append(place)
    ranks_in = Counter((bool(place.awaited), place.call) for place in places)
    # Who waits for no rank is what the others wait for. Then come calls that few ranks are in.
    groups = sorted(
        alike.values(),
        key=lambda group: (bool(group[0].awaited), ranks_in[bool(group[0].awaited), group[0].call], group[0].rank),
    )
    names_hosts = len({place.host for place in places if place.host}) > 1
    lines = [f"shardwise: nothing has moved for {waited_seconds:g} s. Where the {len(places)} ranks are:"]
    for number, group in enumerate(groups):
        entry = [f"  {_sentence(group, names_hosts=names_hosts)}", *(f"      {each}" for each in group[0].lines)]
        if len(lines) + len(entry) > MAX_LINES - (number + 1 < len(groups)):
            left = [place.rank for each in groups[number:] for place in each]
            lines.append(f"  and {ranks_in_words(left)} in {len(groups) - number} other places")
            break
        lines += entry
    return "\n".join(_printable(line)[:_MAX_COLUMNS] for line in lines)


def _sentence(group: Sequence[Whereabouts], *, names_hosts: bool) -> str:
    place, several = group[0], len(group) > 1
    who = ranks_in_words([each.rank for each in group])
    if names_hosts and (hosts := dict.fromkeys(each.host for each in group if each.host)):
        who += f" on {next(iter(hosts))}" + (f" and {len(hosts) - 1} other hosts" if len(hosts) > 1 else "")
    seconds = f"{max(each.seconds for each in group):.0f} s"
    if place.awaited:
        verb = "wait" if several else "waits"
        return f"{who} {verb} for {ranks_in_words(place.awaited)} in {place.call}, for {seconds}"
    if place.note:
        return f"{who} {place.note}"
    last = f"its last one, {seconds} ago, was {place.call}" if place.call else "it has made none yet"
    if several:
        last = f"the last one, {seconds} ago, was {place.call}" if place.call else "they have made none yet"
    return f"{who} {'are' if several else 'is'} in no call; {last}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as "rank 3" and "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _printable(text: str) -> str:
    # Texts of other ranks go to a terminal.
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def lines_of(thread: int | None) -> tuple[str, ...]:
    """The program's own lines in which a thread (its identifier) is, the innermost last.

    Without lines of the program: the innermost lines of all.
    """
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is None:
        return ()
    stack = traceback.extract_stack(frame)
    own = [at for at, each in enumerate(stack) if _is_of_program(each.filename)] or list(range(len(stack)))
    shown = [stack[at] for at in own[-_MAX_FRAMES:]]
    beyond = stack[own[-1] + 1 :]
    if beyond and not any(_is_ours(each.filename) for each in beyond):  # such as a data loader that waits for a worker
        shown = [*shown[1 - _MAX_FRAMES :], beyond[-1]]
    return tuple(_line_in_words(each) for each in shown)


def _line_in_words(frame: traceback.FrameSummary) -> str:
    folder, name = os.path.split(frame.filename)
    text = f": {frame.line}" if frame.line else ""
    return f"{os.path.basename(folder)}/{name}:{frame.lineno} in {frame.name}{text}".lstrip("/")


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    """Where the interpreter, its packages and torch are."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{path}{os.sep}" for path in {*paths, os.path.dirname(torch.__file__)} if path)


def _is_ours(file: str) -> bool:
    return file.startswith(_OWN_FOLDER)


def _is_of_program(file: str) -> bool:
    return not (_is_ours(file) or file.startswith((*_folders_of_others(), "<frozen")))
