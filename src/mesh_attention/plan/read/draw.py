"""Pictures of a plan as text: a summary, the steps of its schedule, and who computes what.

The command line, reports and golden files show them. All is read from the programs, so a drawing
shows what will run and not what was meant. Nothing is coloured and nothing is printed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.computed_pairs import balance
from mesh_attention.plan.language.plan import Pass, Plan
from mesh_attention.plan.language.program import Attention, CallKind, whole_call
from mesh_attention.plan.language.tasks import Schedule
from mesh_attention.plan.language.text import digest
from mesh_attention.plan.problem.arguments import bytes_text
from mesh_attention.plan.problem.layout import Layout
from mesh_attention.plan.problem.problem import problem_text
from mesh_attention.plan.problem.row_ranges import RowRanges
from mesh_attention.plan.problem.runs import pairs_of_parts
from mesh_attention.plan.problem.spans import Spans, slice_spans
from mesh_attention.plan.read.count import PassCount, count


def draw_summary(plan: Plan) -> str:
    """A plan on one screen: what it solves, what it chose, what it costs."""
    counts = count(plan)
    rows = [
        ("plan", f"{plan.method} on {plan.num_ranks} ranks{_nodes_text(plan)}"),
        ("problem", problem_text(plan.problem)),
        ("layout", _layout_text(plan)),
        ("digest", digest(plan)[:12]),
    ]
    lines = [f"{name:<9} {text}" for name, text in rows]
    for pass_ in plan.passes:
        lines += [f"{pass_.direction}", *_pass_lines(plan, pass_, counts[pass_.direction])]
    return "\n".join(lines)


def _nodes_text(plan: Plan) -> str:
    if not plan.ranks_per_node:
        return ""
    mapped = "" if plan.devices == tuple(range(plan.num_ranks)) else ", mapped as patches of tiles"
    nodes = "node" if plan.num_nodes == 1 else "nodes"
    return f" in {plan.num_nodes} {nodes} of {plan.ranks_per_node}{mapped}"


def _layout_text(plan: Plan) -> str:
    (q, kv), inside = plan.shards, plan.q_layout
    block = f" by blocks of {inside.block}" if inside.block > 1 else ""
    if q.slots == kv.slots:
        slots = f"{q.slots} slots a rank"
    else:
        slots = f"{q.slots} query and {kv.slots} key slots a rank"
    padding = q.padded_tokens - q.num_tokens
    padded = f", {padding} of all query slots are padding" if padding else ""
    kind = f"contiguous shards, {inside.kind}" if plan.relayout else f"{inside.kind}"
    return f"{kind}{block}{' inside' if plan.relayout else ''}, {slots}{padded}"


def _pass_lines(plan: Plan, pass_: Pass, counted: PassCount) -> list[str]:
    numbers = counted.to_json()
    volume = _mean_max_text(numbers["bytes_per_rank"])
    if plan.num_nodes > 1:
        volume += f"; between nodes {_mean_max_text(numbers['inter_node_bytes_per_rank'])}"
    rows = [
        ("setting", ", ".join(f"{key} {value}" for key, value in pass_.setting.items())),
        ("groups", _groups_text(pass_)),
        ("receives", f"{volume}; {numbers['units_total']:g} units over all ranks"),
        ("buffers", f"at most {bytes_text(counted.peak_buffer_bytes)} of workspace at once"),
        ("balance", f"max/mean visible pairs {balance(plan, pass_).ratio:.4f}"),
        ("steps", f"{len(pass_.schedule.steps)}"),
    ]
    return [f"  {name:<8} {text}" for name, text in rows if text]


def _mean_max_text(values: dict[str, float]) -> str:
    mean = f"{bytes_text(values['mean'])} a rank"
    same = values["max"] == values["mean"]
    return mean if same else f"{mean} (max {bytes_text(values['max'])})"


def _groups_text(pass_: Pass) -> str:
    """Groups by the letters of their names: Q0, Q1, ... are the Q groups."""
    families: dict[str, list[str]] = {}
    for name in pass_.groups:
        families.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    parts = []
    for family, names in families.items():
        members = pass_.groups[names[0]]
        shown = " ".join(map(str, members[:8])) + (" ..." if len(members) > 8 else "")
        parts.append(f"{len(names)} {family} of {len(members)} ({names[0]}: {shown})")
    return ", ".join(parts) or "none: every rank works alone"


NOBODY, SEVERAL = -1, -2
MOST_PARTITIONS = 64  # a grid of more does not fit on a screen; then a corner of it is drawn
_CORNER = 32


@dataclass(frozen=True, slots=True)
class Cells:
    """`ranks[i, j]` computes Q partition i against KV partition j, or NOBODY, or SEVERAL do."""

    ranks: NDArray[np.int64]
    several: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> list[list[int | list[int] | None]]:
        """Nested lists: a rank, a list of ranks, or null where nothing is computed."""
        rows: list[list[int | list[int] | None]] = [
            [None if rank == NOBODY else rank for rank in row] for row in self.ranks.tolist()
        ]
        for (i, j), ranks in self.several.items():
            rows[i][j] = list(ranks)
        return rows


def computed_cells(
    plan: Plan,
    pass_: Pass,
    *,
    whole_tasks: bool = False,
    first: int | None = None,
    head: int | None = None,
) -> Cells:
    """Cells of the first `first` partitions (None: all) in which a rank computes visible pairs.

    `whole_tasks` counts every cell that a rank's tasks span, also cells that the mask empties.
    `head` is the query head to look at (None: all): ranks that exchange tokens for heads share
    cells, but not of the same head.
    """
    size = plan.num_ranks if first is None else min(first, plan.num_ranks)
    ranks = np.full((size, size), NOBODY, dtype=np.int64)
    several: dict[tuple[int, int], set[int]] = {}
    for rank, queries, keys, computes in _work_of(plan, pass_, whole_tasks, head):
        rows, columns = queries.partitions < size, keys.partitions < size
        q, kv = queries.partitions[rows], keys.partitions[columns]
        index = np.ix_(q, kv)
        there, computes = ranks[index], computes[np.ix_(rows, columns)]
        shared = computes & (there != NOBODY) & (there != rank)
        for x, y in np.argwhere(shared).tolist():
            cell = (int(q[x]), int(kv[y]))
            several.setdefault(cell, {int(there[x, y])}).add(rank)
        ranks[index] = np.where(shared, SEVERAL, np.where(computes, rank, there))
    return Cells(ranks, {cell: tuple(sorted(ranks_there)) for cell, ranks_there in several.items()})


class OwnedRows:
    """Rows at some places, by the partition that owns them; `partitions` names each owner once."""

    def __init__(self, layout: Layout, places: Spans) -> None:
        slots = layout.slots
        owned = [
            (owner, max(start, owner * slots), min(stop, (owner + 1) * slots))
            for start, stop in places
            for owner in range(start // slots, -(-stop // slots))
        ]
        owners = np.array([owner for owner, _, _ in owned], dtype=np.int64)
        self.partitions, self._index = np.unique(owners, return_inverse=True)
        self._runs = [layout.runs(start, stop) for _, start, stop in owned]

    def see(self, keys: OwnedRows, mask: RowRanges) -> NDArray[np.bool_]:
        """Whether any row of each partition sees any key of each of the keys' partitions."""
        q, k = np.nonzero(pairs_of_parts(self._runs, keys._runs, mask))
        seen = np.zeros((len(self.partitions), len(keys.partitions)), dtype=np.bool_)
        seen[self._index[q], keys._index[k]] = True
        return seen


