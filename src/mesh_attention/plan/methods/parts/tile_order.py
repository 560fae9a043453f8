"""Both sides of a box are gathered: the order of its tasks, and what a unit does of them.

Like the orders of rings, an order is the same for all units. `tasks` is the order of the programs;
`steps` is the schedule, which shows transfers beside the computation that hides them; `in_parts`
says whether reductions are split at their transfers; `setting` says it in words; and `unit` is what
one unit does. Where ranks exchange tokens for heads chunk by chunk (`exchange.py`), an order also
says where each exchange stands. `box.py` chooses an order.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import cached_property

from mesh_attention.plan.language.buffers import Buffer
from mesh_attention.plan.language.program import Operation, Task
from mesh_attention.plan.language.tasks import Schedule, Step
from mesh_attention.plan.methods.parts.exchange import SUM, comes_by, goes_by
from mesh_attention.plan.methods.parts.lower import COMPUTE, Lowerings
from mesh_attention.plan.methods.parts.tile_plan import TilePass
from mesh_attention.plan.methods.parts.tile_side import GATHER_KV, GATHER_Q
from mesh_attention.plan.methods.parts.tile_tasks import CAPPED

MOST_ATTENTIONS = 3  # of an uneven share of heads


class TileBlocks:
    """What one unit does: every Q chunk with every KV chunk."""

    def __init__(self, tiles: TilePass, lowerings: Lowerings, unit: int) -> None:
        self._tiles, self._lowerings = tiles, lowerings
        self._row, self._column = tiles.tile.row(unit), tiles.tile.column(unit)
        self._begun = {tiles.q.reduce_kind: set[int](), tiles.kv.reduce_kind: set[int]()}
        self.buffers: dict[str, Buffer] = {}

    def operations(self, task: Task) -> list[Operation]:
        tiles, lowerings, (i, j) = self._tiles, self._lowerings, task.index
        queries = lowerings.queries(tiles.q.spans(self._row, i))
        calls = lowerings.calls(queries, lowerings.keys(tiles.kv.spans(self._column, j)))
        if not calls:
            return []
        begun_q, begun_kv = self._begun.values()  # chunks whose sums hold something
        fresh = (i not in begun_q, j not in begun_kv)
        begun_q.add(i)
        begun_kv.add(j)
        return [tiles.attend(task, calls, fresh)]

    def empty(self, task: Task) -> list[Operation]:
        """Neutral results where a unit has computed none."""
        (index,) = task.index
        if index in self._begun[task.kind]:
            return []
        return self._tiles.side_of[task.kind].empty(task.at("empty"), index)


class TileOrder:
    """Queries and keys are gathered, in the order of a scheduler (`ordered_by`).

    Computation runs in program order, so a computation that needs a transfer stands after the
    computation that hides the transfer. A reduction is in parts, each up to a transfer: `RS-Q-0` is
    the first part, `RS-Q-0.1` the second. After each attention comes the next part of every
    reduction that has begun. Under a memory cap reductions are in one part, since their buffers are
    held until the last. An exchange comes before the gather that needs it, or after the last part
    of all reductions that feed it; its sums follow one attention later.
    """

    unit = TileBlocks

    def __init__(self, tiles: TilePass, schedule: Schedule, ordered_by: str) -> None:
        self.in_parts = ordered_by != CAPPED
        self._ordered_by = ordered_by
        self._tiles = tiles
        self._gathers = {GATHER_Q: tiles.tile.a > 1, GATHER_KV: tiles.tile.b > 1}
        self._before: dict[Task, Task] = {}  # the exchange that must come before a gather
        self._feeds: dict[Task, Task] = {}  # the exchange of each reduction
        self._find_exchanges(schedule)
        self._unfinished = Counter(self._feeds.values())
        self._begun: list[deque[Task]] = []  # what is left of each communication
        self._steps: list[tuple[Task | None, list[Task]]] = [(None, [])]
        self.tasks: list[Task] = []
        self._make(schedule)
        self.steps = tuple(Step(task, tuple(c)) for task, c in self._steps if task or c)

    @cached_property
    def setting(self) -> dict[str, str]:
        tiles, words = self._tiles, {"tile": str(self._tiles.tile)}
        words["rotation"] = "on" if tiles.tile.rotation else "off"
        kv_reduce = tiles.kv.reduce_by.value if tiles.kv.reduce_kind else "none"
        ways = {"q_reduce": tiles.q.reduce_by.value, "kv_reduce": kv_reduce}
        return {**words, **tiles.cut_setting, **ways, "scheduler": self._ordered_by}

    def _find_exchanges(self, schedule: Schedule) -> None:
        tiles, cut, came = self._tiles, self._tiles.head_group.cut, set[Task]()
        for task in schedule.order() if cut else ():
            assert cut is not None
            key_side = task.kind in (GATHER_KV, tiles.kv.reduce_kind)
            if task.kind in self._gathers:
                exchange = comes_by(cut, key_side, *task.index)
                if exchange not in came:
                    self._before[task] = exchange
                    came.add(exchange)
            elif task.kind != COMPUTE:
                self._feeds[task] = goes_by(cut, tiles.direction, key_side, *task.index)

    def _make(self, schedule: Schedule) -> None:
        for step in schedule.steps:
            if step.communication is None:
                self._steps.append((None, []))
            else:
                self._begin(step.communication)
            for task in step.compute:
                self.tasks.append(task)
                self._steps[-1][1].append(task)
                self._begun = [parts for parts in self._begun if parts]
                for parts in self._begun:
                    self._next_part(parts)
        for parts in self._begun:
            while parts:
                self._next_part(parts)

    def _begin(self, task: Task) -> None:
        if task in self._before:
            self._exchange(self._before[task])
        if self._gathers.get(task.kind, True):
            self._steps.append((task, []))
        num_parts = 1
        if self.in_parts and task.kind not in self._gathers:
            num_parts = len(self._tiles.parts(0, task))
        self._begun.append(deque([task, *(task.at(f"{part}") for part in range(1, num_parts))]))
        self._next_part(self._begun[-1])

    def _next_part(self, parts: deque[Task]) -> None:
        task = parts.popleft()
        self.tasks.append(task)
        exchange = None if parts else self._feeds.get(task.whole)
        if exchange is not None:
            self._unfinished[exchange] -= 1
            if not self._unfinished[exchange]:
                self._exchange(exchange)
                parts.append(exchange.at(SUM))

    def _exchange(self, task: Task) -> None:
        self.tasks.append(task)
        self._steps.append((task, []))


class UnevenOrder:
    """The order of one uneven share of heads, which takes one attention for each of its ranges of
    uniform heads (`HeadGroup.uniform_heads`). `steps` are those of the most that a share can have.
    """

    in_parts = False
    unit = TileBlocks

    def __init__(self, tiles: TilePass) -> None:
        self._tiles = tiles
        kinds = [kind for kind in (tiles.q.reduce_kind, tiles.kv.reduce_kind) if kind]
        steps: list[Step] = []
        for at in range(MOST_ATTENTIONS):
            steps.append(Step(None, (Task(COMPUTE, (at, at)),)))
            steps += [Step(Task(kind, (at,)), ()) for kind in kinds]
        self.steps = tuple(steps)
        own = len(tiles.q.chunks) * (1 + len(kinds))
        self.tasks = list(Schedule(self.steps[:own]).order())

    @property
    def setting(self) -> dict[str, str]:
        group = self._tiles.head_group
        most = -(-self._tiles.problem.num_heads // group.degree)
        work = f"work max/mean {most * group.degree / self._tiles.problem.num_heads:.3f}"
        return {"heads": f"at most {most} a rank, {work}"}
