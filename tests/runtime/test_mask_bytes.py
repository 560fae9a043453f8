"""Bytes of masks: every table once, whatever holds it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mesh_attention.kernels import Causal, Full, RowRange
from mesh_attention.kernels.range_blocks import range_blocks
from mesh_attention.runtime.device import PassMemory
from mesh_attention.runtime.execute.memory import mask_bytes

CPU = torch.device("cpu")


def mask(rows: int) -> RowRange:
    row = torch.arange(rows)
    return RowRange(torch.zeros_like(row), row + 1, row)


def test_a_pass_takes_all_kinds_of_memory_together() -> None:
    assert PassMemory(1, 2, 4, 7).total_bytes == 14


def test_tables_of_a_mask_are_counted_once() -> None:
    range_mask = mask(64)
    table = 64 * 8
    assert mask_bytes([Full(), Causal()], CPU) == 0
    assert mask_bytes([range_mask], CPU) == 3 * table  # lo, hi, positions
    assert mask_bytes([range_mask, range_mask, mask(64)], CPU) == 6 * table
    assert mask_bytes([range_mask], torch.device("cuda")) == 0


def test_what_kernels_keep_is_counted_as_it_is_made() -> None:
    range_mask = mask(64)
    before = mask_bytes([range_mask], CPU)
    blocks = range_blocks(range_mask, 64, 64, 16, CPU)
    own = {x.untyped_storage().data_ptr() for x in blocks if isinstance(x, Tensor)}
    assert mask_bytes([range_mask], CPU) == before + 512 * len(own)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tables_and_sets_are_counted() -> None:
    range_mask = mask(64)
    before = mask_bytes([range_mask], CPU)
    range_mask.kept["coo"] = torch.eye(64).to_sparse()  # 2 x 64 indices of 8 bytes, 64 numbers of 4
    assert mask_bytes([range_mask], CPU) == before + 1024 + 512
    csr = torch.eye(64).to_sparse_csr()
    parts = csr.crow_indices(), csr.col_indices(), csr.values()
    range_mask.kept["csr"] = {csr}
    of_parts = [-(-part.untyped_storage().nbytes() // 512) * 512 for part in parts]
    assert mask_bytes([range_mask], CPU) == before + 1536 + sum(of_parts)


def test_objects_of_libraries_are_looked_into() -> None:
    class Slotted:
        __slots__ = ("left_out", "table")
        __module__ = "cudnn.flex_attention.plan"

        def __init__(self) -> None:
            self.table = [{"indices": torch.zeros(1000, dtype=torch.int32)}]

    @dataclass
    class Stranger:
        table: Tensor

    range_mask = mask(64)
    before = mask_bytes([range_mask], CPU)
    range_mask.kept["a library's"] = Slotted()
    range_mask.kept["itself"] = range_mask
    range_mask.kept["whatever"] = Stranger(torch.zeros(1000))
    assert mask_bytes([range_mask], CPU) == before + 8 * 512
