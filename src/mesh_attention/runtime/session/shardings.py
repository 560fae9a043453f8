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
    packed   tokens of what was cut by several documents, by the slots of a rank; a batch of so
             many slots takes the place of the one before
    """

    def __init__(self) -> None:
        self.plain: LruCache[Layout, bool] = LruCache(_NUM_KEPT)
        self.packed: LruCache[int, int] = LruCache(_NUM_KEPT)
        self.latest = 0  # tokens of what was cut last

    def keep_plain(self, layout: Layout, of_batch: bool) -> None:
        # Whoever says a length of its own means it, whatever batches bring.
        self.plain.keep(layout, of_batch and self.plain.get(layout, True))
        self.packed.pop(layout.slots, None)

    def keep_packed(self, layout: Layout) -> None:
        for other in [x for x, of_batch in self.plain.items() if of_batch]:
            if other.slots == layout.slots:
                del self.plain[other]
        self.packed.keep(layout.slots, layout.num_tokens)

    def is_packed(self, slots: int) -> bool:
        """Whether what has so many slots on a rank is known to have several documents."""
        return slots in self.packed and not any(x.slots == slots for x in self.plain)

    def has_slots(self, slots: int) -> bool:
        return slots in self.packed or any(layout.slots == slots for layout in self.plain)