def _work_of(
    plan: Plan, pass_: Pass, whole_tasks: bool, head: int | None
) -> Iterator[tuple[int, OwnedRows, OwnedRows, NDArray[np.bool_]]]:
    """For each kernel call, or task: its rank and rows, and in which cells it computes anything."""

    @cache
    def rows(layout: Layout, buffer: Buffer, start: int, stop: int) -> OwnedRows:
        return OwnedRows(layout, slice_spans(buffer.rows, start, stop))

    for program in pass_.programs:
        table = program.buffer_table()
        for op in program.operations:
            if not isinstance(op, Attention):
                continue
            q_buffer, k_buffer = table[op.q.buffer], table[op.k.buffer]
            if head is not None and head not in range(*op.q.heads_of(q_buffer)):
                continue
            for call in (whole_call(op, CallKind.FULL),) if whole_tasks else op.calls:
                q_first, k_first = op.q.start, op.k.start
                q = rows(plan.q_layout, q_buffer, q_first + call.q_start, q_first + call.q_stop)
                k = rows(plan.kv_layout, k_buffer, k_first + call.k_start, k_first + call.k_stop)
                if call.kind is CallKind.FULL:
                    computes = np.ones((len(q.partitions), len(k.partitions)), dtype=np.bool_)
                else:
                    computes = q.see(k, plan.problem.rows)
                yield program.rank, q, k, computes


