"""Counted volumes of every method against the closed formulas (algorithm.md, section 8).

The formulas are those of docs/methods.md, so the page is proven too; where they differ from the
paper's the page says why. `PAPER` holds the paper's own, for the methods it gives one for.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from method_settings import Setting, shapes
from paper_volumes import CELLS, Cell, count_cell

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.methods.startrail import team_sizes
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import PassCount, count
from support.sample import sample

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_methods.py"))
VOLUMES: dict[str, tuple[str, str]] = GENERATOR["VOLUMES"]

RANKS = (1, 2, 3, 4, 6, 8, 9, 12, 18)
F = Fraction


def volumes(
    name: str,
    ranks: int,
    setting: Setting,
    direction: Direction = Direction.FORWARD,
    *,
    causal: bool = False,
) -> list[Fraction]:
    """Of each rank, in units of N*d elements; statistics left out."""
    problem = Problem(2 * ranks, num_heads=ranks, head_dim=4, mask=Mask(causal=causal))
    plan = make_plan(problem, ranks, method=name, directions=(direction,), **setting)
    counted: PassCount = count(plan)[direction]
    unit = counted.unit_bytes * ranks
    return [F(rank.total.token_bytes, unit) for rank in counted.ranks]


def variables(ranks: int, setting: Setting) -> dict[str, Fraction]:
    a, b = setting.get("tile", (1, ranks))
    values = {"n": ranks, "a": a, "b": b, "U": setting.get("ulysses", 1), "C": setting.get("team")}
    return {name: F(value) for name, value in values.items() if value is not None}


def as_counted(name: str, ranks: int) -> list[Setting]:
    """Every shape, set up as the formula counts; StarTrail's needs a placement for all ranks."""
    settings = []
    for shape in shapes(METHODS[name], Problem(ranks, ranks, 4), ranks):
        if "team" not in shape:
            settings.append(shape)
        elif shape["team"] ** 2 < ranks:
            settings.append(shape | {"first_block": "next"})
    return settings


@pytest.mark.parametrize(("name", "direction"), sample(product(METHODS, Direction), 3))
def test_every_rank_moves_exactly_the_volume_of_the_formula_in_the_docs(
    name: str, direction: Direction
) -> None:
    formula = VOLUMES[name][direction is Direction.BACKWARD]
    for ranks in (4, 9):
        for setting in as_counted(name, ranks):
            expected = eval(formula, {"__builtins__": {}}, variables(ranks, setting))
            moved_units = volumes(name, ranks, setting | {"layout": "striped"}, direction)
            assert set(moved_units) == {expected}, (ranks, setting)


@pytest.mark.parametrize("name", sample([name for name in METHODS if name != "seen"], 2))
def test_a_causal_mask_changes_no_volume(name: str) -> None:
    ranks = 6  # tiles and degrees of two and three
    for direction in Direction:
        for setting in as_counted(name, ranks):
            full, causal = (
                volumes(name, ranks, setting, direction, causal=masked) for masked in (False, True)
            )
            assert full == causal, (ranks, setting, direction)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9])
def test_where_only_what_is_seen_travels_causal_ranks_receive_what_lies_before_their_queries(
    ranks: int,
) -> None:
    """Zigzag rank g has blocks g and 2n-1-g of 2n, and sees those up to the second."""
    forward, backward = (
        volumes("seen", ranks, {}, direction, causal=True) for direction in Direction
    )
    seen = [F(2 * (2 * ranks - 2 - g), 2 * ranks) for g in range(ranks)]
    # Backward each receives as well the gradients of its two blocks from all that see them.
    viewers = [(ranks - 1) + g for g in range(ranks)]
    assert forward == seen
    assert backward == [s + F(2 * v, 2 * ranks) for s, v in zip(seen, viewers, strict=True)]


PAPER: dict[str, Callable[[dict[str, Fraction]], Fraction]] = {
    "mesh": lambda x: (2 * x["a"] + 2 * x["b"] - 4) / x["n"],
    "ring": lambda x: 2 - 2 / x["n"],
    "ulysses": lambda x: 4 * (x["n"] - 1) / x["n"] ** 2,
    "usp": lambda x: 4 * (x["U"] - 1) / (x["U"] * x["n"]) + 2 * (x["n"] / x["U"] - 1) / x["n"],
    "startrail": lambda x: (4 * x["C"] - 4) / x["n"] + 2 / x["C"],
    "mesh-usp": lambda x: (
        4 * (x["U"] - 1) / (x["U"] * x["n"]) + (2 * x["a"] + 2 * x["b"] - 4) / x["n"]
    ),
}
SAME_AS = {
    "ring-q": "ring",
    "allgather-kv": "ring",
    "double-ring": "usp",
    "agq-ringkv": "mesh",
    "agkv-ringqo": "mesh",
    "seen": "mesh",
}


