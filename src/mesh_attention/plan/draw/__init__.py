"""Pictures of a plan as text, all read from its programs: who computes what, in which steps.

Every function here is pure and returns a string or plain data; nothing is coloured and nothing is
printed, so the same text serves terminals, golden files and reports.
"""

from mesh_attention.plan.draw.matrix import Cells, computed_cells, draw_assignment
from mesh_attention.plan.draw.schedule import (
    ScheduleComparison,
    compare_schedulers,
    draw_steps,
    task_graph,
)
from mesh_attention.plan.draw.summary import bytes_text, draw_summary
from mesh_attention.plan.draw.work import Balance, balance

__all__ = [
    "Balance",
    "Cells",
    "ScheduleComparison",
    "balance",
    "bytes_text",
    "compare_schedulers",
    "computed_cells",
    "draw_assignment",
    "draw_steps",
    "draw_summary",
    "task_graph",
]
