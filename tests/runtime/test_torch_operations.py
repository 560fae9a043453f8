"""Collectives on tensors that do not lie as torch.distributed wants them, with stand-ins for it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.plan.language.buffers import Piece
from mesh_attention.runtime.transport import torch_operations
from mesh_attention.runtime.transport.interface import Transfers
from mesh_attention.runtime.transport.torch_operations import (
    CollectiveRows,
    Copies,
    PointToPoint,
    Works,
    exchange,
    gather,
    messages,
    reduce,
)

GROUP: Any = None
PARTS = torch.arange(3 * 2 * 4, dtype=torch.float32).view(3, 2, 4)  # of members: rows, heads


def contiguous_or_not(shape: tuple[int, ...], contiguous: bool) -> Tensor:
    """Poisoned, so that what is not written shows."""
    if contiguous:
        return torch.full(shape, torch.nan)
    return torch.full((*shape[:-1], 2 * shape[-1]), torch.nan)[..., : shape[-1]]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_gathered_rows_come_to_the_members_whatever_the_order_of_the_process_group(
    order: tuple[int, ...], contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = []

    def all_gather(whole: Tensor, part: Tensor, group: Any) -> None:
        assert whole.is_contiguous()
        assert part.is_contiguous()
        in_place.append(whole.data_ptr() == rows.data_ptr())
        for member, place in enumerate(order):
            whole[2 * place : 2 * place + 2] = PARTS[member]

    monkeypatch.setattr(torch_operations, "all_gather", all_gather)
    rows = contiguous_or_not((6, 4), contiguous)
    works: Works = []
    finish: Copies = []
    gather(CollectiveRows(PARTS[0], rows, GROUP, order), works, finish)
    for copy in finish:
        copy()
    assert torch.equal(rows, PARTS.view(6, 4))
    assert len(works) == 1
    assert in_place == [contiguous and order == (0, 1, 2)]
    assert bool(finish) != in_place[0]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_rows_to_be_reduced_are_given_in_the_order_of_the_process_group(
    order: tuple[int, ...], contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce_scatter(part: Tensor, whole: Tensor, group: Any) -> None:
        assert whole.is_contiguous()
        assert part.is_contiguous()
        for member, place in enumerate(order):
            assert torch.equal(whole[2 * place : 2 * place + 2], PARTS[member])
        part.copy_(PARTS[2])

    monkeypatch.setattr(torch_operations, "reduce_scatter", reduce_scatter)
    rows = contiguous_or_not((6, 4), contiguous)
    rows.copy_(PARTS.view(6, 4))
    part = contiguous_or_not((2, 4), contiguous)
    works: Works = []
    finish: Copies = []
    reduce(CollectiveRows(part, rows, GROUP, order), works, finish)
    for copy in finish:
        copy()
    assert torch.equal(part, PARTS[2])
    assert len(works) == 1
    assert len(finish) == (0 if contiguous else 1)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("call", "new", "old"),
    [
        ("all_gather", "all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    ],
)
def test_the_new_name_of_a_collective_is_used_where_torch_has_it(
    call: str, new: str, old: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later releases warn on the old name, or have it no longer."""
    monkeypatch.setattr(dist, new, lambda *_, **__: new, raising=False)
    monkeypatch.setattr(dist, old, lambda *_, **__: old)
    if not there:
        monkeypatch.delattr(dist, new)
    made = getattr(torch_operations, call)(PARTS, PARTS[0], GROUP)
    assert made == (new if there else old)


def test_receives_are_posted_before_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would tell a peer that it receives only behind all that it sends there: sending to and
    receiving from one peer would take turns."""
    posted: list[Any] = []

    def post(operations: list[Any]) -> list[Any]:
        posted.extend(operations)
        return []

    monkeypatch.setattr(dist, "P2POp", lambda call, tensor, peer, group, tag: (call, peer, tag))
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    pairs = [((peer,), sent) for peer in (1, 2) for sent in (True, False)]
    tensors = [PointToPoint(PARTS[0], peers, 0, sent) for peers, sent in pairs]
    exchange(tensors, (), GROUP, host_driven=True)([], [])
    calls = {True: dist.isend, False: dist.irecv}
    assert posted == [(calls[sent], peer, 0) for sent in (False, True) for peer in (1, 2)]


def test_heads_for_several_ranks_are_one_copy_and_travel_as_before() -> None:
    """Rank 3 of 8 sends its rows to ranks 0..2 and 4..7, in two copies of each tensor."""
    member, size, rows = 3, 8, 5
    pieces = [Piece("q", 0, rows, (2 * m, 2 * m + 2)) for m in range(size)]
    landing = [Piece("whole", rows * m, rows * m + rows) for m in range(size)]
    moved = Transfers(tuple((p,) for p in pieces), tuple((p,) for p in landing))
    made = messages(moved, member)
    assert made.own == ((pieces[member], landing[member]),)
    sent = [message for message in made.between if message.sent]
    assert [message.members for message in sent] == [(0, 1, 2), (4, 5, 6, 7)]
    q = torch.arange(rows * 16.0).view(rows, 1, 16, 1)
    for message in sent:
        tensor = message.tensor(lambda piece: q[:, :, slice(*(piece.heads or ()))])
        for part, other in zip(tensor, message.members, strict=True):
            assert torch.equal(part, q[:, :, 2 * other : 2 * other + 2])
    received = [message for message in made.between if not message.sent]
    assert [message.members for message in received] == [(m,) for m in range(size) if m != member]
