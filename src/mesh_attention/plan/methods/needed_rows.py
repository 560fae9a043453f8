"""Only what is seen travels: every rank receives the keys that its queries see, and no others.

For masks that show a query little of the sequence: a window needs a halo of its neighbours' keys
whatever the number of ranks, documents inside one rank need nothing. Under a full mask this is
all-gather KV by other means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import AllToAll, MergeRule
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.exchange import with_exchanges
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.lower import Lowerings
from mesh_attention.plan.methods.parts.needed_builder import SeenBuilder
from mesh_attention.plan.methods.parts.needed_rows import num_stretches, seen_keys, seen_queries
from mesh_attention.plan.methods.parts.needed_share import share_of
from mesh_attention.plan.methods.parts.needed_side import SeenSide
from mesh_attention.plan.methods.parts.setting import ShapeSetting, SliceSetting
from mesh_attention.plan.methods.parts.slices import sizes_for, suggested_cut
from mesh_attention.plan.methods.parts.tile_plan import (
    SharedOptions,
    layouts_of,
    shards_of,
    tile_for,
)
from mesh_attention.plan.problem.layout import Layout, LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

# Each stretch that a rank sees is a message of its own; two for each rank are always allowed.
MAX_STRETCHES = 4096


@dataclass(frozen=True)
class SeenSetting(ShapeSetting, SliceSetting):
    """Who computes what (left out: its own queries, a tile of 1 x n), and how finely transfers are
    cut."""


def plan_seen(
    problem: Problem, ranks: int, setting: SeenSetting, directions: tuple[Direction, ...]
) -> Plan:
    shared = SharedOptions.of("seen", setting)
    if shared.layout is None:
        shared = replace(shared, layout=usual_layout(problem.mask))
    layouts = layouts_of(problem, ranks, shared)
    _check_stretches(layouts[1])
    tile = tile_for(setting.tile or (1, ranks), ranks)
    devices = tuple(range(ranks))
    shards = shards_of(layouts, devices, shared)
    head_group = HeadGroup(problem, *layouts, shards=shards)
    lowerings = Lowerings(*layouts, problem.rows)
    seen = [find(*layouts, problem.rows, tile) for find in (seen_queries, seen_keys)]
    # Both passes exchange the same rows.
    q_shares, kv_shares = (
        cache(partial(share_of, rows, layout)) for rows, layout in zip(seen, layouts, strict=True)
    )
    q_travels, kv_travels = (rows.travels for rows in seen)
    gathers: dict[object, AllToAll] = {}

    def build(direction: Direction) -> Pass:
        travels = q_travels or kv_travels
        sizes = _slices(problem, ranks, setting, direction, tile=tile, travels=travels)
        forward = direction is Direction.FORWARD
        statistic = Kind.OUT if setting.gather_out else Kind.DELTA
        q = SeenSide(
            *(head_group, q_shares, sizes),
            travels=q_travels,
            inputs=(Kind.Q,) if forward else (Kind.Q, Kind.GRAD_OUT, Kind.LSE, statistic),
            partials=(Kind.OUT, Kind.LSE) if forward else (Kind.GRAD_Q,),
            rule=MergeRule.SOFTMAX if forward else MergeRule.SUM,
        )
        kv = SeenSide(
            *(head_group, kv_shares, sizes),
            travels=kv_travels,
            inputs=(Kind.K, Kind.V),
            partials=() if forward else (Kind.GRAD_K, Kind.GRAD_V),
            rule=MergeRule.SUM,
        )
        builder = SeenBuilder(head_group, direction, q, kv, lowerings, sizes, str(tile), gathers)
        return with_exchanges([builder])

    return Plan(
        problem,
        *layouts,
        tuple(map(build, directions)),
        devices=devices,
        ranks_per_node=setting.ranks_per_node,
        method="seen",
        relayout=shards is not None,
    )


def usual_layout(mask: Mask) -> LayoutKind:
    """Contiguous where every query sees equally much: all of it, or a window."""
    left, right = mask.window or (None, None)
    is_window = left is not None and (right is not None or mask.causal)
    return LayoutKind.CONTIGUOUS if mask.is_full or is_window else LayoutKind.ZIGZAG


def _slices(
    problem: Problem,
    ranks: int,
    setting: SeenSetting,
    direction: Direction,
    *,
    tile: Tile,
    travels: bool,
) -> tuple[int, ...]:
    """Sizes of the slices of heads: as given, or by size where there is a transfer to hide."""
    given, name = setting.head_slices, "head_slices"
    if direction is Direction.BACKWARD and setting.backward_head_slices:
        given, name = setting.backward_head_slices, "backward_head_slices"
    if given is None and travels:
        given = suggested_cut(problem, ranks, (tile.a, tile.b), 1)[1]
        if given is not None and setting.one_call:
            given = (given[1], given[1])  # alike: kernels make something of a mask for each size
    return sizes_for(problem, 1, given, name)


def most_stretches(num_ranks: int) -> int:
    return max(MAX_STRETCHES, 2 * num_ranks)


def _check_stretches(layout: Layout) -> None:
    found = num_stretches(layout)
    if found > most_stretches(layout.num_ranks):
        least = -(-layout.num_tokens // MAX_STRETCHES)
        ways = f"give a stripe_block of at least {least}, or layout=zigzag or contiguous"
        if layout.kind is LayoutKind.LISTED:
            ways = "list fewer and longer 'stretches'"
        raise PlanError(
            f"layout={layout.kind}: the keys lie in {found} stretches, each of which would be a "
            f"message of its own; at most {MAX_STRETCHES} are supported: {ways}"
        )
