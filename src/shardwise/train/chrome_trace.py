"""A timeline as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open: a row per rank."""

import json
from pathlib import Path

from shardwise.plan.timeline import Timeline


def save_trace(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write the timeline as JSON of complete events, in microseconds since its start.

    Source: Google's "Trace Event Format". Viewers nest the spans of one rank, so they either contain each other or
    do not overlap.
    """
    events: list[dict[str, object]] = [_named("process_name", 0, title)]
    for rank in range(timeline.num_ranks):
        events.append(_named("thread_name", rank, f"rank {rank}"))
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
    events += [
        {
            "name": f"{span.kind}{' ' if len(span.kind) > 1 else ''}{span.microbatch}.{span.stage}",
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": (span.start_s - timeline.start_s) * 1e6,
            "dur": (span.stop_s - span.start_s) * 1e6,
            "args": {"microbatch": span.microbatch, "stage": span.stage},
        }
        for span in timeline.spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="ascii")


def _named(what: str, rank: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
