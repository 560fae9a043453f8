"""Timelines to look at: a Gantt chart by matplotlib, and a trace that Perfetto opens.

The chart has two streams for each of the first ranks; the report uses its colours. The trace is in
the Chrome format (ui.perfetto.dev, chrome://tracing): a process for each rank, a thread for each
stream, microseconds. Every stream of it is filled from the beginning to the end: where it does not
work it waits (for other ranks) or idles, so its durations add up to the runtime. Passes given
together follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mesh_attention.cost.timeline import Event, Stream, Timeline, some_timelines
from mesh_attention.errors import MeshAttentionError, MissingPackageError
from mesh_attention.files import replacing
from mesh_attention.plan.language.program import Communication, Free, Operation
from mesh_attention.plan.language.traffic import TrafficMeter

_FORMATS = (".png", ".svg")
WAIT = "waits for other ranks"
# The colours of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = {
    "Attend": "#e69f00",
    "AttendBackward": "#d55e00",
    "Merge": "#8c6d1f",
    "AllGather": "#56b4e9",
    "ReduceScatter": "#cc79a7",
    "AllToAll": "#0072b2",
    "SendRecv": "#009e73",
    WAIT: "#c9ced6",
}
_LABEL_SHARE = 0.012  # of the width of the chart for each letter of a label


def pyplot() -> Any:
    """`matplotlib.pyplot` without a screen, imported when a picture is drawn. Where it is missing,
    an error names the package to install (the extra `plots`)."""
    try:
        import matplotlib
    except ImportError:
        raise MissingPackageError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_gantt(path: Path | str, num_ranks: int) -> None:
    """Refuses arguments now that `draw_gantt` would refuse after a long search."""
    if not isinstance(path, str | Path) or Path(path).suffix.lower() not in _FORMATS:
        raise MeshAttentionError(f"{path}: a Gantt chart is written as .png or .svg")
    if num_ranks < 1:
        raise MeshAttentionError(f"num_ranks={num_ranks}: a Gantt chart shows at least 1 rank")
    pyplot()


def draw_gantt(timelines: Sequence[Timeline], path: Path | str, num_ranks: int = 4) -> None:
    """One panel a pass, written as PNG or SVG by the ending of `path`."""
    check_gantt(path, num_ranks)
    some_timelines(timelines)
    plt = pyplot()
    shown = min(num_ranks, timelines[0].plan.num_ranks)
    height = 1.4 + 0.56 * shown
    size = (12, height * len(timelines))
    figure, axes = plt.subplots(len(timelines), 1, figsize=size, squeeze=False)
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(plt, axis, timeline, shown)
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, dpi=140)
    plt.close(figure)


def _draw(plt: Any, axis: Any, timeline: Timeline, shown: int) -> None:
    streams = list(Stream)
    width = timeline.runtime_seconds * 1e3
    kinds: set[str] = set()
    for rank in range(shown):
        for event in timeline.events(rank):
            row = rank * len(streams) + streams.index(event.stream)
            if event.start > event.issued:
                kinds.add(WAIT)
                _bar(axis, row, event.issued, event.start, WAIT)
            if event.end > event.start:
                kinds.add(event.kind)
                _bar(axis, row, event.start, event.end, event.kind)
                _label(axis, row, event, width)
    labels = [f"rank {rank} {stream.value}" for rank in range(shown) for stream in streams]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlim(0, width or 1.0)
    for rank in range(1, shown):
        axis.axhline(rank * len(streams) - 0.5, color="#adb5bd", linewidth=0.6)
    axis.set_xlabel("milliseconds, modelled")
    axis.set_title(_title(timeline, shown), fontsize=10, loc="left")
    patches = [plt.Rectangle((0, 0), 1, 1, color=c) for k, c in COLOURS.items() if k in kinds]
    names = [kind for kind in COLOURS if kind in kinds]
    axis.legend(patches, names, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bar(axis: Any, row: int, start: float, end: float, kind: str) -> None:
    axis.barh(
        row,
        (end - start) * 1e3,
        left=start * 1e3,
        height=0.84,
        color=COLOURS[kind],
        edgecolor="white",
        linewidth=0.4,
    )


def _label(axis: Any, row: int, event: Event, width: float) -> None:
    """The name of an operation, where its bar has room for it."""
    if (event.end - event.start) * 1e3 > _LABEL_SHARE * width * len(event.name):
        middle = (event.start + event.end) / 2 * 1e3
        axis.text(middle, row, event.name, ha="center", va="center", fontsize=7)


def _title(timeline: Timeline, shown: int) -> str:
    plan = timeline.plan
    ranks = f"ranks 0 to {shown - 1} of {plan.num_ranks}" if shown < plan.num_ranks else "all ranks"
    return (
        f"{plan.method} {timeline.pass_.direction} on {timeline.cluster.name}, {ranks}: "
        f"{timeline.runtime_seconds * 1e3:.3f} ms, MFU {timeline.mfu_percent:.1f} %, "
        f"exposed communication {timeline.open_communication_seconds * 1e3:.3f} ms, waiting for "
        f"other ranks {timeline.waiting_for_ranks_seconds * 1e3:.3f} ms"
    )


# Times are rounded to 1/1024 us, which binary floats hold exactly: sums of durations are exact too.
_TICKS = 1024
_THREADS = {stream: number for number, stream in enumerate(Stream)}


def trace_of(timelines: Sequence[Timeline], num_ranks: int = 16) -> dict[str, Any]:
    """For `json.dump`. The first `num_ranks` ranks only: thousands would not open."""
    if num_ranks < 1:
        raise MeshAttentionError(f"num_ranks={num_ranks}: a trace shows at least 1 rank")
    first = some_timelines(timelines)[0]
    shown = min(num_ranks, first.plan.num_ranks)
    events = [event for rank in range(shown) for event in _headings(first, rank)]
    begin = 0
    for timeline in timelines:
        for rank in range(shown):
            events += _rank_events(timeline, rank, begin)
        begin += _ticks(timeline.runtime_seconds)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "modelled": "by mesh-attention simulate, not measured",
            "cluster": first.cluster.name,
            "ranks": f"{shown} of {first.plan.num_ranks}",
            "runtime_us": {t.pass_.direction.value: t.runtime_seconds * 1e6 for t in timelines},
        },
    }


def _headings(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    device = timeline.plan.devices[rank]
    title = f"rank {rank} (device {device}, node {timeline.cluster.links.node_of(device)})"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for stream, thread in _THREADS.items():
        place = {"ph": "M", "pid": rank, "tid": thread}
        yield {**place, "name": "thread_name", "args": {"name": stream.value}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _rank_events(timeline: Timeline, rank: int, begin: int) -> Iterator[dict[str, Any]]:
    program = timeline.pass_.programs[rank]
    meter = TrafficMeter(timeline.plan.problem, program.buffer_table())
    operations = [op for op in program.operations if not isinstance(op, Free)]
    end = begin + _ticks(timeline.runtime_seconds)
    now = dict.fromkeys(Stream, begin)

    def upto(event: Event, until: int, name: str, kind: str, **more: Any) -> Iterator[Any]:
        start, now[event.stream] = now[event.stream], max(until, now[event.stream])
        yield from _slice(rank, event.stream, start, now[event.stream], name, kind, more)

    for op, event in zip(operations, timeline.events(rank), strict=True):
        yield from upto(event, begin + _ticks(event.issued), "idle", "idle")
        yield from upto(event, begin + _ticks(event.start), "wait", "wait", before=event.name)
        more = _arguments(timeline, rank, op, meter)
        yield from upto(event, begin + _ticks(event.end), event.name, event.kind, **more)
    for stream, start in now.items():
        yield from _slice(rank, stream, start, end, "idle", "idle", {})


def _arguments(timeline: Timeline, rank: int, op: Operation, meter: TrafficMeter) -> dict[str, Any]:
    if not isinstance(op, Communication):
        return {"calls": len(getattr(op, "calls", ()))}
    ranks = timeline.pass_.groups[op.group]
    moved = meter.traffic(op, ranks.index(rank), len(ranks))
    return {
        "group": op.group,
        "ranks": len(ranks),
        "sent_bytes": moved.sent_bytes,
        "received_bytes": moved.received_bytes,
    }


def _slice(
    rank: int, stream: Stream, start: int, end: int, name: str, kind: str, more: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if end > start:
        yield {
            "ph": "X",
            "pid": rank,
            "tid": _THREADS[stream],
            "ts": start / _TICKS,
            "dur": (end - start) / _TICKS,
            "name": name,
            "cat": kind,
            "args": {"kind": kind, **more},
        }


def _ticks(seconds: float) -> int:
    return round(seconds * 1e6 * _TICKS)
