"""The ranks of a run as a table, of the means over its last updates.

demo  step 120/200  loss 2.1034  12.3 k tokens/s  eta 01:20  running
    rank        compute   waits      for  outside    sent  received      peak
       0          50 ms  450 ms   1: 98%     1 ms  1.2 MB    2.4 MB  612.0 MB
       1  slow   550 ms    2 ms  0: 100%     1 ms  1.2 MB    2.4 MB  612.0 MB
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.plan.timeline import slow_ranks
from shardwise.runs.quantities import clock, count, size
from shardwise.runs.run_folder import RunView
from shardwise.runs.timeline_text import seconds_text

_COLUMNS = ("rank", "", "compute", "waits", "for", "outside", "sent", "received", "peak")


def heading(view: RunView) -> str:
    """How far a run is, on one line."""
    words = [view.folder.name or str(view.folder.resolve().name)]
    if view.lines:
        last = view.lines[-1]
        steps = view.mark.get("steps")
        words.append(f"step {last['step']}" + (f"/{steps}" if steps else ""))
        if last.get("loss") is not None:
            words.append(f"loss {last['loss']:.4f}")
        if last.get("held_out_loss") is not None:
            words.append(f"held-out {last['held_out_loss']:.4f}")
        if (pace := last.get("tokens_per_second", last.get("rows_per_second"))) is not None:
            words.append(f"{count(pace)} {view.mark.get('rows', 'tokens')}/s")
        if steps and view.ended is None and len(view.lines) > 1:
            first = view.lines[0]
            pace_s = (last["elapsed_s"] - first["elapsed_s"]) / max(1, last["step"] - first["step"])
            words.append(f"eta {clock(pace_s * (steps - last['step']))}")
        if last.get("skipped"):
            words.append("update skipped")
    words.append(view.state)
    return "  ".join(words)


def table(view: RunView, *, most_rows: int | None = None) -> list[str]:
    """The lines below the heading: a row per rank. Of more than `most_rows` ranks those that were busy longest."""
    means, num_updates = _means(view)
    if not means:
        return ["no times of ranks yet"] if not view.lines else ["these metrics have no times of ranks"]
    slow = _slow(view, means)
    left_out = 0
    if most_rows is not None and len(means) > most_rows:
        left_out = len(means) - most_rows
        means = sorted(sorted(means, key=lambda each: -_busy_s(each))[:most_rows], key=lambda each: each["rank"])
    rows = [_COLUMNS, *(_row(each, slow) for each in means)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if left_out:
        lines.append(f"and {left_out} ranks that were busy for less time")
    lines.append(_verdict(slow, num_updates))
    return lines


def line(view: RunView) -> str:
    """The whole of a run on one line, for a file."""
    slow = _slow(view, _means(view)[0])
    return "  ".join([heading(view), *([_named(slow)] if slow else [])])


def _means(view: RunView) -> tuple[list[dict[str, Any]], int]:
    """The means of the ranks that the newest line shows, and of how many updates they are at most."""
    seen = [line["ranks"] for line in view.lines if line.get("ranks")]
    if not seen:
        return [], 0
    # A run that goes on may have other ranks than before: those of the newest line count. Lines show 64 ranks at most,
    # which are not the same ones in each.
    seen = [ranks for ranks in seen if len(ranks) == len(seen[-1])]
    of_rank: dict[int, list[Mapping[str, Any]]] = {each["rank"]: [] for each in seen[-1]}
    for each in (each for ranks in seen for each in ranks):
        if each["rank"] in of_rank:
            of_rank[each["rank"]].append(each)
    return [_mean(each) for each in of_rank.values()], len(seen)


def _slow(view: RunView, means: Sequence[Mapping[str, Any]]) -> Sequence[int]:
    if [each["rank"] for each in means] == list(range(len(means))):
        return slow_ranks({each["rank"]: _busy_s(each) for each in means})
    # The middle one may not be among those that are shown. The last update has found it among all.
    return view.lines[-1].get("slowest") or [] if view.lines else []


def _verdict(slow: Sequence[int], num_updates: int) -> str:
    of = f"the last {num_updates} updates" if num_updates > 1 else "the last update"
    return f"means of {of}; {_named(slow) if slow else 'no rank is slow'}"


def _named(slow: Sequence[int]) -> str:
    return f"slowest: {'rank' if len(slow) == 1 else 'ranks'} {', '.join(map(str, slow))}"


def _busy_s(rank: Mapping[str, Any]) -> float:
    return (rank["compute_s"] or 0.0) + (rank["outside_s"] or 0.0)


def _mean(of_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": of_rank[-1]["rank"], "peak_bytes": of_rank[-1]["peak_bytes"]}
    for name in ("compute_s", "waiting_s", "outside_s", "sent_bytes", "received_bytes"):
        known = [each[name] for each in of_rank if each[name] is not None]
        found[name] = sum(known) / len(known) if known else None
    waited: Counter[str] = Counter()
    for each in of_rank:
        for rank, seconds in each["waited_for"].items():
            waited[rank] += seconds
    found["waited_for"] = [(rank, seconds / len(of_rank)) for rank, seconds in waited.most_common(1)]
    return found


def _row(rank: Mapping[str, Any], slow: Sequence[int]) -> tuple[str, ...]:
    whom = "-"
    if rank["waited_for"] and rank["waiting_s"]:
        peer, seconds = rank["waited_for"][0]
        whom = f"{peer}: {seconds / rank['waiting_s']:.0%}"
    return (
        str(rank["rank"]),
        "slow" if rank["rank"] in slow else "",
        *(_seconds(rank[name]) for name in ("compute_s", "waiting_s")),
        whom,
        _seconds(rank["outside_s"]),
        *(size(round(rank[name])) for name in ("sent_bytes", "received_bytes", "peak_bytes")),
    )


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return seconds_text(float(f"{value:.3g}"))
