"""The differentiable attention: forward and backward programs as one autograd function.

Only q, k, v, out and lse are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.plan import Direction
from mesh_attention.runtime.engine import Engine
from mesh_attention.runtime.executor import CallShape
from mesh_attention.runtime.sharding import rows_first

__all__ = ["attend"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, call_shape: CallShape, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = {name: rows_first(x) for name, x in (("q", q), ("k", k), ("v", v))}
        result = engine.run(Direction.FORWARD, call_shape, inputs)
        out = result["out"].transpose(0, 1).contiguous()
        lse = result["lse"].squeeze(-1).permute(1, 2, 0)  # a view: backward wants rows first again
        ctx.engine, ctx.call_shape = engine, call_shape
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are recorded here only for create_graph=True. `once_differentiable` would not
        # do: torch.autograd.grad passes its error node by and returns a wrong second derivative.
        if torch.is_grad_enabled():
            raise MeshAttentionError(
                "second derivatives of attention are not supported; call with create_graph=False"
            )
        q, k, v, out, lse = ctx.saved_tensors
        named = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
        inputs = {name: rows_first(x) for name, x in named.items()}
        inputs["lse"] = lse.permute(2, 0, 1).unsqueeze(-1).contiguous()
        result = ctx.engine.run(Direction.BACKWARD, ctx.call_shape, inputs)
        grads = [
            result[name].transpose(0, 1).contiguous() if needed else None
            for name, needed in zip(
                ("grad_q", "grad_k", "grad_v"), ctx.needs_input_grad[2:], strict=True
            )
        ]
        return (None, None, *grads)


def attend(
    engine: Engine, call_shape: CallShape, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's shards; out is differentiable, lse is not."""
    out, lse = _Attention.apply(engine, call_shape, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse
