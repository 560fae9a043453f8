"""Tensors as runs of words: a plain reading of the table writes every element and no other."""

from __future__ import annotations

import ctypes

import pytest
import torch
from replay.stand_in_data import (
    BLOCK_WORDS,
    WriteTable,
    memory_runs,
    write_table,
    write_tables,
)
from torch import Tensor


def follow(table: WriteTable) -> None:
    """What the kernel does with its table, word by word: sets every byte to 1."""
    for address, _, words, length, stride in table.numbers:
        assert table.columns * table.rows == BLOCK_WORDS
        for first in range(0, words, length):
            size = min(length, words - first) * table.word_bytes
            ctypes.memset(address + first // length * stride * table.word_bytes, 1, size)


def check(cuts: list[Tensor], wholes: list[Tensor]) -> WriteTable:
    table = write_table([memory_runs(cut, cut) for cut in cuts])
    follow(table)
    for cut, whole in zip(cuts, wholes, strict=True):
        assert int(cut.ne(0).sum()) == cut.numel()
        assert int(whole.ne(0).sum()) == cut.numel()
    return table


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("heads", [(0, 8), (2, 5), (7, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_whole_rows_and_some_heads(batch: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    whole = torch.zeros(70, batch, 8, 48, dtype=dtype)
    check([whole[3:61, :, heads[0] : heads[1]]], [whole])


def test_pieces_of_all_sizes_share_a_table() -> None:
    wholes = [torch.zeros(*shape) for shape in ((900, 1, 8, 64), (33, 1, 8, 1), (1, 1, 1, 1))]
    result = check(wholes, wholes)
    assert result.columns == 1
    assert not result.aligned


def test_odd_widths_of_two_bytes_are_written_in_words_of_two_bytes() -> None:
    whole = torch.zeros(5, 1, 3, 7, dtype=torch.bfloat16)
    assert check([whole[:, :, 1:2]], [whole]).word_bytes == 2


def test_rows_of_usual_size_are_written_in_long_vectors() -> None:
    whole = torch.zeros(2048, 1, 8, 128, dtype=torch.bfloat16)
    result = check([whole], [whole])
    assert result.aligned == (whole.data_ptr() % 16 == 0)
    assert result.columns == BLOCK_WORDS
    assert result.word_bytes == 4


def test_nothing_to_write_is_a_table_without_pieces() -> None:
    assert write_table([]).numbers == ()


def test_statistics_of_few_heads_do_not_narrow_the_blocks_of_tokens() -> None:
    tokens = torch.zeros(300, 1, 8, 64, dtype=torch.bfloat16)
    statistics = torch.zeros(300, 1, 8, 1)
    pieces = [tokens[:, :, 2:4], statistics[:, :, 2:4], tokens[:, :, 5:6]]
    tables = write_tables([memory_runs(piece, piece) for piece in pieces])
    assert [table.columns for table in tables] == [32, 2]  # words of 4 bytes
    assert [len(table.numbers) for table in tables] == [2, 1]
    for table in tables:
        follow(table)
    assert all(bool(piece.ne(0).all()) for piece in pieces)
    assert int(tokens.ne(0).sum()) == 300 * 3 * 64
    assert int(statistics.ne(0).sum()) == 300 * 2
