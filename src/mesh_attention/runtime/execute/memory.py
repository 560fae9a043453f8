"""What a pass holds on the device besides its buffers: kernels' own memory, and tables of masks.

Kernels return new tensors, which are merged into the buffers and dropped, and may take memory for
themselves meanwhile; backward calls share what is prepared for them. The largest operation decides,
so the number is known before anything runs. The bytes of masks are counted once masks are made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels import Block, BlockMask, BlockSize, Kernel
from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward, Call, Program
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.execute.kernel_calls import Missing, needs_of_calls


def scratch_bytes(
    program: Program, problem: Problem, kernels: Mapping[str, Kernel], *, two_streams: bool
) -> int:
    """The most that kernel calls hold at once, for one batch element. With two streams what one
    operation prepared is held during the first call of the next."""
    table = program.buffer_table()
    largest = held = 0
    for op in program.operations:
        if not isinstance(op, Attend | AttendBackward) or not op.calls:
            continue
        direction, prepared = Direction.FORWARD, 0
        if isinstance(op, AttendBackward):  # what is made once for all calls
            direction, needs = Direction.BACKWARD, needs_of_calls(op, kernels)
            has_out, has_delta = op.out is not None, op.delta is not None
            missing = Missing.of(needs, has_out=has_out, has_delta=has_delta)
            prepared = op.q.num_heads(table[op.q.buffer]) * missing.head_bytes(problem)
        first, *others = (
            kernels[call.kernel].scratch_bytes(direction, call_size(problem, table, op, call))
            for call in op.calls
        )
        largest = max(largest, held + prepared + first, *(prepared + call for call in others))
        held = prepared if two_streams else 0
    return largest


def call_size(
    problem: Problem, table: Mapping[str, Buffer], op: Attend | AttendBackward, call: Call
) -> BlockSize:
    """The size of a kernel call of an attention. `table`: the buffers of the program, by name."""
    heads, kv_heads = (piece.num_heads(table[piece.buffer]) for piece in (op.q, op.k))
    return BlockSize(
        num_queries=call.q_stop - call.q_start,
        num_keys=call.k_stop - call.k_start,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_dim,
        element_bytes=problem.element_bytes,
        accumulate_bytes=problem.accumulate_bytes,
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


_GRAIN = 512  # bytes; PyTorch gives out memory on a GPU by these
_OWNERS = ("mesh_attention", "cudnn")  # packages whose objects are looked into


def mask_bytes(masks: Iterable[BlockMask], device: torch.device) -> int:
    """What masks hold: their own tables, and what kernels made of them and kept. Each piece of
    memory counts once, whoever holds it: tensors, also sparse ones, in tuples, lists,
    sets and mappings, and in objects of ours and of cuDNN Frontend."""
    sizes: dict[int, int] = {}  # by address
    for x in _tensors(list(masks), set()):
        if x.device.type == device.type:
            for part in _parts(x):
                storage = part.untyped_storage()
                sizes[storage.data_ptr()] = -(-storage.nbytes() // _GRAIN) * _GRAIN
    return sum(sizes.values())


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the memory of a tensor: a sparse one has none of its own."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that a thing holds. `seen`: the ids of what was looked into already."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    holds = isinstance(thing, Mapping | list | tuple | set | frozenset)
    if holds or type(thing).__module__.partition(".")[0] in _OWNERS:
        for part in gc.get_referents(thing):
            yield from _tensors(part, seen)
