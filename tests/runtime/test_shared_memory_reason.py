"""Why a host has no shared memory, in one line with the way out."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from mesh_attention import Problem, make_plan
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.device import Workspace
from mesh_attention.runtime.session.transports import Transports
from mesh_attention.runtime.transport import shared_memory
from mesh_attention.runtime.transport.copies import Copies, Steps
from mesh_attention.runtime.transport.shared_memory import SharedMemory, _in_short
from mesh_attention.runtime.transport.symmetric_memory import SymmetricBlock


def test_the_reason_is_the_first_line_of_the_error_or_its_type() -> None:
    assert _in_short("no memory", RuntimeError("full\nat 0x12")) == "no memory (full)"
    assert _in_short("no memory", MemoryError()) == "no memory (MemoryError)"


def test_ranks_that_share_a_gpu_are_told_what_lets_them() -> None:
    message = _in_short("no memory", RuntimeError("overlapping devices are not allowed"))
    assert message == (
        "no memory (overlapping devices are not allowed); "
        "ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """Rank 4 of a node of ranks 4 and 5, of which the other is on another host."""
    store = HashStore()
    monkeypatch.setattr(shared_memory, "default_store", lambda: store)
    groups: Any = SimpleNamespace(global_rank_of_self=4, name="g")
    return SharedMemory(groups, (4, 5), timedelta(seconds=5), Workspace())


def test_a_rank_that_is_alone_on_its_host_shares_nothing_and_says_why(alone: SharedMemory) -> None:
    for _ in range(2):
        assert not alone.meet(torch.device("cpu"))
    assert alone.members == (4,)
    reason = "no other rank of its node is on the host of rank 4"
    assert alone.why_not((4, 5)) == reason
    assert not alone.covers((4,))
    assert alone.device is None


def test_what_can_not_be_shared_is_known_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, alone: SharedMemory
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(shared_memory, "obstacle", lambda _: None)
    groups: Any = SimpleNamespace(global_rank_of_self=4, name="h")
    node_of_one_rank = SharedMemory(groups, (4,), timedelta(seconds=5), Workspace())
    assert not node_of_one_rank.may_be_shared(device)
    assert alone.may_be_shared(device)
    monkeypatch.setattr(shared_memory, "obstacle", lambda _: "no such memory")
    assert not alone.may_be_shared(device)
    monkeypatch.setattr(shared_memory, "obstacle", lambda _: None)
    assert not alone.meet(device)
    assert not alone.may_be_shared(device)


def test_ranks_of_another_node_are_named(alone: SharedMemory) -> None:
    assert alone.why_not((7, 4, 6)) == "rank 4 is on another node than ranks [6, 7]"


def test_what_was_said_in_earlier_rounds_is_forgotten(alone: SharedMemory) -> None:
    alone.members, alone._store = (4,), (store := HashStore())
    for number in range(5):
        assert not alone._all_well(str(number))
        assert alone.reason == f"rank 4: {number}"
        assert store.num_keys() == 1


def test_a_block_that_is_connected_forgets_what_its_store_was_told() -> None:
    messages: list[str] = []
    block = object.__new__(SymmetricBlock)  # made without a GPU
    store: Any = SimpleNamespace(forget=lambda: messages.append("forget"))
    block._store = store
    block.connected()
    assert messages == ["forget"]


def test_memory_is_that_of_the_own_node_and_begins_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "default_store", HashStore)
    groups: Any = SimpleNamespace(
        global_rank_of_self=12, name="g", global_rank=lambda plan, rank: 10 + rank
    )
    plan = make_plan(Problem(64, 4, 8), 4, method="ring", ranks_per_node=2)
    transports, rank_plan = Transports(groups), SimpleNamespace(plan=plan, rank=2)
    memory = transports.memory(rank_plan, timedelta(seconds=5))  # type: ignore[arg-type]
    assert memory._node == (12, 13)
    # NaN in it is for tests.
    assert not memory.workspace.poisons
    assert not transports.workspace.poisons


def test_a_sum_in_higher_precision_is_rounded_into_its_place_wherever_that_lies() -> None:
    """The place is in a large block, which lies behind all small tensors."""
    tensors = {
        "part": torch.tensor([1.0, 2.0]).bfloat16(),
        "sum": torch.empty(1 << 25, dtype=torch.bfloat16),
    }
    own = ((Piece("part", 0, 2), Piece("sum", 0, 2)),)
    copies = Copies(
        Steps((), (), (), own, adds=True), lambda piece: tensors[piece.buffer][:2], {}, 0
    )
    tensors["sum"][:2] = 0
    copies.keep()
    copies.finish()
    assert tensors["sum"][:2].tolist() == [1.0, 2.0]
