"""One rank's side of a plan over torch.distributed: groups, agreement, executors, workspace.

Executors are kept by the shape of the call (batch, dtype, device), so a warm call plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.plan import Direction, Plan
from mesh_attention.plan.text import digest
from mesh_attention.runtime.executor import CallShape, Executor, nvtx_span, run_to_end
from mesh_attention.runtime.graph import CapturedCall
from mesh_attention.runtime.handshake import Handshake
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.interface import Counters
from mesh_attention.runtime.transports import TransportName, Transports
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
        transport: TransportName = TransportName.AUTO,
        timeout: timedelta | None,
        cuda_graph: bool = False,
        nvtx: bool = False,
    ) -> None:
        self.groups = Groups(parent, timeout)
        self.handshake = Handshake(self.groups, timeout)
        self.device_index = dist.get_rank(parent)
        self.counters: dict[Direction, Counters] = {}
        self._make_plan = make_plan
        self._softmax_scale = softmax_scale
        self._kernel = kernel
        self._cuda_graph = cuda_graph
        self._nvtx = nvtx
        self._wanted_transport = transport
        # Signals between blocks of shared memory have not been captured; NCCL's operations are.
        usable = TransportName.DISTRIBUTED if cuda_graph else transport
        self._transports = Transports(usable, self.groups, self._look_around)
        self._workspace = Workspace()
        self._plans: dict[int, tuple[Plan, str]] = {}
        self._executors: dict[tuple[Direction, CallShape], Executor] = {}
        self._captured: dict[tuple[Direction, CallShape], CapturedCall] = {}
        self._agreed: dict[object, dict[str, object]] = {}
        self._calls = 0
        self._statement: dict[str, object] = {}
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
                "transport": self._wanted_transport.value,
                "cuda_graph": self._cuda_graph,
            }
        except Exception as found:  # whatever it is, the others must not wait for us
            self.handshake.agree({}, found)
            raise
        self.handshake.agree(statement)

    def prepare(
        self, call_shape: CallShape, needs_grad: bool, error: MeshAttentionError | None
    ) -> None:
        """Agree on a kind of call once; afterwards nothing is exchanged."""
        self.refuse_if_closed()
        self._calls += 1
        key = (call_shape, needs_grad)
        if error is None and key in self._agreed:
            self._statement = self._agreed[key]
            return
        statement: dict[str, object] = {}
        directions = tuple(Direction) if needs_grad else (Direction.FORWARD,)
        try:
            if error is None:
                statement = {
                    "plan": self._planned(call_shape.dtype.itemsize)[1],
                    "batch": call_shape.batch,
                    "dtype": str(call_shape.dtype),
                    "device": call_shape.device.type,
                    "needs_grad": needs_grad,
                }
                # A kernel may refuse what only some ranks have to do: all must hear of it.
                executors = [self.executor(direction, call_shape) for direction in directions]
                self._transports.check(self.plan(call_shape.dtype.itemsize), call_shape.device)
                if self._cuda_graph:
                    self._reserve(executors)
        except MeshAttentionError as refused:
            error = refused
        # Ranks that know this kind of call are in it already; where none does nobody can be.
        try:
            self.handshake.agree(statement, error, call=self._calls)
        except Exception:
            self._broken |= bool(self._agreed) and self.handshake.left_under_way
            raise
        self._connect(call_shape, directions)
        self._agreed[key] = self._statement = statement

    def _connect(self, call_shape: CallShape, directions: tuple[Direction, ...]) -> None:
        """Shared memory and process groups for a kind of call that all ranks have agreed on."""
        plan = self.plan(call_shape.dtype.itemsize)
        rank = self.rank(plan)
        self._workspace.give_up(call_shape.device)  # or it would keep a block that is outgrown
        workspace = self._transports.share(plan, rank, directions, call_shape)
        if workspace is not None:
            self._workspace.adopt(workspace)
        if self._transports.must_share():
            chosen = self._transports.choices(plan, rank, directions, call_shape.device)
            refusal = self._transports.refusal(chosen)
            self.handshake.agree({"transport": "symmetric"}, refusal, call=self._calls)
        for planned, _ in self._plans.values():
            self.groups.prepare(planned, without=self._transports.covers)

    def _look_around(self) -> None:
        """Asked during a long wait: another rank may be at something else in this very call, and
        wait for an agreement that we skipped. Then all of us make it, and hear who is odd."""
        if self.handshake.is_called_for(self._calls):
            self.handshake.agree(self._statement, call=self._calls, under_way=True)

    def _reserve(self, executors: Sequence[Executor]) -> None:
        """A graph replays on the memory it was captured with, so that must not grow later."""
        for executor in executors:
            if executor.call_shape.device.type != "cuda":
                device = executor.call_shape.device.type
                raise MeshAttentionError(f"cuda_graph=True needs CUDA tensors, not {device} ones")
            if executor.why_not_captured is not None:
                raise MeshAttentionError(f"cuda_graph=True: {executor.why_not_captured}")
        most = max(executor.workspace_bytes for executor in executors)
        self._workspace.take(most, executors[0].call_shape.device)

    def run(
        self, direction: Direction, call_shape: CallShape, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        executor = self.executor(direction, call_shape)
        # Triton launches on the current device, which need not be that of the tensors.
        cuda = call_shape.device.type == "cuda"
        try:
            with torch.cuda.device(call_shape.device) if cuda else nullcontext():
                if self._cuda_graph:
                    return self._replay(direction, executor, inputs)
                return run_to_end(executor.run(inputs))
        except MeshAttentionError:
            self._broken = True
            raise

    def _replay(
        self, direction: Direction, executor: Executor, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        key = (direction, executor.call_shape)
        if key not in self._captured:
            block = self._workspace.take(executor.workspace_bytes, executor.call_shape.device)
            self._captured[key] = CapturedCall(
                lambda static: run_to_end(executor.run(static)), inputs, block
            )
        return self._captured[key](inputs)

    def executor(self, direction: Direction, call_shape: CallShape) -> Executor:
        self.refuse_if_closed()
        key = (direction, call_shape)
        if key not in self._executors:
            plan = self.plan(call_shape.dtype.itemsize)
            rank, one = self.rank(plan), plan.direction(direction)
            transport, self.counters[direction] = self._transports.make(
                plan, one, rank, call_shape, self.counters.get(direction)
            )
            self._executors[key] = Executor(
                plan,
                one,
                rank,
                transport,
                self._workspace,
                call_shape,
                softmax_scale=self._scale(plan),
                kernel=self._kernel,
                trace=nvtx_span if self._nvtx and call_shape.device.type == "cuda" else None,
            )
        return self._executors[key]

    def _scale(self, plan: Plan) -> float:
        given = self._softmax_scale
        return float(plan.problem.head_dim) ** -0.5 if given is None else given

    def kernel_choices(self) -> dict[str, tuple[tuple[str, str], ...]]:
        found = {}
        for (direction, _), executor in self._executors.items():
            for kind, choice in executor.choices.items():
                found[f"{direction} {kind}"] = choice.reasons
            found[f"{direction} rows"] = executor.row_choice.reasons
        return found

    def transport_choices(self) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for direction, call_shape in self._executors:
            plan = self.plan(call_shape.dtype.itemsize)
            found |= self._transports.choices(
                plan, self.rank(plan), (direction,), call_shape.device
            )
        return found

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise MeshAttentionError("this ContextParallel is closed; make a new one")
        if self._broken:
            raise MeshAttentionError(
                "an earlier call of this ContextParallel was broken off while messages were under "
                "way, which a new call could take for its own; close it, and start the processes "
                "anew or make a new one on new process groups (torch.distributed.new_group)"
            )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._captured.clear()  # before the groups: graphs hold on to communicators
            self._executors.clear()
            self._workspace.release()
            self._transports.close(abandon=self._broken)
            self.groups.close(abort=self._broken)


def _in_words(plan: Plan) -> str:
    """Enough of a plan for people to see in what two of them differ."""
    p = plan.problem
    heads = f"{p.num_heads} heads of {p.head_dim}, {p.kv_heads} KV heads"
    setting = ", ".join(f"{name} {value}" for name, value in plan.forward.setting.items())
    tokens = f"{p.q_tokens} by {p.keys} tokens"
    return f"{plan.method}, {tokens}, {heads}, {p.mask.describe()}, {plan.q_layout.kind}, {setting}"
