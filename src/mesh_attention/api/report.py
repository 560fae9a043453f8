"""What a `ContextParallel` reports: bytes, kernels and transports, planned and real."""

from __future__ import annotations

from dataclasses import replace

from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.read.count import PassCount, count
from mesh_attention.request.arguments import refuse_if_wrong
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.device import PassMemory
from mesh_attention.runtime.transport.interface import Counters


class Reports:
    """A base of `ContextParallel`, which sets `_calls`."""

    _calls: ObjectCalls

    @property
    def plan(self) -> Plan:
        """The plan of this object. If sizes come with calls, that of the latest call."""
        calls = self._calls
        if calls.fixed is None and calls.batch is not None:
            return calls.batch[0]
        return calls.source.first.plan

    @property
    def choice(self) -> str:
        """A line: method and setting of the latest call, and how they were chosen. Before the first
        call those of `plan`, if the object has sizes."""
        calls = self._calls
        why = calls.chosen_by or "as asked for"
        if calls.batch is not None:
            plan, pack, layer = calls.batch
            why = f"for the documents of the latest call, {pack.reason_for(layer)}"
        elif calls.fixed is None and calls.latest is None:
            return f"nothing yet, for no call has said the sizes: {why}"
        else:
            plan = self.plan
        setting = [f"{name} {value}" for name, value in plan.forward.setting.items()]
        if plan.devices != tuple(range(plan.num_ranks)):
            setting.append("nodes in patches of the tiles")
        return f"{plan.method} ({', '.join(setting)}): {why}"

    def verify(self) -> None:
        """Prove the plan; raises if anything is wrong with it."""
        refuse_if_wrong(self.plan)

    def volume(self) -> dict[str, PassCount]:
        """Bytes that the plan moves and holds, counted from its programs."""
        return {direction.value: counted for direction, counted in count(self.plan).items()}

    @property
    def traffic(self) -> dict[str, Counters]:
        """Bytes that this rank has really handed to its transport so far, by pass. Experimental."""
        return {direction.value: c for direction, c in self._calls.user.counters.items()}

    def kernels(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For the latest call of each pass and each kind of block, and for the latest loss: which
        kernels were asked, and why one was chosen. Experimental."""
        user = self._calls.user
        return {
            f"{direction} {kind}": reasons
            for direction, report in user.reports.items()
            for kind, reasons in report.kernels.items()
        } | user.loss_kernels

    def memory(self, *, layers: int = 1) -> dict[str, PassMemory]:
        """For the latest call of each pass: bytes that it takes on this rank's device besides your
        tensors. `layers`: how many layers keep rows for the backward pass at the same time."""
        number("layers", layers)
        memory = {str(d): report.memory for d, report in self._calls.user.reports.items()}
        return {name: replace(x, kept_bytes=layers * x.kept_bytes) for name, x in memory.items()}

    def transports(self) -> dict[str, tuple[str, str]]:
        """For the latest call of each pass: the transport of each group of ranks, and why.
        Experimental."""
        transports: dict[str, tuple[str, str]] = {}
        for direction, report in self._calls.user.reports.items():
            transports |= report.transport.choices((direction,))
        return transports
