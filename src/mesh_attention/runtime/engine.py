"""One rank's side of a plan over torch.distributed: groups, agreement, executors, workspace.

Executors are kept by the form of the tensors (batch, dtype, device), so a warm call plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.text import digest
from mesh_attention.runtime.executor import Executor, Form, run_to_end
from mesh_attention.runtime.handshake import Handshake
from mesh_attention.runtime.transport.distributed import DistributedTransport
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Counters
from mesh_attention.runtime.workspace import Workspace

__all__ = ["Engine"]


class Engine:
    """`make_plan(element_bytes)` is asked once for each size of element that turns up."""

    def __init__(
        self,
        parent: dist.ProcessGroup,
        make_plan: Callable[[int], Plan],
        *,
        softmax_scale: float | None,
        kernel: str | None,
        timeout: timedelta | None,
    ) -> None:
        self.groups = Groups(parent, timeout)
        self.handshake = Handshake(self.groups, timeout)
        self.device_index = dist.get_rank(parent)
        self.counters: dict[Direction, Counters] = {}
        self._make_plan = make_plan
        self._softmax_scale = softmax_scale
        self._kernel = kernel
        self._workspace = Workspace()
        self._plans: dict[int, tuple[Plan, str]] = {}
        self._executors: dict[tuple[Direction, Form], Executor] = {}
        self._agreed: dict[object, dict[str, object]] = {}
        self._calls = 0
        self._statement: dict[str, object] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._closed = False
        self._broken = False  # a call ended in the middle: transfers may be under way for ever

    def plan(self, element_bytes: int) -> Plan:
        return self._planned(element_bytes)[0]

    def _planned(self, element_bytes: int) -> tuple[Plan, str]:
        if element_bytes not in self._plans:
            plan = self._make_plan(element_bytes)
            self._plans[element_bytes] = (plan, f"{digest(plan)} ({_in_words(plan)})")
        return self._plans[element_bytes]

    def rank(self, plan: Plan) -> int:
        """The logical rank that this process plays."""
        return plan.devices.index(self.device_index)

    def agree_on_plan(self, element_bytes: int, error: MeshAttentionError | None) -> None:
        """First meeting of all ranks: the same plan everywhere, or an error everywhere.

        `error` is what is wrong with this rank's other arguments.
        """
        try:
            if error is not None:
                raise error
            statement = {
                "plan": self._planned(element_bytes)[1],
                "softmax_scale": self._softmax_scale,
            }
        except Exception as found:  # whatever it is, the others must not wait for us
            self.handshake.agree({}, found)
            raise
        self.handshake.agree(statement)

    def prepare(self, form: Form, needs_grad: bool, error: MeshAttentionError | None) -> None:
        """Agree on a kind of call once; afterwards nothing is exchanged."""
        self.refuse_if_closed()
        self._calls += 1
        key = (form, needs_grad)
        if error is None and key in self._agreed:
            self._statement = self._agreed[key]
            return
        statement: dict[str, object] = {}
        try:
            if error is None:
                statement = {
                    "plan": self._planned(form.dtype.itemsize)[1],
                    "batch": form.batch,
                    "dtype": str(form.dtype),
                    "device": form.device.type,
                    "needs_grad": needs_grad,
                }
                # A kernel may refuse what only some ranks have to do: all must hear of it.
                for direction in Direction if needs_grad else (Direction.FORWARD,):
                    self.executor(direction, form)
        except MeshAttentionError as refused:
            error = refused
        self.handshake.agree(statement, error, call=self._calls)
        self.groups.prepare(self.plan(form.dtype.itemsize))
        self._agreed[key] = self._statement = statement

    def _look_around(self) -> None:
        """Asked during a long wait: another rank may be at something else in this very call, and
        wait for an agreement that we skipped. Then all of us make it, and hear who is odd."""
        if self.handshake.is_called_for(self._calls):
            self.handshake.agree(self._statement, call=self._calls)

    def run(
        self, direction: Direction, form: Form, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        try:
            return run_to_end(self.executor(direction, form).run(inputs))
        except MeshAttentionError:
            self._broken = True
            raise

    def executor(self, direction: Direction, form: Form) -> Executor:
        self.refuse_if_closed()
        key = (direction, form)
        if key not in self._executors:
            plan = self.plan(form.dtype.itemsize)
            rank, one = self.rank(plan), plan.direction(direction)
            transport = DistributedTransport(
                plan, one, rank, self.groups, self._stream(form.device), self._look_around
            )
            counters = self.counters.setdefault(direction, transport.meter.counters)
            transport.meter.counters = counters
            self._executors[key] = Executor(
                plan,
                one,
                rank,
                transport,
                self._workspace,
                form,
                softmax_scale=self._scale(plan),
                kernel=self._kernel,
            )
        return self._executors[key]

    def _scale(self, plan: Plan) -> float:
        given = self._softmax_scale
        return float(plan.problem.head_dim) ** -0.5 if given is None else given

    def kernel_choices(self) -> dict[str, tuple[tuple[str, str], ...]]:
        return {
            f"{direction} {kind}": choice.reasons
            for (direction, _), executor in self._executors.items()
            for kind, choice in executor.choices.items()
        }

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise MeshAttentionError("this ContextParallel is closed; make a new one")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._executors.clear()
            self._workspace.release()
            self.groups.close(abort=self._broken)


def _in_words(plan: Plan) -> str:
    """Enough of a plan for people to see in what two of them differ."""
    p = plan.problem
    heads = f"{p.num_heads} heads of {p.head_dim}, {p.kv_heads} KV heads"
    setting = ", ".join(f"{name} {value}" for name, value in plan.forward.setting.items())
    tokens = f"{p.q_tokens} by {p.keys} tokens"
    return f"{plan.method}, {tokens}, {heads}, {p.mask.describe()}, {plan.q_layout.kind}, {setting}"
