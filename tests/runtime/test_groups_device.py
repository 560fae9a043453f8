"""Tensors that cannot travel on the caller's kind of group are refused before anything begins."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mesh_attention import MeshAttentionError
from mesh_attention.runtime.transport.groups import Groups


@pytest.mark.parametrize(
    ("backend", "ranks", "refused"), [("nccl", 2, True), ("nccl", 1, False), ("gloo", 2, False)]
)
def test_tensors_on_the_cpu_are_refused_over_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int, refused: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    groups = object.__new__(Groups)
    groups.parent, groups.ranks = object(), tuple(range(ranks))  # type: ignore[assignment]
    groups.check_device(torch.device("cuda"))
    if not refused:
        groups.check_device(torch.device("cpu"))
        return
    with pytest.raises(MeshAttentionError, match=r"on the cpu.*over nccl: move them to a CUDA"):
        groups.check_device(torch.device("cpu"))
