"""Collectives on tensors that do not lie as torch.distributed wants them, with stand-ins for it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.runtime.transport import distributed
from mesh_attention.runtime.transport.distributed import CollectiveRows, gather, reduce
from mesh_attention.runtime.transport.exchange import LaterCopies, Works

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

    monkeypatch.setattr(distributed, "all_gather", all_gather)
    rows = contiguous_or_not((6, 4), contiguous)
    works: Works = []
    finish: LaterCopies = []
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

    monkeypatch.setattr(distributed, "reduce_scatter", reduce_scatter)
    rows = contiguous_or_not((6, 4), contiguous)
    rows.copy_(PARTS.view(6, 4))
    part = contiguous_or_not((2, 4), contiguous)
    works: Works = []
    finish: LaterCopies = []
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
    made = getattr(distributed, call)(PARTS, PARTS[0], GROUP)
    assert made == (new if there else old)
