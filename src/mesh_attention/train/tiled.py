"""`cp.tiled(mlp, tokens=...)`: runs a block that treats each token by itself on tiles of tokens.

Intermediate values exist for one tile at a time. Nothing of a tile is saved: the backward pass
computes it again, with the random numbers and the autocast of the first time. Gradients of
parameters are summed over tiles, in their order, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mesh_attention.errors import MeshAttentionError
from mesh_attention.plan.problem.arguments import number
from mesh_attention.request.kept_calls import AroundAttention, Make, Results
from mesh_attention.runtime.session.modes import ambient_autocast, outside_compile

_MIX_TOKENS = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.RNNBase,
    nn.MultiheadAttention,
)


class Tiled:
    """Runs `block`, a module or a module's method, on tiles of (..., tokens, width). It is no
    module itself, so that names of parameters stay."""

    def __init__(self, block: Callable[[Tensor], Tensor], tokens: int) -> None:
        if not callable(block):
            raise MeshAttentionError(f"tiled: {block!r} is neither a module nor a function")
        self.block, self.tokens = block, number("tokens", tokens)
        owner = getattr(block, "__self__", block)  # of `module.forward` too
        self.module = owner if isinstance(owner, nn.Module) else None
        for name, part in self._parts():
            if isinstance(part, _MIX_TOKENS):
                raise _refusal(
                    f"{name or 'the block'} is {type(part).__name__}, which looks at several "
                    "tokens; tile what is beside it"
                )

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        if self.module is not None:
            yield from self.module.named_modules()

    @outside_compile
    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim < 2:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise _refusal(f"the block is called with {shape}; give a tensor (..., tokens, width)")
        for name, part in self._parts():
            tiles_gather = part is not self.module or part is self.block
            if tiles_gather and "FSDPModule" in [base.__name__ for base in type(part).__mro__]:
                raise _refusal(
                    f"{name or 'the block'} is sharded by fully_shard, and would gather parameters "
                    "for every tile; say block.forward = cp.tiled(block.forward) of that module"
                )
        parameters = () if self.module is None else self.module.parameters()
        leaves = [p for p in parameters if p.requires_grad]
        with _NoAttention():
            nothing = None if self.module else self.block(x.narrow(-2, 0, 0).detach())
            if isinstance(nothing, Tensor) and nothing.requires_grad:
                raise _refusal("the function uses parameters; give a module, or its forward")
        out: Tensor = _InTiles.apply(self, _Modes(x.device), x, *leaves)  # type: ignore[no-untyped-call]
        return out


class _InTiles(torch.autograd.Function):
    """Runs the block, and its backward pass, a tile at a time. `leaves`: its parameters."""

    @staticmethod
    def forward(ctx: Any, tiled: Tiled, modes: _Modes, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.tiled, ctx.modes, ctx.leaves = tiled, modes, leaves
        ctx.save_for_backward(x, *leaves)  # refused if they change meanwhile
        out, begin = x, 0
        with _NoAttention(), modes.autocast():
            for tile in torch.split(x, tiled.tokens, -2):
                part = tiled.block(tile)
                if not isinstance(part, Tensor) or part.shape[:-1] != tile.shape[:-1]:
                    shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    raise _refusal(
                        f"of {tuple(tile.shape)} the block makes {shape}; it must give one tensor "
                        "with as many tokens"
                    )
                if not begin:
                    out = part.new_empty((*x.shape[:-1], part.shape[-1]))
                out.narrow(-2, begin, tile.shape[-2]).copy_(part)
                begin += tile.shape[-2]
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise _refusal("second derivatives are not supported; call with create_graph=False")
        x, size, leaves = ctx.saved_tensors[0], ctx.tiled.tokens, ctx.leaves
        grad_x = torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(leaves)
        with _NoAttention(), ctx.modes.autocast(), ctx.modes.random_numbers():
            for begin in range(0, x.shape[-2], size):
                tile, grad, grad_tile = (
                    y.narrow(-2, begin, min(size, x.shape[-2] - begin))
                    for y in (x, grad_out, grad_x)
                )
                of_tile, *of_leaves = _gradients(ctx.tiled.block, tile.detach(), leaves, grad)
                grad_tile.zero_() if of_tile is None else grad_tile.copy_(of_tile)
                sums = [_sum(*pair) for pair in zip(sums, of_leaves, strict=True)]
                del of_tile, of_leaves  # before the next
        totals = [s if s is None else s.to(p.dtype) for s, p in zip(sums, leaves, strict=True)]
        return (None, None, grad_x, *totals)


def _gradients(
    block: Callable[[Tensor], Tensor], tile: Tensor, leaves: Sequence[Tensor], grad: Tensor
) -> Sequence[Tensor | None]:
    inputs = (tile.requires_grad_(), *leaves)
    with torch.enable_grad():
        out = block(tile)
    if not {*map(id, _leaves_of(out))} <= {*map(id, inputs)}:
        raise _refusal(
            "the block uses a parameter that was not among those of the module in the forward "
            "pass, whose gradient would be lost; make it one of them"
        )
    return torch.autograd.grad(out, inputs, grad, allow_unused=True)


def _leaves_of(out: Tensor) -> Iterator[Tensor]:
    """All leaves that autograd would compute a gradient for, by its graph."""
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.to(wide, copy=True) if total is None else total.add_(grad)


class _NoAttention(AroundAttention):
    """A context in which calls of attention are refused."""

    def fault(self) -> MeshAttentionError:
        return _refusal("the block calls attention, which looks at all tokens; tile what is beside")

    def attend(self, make: Make, inputs: tuple[Any, ...]) -> Results:
        raise self.fault()  # of compiled code


class _Modes:
    """Autocast and random state as they were in the forward pass, for both passes."""

    def __init__(self, device: torch.device) -> None:
        self._dtypes = {kind: torch.get_autocast_dtype(kind) for kind in ambient_autocast()}
        self._device, self._cpu = device, torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def autocast(self) -> ExitStack:
        """Without its cache: a parameter that was cast without gradients would have none later."""
        stack = ExitStack()
        for kind in {"cpu", self._device.type}:
            dtype, on = self._dtypes.get(kind), kind in self._dtypes
            stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
        return stack

    @contextmanager
    def random_numbers(self) -> Iterator[None]:
        with torch.random.fork_rng([] if self._cuda is None else [self._device]):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield


def _refusal(why: str) -> MeshAttentionError:
    return MeshAttentionError(f"tiled: {why}")
