"""What a context does with calls in flight when it is dropped, and when it is broken off at all."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mesh_attention
from mesh_attention.errors import MeshAttentionError
from mesh_attention.runtime.agreement import guard, watch
from mesh_attention.runtime.agreement.guard import Guard, _forget_locals
from mesh_attention.runtime.agreement.handshake import DisagreementError
from mesh_attention.runtime.agreement.identity import AgreedKind, Identity
from mesh_attention.runtime.agreement.watch import DeviceComparison
from mesh_attention.runtime.session.call_options import CallOptions
from mesh_attention.runtime.session.calls import Calls
from mesh_attention.runtime.session.session import Session
from mesh_attention.runtime.transport import groups as groups_of_context
from mesh_attention.runtime.transport.groups import Groups


def session(*, broken: bool, log: list[str]) -> Any:
    """Of stand-ins that write down what is asked of them."""
    guard: Any = SimpleNamespace(
        broken=broken,
        break_off=lambda cause: log.append("broken off"),
        place=1,
        known=lambda error: error,
    )
    groups: Any = SimpleNamespace(
        abort=lambda: log.append("abort"),
        close=lambda abort: log.append(f"close groups, abort {abort}"),
        set_timeout=lambda timeout: timeout,
    )
    transports: Any = SimpleNamespace(
        close=lambda abandon: log.append(f"close transports, abandon {abandon}")
    )
    handshake: Any = SimpleNamespace()
    made: Any = object.__new__(Session)
    made.guard, made.groups, made.transports = guard, groups, transports
    made.calls = Calls(groups, handshake, guard, transports)
    made.calls._living = [SimpleNamespace(clear=lambda: log.append("clear"))]
    return made


class LivingCall:
    def __init__(self, calls: Any) -> None:
        self.clear = lambda: calls._add_living(LivingCall(calls))


def test_calls_that_another_thread_makes_ready_do_not_end_the_dropping_of_calls() -> None:
    dropped = session(broken=False, log=[])
    dropped.calls._living = weakref.WeakSet()
    kept = [LivingCall(dropped.calls) for _ in range(3)]
    for call in kept:
        dropped.calls._add_living(call)
    dropped._drop()


@pytest.mark.parametrize("broken", [True, False])
def test_what_is_in_flight_is_aborted_before_calls_are_given_up_and_only_where_it_is_broken(
    broken: bool,
) -> None:
    log: list[str] = []
    session(broken=broken, log=log)._drop()
    rest = ["clear", f"close transports, abandon {broken}", f"close groups, abort {broken}"]
    assert log == ["abort"] * broken + rest


@pytest.mark.parametrize("knows_calls", [True, False])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_disagreement_breaks_a_context_off_where_calls_may_be_in_flight(
    knows_calls: bool, in_flight: bool
) -> None:
    log: list[str] = []
    calls = session(broken=False, log=log).calls
    if knows_calls:
        calls._agreed["sharding"] = None

    def agree(*_: object, first: bool, **__: object) -> bool:
        assert first is not knows_calls
        raise DisagreementError("ranks differ")

    calls._handshake = SimpleNamespace(agree=agree, left_in_flight=in_flight)
    with pytest.raises(DisagreementError):
        calls.agree({}, CallOptions(), None)
    assert log == ["broken off"] * in_flight


def test_a_group_is_aborted_once_and_one_that_cannot_be_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_of_context, "is_registered", lambda group: True)
    aborted = threading.Semaphore(0)

    class Group:
        def abort(self) -> None:
            aborted.release()

    groups: Any = object.__new__(Groups)
    groups._made, groups._aborting = {0: Group(), 1: object(), 2: Group()}, {}
    groups._connections = []
    groups.abort()
    groups.abort()
    for thread in groups._aborting.values():
        thread.join(5.0)
    assert len(groups._aborting) == 2
    assert [aborted.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_only_calls_on_a_device_over_nccl_are_compared_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    bare: Any = object.__new__(Guard)
    bare.place, bare._comparison = 1, None
    bare._groups = SimpleNamespace(everybody=lambda: None, asked_timeout=None, limit=None)
    begin = SimpleNamespace(begin=lambda *_: log.append("device"))
    monkeypatch.setattr(Guard, "_watched", lambda self, stream: begin)

    class Host:
        def agrees(self, number: int, look_around: object) -> bool:
            log.append("host")
            return True

    monkeypatch.setattr(guard, "HostComparison", lambda *_: Host())
    call = Identity(AgreedKind({}), "forward", 0)
    for nccl, stream in ((True, object()), (True, None), (False, object()), (False, None)):
        bare._nccl = nccl
        assert bare._compare(call, None, stream)
    assert log == ["device", "host", "host", "host"]


def test_an_error_breaks_a_call_off_once_ranks_have_compared_it() -> None:
    """Before that nothing has moved, and all learn of it where they agree on the call."""
    log: list[str] = []
    made = session(broken=False, log=log)
    made.process, made.groups.ranks = os.getpid(), (0, 1)
    made.calls = SimpleNamespace(agree=lambda *_: log.append("agreed"))
    made.guard = of_call = object.__new__(Guard)
    of_call.place, of_call._alone, of_call._cause = 0, False, None
    of_call._handshake = SimpleNamespace(unheard=None)  # type: ignore[assignment]
    of_call._compare = lambda *_: True  # type: ignore[method-assign]
    of_call.break_off = lambda _: log.append("broken off")  # type: ignore[assignment,method-assign]
    for is_compared in (False, True):
        of_call.enter()
        if is_compared:
            of_call.begin(Identity(AgreedKind({}), "forward", 0), None, None)
        made.tell_of(LookupError("no memory"), CallOptions())
    assert log == ["agreed", "broken off"]


def test_calls_that_differ_are_broken_off_though_no_rank_says_how() -> None:
    causes: list[str] = []
    made: Any = object.__new__(Guard)
    made._break_off = causes.append
    for said in ("rank 1 differs", ""):
        made._difference = lambda place, identity, said=said: said
        made._find_difference(1, Identity(AgreedKind({}), "forward", 0))
    assert causes == ["rank 1 differs", "the ranks are at different calls"]


def test_a_captured_call_has_numbers_of_its_own_that_later_calls_do_not_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def numbers(count: int, device: object) -> Any:
        return SimpleNamespace(host=[[0, 0] for _ in range(count)], device=[None] * count)

    stream: Any = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(watch, "SharedNumbers", numbers)
    monkeypatch.setattr(watch, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    comparison: Any = object.__new__(DeviceComparison)
    comparison._stream = comparison._device = stream
    comparison._slots, comparison._captured, comparison._options = (
        numbers(watch._SLOTS, None),
        {},
        None,
    )
    work = SimpleNamespace(wait=lambda: None)
    comparison._backend = SimpleNamespace(allreduce=lambda tensors, options: work)
    comparison._compared = SimpleNamespace(record=lambda stream: None)
    for place, captured in ((1, False), (2, True), (2 + watch._SLOTS, False)):
        comparison.begin(100 + place, place, captured=captured)
    assert set(comparison._captured) == {2}
    assert comparison._numbers(2)[0] == [102, -102]
    assert comparison._slots.host[1] == [101, -101]
    assert comparison._slots.host[2] == [1126, -1126]


class Held:
    """Stands for a process group, whose connections close when nobody holds it."""


def raised(how: str) -> tuple[BaseException, weakref.ref[Held]]:
    """An error that begins in a function of the library, and what that function held."""
    source = f"""
def inner():
    held = make()
    raise ValueError("inner")

def outer():
    try:
        inner()
    except ValueError as error:
        {how}
"""
    made: list[weakref.ref[Held]] = []

    def make() -> Held:
        held = Held()
        made.append(weakref.ref(held))
        return held

    file = Path(mesh_attention.__file__).with_name("made_up.py")
    space: dict[str, Any] = {"MeshAttentionError": MeshAttentionError, "make": make}
    exec(compile(source, str(file), "exec"), space)
    try:
        space["outer"]()
    except Exception as error:
        return error, made[0]
    raise AssertionError


@pytest.mark.parametrize(
    "how",
    [
        "raise MeshAttentionError('outer') from error",
        "raise MeshAttentionError('outer')",
        "raise",
    ],
)
def test_an_error_holds_nothing_of_the_library_alive_however_it_came_about(how: str) -> None:
    error, watched = raised(how)
    assert watched() is not None
    _forget_locals(error)
    gc.collect()
    assert watched() is None
