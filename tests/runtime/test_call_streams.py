"""The order in which kernel calls take turns on two streams, written down by stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mesh_attention import Problem, make_plan
from mesh_attention.plan.language.program import Attention
from mesh_attention.plan.language.workspace import workspace_map
from mesh_attention.runtime.device import ComputeStreams
from mesh_attention.runtime.execute.attentions import must_follow
from mesh_attention.runtime.execute.kernel_calls import KernelCalls
from mesh_attention.runtime.transport.distributed import DistributedTransport, _Known


class Noted:
    """Stands for a stream or an event: writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: Noted) -> None:
        self._log.append(f"{self.name} waits for {event.name}")

    def record(self, stream: Noted) -> None:
        self._log.append(f"{self.name} on {stream.name}")


class Log(list[str]):
    """Stands for the streams and for the rows that results go to."""

    def turn(self) -> None:
        self.append("turn")

    def follow(self) -> None:
        self.append("follow")

    def take(self, *result: Any) -> None:
        self.append("take")


@pytest.mark.parametrize("follows", [True, False])
def test_only_the_first_call_waits_for_what_was_computed_before_and_every_merge_for_the_last_one(
    follows: bool,
) -> None:
    log: Any = Log()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        log.append("call")
        return torch.zeros(1), torch.zeros(1)

    KernelCalls([(call, log), (call, log)], [], None, log, follows=follows)()
    each = ["turn", "call", "follow", "take"]
    assert log == (["turn", "follow", *each[1:], *each] if follows else [*each, *each])


def streams_without_a_gpu() -> Any:
    streams: Any = object.__new__(ComputeStreams)
    streams._side, streams._held = None, []
    return streams


def test_with_one_stream_there_is_nothing_to_finish() -> None:
    streams = streams_without_a_gpu()
    only: Any = object()
    streams._main = streams._stream = only  # as a GPU has it: it would refuse to wait for itself
    waited: list[int] = []
    streams.wait(lambda: waited.append(1))
    assert waited == [1]
    streams.pause()
    streams.resume()
    streams.__exit__()
    assert streams._stream is only


@pytest.mark.parametrize(("last", "next_one"), [("main", "side"), ("side", "main")])
def test_what_both_streams_need_lets_the_stream_of_the_next_call_go_first(
    monkeypatch: pytest.MonkeyPatch, last: str, next_one: str
) -> None:
    log: list[str] = []
    streams = streams_without_a_gpu()
    streams._main, streams._side = Noted("main", log), Noted("side", log)
    streams._stream = streams._main if last == "main" else streams._side
    streams._passed = Noted("passed", log)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"on {stream.name}"))
    streams.wait(lambda: log.append("wait"))
    there = ["wait", f"passed on {next_one}", f"{last} waits for passed"]
    assert log == [f"on {next_one}", *there, f"on {last}"]
    assert streams._stream.name == last


def test_calls_take_turns_on_both_streams_and_each_turn_marks_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    streams = streams_without_a_gpu()
    streams._main = streams._stream = Noted("main", log)
    streams._side, streams._turn = Noted("side", log), 0
    streams._ends = [Noted("even", log), Noted("odd", log)]
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"on {stream.name}"))
    for _ in range(3):
        streams.turn()
    to_side, back = ["even on main", "on side"], ["odd on side", "on main"]
    assert log == [*to_side, *back, *to_side]


@pytest.mark.parametrize("on_stream", [True, False])
def test_a_transfer_begins_on_its_stream_after_what_it_reads_was_computed(
    on_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    transport: Any = object.__new__(DistributedTransport)
    transport._host_driven, transport._limit = False, ()
    transport._stream = Noted("transfers", log) if on_stream else None
    event: Any = Noted("done", log) if on_stream else None
    op: Any = None

    def begin(works: list[Any], copies: list[Any]) -> None:
        log.append("begin KV-0")
        works.append(SimpleNamespace(wait=lambda: log.append("wait")))

    transport._known = {id(op): _Known(op, "KV-0", lambda _: [begin], event)}
    transport.prepare(op, None)((Noted("rows", log),))
    before, after = ["transfers waits for rows"], ["wait", "done on transfers"]
    assert log == (before * on_stream + ["begin KV-0"] + after * on_stream)


def test_attention_joins_what_was_computed_right_before_it() -> None:
    """Delta is computed first; an attention that reads it as it lies must wait for it."""
    local = make_plan(Problem(64, 4, 8), 2, method="mesh", tile=(1, 2), chunks=(1, 2))
    program = local.backward.programs[0]
    first, *others = [at for at, op in enumerate(program.operations) if isinstance(op, Attention)]
    assert must_follow(program.operations, workspace_map(program, local.problem)) == {first}
    assert others  # they run beside the call before them, long after delta
    gathered = make_plan(Problem(64, 4, 8), 2, method="mesh", tile=(2, 1))
    other = gathered.backward.programs[0]
    assert must_follow(other.operations, workspace_map(other, gathered.problem)) == set()
