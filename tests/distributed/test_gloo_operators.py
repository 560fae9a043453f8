"""Eager attention is an operator: modes, checkpoint policies and tracing see each call as a whole.

What goes on inside a call is seen by nobody, and all that a backward pass needs are results.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mesh_attention import ContextParallel, MeshAttentionError, mesh_attention
from mesh_attention.plan.language.plan import Direction
from mesh_attention.request import compiled_attention
from mesh_attention.request.operators import attention_backward_op, attention_op
from mesh_attention.runtime.session.prepared_call import PreparedCall
from support.gloo_case import context, handed_bytes
from support.gloo_grads import CASE, all_equal, local, out_of
from support.pool import WorkerPool
from support.transformer_block import Compiled


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def seen(rank: int, world_size: int) -> list[bool]:
    found = []
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        ways: Any = (partial(out_of, cp), partial(mesh_attention, causal=True, seq_len=45))
        for attend in ways:
            plain = attend(*leaves)
            wanted = (plain.detach(), *torch.autograd.grad(plain, leaves, grad_out))
            for _ in range(2):
                with Seen() as forward:
                    out = attend(*leaves)
                with Seen() as backward:
                    grads = torch.autograd.grad(out, leaves, grad_out)
                found.append(all_equal(wanted, (out.detach(), *grads)))
                calls = [op for op in forward.ops if op is not torch.ops.aten.detach.default]
                found.append(calls == [attention_op])
                found.append(attention_backward_op in backward.ops and len(backward.ops) < 6)
    return found


def test_a_dispatch_mode_sees_the_two_operators_and_nothing_inside_them(pool: WorkerPool) -> None:
    assert pool.run(seen, 4) == [[True] * 12] * 4


def selective(rank: int, world_size: int, policy: CheckpointPolicy) -> tuple[bool, int]:
    """Whether gradients are those without a checkpoint, and the number of forward passes."""

    def of(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is attention_op else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out_of(cp, out_of(cp, q.sin(), k, v).relu(), k.cos(), v)

    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        wanted = torch.autograd.grad(block(*leaves), leaves, grad_out)
        once = handed_bytes(cp)["forward"]
        out = checkpoint(
            block,
            *leaves,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, of),
        )
        grads = torch.autograd.grad(out, leaves, grad_out)
        moved = handed_bytes(cp)["forward"]
        return all_equal(wanted, grads), min(sum(moved[kind]) // sum(once[kind]) for kind in once)


@pytest.mark.parametrize(
    ("policy", "passes"),
    [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.PREFER_RECOMPUTE, 3)],
)
def test_a_checkpoint_policy_decides_whether_a_block_attends_again(
    pool: WorkerPool, policy: CheckpointPolicy, passes: int
) -> None:
    """Need 22. Without a checkpoint, in one, and again in its backward pass."""
    assert pool.run(selective, 4, policy) == [(True, passes)] * 4


def traced(rank: int, world_size: int) -> dict[str, Any]:
    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = cp.attention(q, k, v, documents=documents, label="traced")
        assert isinstance(out, Tensor)
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    with ContextParallel(causal=True) as cp:
        documents = cp.documents([0, 5, 16])
        leaves = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
        graph = make_fx(gradients)(*leaves)
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        wanted = gradients(*leaves)
        leaves = [x.detach() for x in leaves]
        again = all_equal(wanted, graph(*leaves))
        documents.plans.warm.clear()
        documents.plans._sources.clear()
        cp._calls.session.calls.clear()
        anew = all_equal(wanted, graph(*leaves))
    try:
        graph(*leaves)
        closed = ""
    except MeshAttentionError as error:
        closed = str(error)
    return {
        "operators": [op for op in targets if op in (attention_op, attention_backward_op)]
        == [attention_op, attention_backward_op],
        "again": again,
        "anew": anew,
        "closed": "this ContextParallel is closed" in closed,
    }


def test_a_trace_of_an_eager_call_runs_again_also_where_its_prepared_call_is_gone(
    pool: WorkerPool,
) -> None:
    for found in pool.run(traced, 2):
        assert all(found.values()), found


def kept(rank: int, world_size: int) -> list[bool]:
    """As if forward programs gave q, k and v to backward programs, eager and compiled."""
    run = PreparedCall.run

    def keeping(call: PreparedCall, direction: Any, inputs: Any, counters: Any) -> Any:
        results = run(call, direction, inputs, counters)
        if direction is Direction.FORWARD:
            call.kept = ("q", "k", "v")
            results |= {name: inputs[name].clone() for name in call.kept}
        return results

    def shapes(calls: Any, q: Tensor, k: Tensor, v: Tensor, documents: Any) -> Any:
        return [(x.transpose(0, 1).shape, x.dtype) for x in (q, k, v)]

    saved: list[tuple[int, ...]] = []

    def save(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out_of(cp, q.sin(), k, v).relu()

    def block(*leaves: Tensor) -> Any:
        return checkpoint(attend, *leaves, use_reentrant=False)

    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        wanted = torch.autograd.grad(block(*leaves), leaves, grad_out)
        with (
            patch.object(PreparedCall, "run", keeping),
            patch.object(compiled_attention, "kept_shapes", shapes),
        ):
            with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
                out = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, grad_out)
            compiled = torch.autograd.grad(Compiled(block)(*leaves), leaves, grad_out)
    of_call = [(2, 12, 4, 8), (2, 4, 12), *(tuple(x.transpose(0, 1).shape) for x in leaves)]
    return [
        all_equal(wanted, grads),
        all_equal(wanted, compiled),
        sorted(saved) == sorted([*of_call, (2, 12, 4, 8), (2, 12, 4, 8)]),  # and of sin and relu
    ]


def test_what_a_forward_pass_keeps_takes_the_place_of_q_k_and_v(compiling_pool: WorkerPool) -> None:
    assert compiling_pool.run(kept, 4, seconds=300.0) == [[True] * 3] * 4
