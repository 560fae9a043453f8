"""A first chunk of keys that is a quarter of the others, so that computation begins sooner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exchanged_plans import exchanged_plan

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Plan
from mesh_attention.plan.language.program import AllToAll, Attend
from mesh_attention.plan.methods.parts.chunks import chunk_slots
from mesh_attention.plan.read.verify import verify
from mesh_attention.testing import run_local
from support.sample import sample

# Ranks, Ulysses degree, tile, chunks, heads and KV heads; what else is asked for.
SHAPES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((4, 2, (1, 2), (2, 2), 2, 2), {}),
    ((8, 2, (2, 2), (4, 4), 2, 2), {"even_chunks": True}),
    ((8, 4, (1, 2), (1, 3), 8, 8), {"head_slices": (1, 1)}),
    ((12, 2, (3, 2), (3, 2), 4, 2), {"layout": "contiguous"}),
    ((8, 4, (2, 1), (2, 4), 8, 2), {}),
    ((6, 2, (1, 3), (2, 2), 2, 2), {"layout": "striped"}),
]


def plan_of(*shape: Any, **options: Any) -> Plan:
    return exchanged_plan(*shape, **{"short_start": True, **options})


@pytest.mark.parametrize("halves", [(0, 8, 16), (0, 7, 14), (0, 1, 2), (0, 9), (0, 64)])
@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("even", [False, True])
def test_the_first_of_several_chunks_is_cut_where_it_can_be(
    halves: tuple[int, ...], count: int, even: bool
) -> None:
    usual = chunk_slots(halves, count, even=even)
    chunks = chunk_slots(halves, count, even=even, short_start=True)
    slots = [slot for chunk in chunks for a, b in chunk for slot in range(a, b)]
    assert sorted(slots) == list(range(halves[-1]))
    ((start, stop), *_) = usual[0]
    if len(usual) == 1 or stop - start < 4:
        assert chunks == usual
    else:
        assert chunks[2:] == usual[1:]
        assert chunks[0][0] == (start, start + (stop - start) // 4)


@pytest.mark.parametrize(("shape", "options"), sample(SHAPES, 3))
def test_programs_with_a_short_start_are_proven_and_compute_the_same(
    shape: tuple[Any, ...], options: dict[str, Any]
) -> None:
    plan = plan_of(*shape, **options)
    kq, kkv = shape[3]
    for pass_ in plan.passes:
        assert pass_.setting["short_start"] == "on"
        assert pass_.setting["chunks"] == f"{kq}x{kkv}"  # as it was asked for
    assert verify(plan) == []
    problem = plan.problem
    sizes = [(problem.num_heads, 4), (problem.kv_heads, 4), (problem.kv_heads, 4)]
    q, k, v = (torch.randn(1, problem.q_tokens, *size, dtype=torch.float64) for size in sizes)
    grad = torch.randn_like(q)
    alone = make_plan(replace(problem), 1, method="mesh")
    result, wanted = (run_local(which, q, k, v, grad) for which in (plan, alone))
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(result, name), getattr(wanted, name))


def test_there_is_something_to_compute_after_a_quarter_of_the_first_keys() -> None:
    def keys_before_the_first_attention(plan: Plan) -> int:
        rows = 0
        for op in plan.forward.programs[0].operations:
            if isinstance(op, Attend):
                return rows
            if isinstance(op, AllToAll) and op.name.startswith("EX-KV"):
                rows += sum(p.stop - p.start for pieces in op.receives for p in pieces)
        raise AssertionError("nothing is computed")

    shape = (8, 2, (1, 4), (2, 2), 2, 2)
    short, usual = (
        keys_before_the_first_attention(plan_of(*shape, short_start=on)) for on in (True, False)
    )
    assert 0 < short <= usual / 2


@pytest.mark.parametrize("options", [{"ulysses": 1, "tile": (2, 4)}, {"relayout": True}])
def test_rows_that_are_not_exchanged_are_refused(options: dict[str, Any]) -> None:
    named = {"degree": 2, "tile": (2, 2), "chunks": (2, 2), "heads": 2, "kv_heads": 2}
    with pytest.raises(PlanError, match="short_start=True is for what ranks exchange for heads"):
        plan_of(8, **{**named, **options})


def test_keys_that_are_not_cut_have_no_start_of_their_own() -> None:
    for chunks in ((1, 1), (2, 1)):
        plan = plan_of(8, 2, (2, 2), chunks, 2, 2)
        assert "short_start" not in plan.forward.setting
        assert verify(plan) == []


@pytest.mark.parametrize("value", [2, "maybe"])
def test_it_is_on_or_off(value: Any) -> None:
    with pytest.raises(PlanError, match="short_start"):
        plan_of(*SHAPES[0][0], short_start=value)
