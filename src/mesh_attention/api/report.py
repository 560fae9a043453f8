"""What a `ContextParallel` tells of itself: bytes, kernels and transports, planned and real."""

from __future__ import annotations

from dataclasses import replace

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.problem.arguments import number
from mesh_attention.plan.read.count import PassCount, count
from mesh_attention.plan.read.verify import verify
from mesh_attention.request.object_calls import ObjectCalls
from mesh_attention.runtime.device import PassMemory
from mesh_attention.runtime.transport.interface import Counters


class Reports:
    _calls: ObjectCalls

    @property
    def plan(self) -> Plan:
        """The plan that was given, or that for the dtype given at the start; of an object without
        sizes that of the latest call, with documents or without."""
        calls = self._calls
        if calls.fixed is None and calls.batch is not None:
            return calls.batch[0]
        return calls.source.first.plan

    @property
    def choice(self) -> str:
        """Method and setting of the latest call, with documents or without, and how they were
        chosen, in a line; before the first call those of `plan`, where there is one."""
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
        findings = verify(self.plan)
        if findings:
            raise MeshAttentionError(f"the plan is wrong: {findings[0]}")

    def volume(self) -> dict[str, PassCount]:
        """Bytes that the plan moves and holds, counted from its programs."""
        return {direction.value: counted for direction, counted in count(self.plan).items()}

    @property
    def traffic(self) -> dict[str, Counters]:
        """Bytes this rank has really handed to its transport so far, by direction. Experimental."""
        return {direction.value: c for direction, c in self._calls.user.counters.items()}

    def kernels(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """Of the latest call of each pass, with documents or without: for each kind of block which
        kernels were asked, and why one was chosen. Experimental."""
        return {
            f"{direction} {kind}": reasons
            for direction, report in self._calls.user.reports.items()
            for kind, reasons in report.kernels.items()
        }

    def memory(self, *, layers: int = 1) -> dict[str, PassMemory]:
        """Of the latest call of each pass, with documents or without: bytes that it takes on this
        rank's device besides the caller's tensors, masks as far as they have been made. `layers`:
        so many keep their rows for the backward pass at the same time."""
        number("layers", layers)
        memory = {str(d): report.memory for d, report in self._calls.user.reports.items()}
        return {name: replace(x, kept_bytes=layers * x.kept_bytes) for name, x in memory.items()}

    def transports(self) -> dict[str, tuple[str, str]]:
        """Of the latest call of each pass: for each group of ranks its transport, and why that
        one. Experimental."""
        transports: dict[str, tuple[str, str]] = {}
        for direction, report in self._calls.user.reports.items():
            transports |= report.transport.choices((direction,))
        return transports
