"""Checkpoints that keep attention: the bits of a block without any checkpoint, and a forward pass
that communicates once."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from mesh_attention import ContextParallel, MeshAttentionError, mesh_attention, release
from mesh_attention.train.keep_attention import KeepAttention
from support.checkpointed_blocks import Block, Run, equal, not_reentrant, plain, reentrant
from support.gloo_case import handed_bytes
from support.pool import WorkerPool
from support.transformer_block import Compiled

HEADS, KV_HEADS, HEAD_DIM, TOKENS, STARTS = 4, 2, 8, 32, [0, 9, 32]
WIDTH = HEADS * HEAD_DIM
SIZES: dict[str, Any] = {
    "seq_len": TOKENS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}


def blocks_of(cp: ContextParallel, count: int = 2) -> nn.ModuleList:
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, HEAD_DIM)
    return nn.ModuleList(Block(cp, heads, dropout=0.3) for _ in range(count))


def trained(
    cp: ContextParallel, run: Run, blocks: Any, documents: Any = None, watch: Any = None
) -> list[Tensor]:
    """Two steps of two batches each, whose forward passes come before their backward passes: the
    outputs, and the gradients of all parameters. `watch` is called between the passes."""
    torch.manual_seed(1)  # of dropout too
    results = []
    for _ in range(2):
        outs = []
        for _ in range(2):
            whole = torch.randn(1, TOKENS, WIDTH)
            x = cp.shard(whole, 1, documents=documents).requires_grad_() * 1
            angles = torch.rand(HEAD_DIM)
            for block in blocks:
                x = run(block, x, angles, documents)
            outs.append(x)
        if watch is not None:
            watch()
        for out in outs:
            out.square().sum().backward()  # type: ignore[no-untyped-call]
        results += [out.detach().clone() for out in outs]
        for parameter in blocks.parameters():
            results.append(parameter.grad)
            parameter.grad = None
    return results


def received(cp: ContextParallel) -> dict[str, int]:
    handed = handed_bytes(cp)
    return {name: sum(r for _, r in kinds.values()) for name, kinds in handed.items()}


def counted(cp: ContextParallel, run: Run, *more: Any) -> tuple[list[Tensor], dict[str, int]]:
    """What `trained` gives, and the bytes that were received for it in each pass."""
    before = received(cp)
    result = trained(cp, run, blocks_of(cp), *more)
    return result, {name: n - before.get(name, 0) for name, n in received(cp).items()}


def in_every_kind(rank: int, world_size: int, options: dict[str, Any], packed: bool) -> list[str]:
    """What is wrong."""
    wrong = []
    with ContextParallel(**options) as cp, ContextParallel(**options, keep="shards") as shards:
        documents, others = (x.documents(STARTS) if packed else None for x in (cp, shards))
        wanted, usual = counted(cp, plain, documents)
        result, once = counted(shards, plain, others)
        assert equal(wanted, result)
        offloading = cp.keep_attention(offload=True)
        capped = cp.keep_attention(offload=True, host_bytes=12_000)
        memory, small = offloading.host, capped.host
        assert memory is not None
        assert small is not None
        ways = {
            "kept": partial(not_reentrant, cp.keep_attention()),
            "offloaded": partial(not_reentrant, offloading),
            "capped": partial(not_reentrant, capped),
            "reentrant": partial(reentrant, cp.keep_attention()),
            "reentrant, offloaded": partial(reentrant, cp.keep_attention(offload=True)),
        }
        between: list[int] = []
        for name, run in ways.items():
            watch = (lambda: between.append(memory.num_bytes)) if name == "offloaded" else None
            result, moved = counted(cp, run, documents, watch)
            if not equal(wanted, result):
                wrong.append(f"{name}: other bits")
            if moved != once:
                wrong.append(f"{name}: received {moved}, not {once}")
        # Of four blocks in flight: their inputs, out, and lse, which has a number for each head.
        tokens = TOKENS // world_size
        if between != 2 * [4 * 4 * tokens * (WIDTH + WIDTH + HEADS)]:
            wrong.append(f"in the host's memory: {between}")
        if small.most_bytes > 12_000 or not small.stayed_bytes:
            wrong.append(f"at most 12,000 bytes: {small.most_bytes}, {small.stayed_bytes} stayed")
        gc.collect()
        if memory.num_bytes or small.num_bytes or memory.stayed_bytes:
            wrong.append(f"after it: {memory.num_bytes}, {small.num_bytes}, {memory.stayed_bytes}")
        _, twice = counted(cp, partial(not_reentrant, None), documents)
        if twice["forward"] != 2 * usual["forward"]:
            wrong.append(f"an ordinary checkpoint: {twice} and {usual}")
    return wrong


@pytest.mark.parametrize(
    ("options", "packed"),
    [(SIZES, False), ({}, True)],
)
def test_every_kind_of_checkpoint_has_the_bits_of_none_and_attends_forward_once(
    pool: WorkerPool, options: dict[str, Any], packed: bool
) -> None:
    options = {"causal": True, "method": "ulysses", **options}
    assert pool.run(in_every_kind, 2, options, packed) == [[]] * 2


def fully_sharded(rank: int, world_size: int) -> list[bool]:
    from torch.distributed.fsdp import fully_shard  # seconds, which the pool has spent already

    mesh, results = init_device_mesh("cpu", (world_size,)), []
    with ContextParallel(mesh, causal=True, method="ulysses", **SIZES) as cp:
        tiles, offloading = partial(cp.tiled, tokens=5), cp.keep_attention(offload=True)
        for in_tiles in (False, True):
            for run in (plain, partial(not_reentrant, offloading)):
                blocks = blocks_of(cp)
                for block in blocks:
                    assert isinstance(block, Block)
                    if in_tiles:
                        block.mlp.forward = tiles(block.mlp.forward)  # type: ignore[method-assign]
                    fully_shard(block.mlp, mesh=mesh)
                    fully_shard(block, mesh=mesh)
                result = trained(cp, run, blocks)
                results.append([getattr(x, "full_tensor", lambda x=x: x)() for x in result])
    for whole, in_parts in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(whole, in_parts)
    return [equal(results[0], results[1]), equal(results[2], results[3])]


def test_parameters_may_be_sharded_and_the_mlp_tiled(pool: WorkerPool) -> None:
    assert pool.run(fully_sharded, 2) == [[True] * 2] * 2


def compiled(rank: int, world_size: int) -> list[bool]:
    """The same graph without a checkpoint, in one that keeps, and without again; and one for the
    documents of batches, of which graphs know no rows that a plan keeps."""
    results = []
    for sizes, kept in ((SIZES, (False, True, False)), ({}, (True,))):
        with ContextParallel(causal=True, method="ulysses", **sizes) as cp:
            documents = None if sizes else cp.documents(STARTS)
            blocks = blocks_of(cp, 1)
            blocks[0].eval()  # random numbers of a graph are others
            wanted = trained(cp, plain, blocks, documents)
            once, graph = received(cp)["forward"], Compiled(blocks[0])
            for keeps in kept:
                keep = cp.keep_attention(offload=not sizes)
                run = partial(not_reentrant, keep) if keeps else plain
                before = received(cp)["forward"]
                again = trained(cp, lambda _, *x: run(graph, *x), blocks, documents)  # noqa: B023
                results.append(equal(wanted, again))
                results.append(received(cp)["forward"] - before < 1.1 * once)  # lse besides
    return results


@pytest.mark.slow
def test_a_checkpoint_around_compiled_code_keeps_its_attention(compiling_pool: WorkerPool) -> None:
    assert compiling_pool.run(compiled, 2, seconds=300.0) == [[True] * 8] * 2


def inside_a_graph(rank: int, world_size: int) -> list[bool]:
    """Of a checkpoint that compiled code is given and one that it makes: whether bits are those of
    eager blocks, attention communicates forward once, and less than half is saved."""

    def counted(run: Run) -> tuple[list[Tensor], int, int]:
        def pack(x: Tensor) -> Tensor:
            sizes.append(x.nbytes)
            return x

        before, sizes = received(cp).get("forward", 0), list[int]()
        with saved_tensors_hooks(pack, lambda x: x):
            out = run(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
        activations = sum(sizes) - sum(parameter.nbytes for parameter in block.parameters())
        return [out.detach(), *grads], received(cp)["forward"] - before, activations

    with ContextParallel(causal=True, method="ulysses", **SIZES) as cp:
        block, angles = blocks_of(cp, 1)[0].eval(), torch.rand(HEAD_DIM)
        x = cp.shard(torch.randn(1, TOKENS, WIDTH), 1).requires_grad_()
        keep = cp.keep_attention()

        def checkpoints(x: Tensor, offload: bool) -> Tensor:
            x = not_reentrant(keep, block, x, angles)
            return not_reentrant(cp.keep_attention(offload=offload), block, x, angles)

        wanted, once, whole = counted(lambda x: block(block(x, angles), angles))
        graph = Compiled(checkpoints)
        result, forward, less = counted(lambda x: graph(x, False))
        with pytest.raises(RuntimeError, match="inside compiled code: graphs keep tensors"):
            graph(x, True)
    return [equal(wanted, result), forward == once, less < whole / 2]


def test_a_checkpoint_inside_compiled_code_keeps_attention(compiling_pool: WorkerPool) -> None:
    assert compiling_pool.run(inside_a_graph, 2, seconds=300.0) == [[True] * 3] * 2


def in_other_uses(rank: int, world_size: int) -> list[bool]:
    """A checkpoint in another one, a second backward pass, and a call after a mistake of all."""

    def two(x: Tensor, angles: Tensor) -> Tensor:
        inner = not_reentrant(keep, blocks[0], x, angles)
        return not_reentrant(keep, blocks[1], inner, angles)

    def changes(x: Tensor) -> Tensor:
        out = cp.attention(*x.reshape(*x.shape[:2], 3, 4, -1).unbind(2))
        assert isinstance(out, Tensor)
        return out.mul_(2.0).sin()

    results = []
    with ContextParallel(causal=True, seq_len=TOKENS) as cp:
        blocks, angles = blocks_of(cp), torch.rand(HEAD_DIM)
        for block in blocks:
            block.eval()
        x = cp.shard(torch.randn(1, TOKENS, WIDTH), 1).requires_grad_()
        leaves = [x, *blocks.parameters()]
        loss = blocks[1](blocks[0](x, angles), angles).square().sum()
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
        for keep in (cp.keep_attention(), cp.keep_attention(offload=True)):
            kept = not_reentrant(keep, two, x, angles).square().sum()
            for more in (True, False):
                grads = torch.autograd.grad(kept, leaves, retain_graph=more)
                results.append(equal([*wanted], [*grads]))
            try:
                y = cp.shard(torch.randn(2, TOKENS, 48), 1).requires_grad_()
                torch.autograd.grad(not_reentrant(keep, changes, y).sum(), y)
            except MeshAttentionError as error:
                results.append("was changed in place" in str(error))
        results.append(equal([*wanted], [*torch.autograd.grad(loss, leaves)]))
        [grad] = torch.autograd.grad(blocks[0](x, angles).square().sum(), x)
        keep = cp.keep_attention(offload=True)
        loss = reentrant(keep, blocks[0], x, angles).square().sum()
        for more in (True, False):
            loss.backward(retain_graph=more)  # type: ignore[no-untyped-call]
            assert keep.host is not None
            results.append((keep.host.num_bytes > 0) == more)  # although the loss is still there
        assert x.grad is not None
        results.append(torch.equal(x.grad, 2 * grad))
        again = keep.reentrant(blocks[0])
        again(x, angles)
        with pytest.raises(MeshAttentionError, match="make it anew for each"):
            again(x, angles)
    return results


def test_nested_checkpoints_second_backward_passes_and_changes_in_place(pool: WorkerPool) -> None:
    assert pool.run(in_other_uses, 2) == [[True] * 10] * 2


def of_the_function(rank: int, world_size: int) -> list[bool]:
    """The function has no object: its calls in the recomputation are those of the forward pass."""

    def block(x: Tensor) -> Tensor:
        out = mesh_attention(x.sin(), x, x.cos(), causal=True)
        assert isinstance(out, Tensor)
        return out.square()

    results = []
    with ContextParallel(causal=True, seq_len=TOKENS) as cp:
        torch.manual_seed(0)
        x = cp.shard(torch.randn(1, TOKENS, HEADS, HEAD_DIM), 1).requires_grad_()
        [wanted] = torch.autograd.grad(block(x).sum(), x)
        for run in (not_reentrant, reentrant):
            x.grad = None
            run(cp.keep_attention(), block, x).sum().backward()  # type: ignore[no-untyped-call]
            results.append(x.grad is not None and torch.equal(wanted, x.grad))
    release()
    return results


def test_calls_of_the_function_are_kept_too(pool: WorkerPool) -> None:
    assert pool.run(of_the_function, 2) == [[True] * 2] * 2


def out_of_step(rank: int, world_size: int, mistake: str) -> str:
    """What a rank is told, if rank 1 calls more often in its recomputation, or keeps nothing."""
    calls = 0

    def block(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = cp.attention(x, x, x)
        if mistake == "calls again" and rank == 1 and calls > 1:
            out = cp.attention(x, x, x)
        assert isinstance(out, Tensor)
        return out.sin()

    with ContextParallel(causal=True, method="mesh", seq_len=TOKENS) as cp:
        x = cp.shard(torch.randn(1, TOKENS, HEADS, HEAD_DIM), 1).requires_grad_()
        keep = None if mistake == "keeps nothing" and rank == 1 else cp.keep_attention()
        try:
            not_reentrant(keep, block, x).sum().backward()  # type: ignore[no-untyped-call]
        except MeshAttentionError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [("calls again", "and this call was not made in the forward pass"), ("keeps nothing", "pass")],
)
def test_a_rank_that_computes_something_else_again_is_told_to_all(
    pool: WorkerPool, mistake: str, words: str
) -> None:
    messages = pool.run(out_of_step, 2, mistake, group_seconds=6.0)
    assert all(words in each for each in messages), messages


def test_a_limit_of_what_is_not_offloaded_is_refused() -> None:
    with pytest.raises(MeshAttentionError, match="limits offload=True"):
        KeepAttention(host_bytes=1)
