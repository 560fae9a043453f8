"""A transformer block as models have it, whose attention is that of a `ContextParallel`, eager and
compiled side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mesh_attention import ContextParallel

__all__ = ["HEADS", "HEAD_DIM", "Compiled", "Decoder", "Shape", "difference", "gradients", "steps"]

HEADS, HEAD_DIM = 2, 8
Function = Callable[..., Any]
Shape = tuple[str, int, dict[str, Any]]  # device, head_dim, and what torch.compile is given


class Decoder(nn.Module):
    """Norm, q, k and v, rotary positions, attention with sinks, and MLP."""

    def __init__(self, cp: ContextParallel, head_dim: int = HEAD_DIM) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.cp = cp
        self.before = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.sinks = nn.Parameter(torch.ones(HEADS))

    def forward(self, x: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.unbind(2)
        q, k = rotate(q, positions), rotate(k, positions)
        seen = self.cp.attention(q, k, v, documents=documents, sinks=self.sinks)
        assert isinstance(seen, Tensor)
        x = x + self.out(seen.flatten(2))
        out: Tensor = x + self.mlp(self.after(x))
        return out


def rotate(x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
    half = x_BSHD.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, device=x_BSHD.device) / half)
    angles = (positions_S[:, None] * rates)[:, None, :]
    a, b = x_BSHD.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x_BSHD.dtype)


class Compiled:
    """Of whole graphs; those of `backend="aot_eager"`, which runs them as they are, are counted."""

    def __init__(self, function: Function, **arguments: Any) -> None:
        import torch._dynamo
        from torch._dynamo.backends.registry import lookup_backend

        torch._dynamo.reset()
        self.graphs = 0

        def counted(graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return lookup_backend("aot_eager")(graph, inputs)

        self._compiled = torch.compile(
            function, fullgraph=True, **(arguments or {"backend": counted})
        )

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)


def gradients(function: Function, leaves: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all leaves."""
    result = function()
    outs = result if isinstance(result, tuple) else (result,)
    loss = sum((out.double() ** 2).sum() for out in outs)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*(out.detach().clone() for out in outs), *(g.clone() for g in grads if g is not None)]


def difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def steps(
    cp: ContextParallel, packs: list[list[int]], shape: Shape = ("cpu", HEAD_DIM, {})
) -> tuple[list[float], list[int]]:
    """Of a block on packs of documents, compiled and not: how far outputs and gradients of all
    parameters are apart, and how many graphs there were after each."""
    device, head_dim, inputs = shape
    torch.manual_seed(0)
    eager, copy = (Decoder(cp, head_dim).to(device) for _ in range(2))
    copy.load_state_dict(eager.state_dict())
    compiled = Compiled(copy, **inputs)
    errors, graphs = [], []
    for starts in packs:
        documents = cp.documents(starts)
        whole = torch.randn(1, starts[-1], HEADS * head_dim)
        x = cp.shard(whole, 1, documents=documents).to(device)
        positions = cp.positions(documents=documents, restart=True, device=device)
        given_to = (x, positions, documents)
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        result = gradients(lambda: compiled(*given_to), [*copy.parameters()])  # noqa: B023
        wanted = gradients(lambda: eager(*given_to), [*eager.parameters()])  # noqa: B023
        errors.append(difference(wanted, result))
        graphs.append(compiled.graphs)
    return errors, graphs
