"""The box: heads by queries by keys. Most methods are boxes, and this is their one builder.

    units      U consecutive ranks are a unit; they exchange tokens for heads, and each of them has
               all tokens of the unit for a share of the heads (`head_group.py`)
    tile       a x b units of queries and of keys: the part of the query-key matrix that a unit
               computes, in a row of a units that share queries and a column of b that share keys
    each side  is gathered, all at once or chunk by chunk, or rotated: block after block goes round
    attend     a unit attends from the queries that it has to the keys that it has
    combine    partial results reach the owners of their rows: those of queries in the row, those of
               keys in the column; at the end, or step by step with the rotation
    back       heads are exchanged for tokens

Without Ulysses a unit is a rank. Ring-Attention is a tile 1 x n whose keys rotate, all-gather KV
one whose keys are gathered, Ulysses a tile 1 x 1; the mesh is any other. `box_methods.py` says the
box of each method. algorithm.md, sections 2 to 5 and 9.
"""

from __future__ import annotations

from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.methods.parts.assemble import GroupPass, Unit
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.query_ring import QueryOrder
from mesh_attention.plan.methods.parts.ring_order import RingOrder
from mesh_attention.plan.methods.parts.tile_order import TileOrder, UnevenOrder
from mesh_attention.plan.methods.parts.tile_pass import TilePass

Order = TileOrder | UnevenOrder | RingOrder | QueryOrder
# Tasks differ between ranks, so a transfer is often due while the attention before it still runs.
HOLD = 1


def box_on_group(mesh: TilePass, lowerings: Lowerings, order: Order) -> GroupPass:
    """A box on one head group."""

    def unit(unit: int) -> Unit:
        """All operations of one unit; exchanges around it are added by `assemble.py`."""
        blocks = order.unit(mesh, lowerings, unit)
        operations: list[Operation | Task] = []
        for task in order.tasks:
            match task.kind:
                case "C" | "Q" | "KV" | "sent" | "end":  # attend; a block comes, its results go
                    operations += blocks.operations(task)
                case mesh.q.reduce_kind | mesh.kv.reduce_kind:  # combine
                    if not task.stage:
                        operations += blocks.empty(task)
                    parts = mesh.parts(unit, task.whole)
                    for part in [parts[int(task.stage or 0)]] if order.in_parts else parts:
                        operations += part
                case "AG-Q" | "AG-KV":
                    operations += mesh.parts(unit, task)[0]
                case _:  # exchange tokens for heads, or back
                    operations.append(task)
        return Unit(operations, {**mesh.buffers(unit), **blocks.buffers})

    alone = mesh.tile.num_ranks == 1 and mesh.head_group.cut is None
    return GroupPass(
        mesh.head_group,
        mesh.direction,
        mesh.needs,
        mesh.groups(),
        order.steps,
        order.setting,
        unit,
        hold=HOLD if order.in_parts and not alone else 0,
        keeps_gathered=mesh.keeps_gathered,
    )
