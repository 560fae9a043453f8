"""The executor: interprets one rank's program, and nothing else.

`run` is a generator that yields while it has to wait for ranks of the same process, so the same
loop serves all ranks in one process and one rank of many processes. Communication is started in
program order and waited for only by the operations that need it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.kernels import Choice, Kernel, MaskKind, Request, choose
from mesh_attention.plan.buffers import Buffer, Piece, Precision, Role
from mesh_attention.plan.dependencies import dependencies, is_communication
from mesh_attention.plan.offsets import workspace_map
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.program import Attend, AttendBackward, Free, Merge, Operation
from mesh_attention.runtime.compute import BlockMasks, Compute
from mesh_attention.runtime.lanes import Lanes
from mesh_attention.runtime.transport.interface import Handle, Transport, View
from mesh_attention.runtime.workspace import Workspace

__all__ = ["Executor", "Form", "run_to_end"]


@dataclass(frozen=True, slots=True)
class Form:
    """What the tensors of a call have in common."""

    batch: int
    dtype: torch.dtype
    device: torch.device

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def dtype_of(self, buffer: Buffer) -> torch.dtype:
        return self.dtype if buffer.precision is Precision.ELEMENT else self.accumulate_dtype


class Executor:
    """One rank's program of one pass, ready to be run many times."""

    def __init__(
        self,
        plan: Plan,
        one: Pass,
        rank: int,
        transport: Transport,
        workspace: Workspace,
        form: Form,
        *,
        softmax_scale: float,
        kernel: str | None = None,
    ) -> None:
        program = one.programs[rank]
        if form.dtype.itemsize != plan.problem.element_bytes:
            raise MeshAttentionError(
                f"the plan is for {plan.problem.element_bytes}-byte elements, "
                f"but the tensors are {form.dtype}"
            )
        self.form = form
        self._problem = plan.problem
        self._operations = program.operations
        self._table = program.buffer_table()
        self._memory = workspace_map(program, plan.problem)
        self._waits = dependencies(program, self._memory)
        self._transport = transport
        self._workspace = workspace
        masks = BlockMasks(plan, program)
        self.choices = _choose(plan, form, masks, one.direction, kernel)
        kernels: dict[MaskKind, Kernel] = {k: c.kernel for k, c in self.choices.items()}
        self._compute = Compute(kernels, masks, softmax_scale)
        awaited = {i for waits in self._waits for i in waits}
        self._marks = {i for i in awaited if not is_communication(self._operations[i])}

    @property
    def workspace_bytes(self) -> int:
        return self._memory.total_bytes * self.form.batch

    def run(self, inputs: Mapping[str, Tensor]) -> Generator[None, None, dict[str, Tensor]]:
        """Inputs are (rows, batch, heads, width), contiguous; so are the outputs."""
        tensors, outputs = self._bind(inputs)

        def view(piece: Piece) -> Tensor:
            rows = tensors[piece.buffer][piece.start : piece.stop]
            return rows if piece.heads is None else rows[:, :, piece.heads[0] : piece.heads[1]]

        lanes = Lanes(self.form.device)
        handles: dict[int, Handle] = {}
        for at, op in enumerate(self._operations):
            for before in self._waits[at]:
                handle = handles.get(before)
                if handle is not None:
                    while not handle.ready():
                        yield
                    handle.wait()
            if isinstance(op, Attend | AttendBackward | Merge | Free):
                self._run_compute(op, view)
                if at in self._marks:
                    lanes.mark(at)
            else:
                after = lanes.after(i for i in self._waits[at] if i not in handles)
                handles[at] = self._transport.start(op, view, after)
        for handle in handles.values():
            while not handle.ready():
                yield
            handle.wait()
        return outputs

    def _run_compute(self, op: Operation, view: View) -> None:
        match op:
            case Attend():
                self._compute.attend(op, view)
            case AttendBackward():
                self._compute.attend_backward(op, view)
            case Merge():
                self._compute.merge(op, view)
            case Free():
                pass  # offsets were planned from it; `dependencies` guards the reuse

    def _bind(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        form = self.form
        memory = self._workspace.take(self.workspace_bytes, form.device)
        tensors: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for name, buffer in self._table.items():
            dtype = form.dtype_of(buffer)
            width = buffer.kind.width(self._problem)
            shape = (buffer.num_rows, form.batch, buffer.num_heads, width)
            match buffer.role:
                case Role.INPUT:
                    given = inputs[name]
                    assert given.shape == shape, (name, given.shape, shape)
                    assert given.dtype == dtype, (name, given.dtype, dtype)
                    tensors[name] = given
                case Role.OUTPUT:
                    tensors[name] = outputs[name] = torch.empty(
                        shape, dtype=dtype, device=form.device
                    )
                case Role.WORKSPACE:
                    start = self._memory.offsets[name] * form.batch
                    size = buffer.num_bytes(self._problem) * form.batch
                    tensors[name] = memory[start : start + size].view(dtype).view(shape)
        self._workspace.poison(memory, outputs.values())
        return tensors, outputs


def run_to_end(
    execution: Generator[None, None, dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Run an execution whose transport never makes it wait for its own process."""
    while True:
        try:
            next(execution)
        except StopIteration as end:
            result: dict[str, Tensor] = end.value
            return result


def _choose(
    plan: Plan, form: Form, masks: BlockMasks, direction: Direction, force: str | None
) -> dict[MaskKind, Choice]:
    problem = plan.problem
    cuda = form.device.type == "cuda"
    return {
        kind: choose(
            Request(
                device_type=form.device.type,
                capability=torch.cuda.get_device_capability(form.device) if cuda else None,
                dtype=form.dtype,
                head_dim=problem.head_dim,
                v_head_dim=problem.v_dim,
                num_heads=problem.num_heads,
                num_kv_heads=problem.kv_heads,
                mask=kind,
                needs_backward=direction is Direction.BACKWARD,
            ),
            force=force,
        )
        for kind in sorted(masks.kinds)
    }
