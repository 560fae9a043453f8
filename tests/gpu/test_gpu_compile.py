"""Blocks that inductor compiles, with its CUDA graphs: those end before attention and begin after
it, so documents may change with every step, and nothing that ranks do together is replayed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mesh_attention import ContextParallel
from support.pool import WorkerPool
from support.transformer_block import steps

pytestmark = pytest.mark.gpu


def block(rank: int, world_size: int, mode: str) -> list[float]:
    with ContextParallel(dist.new_group(backend="nccl"), causal=True) as cp:
        packs = [[0, 100, 512], [0, 512], [0, 1, 300, 512], [0, 256, 512], [0, 7, 512]]
        errors, _ = steps(cp, packs, ("cuda", 64, {"mode": mode}))
        cp.check()
        return errors


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_blocks_have_the_numbers_of_eager_ones(
    gpu_pool_in_turns: WorkerPool, mode: str
) -> None:
    for errors in gpu_pool_in_turns.run(block, 2, mode, seconds=300.0):
        assert max(errors) < 1e-2
