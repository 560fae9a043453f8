"""Eager attention is an operator: modes, checkpoint policies and tracing see each call as a whole.

What goes on inside a call is seen by nobody, and all that a backward pass needs are results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

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
from mesh_attention.request.operators import attention_backward_op, attention_op
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
    results = []
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
                results.append(all_equal(wanted, (out.detach(), *grads)))
                calls = [op for op in forward.ops if op is not torch.ops.aten.detach.default]
                results.append(calls == [attention_op])
                results.append(attention_backward_op in backward.ops and len(backward.ops) < 6)
    return results


def test_a_dispatch_mode_sees_the_two_operators_and_nothing_inside_them(pool: WorkerPool) -> None:
    assert pool.run(seen, 4) == [[True] * 12] * 4


def profiled(rank: int, world_size: int) -> list[str]:
    with context(CASE) as cp:
        leaves, grad_out = local(cp)
        for _ in range(2):
            with torch.profiler.profile() as seen_by:
                torch.autograd.grad(out_of(cp, *leaves), leaves, grad_out)
        names = {event.name for event in seen_by.events()}
        return sorted(name for name in names if name.startswith("mesh_attention::"))


def test_a_profiler_sees_the_two_operators(pool: WorkerPool) -> None:
    wanted = ["mesh_attention::attention", "mesh_attention::attention_backward"]
    assert pool.run(profiled, 4) == [wanted] * 4


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
    [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.MUST_RECOMPUTE, 3)],
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
    for result in pool.run(traced, 2):
        assert all(result.values()), result


def kept(rank: int, world_size: int) -> list[bool]:
    """Rows that were exchanged for heads, eager and compiled, in a checkpoint and without; compiled
    also where a graph cannot know what a plan keeps."""

    def attend(cp: ContextParallel, *leaves: Tensor) -> Tensor:
        return out_of(cp, *leaves).relu()

    results = []
    options = {"method": "ulysses"}
    heads = replace(CASE, q_tokens=48, kv_tokens=48, heads=(4, 4), options=options)
    unknown = ContextParallel(causal=True, method="ulysses")
    with context(heads, keep="shards") as plain, context(heads) as cp, unknown:
        shards = [cp.shard(x, 1) for x in heads.tensors()]
        leaves, grad_out = [x.requires_grad_() for x in shards[:3]], shards[3]
        wanted = torch.autograd.grad(attend(plain, *leaves), leaves, grad_out)
        for once in (cp, unknown):
            compiled = Compiled(partial(attend, once))
            block = Compiled(partial(checkpoint, attend, once, use_reentrant=False))
            for call in (partial(attend, once), compiled, block, compiled):
                results.append(
                    all_equal(wanted, torch.autograd.grad(call(*leaves), leaves, grad_out))
                )
        moved = {x: handed_bytes(x)["backward"]["AllToAll"][0] for x in (plain, cp)}
        results.append(moved[cp] < 0.6 * 4 * moved[plain])  # four calls, and one
    return results


@pytest.mark.slow
def test_what_a_forward_pass_keeps_serves_the_backward_pass(compiling_pool: WorkerPool) -> None:
    assert compiling_pool.run(kept, 4, seconds=300.0) == [[True] * 9] * 4