def visible_cells(plan: Plan, first: int) -> NDArray[np.bool_]:
    """Which cells of the first partitions hold any visible pair at all."""
    queries, keys = (
        OwnedRows(layout, ((0, first * layout.slots),))
        for layout in (plan.q_layout, plan.kv_layout)
    )
    return queries.see(keys, plan.problem.rows)


def draw_assignment(
    plan: Plan, pass_: Pass, *, whole_tasks: bool = False, first: int | None = None
) -> str:
    """A row for each Q partition, a column for each KV partition, the rank that computes the cell
    (algorithm.md, section 1).

    Cells that the mask empties are `.`; with `whole_tasks` they show the rank whose tasks span
    them. A visible cell that nobody computes would be `?`, a cell that several ranks share is `*`.
    `first` limits the grid to the first partitions; by default all up to 64, else the first 32.

       KV  0 1 2 3
      Q 0  0 1 0 1
        1  0 1 0 1
        2  2 3 2 3
        3  2 3 2 3
    """
    total = plan.num_ranks
    if first is None:
        first = total if total <= MOST_PARTITIONS else _CORNER
    size = min(first, total)
    ranks = computed_cells(plan, pass_, whole_tasks=whole_tasks, first=size).ranks.tolist()
    visible = visible_cells(plan, size).tolist()
    signs = [
        [_sign(rank, seen) for rank, seen in zip(row, visible_row, strict=True)]
        for row, visible_row in zip(ranks, visible, strict=True)
    ]
    width = len(str(total - 1))
    more = " ..." if size < total else ""
    labels = [f"{'KV':>{4 + width}}", *(f"{'' if i else 'Q':>3} {i:>{width}}" for i in range(size))]
    lines = [
        f"{label}  {' '.join(f'{cell:>{width}}' for cell in row)}{more}"
        for label, row in zip(labels, [[str(j) for j in range(size)], *signs], strict=True)
    ]
    if more:
        lines.append(f"{'':>3}...")
        lines.append(f"the first {size} of {total} partitions; `first` sets how many are drawn")
    used = {sign for row in signs for sign in row}
    return "\n".join([*lines, *(meaning for meaning in _MEANINGS if meaning[0] in used)])


_MEANINGS = (
    ". the mask shows nothing here",
    "* several ranks share this cell",
    "? visible, but computed by nobody",
)


def _sign(rank: int, visible: bool) -> str:
    if rank == NOBODY:
        return "?" if visible else "."
    return "*" if rank == SEVERAL else str(rank)


def draw_steps(schedule: Schedule) -> str:
    """One row for each step, with the paper's names; an idle stream is a dash.

    >>> print(draw_steps(Schedule.parse("1 AG-Q-0 + C-0-0\\n2 compute only C-1-0")))
    step  communication  compute
       1  AG-Q-0         C-0-0
       2  -              C-1-0
    """
    rows = [
        (str(number), str(step.communication or "-"), " ".join(map(str, step.compute)) or "-")
        for number, step in enumerate(schedule.steps, 1)
    ]
    rows.insert(0, ("step", "communication", "compute"))
    width = max(len(communication) for _, communication, _ in rows)
    return "\n".join(f"{number:>4}  {left:<{width}}  {right}" for number, left, right in rows)
