"""A timeline as files: a picture, and a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Both have a row per rank, and a bar per forward and backward. torch is not needed here: `shardwise schedule` draws with
it too.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shardwise.errors import PlanError
from shardwise.plan.timeline import Timeline, TimeSpan

_INK, _MUTED, _IDLE = "#22252b", "#8a8f98", "#eef0f2"
_COLOURS = {
    "F": ("#9dc0e8", "#6d9fd6", "#4a80bd", "#2f5d9b"),
    "B": ("#f2b99a", "#e8946a", "#d9703f", "#b8522a"),
}
"""By the chunk of the rank that a stage is: the first one's colour, the second one's, ..."""
_BAR = 0.8
_INCHES_PER_DIGIT = 0.065


def save_picture(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write the timeline as a PNG or SVG, by the suffix of `path`. Needs matplotlib (the extra `train`).

    A bar bears the number of its microbatch where that fits. Raises PlanError for any other suffix.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise PlanError(f"picture: {str(path)!r} ends neither in .png nor in .svg")
    # Imported late: matplotlib is an extra, and takes longer to load than all else here.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Wide enough for a digit in most bars, within what a screen or a page can show.
    longest = max(Counter(span.rank for span in timeline.busy_spans()).values(), default=0)
    width = min(max(12.0, 0.2 * longest), 40.0)
    figure = Figure(figsize=(width, 1.7 + 0.45 * timeline.num_ranks), dpi=144, layout="constrained")
    axes = figure.subplots()
    unit, scale = _unit(timeline.makespan_s)
    span = timeline.makespan_s * scale or 1.0
    axes.barh(range(timeline.num_ranks), span, height=_BAR, color=_IDLE, zorder=0)
    _draw_bars(axes, timeline, scale, inches=(width - 1.2) / span)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)], color=_INK)
    # Downwards, so that rank 0 is on top, as in the drawings in text.
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, span)
    axes.set_xlabel(unit, color=_MUTED, loc="right")
    axes.set_title(f"{title}; bubble {timeline.bubble:.1%}", loc="left", color=_INK, fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    with rc_context({"svg.hashsalt": "shardwise", "svg.fonttype": "none"}):  # one timeline, one text of an SVG
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw_bars(axes: Any, timeline: Timeline, scale: float, *, inches: float) -> None:
    """The bars, their numbers, and the legend. `inches`: how wide a unit of time is."""

    spans = timeline.busy_spans()
    stages_of: dict[int, list[int]] = {
        rank: sorted({span.stage for span in group}) for rank, group in groupby(spans, key=lambda span: span.rank)
    }

    def look(span: TimeSpan) -> tuple[str, int]:
        return span.kind, stages_of[span.rank].index(span.stage)

    # Grouped by look, so that each look is one call and one entry of the legend.
    shown = sorted(spans, key=lambda span: (span.kind != "F", look(span)[1]))
    many = len({look(span) for span in shown}) > 2
    for (kind, chunk), group in groupby(shown, key=look):
        bars = list(group)
        starts = [(span.start_s - timeline.start_s) * scale for span in bars]
        widths = [(span.stop_s - span.start_s) * scale for span in bars]
        colour = _COLOURS[kind][chunk % len(_COLOURS[kind])]
        its_stages = [span.stage for span in bars]
        stages = f", stages {min(its_stages)} to {max(its_stages)}" if many else ""
        axes.barh(
            [span.rank for span in bars], widths, left=starts, height=_BAR, color=colour, edgecolor="white",
            linewidth=0.5, label=("forward" if kind == "F" else "backward") + stages,
        )  # fmt: skip
        for span, start, width in zip(bars, starts, widths, strict=True):
            number = str(span.microbatch)
            if width * inches > _INCHES_PER_DIGIT * len(number):
                colour = _INK if chunk % len(_COLOURS[kind]) < 2 else "white"
                axes.text(start + width / 2, span.rank, number, ha="center", va="center", fontsize=8, color=colour)
    # A bar without a size, only for its entry in the legend.
    axes.bar(0, 0, color=_IDLE, label="idle")
    axes.figure.legend(frameon=False, ncols=5, loc="outside lower right", fontsize=9, labelcolor=_INK)


def _unit(seconds: float) -> tuple[str, float]:
    """A unit of time for so long a span, and how many of it are in a second."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return unit, per_second
    return "us", 1e6


class TraceBar(NamedTuple):
    """Anything else that a rank did, in seconds on the clock of the timeline, or of the rank."""

    name: str
    category: str
    start_s: float
    stop_s: float
    arguments: Mapping[str, object] = MappingProxyType({})
    """What a click on the bar shows."""
    rank: int = 0


def save_trace(timeline: Timeline, path: Path, *, title: str, bars: Sequence[TraceBar] = ()) -> None:
    """Write the timeline, and more bars, as JSON of complete events, in microseconds since its start.

    Source: Google's "Trace Event Format". Viewers nest the spans of one rank, so they either contain each other or
    do not overlap.
    """
    events: list[dict[str, object]] = [_named("process_name", 0, title)]
    for rank in range(timeline.num_ranks):
        events.append(_named("thread_name", rank, f"rank {rank}"))
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
    begin_s = min([timeline.start_s] * bool(timeline.spans) + [bar.start_s for bar in bars], default=0.0)
    spans = [
        TraceBar(
            rank=span.rank,
            name=f"{span.kind}{' ' if len(span.kind) > 1 else ''}{span.microbatch}.{span.stage}",
            category=span.kind,
            start_s=span.start_s,
            stop_s=span.stop_s,
            arguments={"microbatch": span.microbatch, "stage": span.stage},
        )
        for span in timeline.spans
    ]
    events += [
        {
            "name": bar.name,
            "cat": bar.category,
            "ph": "X",
            "pid": 0,
            "tid": bar.rank,
            "ts": (bar.start_s - begin_s) * 1e6,
            "dur": (bar.stop_s - bar.start_s) * 1e6,
            "args": dict(bar.arguments),
        }
        for bar in [*bars, *spans]
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="ascii")


def _named(what: str, rank: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
