"""Attention under torch.compile: whole graphs that equal eager calls, are not compiled again for
other documents, and make every call, in order, on all ranks.

The backend traces forward and backward graphs and runs them as they are: inductor, which makes
kernels of them, is tried in a slow test.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mesh_attention import (
    ContextParallel,
    ContextParallelAttention,
    MeshAttentionError,
    mesh_attention,
)
from mesh_attention.request.operators import attention_backward_op, attention_op
from support.pool import WorkerPool
from support.transformer_block import HEAD_DIM, HEADS, Compiled, difference, gradients, steps

Function = Callable[..., Any]
SECONDS = 300.0  # graphs are made by Python, on machines with other things to do


def block(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    with ContextParallel(causal=True) as cp:
        return steps(cp, [[0, 5, 16], [0, 1, 7, 16], [0, 3, 24], [0, 20, 40], [0, 4, 16]])


def test_a_transformer_block_compiles_whole_and_once_for_all_documents(
    compiling_pool: WorkerPool,
) -> None:
    """Need 23: other documents compile nothing, other lengths once more, for any of them."""
    for errors, graphs in compiling_pool.run(block, 2, seconds=SECONDS):
        assert max(errors) < 1e-5
        assert graphs == [1, 1, 2, 2, 2]


def qkv(cp: ContextParallel, documents: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    whole = torch.randn(3, 1, 16, HEADS, HEAD_DIM).to(dtype).unbind()
    return [cp.shard(x, 1, documents=documents).requires_grad_() for x in whole]


def forms(rank: int, world_size: int) -> dict[str, float]:
    """Calls as code makes them, compiled against eager."""
    results: dict[str, float] = {}
    with ContextParallel(causal=True, differentiable_lse=True, layout="zigzag") as cp:
        docs = cp.documents([0, 5, 16])
        q, k, v = leaves = qkv(cp, docs)
        sinks = torch.randn(HEADS, requires_grad=True)
        module = ContextParallelAttention(cp)

        def attend(q: Tensor, **inputs: Any) -> Any:
            return cp.attention(q, k, v, documents=docs, **inputs)

        def several() -> Any:
            middle = attend(q.sin(), label=1, sinks=sinks) + module(q, k, v, docs)
            return attend(middle, label="last", return_lse=True)

        def checkpointed() -> Tensor:
            x = q
            for _ in range(2):
                x = checkpoint(lambda x: attend(x.sin()).relu() + x, x, use_reentrant=False)
            return x

        def lower_precision() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = cp.attention(q, k, v.bfloat16(), documents=docs)  # type: ignore[assignment]
            assert out.dtype is torch.bfloat16
            return out

        def replaced() -> Tensor:
            a, b, c = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(a, b, c, is_causal=True)

        for function in (several, checkpointed, lower_precision):
            wanted = gradients(function, [*leaves, sinks])
            results[function.__name__] = difference(
                wanted, gradients(Compiled(function), [*leaves, sinks])
            )

        def whole_step() -> Tensor:
            made = cp.documents([0, 7, 16])  # here and below the graph ends, and begins anew
            out: Any = cp.attention(q.sin(), k, v, documents=made)
            out = mesh_attention(out, k, v, causal=True, seq_len=16) + out
            targets = torch.zeros(out.shape[:2], dtype=torch.long)
            return cp.cross_entropy(out.flatten(2), targets, reduce="sum").loss

        torch._dynamo.reset()
        broken = torch.compile(whole_step, backend="aot_eager")
        results["whole step"] = difference(gradients(whole_step, leaves), gradients(broken, leaves))
        compiled = Compiled(replaced)
        for starts in ([0, 5, 16], [0, 9, 16]):
            with cp.context_parallel(documents=cp.documents(starts)):
                both = gradients(replaced, leaves), gradients(compiled, leaves)
            results[f"replaced {starts}"] = difference(*both)
        results["graphs of two blocks"] = compiled.graphs - 1
    return results


def test_every_form_of_the_call_compiles_to_the_numbers_of_eager_calls(
    compiling_pool: WorkerPool,
) -> None:
    """Need 23: sinks, lse, labels, the module, checkpoints, autocast, PyTorch's own attention."""
    for results in compiling_pool.run(forms, 2, seconds=SECONDS):
        assert all(error < 1e-6 for error in results.values()), results


