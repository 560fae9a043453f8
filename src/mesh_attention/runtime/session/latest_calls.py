"""The latest calls of a context, by kinds that all ranks know or none of them.

Whether a kind of call is known decides whether ranks stop to agree on it, so it must be the same on
all of them: it depends on what they compare, and on nothing that one of them chooses alone. Those
choices (a kernel, the device, nvtx) tell apart a rank's own calls of one kind.
"""

from __future__ import annotations

from collections.abc import Hashable

from mesh_attention.runtime.agreement.identity import AgreedKind
from mesh_attention.runtime.execute.binding import CallShape
from mesh_attention.runtime.session.lru_cache import Latest, LatestAgreed
from mesh_attention.runtime.session.prepared_call import CallOptions, PreparedCall

NUM_CHOICES = 4  # of this rank alone, for each kind

CallKey = tuple[tuple[str, str], CallOptions, CallShape]  # the first is that of the plan


class _CallsOfKind:
    def __init__(self, kinds: dict[bool, AgreedKind]) -> None:
        self.kinds = kinds
        self.calls: Latest[Hashable, PreparedCall] = Latest(NUM_CHOICES)

    @property
    def last_call(self) -> int:
        return max((kind.last_call for kind in self.kinds.values()), default=0)


class LatestCalls:
    """Of at most `limit` kinds."""

    def __init__(self, limit: int) -> None:
        self._kept: LatestAgreed[Hashable, _CallsOfKind] = LatestAgreed(limit)

    def find(self, key: CallKey) -> PreparedCall | None:
        found = self._kept.get(_compared(key))
        return None if found is None else found.calls.find(key)

    def kinds(self, key: CallKey) -> dict[bool, AgreedKind]:
        """Those that ranks have agreed on, by needs_grad."""
        found = self._kept.get(_compared(key))
        return {} if found is None else found.kinds

    def keep(self, key: CallKey, call: PreparedCall) -> None:
        compared = _compared(key)
        found = self._kept.get(compared)
        if found is None:
            found = _CallsOfKind(call.kinds)
        found.kinds.update(call.kinds)
        call.kinds = found.kinds
        found.calls.keep(key, call)
        self._kept.keep(compared, found)

    def values(self) -> list[PreparedCall]:
        return [call for kept in self._kept.values() for call in kept.calls.values()]

    def one_of_each(self) -> list[PreparedCall]:
        """Of every kind one call: as many, and in the same order, on all ranks."""
        return [[*kept.calls.values()][-1] for kept in self._kept.values()]

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


def _compared(key: CallKey) -> Hashable:
    plan, options, call_shape = key
    device = call_shape.device.type
    return plan, options.compared, call_shape.batch, call_shape.dtype, device
