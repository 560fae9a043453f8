"""Kernel calls of a program as kernels see them: sizes of their blocks, and stand-ins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mesh_attention.kernels import Block, BlockMask, BlockSize
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import Attend, AttendBackward, Call
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.execute.binding import CallShape


def call_size(
    problem: Problem, table: Mapping[str, Buffer], op: Attend | AttendBackward, call: Call
) -> BlockSize:
    heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
    return BlockSize(
        *(call.q_stop - call.q_start, call.k_stop - call.k_start, heads, kv_heads),
        *(problem.head_dim, problem.v_dim),
        *(problem.element_bytes, problem.accumulate_bytes),
    )


def stand_in_block(call_shape: CallShape, size: BlockSize, mask: BlockMask) -> Block:
    """A block with the shapes of a call, and nothing behind them."""
    nothing = torch.empty((), dtype=call_shape.dtype, device=call_shape.device)

    def stand_in(rows: int, heads: int, width: int) -> Tensor:
        whole = (call_shape.batch, rows, heads, width)
        return nothing.new_empty(1, 1, heads, width).expand(whole)

    q = stand_in(size.num_queries, size.num_heads, size.head_dim)
    k = stand_in(size.num_keys, size.num_kv_heads, size.head_dim)
    v = stand_in(size.num_keys, size.num_kv_heads, size.v_head_dim)
    return Block(q, k, v, mask, softmax_scale=1.0)
