"""Compiled blocks as training code has them: kernels made by inductor, and frameworks that reduce
gradients around compiled blocks. Compilers take their time, so these tests are slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mesh_attention import ContextParallel
from support.pool import WorkerPool
from support.transformer_block import HEAD_DIM, HEADS, Decoder, steps

pytestmark = pytest.mark.slow
SECONDS = 900.0


def by_inductor(rank: int, world_size: int) -> list[float]:
    with ContextParallel(causal=True) as cp:
        packs = [[0, 5, 16], [0, 1, 7, 16], [0, 3, 24], [0, 20, 40]]
        return steps(cp, packs, ("cpu", HEAD_DIM, {"backend": "inductor"}))[0]


def test_inductor_gives_the_numbers_of_the_eager_block(pool: WorkerPool) -> None:
    for errors in pool.run(by_inductor, 2, seconds=SECONDS):
        assert max(errors) < 1e-4


def results_in_graphs(rank: int, world_size: int) -> list[bool]:
    """For each op of ours that inductor schedules, and each of its results: may a CUDA graph hold
    it?"""
    from torch._inductor import ir, scheduler
    from torch._inductor.utils import is_cudagraph_unsafe_op

    results: list[bool] = []

    class Seen(scheduler.Scheduler):
        def __init__(self, nodes: list[Any]) -> None:
            ours = (ir.FallbackKernel, ir.MultiOutput)
            results.extend(
                not is_cudagraph_unsafe_op(node) for node in nodes if isinstance(node, ours)
            )
            super().__init__(nodes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "Scheduler", Seen)
        by_inductor(rank, world_size)
    return results


def test_neither_an_op_nor_its_results_are_told_apart_in_a_cuda_graph(pool: WorkerPool) -> None:
    for result in pool.run(results_in_graphs, 1, seconds=SECONDS):
        assert len(result) >= 2 + 2 + 3, "two ops, and results of both"
        assert not any(result)


class Layers(nn.Module):
    def __init__(self, cp: ContextParallel, compile_blocks: bool) -> None:
        super().__init__()
        blocks = [Decoder(cp) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        if compile_blocks:
            for block in blocks:
                block.compile(backend="aot_eager", fullgraph=True)

    def forward(self, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, positions, documents)
        return x


def by_framework(rank: int, world_size: int, name: str) -> list[float]:
    """Gradients of compiled blocks, reduced by the framework, against eager ones added by hand."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    errors = []
    with ContextParallel(mesh["cp"], causal=True) as cp:
        torch.manual_seed(0)
        eager = Layers(cp, compile_blocks=False)
        plain = Layers(cp, compile_blocks=name != "ddp")
        plain.load_state_dict(eager.state_dict())
        if name == "ddp":
            # Its own code breaks graphs, and it cuts them where gradients are sent.
            model: Any = torch.compile(DistributedDataParallel(plain), backend="aot_eager")
        else:
            for block in plain.blocks:
                fully_shard(block, mesh=mesh)
            model = fully_shard(plain, mesh=mesh)
        for starts in ([0, 5, 16], [0, 2, 16], [0, 9, 32]):
            documents = cp.documents(starts)
            x = cp.shard(torch.randn(1, starts[-1], HEADS * HEAD_DIM), 1, documents=documents)
            positions = cp.positions(documents=documents, restart=True)
            for way in (eager, plain):
                way.zero_grad()
            for way in (eager, model):
                way(x, positions, documents).pow(2).sum().backward()
            for own, wanted in zip(plain.parameters(), eager.parameters(), strict=True):
                dist.all_reduce(wanted.grad)
                grad: Any = own.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                assert wanted.grad is not None
                errors.append(float((grad * world_size - wanted.grad).abs().max()))
    return errors


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_frameworks_reduce_the_gradients_of_compiled_blocks(pool: WorkerPool, name: str) -> None:
    """DDP around a whole compiled model, FSDP2 around each compiled block."""
    for errors in pool.run(by_framework, 2, name, seconds=SECONDS):
        assert max(errors) < 1e-4
