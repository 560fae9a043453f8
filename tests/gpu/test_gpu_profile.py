"""`profile` on NCCL ranks of one GPU: it ends, and all ranks have the same file."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mesh_attention.machine.load import parse_cluster
from mesh_attention.measure.kernel_rates import Sizes
from mesh_attention.measure.profile import profile_ranks
from mesh_attention.measure.ranks import ranks_of_group
from support.pool import WorkerPool

pytestmark = pytest.mark.gpu

SHORT = Sizes(2, 64, torch.bfloat16, 128, (1 << 16, 1 << 20), 0.001)


def measured(rank: int, world_size: int) -> list[str]:
    """Twice, as by a program that measures again; the default group is over gloo."""
    group = dist.new_group(backend="nccl")
    ranks = ranks_of_group(group, torch.device("cuda"))
    texts = [profile_ranks(ranks, sizes=SHORT).text for _ in range(2)]
    dist.destroy_process_group(group)
    return texts


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_nccl_ranks_have_the_same_file(gpu_pool: WorkerPool, num_ranks: int) -> None:
    texts = gpu_pool.run(measured, num_ranks, seconds=150)
    assert all(own == texts[0] for own in texts)
    for text in texts[0]:
        cluster = parse_cluster(text, "measured")
        assert (cluster.nodes, cluster.node.ranks) == (1, num_ranks)
        assert not cluster.host_driven
