"""Tensors that cannot travel on the caller's kind of group are refused before anything begins, and
what is wrong with a group that cannot be made is told as it is."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mesh_attention import MeshAttentionError
from mesh_attention.runtime.transport.groups import Groups
from mesh_attention.runtime.transport.make_group import with_all


@pytest.mark.parametrize(
    ("backend", "ranks", "refused"), [("nccl", 2, True), ("nccl", 1, False), ("gloo", 2, False)]
)
def test_tensors_on_the_cpu_are_refused_over_nccl(backend: str, ranks: int, refused: bool) -> None:
    groups = object.__new__(Groups)
    groups.backend, groups.ranks = backend, tuple(range(ranks))
    groups.check_device(torch.device("cuda"))
    if not refused:
        groups.check_device(torch.device("cpu"))
        return
    with pytest.raises(MeshAttentionError, match=r"on the cpu.*over nccl: move them to a CUDA"):
        groups.check_device(torch.device("cpu"))


def test_a_wrong_interface_is_no_rank_that_is_late() -> None:
    def make() -> dist.ProcessGroup:
        raise RuntimeError("Unable to find address for: eth7")

    with pytest.raises(RuntimeError, match="Unable to find address for: eth7"):
        with_all(make, (0, 1), timedelta(seconds=5))
