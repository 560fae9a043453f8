"""Signals and copies between shared blocks, in the order in which stand-ins write them down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllToAll, SendRecv, Task
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.transport import symmetric_memory
from mesh_attention.runtime.transport.copies import Owner
from mesh_attention.runtime.transport.symmetric import SymmetricTransport, perform
from mesh_attention.runtime.transport.symmetric_memory import DONE, READY, SymmetricBlock


class Log(list[tuple[object, ...]]):
    """Stands for the block and for the copies."""

    def put(self, member: int, channel: int) -> None:
        self.append(("put", member, channel))

    def wait(self, member: int, channel: int) -> None:
        self.append(("wait", member, channel))

    def barrier(self) -> None:
        self.append(("barrier",))

    def keep(self) -> None:
        self.append(("keep",))

    def of(self, member: int) -> int:
        return member

    def fetch(self, pulls: str, block: int) -> None:
        self.append(("fetch", pulls, block))


STEPS: Any = SimpleNamespace(readers=[1, 2], pulls=[(1, "from 1"), (2, "from 2")])
PLACES = {1: 5, 2: 6}  # in the block, of the members of the group


def test_readers_are_told_and_owners_waited_for_one_by_one_before_and_after_the_copies() -> None:
    log: Any = Log()
    perform(STEPS, PLACES, False, log, log)
    assert log == [
        ("put", 5, READY), ("put", 6, READY), ("keep",),
        ("wait", 5, READY), ("fetch", "from 1", 5), ("put", 5, DONE),
        ("wait", 6, READY), ("fetch", "from 2", 6), ("put", 6, DONE),
        ("wait", 5, DONE), ("wait", 6, DONE),
    ]  # fmt: skip


def test_one_barrier_before_and_one_after_do_where_all_read_from_all() -> None:
    log: Any = Log()
    perform(STEPS, PLACES, True, log, log)
    copies = [("fetch", "from 1", 5), ("fetch", "from 2", 6)]
    assert log == [("barrier",), ("keep",), *copies, ("barrier",)]


def near(*ranks: int) -> SymmetricTransport:
    """The transport of a rank that shares memory with these."""
    transport = object.__new__(SymmetricTransport)  # made without a GPU
    memory: Any = SimpleNamespace(block=object(), covers=lambda some: set(some) <= set(ranks))
    far: Any = SimpleNamespace(prepare=lambda op, view: ("far", op))
    transport._memory, transport._far = memory, far
    transport._ranks = {"inside": [0, 1], "across": [0, 1, 4]}
    transport._halves = {}
    return transport


def way(op: AllToAll | SendRecv, *ranks: int) -> str:
    view: Any = None
    result: Any = near(*ranks).prepare(op, view)
    if isinstance(result, tuple):
        assert result == ("far", op)
        return "network"
    return "memory" if isinstance(result, partial) else "both"


def test_an_operation_goes_by_memory_where_all_its_ranks_share_it() -> None:
    pieces = (Piece("x", 0, 1),)
    assert way(AllToAll(Task("EX"), "inside", (), ()), 0, 1) == "memory"
    assert way(AllToAll(Task("EX"), "across", (), ()), 0, 1) == "network"
    for to_member, from_member, expected in ((1, 1, "memory"), (2, 2, "network"), (1, 2, "both")):
        shift = SendRecv(Task("KV"), "across", to_member, pieces, from_member, pieces)
        assert way(shift, 0, 1) == expected
    assert way(SendRecv(Task("KV"), "across", 1, pieces, 2, pieces), 0, 1, 4) == "memory"


@pytest.mark.parametrize(("to_member", "from_member"), [(1, 2), (2, 1)])
def test_the_half_of_a_shift_that_leaves_the_node_goes_by_the_network_and_first(
    to_member: int, from_member: int
) -> None:
    log: list[tuple[str, SendRecv]] = []
    transport: Any = near(0, 1)
    transport._far.prepare = lambda op, view: lambda after: log.append(("network", op))
    transport._begin = lambda op, view, after: log.append(("memory", op))
    pieces = (Piece("x", 0, 1),)
    shift = SendRecv(Task("KV"), "across", to_member, pieces, from_member, pieces)
    transport.prepare(shift, None)(())
    sends, receives = replace(shift, receives=()), replace(shift, sends=())
    near_half, far_half = (sends, receives) if to_member == 1 else (receives, sends)
    assert log == [("network", far_half), ("memory", near_half)]
    transport.prepare(shift, None)(())
    assert log[2][1] is log[0][1]  # the network keeps what it knows by the operation


def test_what_a_rank_shows_is_all_that_it_sends_also_after_a_piece_that_goes_to_several() -> None:
    """Two KV heads on four ranks: keys go to two members each, and here before all else."""
    plan = make_plan(Problem(32, 4, 4, num_kv_heads=2), 4, method="ulysses")
    pass_ = plan.direction(Direction.BACKWARD)
    for program in pass_.programs:
        operations = []
        for op in program.operations:
            if isinstance(op, AllToAll):
                op = replace(op, sends=tuple(pieces[::-1] for pieces in op.sends))
            operations.append(op)
        programs = list(pass_.programs)
        programs[program.rank] = replace(program, operations=tuple(operations))
        owner = Owner(plan, replace(pass_, programs=tuple(programs)), program.rank, batch=1)
        for op in operations:
            if isinstance(op, AllToAll):
                others = (some for to, some in enumerate(op.sends) if to != program.rank)
                assert set(owner.regions(op)) == {piece for some in others for piece in some}


class Handle:
    """A rendezvous that has been made."""

    def get_buffer(self, peer: int, shape: Sequence[int], dtype: torch.dtype, at: int) -> object:
        return torch.full(tuple(shape), peer, dtype=dtype)


def test_a_block_that_is_released_leaves_no_process_group_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    binding = SimpleNamespace(
        empty_strided_p2p=lambda size, stride, dtype, device: torch.zeros(size, dtype=dtype),
        rendezvous=lambda tensor, name: Handle(),
    )
    monkeypatch.setattr(symmetric_memory, "_binding", lambda: binding)
    block = SymmetricBlock(8, torch.device("cpu"))
    parent: Any = None
    block.connect(parent, HashStore(), 1, 3, timedelta(seconds=5))
    assert [int(block.of(member)[0]) for member in range(3)] == [0, 0, 2]
    assert block.of(1) is block.own
    taken_back: list[str] = []
    c10d = torch._C._distributed_c10d
    take_back = c10d._unregister_process_group

    def watched(name: Any) -> None:
        taken_back.append(name)
        take_back(name)

    monkeypatch.setattr(c10d, "_unregister_process_group", watched)
    name = block._name
    block.release()
    assert taken_back == [name]
