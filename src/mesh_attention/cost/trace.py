"""Timelines in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process for each rank, a thread for each stream, microseconds. Every stream is filled from the
beginning to the end: where it does not work it waits (for other ranks) or idles, so its durations
add up to the runtime. Passes given together follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mesh_attention.cost.timeline import Event, Stream, Timeline, some_timelines
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.program import Communication, Free, Operation
from mesh_attention.plan.language.traffic import TrafficMeter

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
    title = f"rank {rank} (device {device}, node {timeline.cluster.node_of(device)})"
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
