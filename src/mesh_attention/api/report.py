"""What a `ContextParallel` tells of itself: bytes, kernels and transports, planned and real."""

from __future__ import annotations

from mesh_attention.choose.pack import Layer, Pack
from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.read.count import PassCount, count
from mesh_attention.plan.read.verify import verify
from mesh_attention.runtime.device.workspace import PassMemory
from mesh_attention.runtime.session.plan_on_rank import PlanOnRank, PlanSource
from mesh_attention.runtime.session.prepared_call import CallOptions
from mesh_attention.runtime.session.share import Share
from mesh_attention.runtime.transport.interface import Counters


class Reports:
    _share: Share
    _options: CallOptions
    _fixed: PlanSource | None = None  # where the sizes are known from the start
    _latest: PlanSource | None = None  # where calls say them, without documents
    _batch: tuple[Plan, Pack, Layer] | None = None  # of the latest call, if it has documents
    _chosen_by: str | None = None  # where method and setting were chosen here

    @property
    def _source(self) -> PlanSource:
        found = self._fixed or self._latest
        if found is None:
            raise MeshAttentionError(
                "this object was made without sizes, and no call has said them yet: there is no "
                "plan; give seq_len, num_heads and head_dim, or make a call first"
            )
        return found

    @property
    def _mine(self) -> PlanOnRank:
        return self._source.first

    @property
    def plan(self) -> Plan:
        """The plan that was given, or that for the dtype given at the start; of an object without
        sizes that of the latest call, with documents or without."""
        if self._fixed is None and self._batch is not None:
            return self._batch[0]
        return self._mine.plan

    @property
    def choice(self) -> str:
        """Method and setting of the latest call, with documents or without, and how they were
        chosen, in a line; before the first call those of `plan`, where there is one."""
        why = self._chosen_by or "as asked for"
        if self._batch is not None:
            plan, pack, layer = self._batch
            why = f"for the documents of the latest call, {pack.reason_for(layer)}"
        elif self._fixed is None and self._latest is None:
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
        """Bytes this rank has really handed to its transport so far, by direction."""
        return {direction.value: c for direction, c in self._share.counters.items()}

    def kernels(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """Of the latest call of each pass, with documents or without: for each kind of block which
        kernels were asked, and why one was chosen."""
        return {
            f"{direction} {kind}": reasons
            for direction, report in self._share.reports.items()
            for kind, reasons in report.kernels.items()
        }

    def memory(self) -> dict[str, PassMemory]:
        """Of the latest call of each pass, with documents or without: bytes that it takes on this
        rank's device besides the caller's tensors, masks as far as they have been made."""
        return {str(direction): one.memory for direction, one in self._share.reports.items()}

    def transports(self) -> dict[str, tuple[str, str]]:
        """Of the latest call of each pass: for each group of ranks its transport, and why that
        one."""
        found: dict[str, tuple[str, str]] = {}
        for direction, report in self._share.reports.items():
            found |= report.transport.choices((direction,))
        return found
