"""`method="auto"` on real processes: exact, told in a line, and the same on ranks that differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mesh_attention import ContextParallel, Mask, make_plan, mesh_attention
from mesh_attention.plan.language.text import digest
from mesh_attention.request.auto import ranks_of_nodes
from support.cases import Case
from support.gloo_case import Part, attend, whole
from support.pool import WorkerPool
from support.raised import raised_by
from support.reference import attention, errors, tolerance

CASE = Case(4, 45, 45, heads=(4, 2), batch=2, mask=Mask(causal=True), dtype=torch.float32)


def sizes(case: Case) -> dict[str, Any]:
    p = case.problem
    heads = {"num_heads": p.num_heads, "num_kv_heads": p.kv_heads, "head_dim": p.head_dim}
    return {"seq_len": p.q_tokens, "mask": p.mask, "dtype": case.dtype, **heads}


def run_auto(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    results: dict[str, Any] = {}
    asked = sizes(case)
    with ContextParallel(method="auto", **asked) as cp:
        results["default"] = attend(cp, case), digest(cp.plan), cp.choice
    # Other clusters on other ranks: as the first has it.
    other = "hgx-h100" if rank == 0 else "a100-roce"
    with ContextParallel(method="auto", cluster=other, **asked) as cp:
        results["clusters"] = attend(cp, case), digest(cp.plan), cp.choice
    # Sizes that come with calls, and documents of a batch.
    with ContextParallel(seq_len=45, causal=True) as cp:
        docs = cp.documents([0, 20, 45])
        results["documents"] = attend_documents(cp, case, docs)
        results["by calls"] = cp.choice if attend_layers(cp, case) else ""
    # Layers of one batch, one with a window: objects that share tokens share their places too.
    with ContextParallel(**asked) as cp:
        assert cp.choice == results["default"][2]
        with ContextParallel(**(asked | {"mask": WINDOW})) as windowed:
            assert windowed.plan.q_layout.kind is cp.plan.q_layout.kind
            results["layers"] = attend_layers(cp, case, windowed)
        results["same plan"] = digest(cp.plan) == digest(make_plan(case.problem, 4))
    # Of what cannot be cut so, the next best method.
    with ContextParallel(**asked, head_slices=(1, 2)) as cp:
        results["cut"] = attend(cp, case), digest(cp.plan), cp.choice
    for name, method, cluster in (
        ("refused", "mesh", "hgx-h100"),
        ("unknown", "auto", "hgx-h1000"),
    ):
        wrong = {"method": method, "cluster": cluster, **asked}
        results[name] = raised_by(partial(ContextParallel, **wrong)).error
    return results


WINDOW = Mask(causal=True, window=(6, 0))


def attend_layers(cp: ContextParallel, case: Case, other: ContextParallel | None = None) -> bool:
    """Both objects, or the one and the function, with tokens that the first has cut."""
    shards = [cp.shard(x.to(case.dtype), dim=1) for x in case.tensors()[:3]]
    layers = [(cp.attention(*shards), case.mask)]
    if other is not None:
        layers.append((other.attention(*shards), WINDOW))
    size: dict[str, Any] = {"seq_len": case.problem.q_tokens}
    layers.append((mesh_attention(*shards, causal=True, **size), case.mask))
    layers.append((mesh_attention(*shards, mask=WINDOW, **size), WINDOW))
    for local, mask in layers:
        assert isinstance(local, torch.Tensor)
        off = cp.unshard(local, dim=1).double() - attention(*case.tensors(), mask).out
        assert off.abs().max() < 1e-5
    return True


def attend_documents(cp: ContextParallel, case: Case, docs: Any) -> bool:
    q, k, v, _ = (x.to(case.dtype) for x in case.tensors())
    shards = [cp.shard(x, dim=1, documents=docs) for x in (q, k, v)]
    local = cp.attention(*shards, documents=docs)
    assert isinstance(local, torch.Tensor)
    out = cp.unshard(local, dim=1, documents=docs)
    mask = replace(case.mask, documents=(0, 20, 45))
    truth = attention(*case.tensors(), mask)
    return bool((out.double() - truth.out).abs().max() < 1e-5)


def test_auto_is_exact_and_the_same_on_all_ranks(pool: WorkerPool) -> None:
    by_rank = pool.run(run_auto, 4, CASE)
    truth = attention(*CASE.tensors(), CASE.mask)
    for name in ("default", "clusters", "cut"):
        parts: list[Part] = [of_rank[name][0] for of_rank in by_rank]
        assert max(errors(whole(parts, CASE), truth).values()) <= tolerance(CASE.dtype)
        assert len({of_rank[name][1] for of_rank in by_rank}) == 1
    for results_of_rank in by_rank:
        assert (
            "modelled forward and backward on 4 ranks of hgx-h100" in results_of_rank["default"][2]
        )
        assert "hgx-h100, as given" in results_of_rank["clusters"][2]
        assert "by the first rank; others found something else" in results_of_rank["clusters"][2]
        assert results_of_rank["documents"]
        assert "chosen for the sizes of each call" in results_of_rank["by calls"]
        assert results_of_rank["layers"]
        assert results_of_rank["same plan"]
        assert "head_slices" in results_of_rank["cut"][2]
        assert "only method='auto' chooses by it" in results_of_rank["refused"]
        assert "did you mean hgx-h100?" in results_of_rank["unknown"]


@pytest.mark.parametrize(
    ("ranks", "local", "number"),
    [
        ([0, 1, 2, 3], "4", 4),
        ([0, 1, 2, 3], "2", 2),
        ([0, 2, 4, 6], "4", 2),
        ([0, 1, 2, 4], "4", None),
        ([0, 4, 1, 5], "4", None),
        ([0, 1], None, None),
        ([0, 1], "x", None),
        ([0, 1], "0", None),
    ],
)
def test_nodes_of_a_group_follow_from_the_launcher(
    ranks: list[int], local: str | None, number: int | None
) -> None:
    assert ranks_of_nodes(ranks, local) == number
