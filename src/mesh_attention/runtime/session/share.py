"""One user of a context: which calls are its own, what they moved, and whether it is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.runtime.agreement.identity import AgreedKind, Identity
from mesh_attention.runtime.session.prepared_call import CallOptions, PassReport, PreparedCall
from mesh_attention.runtime.transport.groups import is_registered
from mesh_attention.runtime.transport.interface import Counters

if TYPE_CHECKING:
    from mesh_attention.runtime.session.context import Context


class Share:
    """One user's share of a context: a `ContextParallel`, or `mesh_attention()`."""

    def __init__(self, context: Context, number: int) -> None:
        self.context = context
        self.counters: dict[Direction, Counters] = {}  # bytes of this user's calls
        self.reports: dict[Direction, PassReport] = {}  # of its latest call with such a pass
        self._number = number
        self._closed = False

    def begin(
        self,
        kind: AgreedKind,
        name: str,
        options: CallOptions,
        device: torch.device,
        label: str | int | None = None,
        of: int = 0,
        *,
        sinks: bool = False,
    ) -> None:
        """All ranks are about to make this pass, or none gets a result. `of`: the place of the
        forward call that a backward pass belongs to."""
        context = self.context
        identity = Identity(kind, name, self._number, repr(label), of, sinks)
        context.guard.begin(identity, options.timeout, context.transports.stream(device))
        context.num_begun += 1
        kind.last_call = context.num_begun

    def run(
        self, call: PreparedCall, direction: Direction, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self.reports |= call.reports
        results = call.run(direction, inputs, self.counters.setdefault(direction, Counters()))
        self.context.guard.settle(results.values())
        return results

    def refuse_if_closed(self, *, sends: bool = True) -> None:
        """Also if the context is broken, or belongs to the process that this was forked from, by
        whose connections nothing is sent."""
        if sends:
            self.context.refuse_copies()
        if self._closed:
            closed = MeshAttentionError("this ContextParallel is closed; make a new one")
            raise self.context.guard.known(closed)
        if not is_registered(self.context.groups.parent):
            destroyed = MeshAttentionError(
                "the process group of this call was destroyed (destroy_process_group); make a new "
                "group and a new ContextParallel on it"
            )
            raise self.context.guard.known(destroyed)
        self.context.guard.refuse_if_broken()

    def close(self) -> None:
        """Only this tells the context that a user is gone: garbage is collected at another time on
        each rank, and process groups must be released in the same order everywhere."""
        if not self._closed:
            self._closed = True
            if self.context.is_copy:
                return  # all that it holds is the parent's
            self.reports.clear()
            self.context.num_shares -= 1
            if self.context.num_shares == 0:
                self.context.release()
