"""What a thread has cut on a process group: calls are held against it (`request/port_checks.py`).
Other threads, as those of loaders, may be batches ahead."""

from __future__ import annotations

import threading

from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.caches import LruCache

_NUM_KEPT = 64


class Shardings(threading.local):
    """
    plain    layouts of what was cut as one document, and whether a batch said its length
    packed   tokens of what was cut by several documents, by the slots of a rank
    """

    def __init__(self) -> None:
        self.plain: LruCache[Layout, bool] = LruCache(_NUM_KEPT)
        self.packed: LruCache[int, int] = LruCache(_NUM_KEPT)
        self.latest = 0  # tokens of what was cut last

    def has_slots(self, slots: int) -> bool:
        return slots in self.packed or any(layout.slots == slots for layout in self.plain)
