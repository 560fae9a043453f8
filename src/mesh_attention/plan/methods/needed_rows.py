"""Only needed rows travel: every rank receives the keys that its queries see, and no others.

For masks that show a query little of the sequence: a window needs a halo of its neighbours' keys
for any number of ranks, documents inside one rank need nothing. Under a full mask this is
all-gather KV by other means.

With a tile 1 x n a rank works on its own queries and the keys that they see; with a tile a x b on
the queries of its Q group that see keys of its tile column, and on the keys there that they see.
Heads are cut into slices. Forward a slice is one all-to-all, one attention and, where queries
travel, an all-to-all that brings partial outputs to the owners of the rows; backward it is the same
with gradients. Owners combine what arrives in wide precision. `table.py` lists this as method
"seen".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction, Pass, Plan
from mesh_attention.plan.language.program import AllToAll, Call, Operation, Task
from mesh_attention.plan.language.tasks import Schedule, Step, follow_each_other
from mesh_attention.plan.methods.parts.assemble import HOLD, GroupPass, Unit, with_exchanges
from mesh_attention.plan.methods.parts.assignment import Tile
from mesh_attention.plan.methods.parts.chunks import sizes_for, suggested_cut
from mesh_attention.plan.methods.parts.head_group import HeadGroup
from mesh_attention.plan.methods.parts.lower import COMPUTE, Lowerings, attention, lowerings_of
from mesh_attention.plan.methods.parts.needed_rows import check_ranges, needed_keys, needed_queries
from mesh_attention.plan.methods.parts.needed_side import ByMember, NeededSide, RankRows
from mesh_attention.plan.methods.parts.setting import Keep, ShapeSetting, SliceSetting, kept_kinds
from mesh_attention.plan.methods.parts.tile_plan import Box, TilePlanner, cut_of
from mesh_attention.plan.methods.parts.tile_side import ALL_UNITS, GATHER_KV, kinds_of_sides
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem


@dataclass(frozen=True)
class NeededRowsSetting(ShapeSetting, SliceSetting):
    """The tile (left out: own queries, 1 x n), and how finely transfers are cut."""


def plan_needed_rows(
    problem: Problem, ranks: int, setting: NeededRowsSetting, directions: tuple[Direction, ...]
) -> Plan:
    layout = setting.layout or usual_layout(problem.mask)
    box = Box.of("seen", setting, tile=setting.tile or (1, ranks), layout=layout)
    planner = TilePlanner(problem, ranks, box)
    tile, layouts = planner.tile, planner.layouts
    what = f"layout={layouts[1].kind}: the keys lie in"
    check_ranges(layouts[1], what, "zigzag or contiguous")
    kept = kept_kinds(box.keep, problem, 1)
    head_group = HeadGroup(problem, *layouts, shards=planner.shards, kept=kept)
    lowerings = lowerings_of(*layouts, problem.rows)
    needed = [find(*layouts, problem.rows, tile.a) for find in (needed_queries, needed_keys)]
    travels = any(side.travels for side in needed)
    # Both passes exchange the same rows.
    rows_of = [cache(partial(RankRows, *side)) for side in zip(needed, layouts, strict=True)]
    gathers: dict[object, AllToAll] = {}
    slices_of = {
        direction: _slices(problem, ranks, box, direction, travels=travels)
        for direction in Direction
    }
    keeps_gathered = box.keep is Keep.GATHERED
    if keeps_gathered and len({*slices_of.values()}) > 1:
        raise PlanError("keep=gathered needs equal slices; leave 'backward_head_slices' out")

    def build(direction: Direction) -> Pass:
        slices = slices_of[direction]
        kinds = kinds_of_sides(direction, gather_out=setting.gather_out)
        q, kv = (
            NeededSide(
                head_group,
                rows_of[i],
                slices,
                kinds[i],
                travels=needed[i].travels,
                keeps=keeps_gathered,
            )
            for i in (0, 1)
        )
        method = _NeededRows(head_group, q, kv, lowerings, slices, gathers)
        return with_exchanges(method.on_group(direction, tile))

    return planner.plan(problem, map(build, directions))


def usual_layout(mask: Mask) -> LayoutKind:
    """Contiguous where every query sees equally much: everything, or a window."""
    left, right = mask.window or (None, None)
    is_window = left is not None and (right is not None or mask.causal)
    return LayoutKind.CONTIGUOUS if mask.is_full or is_window else LayoutKind.ZIGZAG


def _slices(
    problem: Problem, ranks: int, box: Box, direction: Direction, *, travels: bool
) -> tuple[int, ...]:
    """Sizes of the slices of heads: as asked for, or by size where there is a transfer to hide."""
    backward = direction is Direction.BACKWARD and box.backward_head_slices
    if box.head_slices or backward or not travels:
        return cut_of(box, direction, problem).slices
    slices = suggested_cut(problem, ranks, box.tile, 1)[1]
    if slices is not None and box.one_call:
        slices = (slices[1], slices[1])  # equal: kernels prepare a mask for each size
    return sizes_for(problem, 1, slices)


class _NeededRows:
    """The method on its one head group."""

    def __init__(
        self,
        head_group: HeadGroup,
        q: NeededSide,
        kv: NeededSide,
        lowerings: Lowerings,
        slices: tuple[int, ...],
        gathers: dict[object, AllToAll],
    ) -> None:
        """`gathers`: the gathers that the other pass has made so far."""
        self._head_group, self._q, self._kv = head_group, q, kv
        self._lowerings, self._slices, self._known_gathers = lowerings, slices, gathers
        self._travels = q.travels or kv.travels
        # Queries that do not travel have their results where they belong.
        self._reduced = [q] * q.travels + [kv] * bool(kv.partials)
        self._reduces = any(side.travels for side in self._reduced)
        self._schedule = follow_each_other([self._of_slice(part) for part in range(len(slices))])

    def on_group(self, direction: Direction, tile: Tile) -> GroupPass:
        travels = "what is seen" if self._travels else "nothing"
        setting = {"tile": str(tile), "travels": travels}
        if len(self._slices) > 1:
            setting["head_slices"] = "+".join(map(str, self._slices))
        return GroupPass(
            self._head_group,
            direction,
            (*self._q.inputs, *self._kv.inputs),
            {ALL_UNITS: tuple(range(self._head_group.num_units))} if self._travels else {},
            self._schedule.steps,
            setting,
            self._unit,
            hold=HOLD if self._travels else 0,
            keeps_gathered=self._q.keeps_gathered or self._kv.keeps_gathered,
        )

    def _of_slice(self, part: int) -> Schedule:
        fetches = any(side.travels and side.moved for side in (self._q, self._kv))
        steps = [Step(Task(GATHER_KV, (part,)), ())] if fetches else []
        steps.append(Step(None, (Task(COMPUTE, (part, part)),)))
        if self._reduced:
            steps.append(Step(Task(self._kv.reduce_kind or self._q.reduce_kind, (part,)), ()))
        return Schedule(tuple(steps))

    def _unit(self, unit: int, index: int) -> Unit:
        q, kv = self._q.rows_of(unit), self._kv.rows_of(unit)
        calls: tuple[Call, ...] = ()
        if kv.rows:
            queries, keys = self._lowerings.queries(q.rows), self._lowerings.keys(kv.rows)
            calls = self._lowerings.calls(queries, keys)
        operations: list[Operation] = []
        later: list[Operation] = []  # merges follow the attention that hides their transfer
        for task in self._schedule.order():
            part = task.index[0]
            if task.kind == GATHER_KV:
                operations.append(self._gather(task, unit, part))
            elif task.kind == COMPUTE:
                operations += [*self._attend(task, q, kv, part, calls), *later]
                later = []
            else:
                merges = [
                    op
                    for side in self._reduced
                    for op in side.merges(task.at(side.rule), side.rows_of(unit), part)
                ]
                operations += self._to_owners(task, unit, part) if self._reduces else merges
                later += merges if self._reduces else []
        buffers = (*self._q.buffers(q), *self._kv.buffers(kv))
        return Unit([*operations, *later], {buffer.name: buffer for buffer in buffers})

    def _gather(self, task: Task, unit: int, part: int) -> AllToAll:
        sides = (self._q, self._kv)
        inputs = [side.moved for side in sides if side.travels]
        key = (task, unit, self._slices, *inputs)  # both passes gather the same keys
        gather = self._known_gathers.get(key)
        if gather is None:
            moved = [side.gather(side.rows_of(unit), part) for side in sides]
            gather = self._known_gathers[key] = self._all_to_all(task, moved)
        return gather

    def _to_owners(self, task: Task, unit: int, part: int) -> list[Operation]:
        """Sends partial results of rows of others, and receives theirs of own rows."""
        rows = [(side, side.rows_of(unit)) for side in self._reduced]
        casts = [op for side, own in rows for op in side.to_wire(task, own, part)]
        return [*casts, self._all_to_all(task, [side.reduce(own, part) for side, own in rows])]

    def _all_to_all(self, task: Task, sides: list[tuple[ByMember, ByMember]]) -> AllToAll:
        """What the sides send and receive, together."""
        moved: list[tuple[tuple[Piece, ...], ...]] = []
        for by_member in zip(*sides, strict=True):
            pieces: list[tuple[Piece, ...]] = [()] * self._head_group.num_units
            for side in by_member:
                for member, more in side.items():
                    pieces[member] += more
            moved.append(tuple(pieces))
        return AllToAll(task, ALL_UNITS, *moved)

    def _attend(
        self, task: Task, q: RankRows, kv: RankRows, part: int, calls: tuple[Call, ...]
    ) -> list[Operation]:
        operations: list[Operation] = []
        if kv.rows:
            queries = {kind: self._q.operand(q, kind, part) for kind in self._q.inputs}
            k, v = (self._kv.operand(kv, kind, part) for kind in self._kv.inputs)
            sums = self._q.sums(q, part) + self._kv.sums(kv, part)
            operations.append(attention(task, queries, (k, v), sums, calls, (True, True)))
        if not self._q.travels:
            end = task.at("copy" if q.rows else "empty")
            operations += self._q.merges(end, q, part)
        return operations
