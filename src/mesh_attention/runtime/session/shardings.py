"""What a thread has cut on a process group: a call that takes such shards for something else is
refused (`request/port_checks.py`). Other threads, as those of loaders, may be batches ahead."""

from __future__ import annotations

import threading

from mesh_attention.plan.problem.layout import Layout
from mesh_attention.runtime.session.caches import LruCache

_NUM_KEPT = 64  # layouts, and numbers of slots


class Shardings(threading.local):
    """
    plain    layouts of tensors that were cut as one document, and whether a batch said its length
    packed   tokens of tensors that were cut by several documents, by their slots on a rank
    latest   layout of the latest
    """

    def __init__(self) -> None:
        self.plain: LruCache[Layout, bool] = LruCache(_NUM_KEPT)
        self.packed: LruCache[int, int] = LruCache(_NUM_KEPT)
        self.latest: Layout | None = None

    def note(self, layouts: tuple[Layout, Layout], *, of_batch: bool, packed: bool) -> None:
        """Of queries and keys."""
        for layout in layouts:
            if packed:
                self.packed.keep(layout.slots, layout.num_tokens)
            else:
                self.plain.keep(layout, of_batch)
        self.latest = layouts[0]

    def has_slots(self, slots: int) -> bool:
        return slots in self.packed or any(layout.slots == slots for layout in self.plain)
