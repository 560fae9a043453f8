"""`tuned=` on real processes: the plan that was measured, or the same error on all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mesh_attention import ContextParallel, Mask, mesh_attention
from mesh_attention.choose.auto import question_of
from mesh_attention.choose.tuned import Answer, TunedEntry, wanted, write_entries
from mesh_attention.machine.load import load_cluster
from mesh_attention.machine.rates import costs_of
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.text import digest
from support.cases import Case
from support.gloo_case import Part, attend, whole
from support.pool import WorkerPool
from support.raised import raised_by
from support.reference import attention, errors, tolerance

CASE = Case(4, 48, 48, heads=(4, 2), batch=2, mask=Mask(causal=True), dtype=torch.float32)
CLUSTER = load_cluster("hgx-h100")
CHOSEN: dict[Direction, tuple[str, dict[str, Any]]] = {
    Direction.FORWARD: ("mesh", {"tile": (2, 2), "chunks": (1, 2)}),
    Direction.BACKWARD: ("usp", {"ulysses": 2}),
}


def write(file: Path, chosen: dict[Direction, tuple[str, dict[str, Any]]] = CHOSEN) -> None:
    seconds, costs = dict.fromkeys(Direction, 1e-3), costs_of(CLUSTER, 4)
    answer = Answer(chosen, seconds, CLUSTER.node.ranks, costs, "cpu, gloo")
    write_entries(file, {wanted(CASE.problem, 4): TunedEntry(answer)})


def run_tuned(rank: int, world_size: int, case: Case, folder: str) -> dict[str, Any]:
    p = case.problem
    heads = {"num_heads": p.num_heads, "num_kv_heads": p.kv_heads, "head_dim": p.head_dim}
    asked: dict[str, Any] = {"seq_len": 48, "mask": case.mask, "dtype": case.dtype, **heads}
    file, other = f"{folder}/tuned.json", f"{folder}/other.json"
    results: dict[str, Any] = {}
    # The same answers by another name, on the last rank.
    own = f"{folder}/copy.json" if rank == 3 else file
    with ContextParallel(tuned=own, **asked) as cp:
        results["fixed"] = attend(cp, case), digest(cp.plan), cp.choice
        shards = [cp.shard(x.to(case.dtype), dim=1) for x in case.tensors()[:3]]
        out = cp.attention(*shards)
        by_function = mesh_attention(*shards, causal=True, tuned=file)
        assert torch.equal(out, by_function)  # type: ignore[arg-type]
    with ContextParallel(tuned=Path(own), causal=True) as cp:
        assert torch.equal(out, cp.attention(*shards))  # type: ignore[arg-type]
        results["by calls"] = digest(cp.plan), cp.choice
        longer = [torch.cat([x, x], dim=1) for x in shards]
        results["other sizes"] = raised_by(partial(cp.attention, *longer)).error
    wrong: dict[str, dict[str, Any]] = {
        "ranks differ": {"tuned": other if rank == 0 else file},
        "one has none": {"tuned": file if rank == 0 else None},
        "options": {"tuned": file, "layout": "striped"},
        "method": {"tuned": file, "method": "mesh"},
        "missing": {"tuned": f"{folder}/missing.json"},
        "no name": {"tuned": 5},
    }
    for name, how in wrong.items():
        results[name] = raised_by(partial(ContextParallel, **asked, **how)).error
    results["plan"] = raised_by(partial(ContextParallel, plan=cp.plan, tuned=file)).error
    return results


def test_what_was_measured_is_planned_and_all_else_is_an_error_on_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for name in ("tuned.json", "copy.json"):
        write(tmp_path / name)
    write(tmp_path / "other.json", dict.fromkeys(Direction, ("ring", {})))
    by_rank = pool.run(run_tuned, 4, CASE, str(tmp_path))
    truth = attention(*CASE.tensors(), CASE.mask)
    parts: list[Part] = [of_rank["fixed"][0] for of_rank in by_rank]
    assert max(errors(whole(parts, CASE), truth).values()) <= tolerance(CASE.dtype)
    measured = digest(question_of(CLUSTER, replace(CASE.problem), 4, CHOSEN).plan())
    for results_of_rank in by_rank:
        _, plan, choice = results_of_rank["fixed"]
        assert plan == results_of_rank["by calls"][0] == measured
        assert "tuned: 1 + 1 ms measured forward and backward on 4 ranks of cpu, gloo" in choice
        assert "others found something else" not in choice
        assert "looked up by the sizes of each call" in results_of_rank["by calls"][1]
        assert "has no answer for 96 tokens" in results_of_rank["other sizes"]
        assert "--tokens 96" in results_of_rank["other sizes"]
        assert "tuned is" in results_of_rank["ranks differ"]
        assert "tuned is" in results_of_rank["one has none"]
        assert "has no answer for 48 tokens" in results_of_rank["options"]
        assert "--layout striped" in results_of_rank["options"]
        assert "the file sets the method" in results_of_rank["method"]
        assert "No such file" in results_of_rank["missing"]
        assert "must be the name of a file" in results_of_rank["no name"]
        assert "leave it out, or leave plan out" in results_of_rank["plan"]