def effects(rank: int, world_size: int) -> list[int]:
    """Each rank uses something else of the same calls; how many were made."""
    with ContextParallel(causal=True) as cp:
        docs = cp.documents([0, 16])
        q, k, v = leaves = qkv(cp, docs)

        def odd(q: Tensor) -> Tensor:
            def attend(label: int) -> Tensor:
                out: Tensor = cp.attention(q, k, v, documents=docs, label=label)  # type: ignore[assignment]
                return out

            unused, first, second, third = (attend(label) for label in (0, 1, 2, 2))
            if rank == 0:
                return third + second
            return second.cos() + third + first + unused.sin()

        def forward_bytes() -> int:
            return cp.traffic["forward"].total.sent_bytes

        with torch.no_grad():
            cp.attention(*leaves, documents=docs)
        once = forward_bytes()
        compiled = Compiled(odd)
        counts = []
        for _ in range(2):
            before = forward_bytes()
            out = compiled(q)
            counts.append((forward_bytes() - before) // once)
        with torch.no_grad():
            before = forward_bytes()
            compiled(q)
            counts.append((forward_bytes() - before) // once)
        del out
        return counts


def test_no_call_is_dropped_merged_or_moved(compiling_pool: WorkerPool) -> None:
    """On one rank two of four results are unused, and two calls look alike."""
    assert compiling_pool.run(effects, 2, seconds=SECONDS) == [[4, 4, 4]] * 2


def faults(rank: int, world_size: int) -> dict[str, str]:
    """Errors, by what is wrong; the first ones on one rank alone."""
    results: dict[str, str] = {}
    cp = ContextParallel(causal=True, keep="shards")  # graphs do not know what batches keep
    docs = cp.documents([0, 5, 16])
    q, k, v = leaves = qkv(cp, docs)

    def attempt(name: str, action: Function) -> None:
        try:
            action()
            results[name] = "nothing"
        except MeshAttentionError as error:
            results[name] = str(error)

    odd = 0.5 if rank == 1 else 0.0
    attempt("dropout", Compiled(lambda: cp.attention(*leaves, documents=docs, dropout_p=odd)))
    other = [q[:, :4], k, v] if rank == 0 else leaves
    attempt("shape", Compiled(lambda: cp.attention(*other, documents=docs)))

    compiled = Compiled(lambda docs: cp.attention(*leaves, documents=docs, return_lse=True))
    made = cp.documents([0, 9, 16])
    out, _ = compiled(made)
    wanted = torch.autograd.grad(cp.attention(*leaves, documents=made).sum(), leaves)  # type: ignore[union-attr]
    del made
    gc.collect()
    grads = torch.autograd.grad(out.sum(), leaves)
    same = all(map(torch.equal, grads, wanted))
    results["documents that nobody holds"] = "the same" if same else "others"

    both = [cp.documents(starts) for starts in ([0, 9, 16], [0, 2, 16])]
    ways: list[Function] = [compiled, lambda each: (cp.attention(*leaves, documents=each), None)]
    # In the same calls one rank is compiled and the other is not.
    outs = [[way(side)[0] for side in both] for way in (ways if rank == 0 else reversed(ways))]
    first, second = ([torch.autograd.grad(out.sum(), leaves) for out in of_way] for of_way in outs)
    same = all(all(map(torch.equal, *pair)) for pair in zip(first, second, strict=True))
    results["several in flight"] = "the same" if same else "others"

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        made = cp.documents([0, 9, 16])
        out, _ = compiled(made)
    del made
    gc.collect()
    attempt("copied by hooks", lambda: torch.autograd.grad(out.sum(), leaves))
    out, lse = compiled(docs)
    attempt("lse", lambda: torch.autograd.grad(lse.sum(), leaves))
    cp.close()
    attempt("closed", lambda: compiled(docs))
    return results


def test_mistakes_in_compiled_code_are_told_to_all_ranks(compiling_pool: WorkerPool) -> None:
    for rank, results in enumerate(compiling_pool.run(faults, 2, seconds=SECONDS)):
        assert "dropout_p=0.5: dropout of attention weights" in results["dropout"], (rank, results)
        assert "q has shape (1, 4, 2, 8), expected (1, 8, 2, 8)" in results["shape"]
        assert results["documents that nobody holds"] == "the same"
        assert results["several in flight"] == "the same"
        assert "the documents of this call are gone" in results["copied by hooks"]
        assert "a loss depends on lse" in results["lse"]
        assert "this ContextParallel is closed" in results["closed"]


def checked_ops(rank: int, world_size: int) -> list[set[str]]:
    with ContextParallel(causal=True, differentiable_lse=True) as cp:
        docs = cp.documents([0, 5, 16])
        leaves = qkv(cp, docs)
        sinks = torch.randn(HEADS, requires_grad=True)
        call: Any = (cp._calls.name, None, False, True)
        label: Any = ("x", None, None)
        of_call: Any = (*call, True, *label, None, None)
        inputs: Any = (*leaves, sinks, docs.number, None, *of_call)
        checks = [torch.library.opcheck(attention_op, inputs)]
        with torch.no_grad():
            out, lse, place, kept = attention_op(*inputs)
        saved = [x.detach() for x in (*leaves, out, lse, sinks)]
        last: Any = (kept, place, docs.number, leaves[1].shape, [True] * 4, *of_call)
        checks.append(torch.library.opcheck(attention_backward_op, (out, None, *saved, *last)))
    return [set(check.values()) for check in checks]


def test_opcheck_passes_for_both_ops(compiling_pool: WorkerPool) -> None:
    assert compiling_pool.run(checked_ops, 1, seconds=SECONDS) == [[{"SUCCESS"}] * 2]


def batches_in_opposite_order(rank: int, world_size: int) -> list[str]:
    """Micro-batches on the same documents, in one graph for all of them."""
    messages = []
    with ContextParallel(causal=True) as cp:
        docs = cp.documents([0, 5, 16])
        x = qkv(cp, docs)[0].detach()
        ids = torch.arange(16)[None]
        batches = [cp.shard_batch(input_ids=ids + i, documents=docs) for i in range(3)]
        compiled = Compiled(lambda documents: cp.attention(x, x, x, documents=documents))
        for i in (0, 2, 1) if rank == 1 else (0, 1, 2):
            try:
                compiled(batches[i].documents)
                messages.append("")
            except MeshAttentionError as error:
                messages.append(str(error))
    return messages


def test_compiled_calls_compare_their_batches(compiling_pool: WorkerPool) -> None:
    for first, second, third in compiling_pool.run(batches_in_opposite_order, 2, seconds=SECONDS):
        assert first == ""
        assert "number of the batch is 7 there, 6 elsewhere" in second
        assert "out of step since an earlier call" in third
