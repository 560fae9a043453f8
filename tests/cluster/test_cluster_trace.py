"""Traces: what Perfetto needs, filled lanes without overlaps, and the bytes of the plan."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from simulated_cases import timeline_of

from mesh_attention.cost.pictures import _TICKS, _ticks, trace_of
from mesh_attention.cost.timeline import Timeline
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.table import METHODS

LANES = {0: "compute", 1: "communication"}


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """By process and thread, as in the file."""
    events_by_lane = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            events_by_lane[event["pid"], event["tid"]].append(event)
    return events_by_lane


def both(method: str, ranks: int = 8) -> list[Timeline]:
    return [timeline_of(method, ranks, direction=direction) for direction in Direction]


def test_a_second_is_a_million_microseconds() -> None:
    assert _ticks(3.0) == 3_000_000 * _TICKS


@pytest.mark.parametrize("method", METHODS)
def test_lanes_are_filled_from_beginning_to_end_without_overlaps(method: str) -> None:
    timelines = both(method)
    trace = json.loads(json.dumps(trace_of(timelines)))
    total = sum(timeline.runtime_seconds for timeline in timelines) * 1e6
    lanes = slices(trace)
    assert set(lanes) == {(rank, thread) for rank in range(8) for thread in LANES}
    for events in lanes.values():
        now = 0.0
        for event in events:
            assert event["ts"] == now
            assert event["dur"] > 0
            now = event["ts"] + event["dur"]
        assert sum(event["dur"] for event in events) == now == pytest.approx(total, abs=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_slices_are_the_operations_of_the_programs_with_their_bytes(method: str) -> None:
    timeline = timeline_of(method)
    lanes = slices(trace_of([timeline]))
    for rank in range(8):
        work = [e for t in LANES for e in lanes[rank, t] if e["cat"] not in ("idle", "wait")]
        events = {event.name: event for event in timeline.events(rank)}
        assert work
        for event in work:
            assert event["cat"] == event["args"]["kind"] == events[event["name"]].kind
        received = sum(event["args"].get("received_bytes", 0) for event in work)
        assert received == timeline.received_bytes[rank]


def test_processes_are_ranks_and_threads_are_lanes() -> None:
    trace = trace_of([timeline_of("mesh", 16)])
    names = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[event["name"]].add(event["args"]["name"])
    assert names["thread_name"] == set(LANES.values())
    assert len(names["process_name"]) == 16
    assert "rank 9 (device 9, node 1)" in names["process_name"]


def test_only_the_first_ranks_are_shown_and_the_trace_says_so() -> None:
    timeline = timeline_of("mesh", 16)
    trace = trace_of([timeline], num_ranks=3)
    assert {rank for rank, _ in slices(trace)} == {0, 1, 2}
    assert trace["otherData"]["ranks"] == "3 of 16"
    assert trace["otherData"]["cluster"] == "hgx-h100"
    with pytest.raises(MeshAttentionError, match="at least 1 rank"):
        trace_of([timeline], num_ranks=0)
    with pytest.raises(MeshAttentionError, match="at least one Timeline"):
        trace_of([])
