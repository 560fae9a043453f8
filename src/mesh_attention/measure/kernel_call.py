"""One call of an attention kernel on random tensors, to be timed."""

from __future__ import annotations

import torch

from mesh_attention.kernels import BackwardInputs, Block, BlockMask, Kernel
from mesh_attention.kernels.rows import delta
from mesh_attention.measure.ranks import Work
from mesh_attention.plan.language.plan import Direction


class KernelCall:
    """`pairs` of a query and a key that the mask shows; `flops` of the pass for all heads."""

    def __init__(
        self,
        kernel: Kernel,
        direction: Direction,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        columns: int,
        heads: int,
        head_dim: int,
        mask: BlockMask,
        pairs: int,
    ) -> None:
        self._kernel, self._direction, self._mask = kernel, direction, mask
        self._scale = head_dim**-0.5
        self.pairs = pairs
        self._tensors = [
            torch.randn(1, n, heads, head_dim, device=device, dtype=dtype)
            for n in (rows, columns, columns)
        ]
        self.flops = 4.0 * head_dim * heads * pairs
        if direction is Direction.BACKWARD:
            self.flops *= 2.5
            out, lse = kernel.forward(self._block(0))
            grad_out = torch.randn_like(out, dtype=dtype)
            out, lse = out.to(dtype), lse.masked_fill(lse == -torch.inf, 1e4)  # exp(x - lse) = 0
            self._given = BackwardInputs(grad_out, out, lse.contiguous(), delta(out, grad_out))

    def _block(self, leave_sms: int) -> Block:
        q, k, v = self._tensors
        return Block(q, k, v, self._mask, self._scale, leave_sms=leave_sms)

    def work(self, leave_sms: int = 0) -> Work:
        """`leave_sms`: multiprocessors that it is asked to leave to transfers."""
        block = self._block(leave_sms)
        if self._direction is Direction.FORWARD:
            return lambda: self._kernel.forward(block)
        return lambda: self._kernel.backward(block, self._given)
