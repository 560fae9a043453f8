"""Only what is seen travels: every rank receives the keys that its queries see, and no others.

For masks that show a query little of the sequence: a window needs a halo of its neighbours' keys
whatever the number of ranks, documents inside one rank need nothing. Under a full mask this is
all-gather KV by other means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from mesh_attention.errors import PlanError
from mesh_attention.plan.build.exchange import with_exchanges
from mesh_attention.plan.build.head_group import HeadGroup
from mesh_attention.plan.build.seen_builder import SeenBuilder
from mesh_attention.plan.build.seen_rows import SeenRows, num_stretches
from mesh_attention.plan.build.seen_share import share_of
from mesh_attention.plan.build.setting import SliceSetting
from mesh_attention.plan.build.slices import sizes_for, suggested_cut
from mesh_attention.plan.build.tile_plan import layouts_of, shared_options
from mesh_attention.plan.layout import Layout, LayoutKind
from mesh_attention.plan.lower import Lowerings
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem

# Each stretch that a rank sees is a message of its own; two for each rank are always allowed.
MAX_STRETCHES = 4096


@dataclass(frozen=True)
class SeenSetting(SliceSetting):
    """How finely transfers are cut."""


def plan_seen(
    problem: Problem, ranks: int, setting: SeenSetting, directions: tuple[Direction, ...]
) -> Plan:
    shared = shared_options("seen", setting)
    if shared.layout is None:
        shared = replace(shared, layout=usual_layout(problem.mask))
    layouts = layouts_of(problem, ranks, shared)
    _check_stretches(layouts[1])
    head_group = HeadGroup(problem, *layouts)
    lowerings = Lowerings(*layouts, problem.rows, one_call=shared.one_call)
    seen = SeenRows(*layouts, problem.rows)
    shares = cache(partial(share_of, seen, layouts[1]))  # both passes exchange the same rows

    def build(direction: Direction) -> Pass:
        sizes = _slices(problem, ranks, setting, direction, travels=seen.travels)
        out = setting.gather_out
        return with_exchanges(
            [SeenBuilder(head_group, direction, seen, shares, lowerings, sizes, gather_out=out)]
        )

    return Plan(
        problem,
        *layouts,
        tuple(map(build, directions)),
        devices=tuple(range(ranks)),
        ranks_per_node=setting.ranks_per_node,
        method="seen",
    )


def usual_layout(mask: Mask) -> LayoutKind:
    """Contiguous where every query sees equally much: all of it, or a window."""
    left, right = mask.window or (None, None)
    is_window = left is not None and (right is not None or mask.causal)
    return LayoutKind.CONTIGUOUS if mask.is_full or is_window else LayoutKind.ZIGZAG


def _slices(
    problem: Problem, ranks: int, setting: SeenSetting, direction: Direction, *, travels: bool
) -> tuple[int, ...]:
    """Sizes of the slices of heads: as given, or by size where there is a transfer to hide."""
    given, name = setting.head_slices, "head_slices"
    if direction is Direction.BACKWARD and setting.backward_head_slices:
        given, name = setting.backward_head_slices, "backward_head_slices"
    if given is None and travels:
        given = suggested_cut(problem, ranks, (1, ranks), 1)[1]
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
