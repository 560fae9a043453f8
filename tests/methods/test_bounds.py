"""No plan moves less than the lower bound, which is what docs/theory.md says it is."""

from __future__ import annotations

import itertools
import runpy
from math import sqrt
from pathlib import Path

import pytest

from mesh_attention.choose.ask import make_plan
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.parts.head_group import ulysses_degrees
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count, least_bytes, unit_bytes
from support.sample import sample

DOCS = Path(__file__).parents[2] / "docs"
HEADS = ((4, 4), (6, 6), (8, 2), (8, 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("causal", "keep"),
    sample([(c, k) for k in ("gathered", "shards") for c in (True, False)], 3),
)
def test_no_plan_moves_less_than_the_bound(method: str, causal: bool, keep: str) -> None:
    """Sizes that ranks share out evenly: then work is even, as the bound supposes."""
    seen = 0
    for ranks, (heads, kv_heads) in itertools.product((2, 3, 4, 8), HEADS):
        problem = Problem(16 * ranks, heads, 8, num_kv_heads=kv_heads, mask=Mask(causal=causal))
        if method == "ulysses" and ranks not in ulysses_degrees(problem):
            continue  # uneven shares of heads
        try:
            plan = make_plan(problem, ranks, method=method, keep=keep)
        except PlanError:
            continue  # more ranks than heads
        for direction, pass_count in count(plan).items():
            moved = sum(rank.total.token_bytes for rank in pass_count.ranks) / ranks
            least = least_bytes(problem, ranks, direction, keeps=keep == "gathered")
            assert moved >= least * (1 - 1e-9), (ranks, heads)
            seen += 1
    assert seen >= 8


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (3, 3), (2, 1), (4, 2), (8, 2)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("direction", "keeps"),
    [(Direction.FORWARD, True), (Direction.BACKWARD, True), (Direction.BACKWARD, False)],
)
def test_no_choice_of_rows_for_one_rank_costs_less(
    heads: int, kv_heads: int, ranks: int, direction: Direction, keeps: bool
) -> None:
    """All numbers of rows that a rank can touch in each KV head, one by one."""
    tokens, group = 4, heads // kv_heads
    problem = Problem(tokens, heads, 1, num_kv_heads=kv_heads, element_bytes=2)
    own_q, own_k, share = group * tokens // ranks, tokens // ranks, heads * tokens**2 // ranks
    q_row, k_row = (2, 2) if keeps else (3, 4)  # dO and dQ; dK and dV; what comes again
    cheapest = {0: 0}  # for so much work in the heads so far
    for _ in range(kv_heads):
        longer: dict[int, int] = {}
        for (work, price), q, k in itertools.product(
            cheapest.items(), range(own_q, group * tokens + 1), range(own_k, tokens + 1)
        ):
            done = min(share, work + q * k)
            paid = price + q_row * (q - own_q) + k_row * (k - own_k)
            longer[done] = min(paid, longer.get(done, paid))
        cheapest = longer
    bound = least_bytes(problem, ranks, direction, keeps=keeps) / 2
    assert bound <= cheapest[share] + 1e-9
    assert (
        bound >= 0.6 * cheapest[share]
    )  # rows are whole, which costs the most where there are few


def test_the_closed_forms_of_the_page_are_what_is_computed() -> None:
    for ranks, heads in itertools.product((2, 5, 8, 63, 64, 256, 4096), (1, 8, 64)):
        problem = Problem(ranks * 4, heads, 128)
        units = least_bytes(problem, ranks, Direction.FORWARD) / unit_bytes(problem, ranks)
        few = 4 * (ranks - 1) / (ranks + 1)
        many = 4 * (sqrt(1 + heads * (ranks - 1)) - 1) / heads
        assert units == pytest.approx(few if ranks < heads else many)


def test_one_rank_and_masks_inside_shards_need_nothing() -> None:
    assert least_bytes(Problem(64, 4, 8), 1, Direction.FORWARD) == 0
    documents = Mask(documents=tuple(range(0, 65, 8)))
    assert least_bytes(Problem(64, 4, 8, mask=documents), 4, Direction.BACKWARD) == 0


def test_the_table_of_the_page_is_what_plans_move() -> None:
    page = (DOCS / "theory.md").read_text()
    made = runpy.run_path(str(DOCS / "make_theory.py"))
    for line in made["table"]((8, 64, 128, 256)).splitlines():
        assert line in page, "python docs/make_theory.py"
    for ranks, kv_heads in itertools.product(made["RANKS"], (64, 8)):
        bounds = made["bounds"](made["problem_of"](ranks, 64, kv_heads), ranks)
        assert f"| 64:{kv_heads} | {ranks:,} | {made['numbers'](bounds)} |" in page
