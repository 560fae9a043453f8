"""Documents as training code writes them: starts, packed positions, padding masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import MeshAttentionError
from mesh_attention.train.whole_batch import rows_of_documents


def rows(
    shape: tuple[int, int],
    cu_seqlens: Any = None,
    positions: list[list[int]] | None = None,
    mask: list[list[int]] | None = None,
) -> list[tuple[int, ...]]:
    read = (None if x is None else torch.tensor(x) for x in (positions, mask))
    return rows_of_documents(shape, cu_seqlens, *read)


def test_a_batch_that_says_nothing_is_one_document_a_row() -> None:
    assert rows((2, 5)) == [(0, 5)] * 2


def test_starts_are_those_of_all_rows_or_of_each() -> None:
    assert rows((2, 5), [0, 2, 5]) == [(0, 2, 5)] * 2
    assert rows((2, 5), torch.tensor([0, 2, 5])) == [(0, 2, 5)] * 2
    assert rows((2, 5), [[0, 2, 5], [0, 4, 5]]) == [(0, 2, 5), (0, 4, 5)]


def test_positions_that_restart_begin_documents() -> None:
    numbers = [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows((2, 5), positions=numbers) == [(0, 2, 5), (0, 5)]
    assert rows((1, 3), positions=[[7, 8, 9]]) == [(0, 3)]


def test_padding_on_either_side_is_a_document() -> None:
    numbers = [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert rows((4, 5), mask=numbers) == [(0, 3, 5), (0, 1, 5), (0, 5), (0, 5)]


def test_padding_is_set_apart_in_packs_too_and_its_positions_say_nothing() -> None:
    assert rows((1, 6), [0, 2, 6], mask=[[1, 1, 1, 1, 0, 0]]) == [(0, 2, 4, 6)]
    positions = [[0, 1, 0, 1, 0, 0]]
    assert rows((1, 6), positions=positions, mask=[[1, 1, 1, 1, 0, 0]]) == [(0, 2, 4, 6)]
    positions = [[1, 1, 0, 1, 2, 3]]  # as Hugging Face makes them of padding on the left
    assert rows((1, 6), positions=positions, mask=[[0, 0, 1, 1, 1, 1]]) == [(0, 2, 6)]
    positions = [[-1, -1, 0, 1, 2, 3]]  # as they are counted by `mask.cumsum(1) - 1`
    assert rows((1, 6), positions=positions, mask=[[0, 0, 1, 1, 1, 1]]) == [(0, 2, 6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": [[1, 0, 1, 1]]}, "row 0 has padding between tokens"),
        ({"mask": [[1, 1, 2, 2]]}, "other values than 0 and 1"),
        ({"positions": [[0, 1, 5, 6]]}, "from 1 to 5 at token 2"),
        ({"positions": [[-2, -1, 0, 1]]}, "row 0 are -2 at token 0, and negative positions"),
        ({"cu_seqlens": [0, 2, 3]}, "3 tokens in a row, and the batch has 4"),
        ({"cu_seqlens": [0, 8]}, "sharded here and only once"),
        ({"cu_seqlens": [[0, 4], [0, 4]]}, "of 2 rows, and the batch has 1"),
        ({"cu_seqlens": [0, 4], "positions": [[0, 1, 0, 1]]}, "restart at token 2"),
        ({"cu_seqlens": [0, 2, 3, 4], "mask": [[1, 1, 0, 0]]}, "document at token 3 of row 0"),
    ],
)
def test_contradictions_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshAttentionError, match=message):
        rows((1, 4), **arguments)
