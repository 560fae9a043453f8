"""Schedulers: pure functions from a task graph with costs to an order of tasks.

`greedy` is the paper's planner, `search` looks for a faster order, `greedy_capped` keeps to a
memory cap. All return a `Schedule`, which `check_schedule` verifies and makespans time.
"""

from mesh_attention.plan.schedule.greedy import greedy
from mesh_attention.plan.schedule.makespan import (
    event_makespan,
    event_times,
    lower_bound,
    strict_makespan,
)
from mesh_attention.plan.schedule.memory import (
    MemoryCapError,
    MemoryModel,
    greedy_capped,
    peak_bytes,
    smallest_cap,
)
from mesh_attention.plan.schedule.search import SearchResult, search
from mesh_attention.plan.schedule.slices import follow_each_other, one_after_another
from mesh_attention.plan.schedule.tasks import (
    CommunicationTask,
    ComputeTask,
    Schedule,
    Step,
    TaskGraph,
    check_schedule,
)

__all__ = [
    "CommunicationTask",
    "ComputeTask",
    "MemoryCapError",
    "MemoryModel",
    "Schedule",
    "SearchResult",
    "Step",
    "TaskGraph",
    "check_schedule",
    "event_makespan",
    "event_times",
    "follow_each_other",
    "greedy",
    "greedy_capped",
    "lower_bound",
    "one_after_another",
    "peak_bytes",
    "search",
    "smallest_cap",
    "strict_makespan",
]
