"""A timeline as text: a row for each rank, and a legend."""

from shardwise.plan.timeline import Timeline, TimeSpan

_FILL = {"F": "-", "B": "="}
_IDLE = "."


def draw_timeline(timeline: Timeline, *, width: int = 100) -> str:
    """The drawing, at most `width` columns wide where that leaves room for time, with a legend and the bubble.

    Microbatch 3's forward is `3--`, its backward `3==`, an idle rank `...`. Where ranks have several stages a cell
    says which, "3.6" for stage 6, as in a schedule's text. A cell too narrow for its number has none.
    """
    names = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    margin = max(map(len, names)) + 2
    cells = _joined(timeline.busy_spans())
    columns, makespan_s = max(width - margin, 10), timeline.makespan_s
    per_second = _columns_per_second([cell.stop_s - cell.start_s for cell in cells], makespan_s, columns)
    length = round(makespan_s * per_second)
    # Starts and stops are rounded, never lengths: neighbours meet, and rounding does not add up along a row.
    rows = [[_IDLE] * length for _ in range(timeline.num_ranks)]
    placed = []
    for cell in cells:
        start = round((cell.start_s - timeline.start_s) * per_second)
        stop = round((cell.stop_s - timeline.start_s) * per_second)
        rows[cell.rank][start:stop] = _FILL[cell.kind] * (stop - start)
        placed.append((cell, start, stop))
    one_stage = len({(cell.rank, cell.stage) for cell in cells}) <= timeline.num_ranks
    full = {cell: f"{cell.microbatch}" if one_stage else f"{cell.microbatch}.{cell.stage}" for cell in cells}
    # Stages in all cells or in none: a row that mixes "3" and "3.6" cannot be read.
    has_stages = not one_stage and all(len(full[cell]) < stop - start for cell, start, stop in placed)
    for cell, start, stop in placed:
        label = full[cell] if has_stages else f"{cell.microbatch}"
        if len(label) < stop - start:  # a column is left that shows forward or backward
            rows[cell.rank][start : start + len(label)] = label
    lines = [f"{name:<{margin}}{''.join(row)}" for name, row in zip(names, rows, strict=True)]
    return "\n".join([*lines, _legend(timeline, has_stages)]) + "\n"


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it: "1.5 s", "20 ms", "3.2 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us" if seconds else "0 s"


def _legend(timeline: Timeline, has_stages: bool) -> str:
    example, meaning = ("3.6", "microbatch 3, stage 6") if has_stages else ("3", "microbatch 3")
    return (
        f"{example}- forward, {example}= backward of {meaning}; . idle; "
        f"{seconds_text(timeline.makespan_s)}, bubble {timeline.bubble:.1%}"
    )


def _joined(spans: list[TimeSpan]) -> list[TimeSpan]:
    """Spans by rank and start; those of one action that follow each other without a gap as one."""
    joined: list[TimeSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last and _action(last) == _action(span) and last.stop_s == span.start_s:
            joined[-1] = TimeSpan(*_action(span), last.start_s, span.stop_s)
        else:
            joined.append(span)
    return joined


def _action(span: TimeSpan) -> tuple[int, str, int, int]:
    return span.rank, span.kind, span.microbatch, span.stage


def _columns_per_second(durations: list[float], makespan_s: float, columns: int) -> float:
    """A whole number of columns for the shortest cell where that fills most of the width, else what fills it all."""
    if not makespan_s:
        return 0.0
    shortest = min(durations, default=makespan_s)
    # Whole columns for the shortest cell make equal actions equally wide. Below two there is no room for a number, and
    # the full width shows more. The small number keeps 3.0000 from becoming 2.
    per_shortest = int(columns * shortest / makespan_s + 1e-9)
    return per_shortest / shortest if per_shortest >= 2 else columns / makespan_s