@pytest.mark.parametrize("name", METHODS)
def test_forward_the_docs_have_the_papers_formula(name: str) -> None:
    """Methods without one of their own move what a method of the paper moves."""
    paper = PAPER[SAME_AS.get(name, name)]
    for ranks in (*RANKS, 64):
        for setting in as_counted(name, ranks):
            values = variables(ranks, setting)
            assert eval(VOLUMES[name][0], {"__builtins__": {}}, values) == paper(values)


@pytest.mark.parametrize("ranks", [4, 8, 9, 16, 18, 25, 32])
@pytest.mark.parametrize("direction", Direction)
def test_startrail_that_begins_near_saves_one_member_of_each_team_the_placement(
    ranks: int, direction: Direction
) -> None:
    """2C units forward, and as many again for the gradients; where C^2 is n there is no other."""
    backward = direction is Direction.BACKWARD
    for team in team_sizes(ranks):
        values = variables(ranks, {"team": team})
        full = eval(VOLUMES["startrail"][backward], {"__builtins__": {}}, values)
        saved = F(2 * team * (1 + backward), ranks)
        for first_block in ("near", "next") if team**2 == ranks else ("near",):
            setting = {"team": team, "first_block": first_block}
            moved_units = volumes("startrail", ranks, setting, direction)
            teams = [moved_units[i : i + team] for i in range(0, ranks, team)]
            assert all(team_units == [full - saved] + [full] * (team - 1) for team_units in teams)


def test_startrail_of_one_is_the_ring() -> None:
    for ranks, direction in product((1, 2, 5, 8), Direction):
        ring = volumes("ring", ranks, {}, direction)
        assert volumes("startrail", ranks, {"team": 1}, direction) == ring


@pytest.mark.parametrize("name", METHODS)
def test_o_in_place_of_delta_adds_one_tensor_wherever_q_moves(name: str) -> None:
    """One for each remote Q, and one in the swap of tokens for heads."""
    for ranks in (4, 6):
        for setting in as_counted(name, ranks):
            delta, with_out = (
                volumes(name, ranks, setting | {"gather_out": gather}, Direction.BACKWARD)
                for gather in (False, True)
            )
            degree = setting.get("ulysses", ranks if name == "ulysses" else 1)
            a = setting.get("team", setting.get("tile", (1, 1))[0])
            a = ranks if name == "ring-q" else a
            extra = F(degree - 1, degree * ranks) + F(a - 1, ranks)
            assert [more - less for less, more in zip(delta, with_out, strict=True)] == (
                [extra] * ranks
            ), (ranks, setting)


def test_statistics_are_in_bytes_but_not_in_units() -> None:
    """Pass-Q forward: one fp32 LSE a row and head comes home beside each partial output."""
    problem = Problem(8 * 16, num_heads=2, head_dim=4)
    pass_count = count(make_plan(problem, 8, method="ring-q"))[Direction.FORWARD]
    rows, heads, fp32_bytes = 16, 2, 4
    for rank in pass_count.ranks:
        statistics = rank.total.received_bytes - rank.total.token_bytes
        assert statistics == 7 * rows * heads * fp32_bytes
    assert pass_count.units_total == 8 * 2 * 7


# The paper's table, 256 GPUs (algorithm.md, section 8), written here a second time.

REPORTED = {
    ("forward", "mesh 16x16"): ("1.9", "0.6"),
    ("forward", "ring"): ("15.9", "2.0"),
    ("forward", "usp U=8"): ("2.0", "1.9"),
    ("forward", "startrail C=8"): ("2.9", "2.0"),
    ("backward", "mesh 16x16"): ("3.8", "1.3"),
    ("backward", "ring"): ("31.9", "4.0"),
    ("backward", "usp U=8"): ("4.0", "3.9"),
    ("backward", "startrail C=16"): ("5.8", "2.3"),
    ("causal forward", "mesh 32x8"): ("2.4", "0.6"),
    ("causal forward", "ring"): ("15.9", "2.0"),
    ("causal forward", "usp U=8"): ("2.0", "1.9"),
}
# A causal ring or a backward one of 256 ranks takes ten seconds and more to plan; USP a second,
# and its formula is held against every rank in both passes above.
SLOW = {
    ("forward", "ring"),
    ("backward", "ring"),
    ("backward", "usp U=8"),
    ("causal forward", "ring"),
}


def cell_of(key: tuple[str, str]) -> Cell:
    return next(cell for cell in CELLS if (cell.row, cell.column) == key)


def test_the_table_of_the_paper_has_the_cells_and_figures_of_the_specification() -> None:
    assert {(c.row, c.column): (c.total, c.inter_node) for c in CELLS} == REPORTED


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.slow] if key in SLOW else [], id=" ".join(key))
        for key in REPORTED
    ],
)
def test_256_ranks_move_the_gib_of_the_paper_to_the_digits_shown(key: tuple[str, str]) -> None:
    assert count_cell(cell_of(key)) == REPORTED[key]
