"""Writes the table of docs/theory.md: the bound, and what plans move, from 8 to 4,096 ranks.

python docs/make_theory.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Communication
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import least_bytes, unit_bytes

PAGE = Path(__file__).with_name("theory.md")
RANKS = (8, 64, 128, 256, 4096)
BEGIN, END = "<!-- Made by docs/make_theory.py: begin -->\n", "<!-- end -->\n"
TOKENS = 2048  # a rank; units do not depend on it
KEEPS = ("gathered", "exchanged", "shards")


def problem_of(ranks: int, heads: int, kv_heads: int) -> Problem:
    return Problem(ranks * TOKENS, heads, 128, num_kv_heads=kv_heads)


def received_units(plan: Plan, direction: Direction) -> float:
    """By rank 0, without statistics: under a full mask all ranks receive as much."""
    directed = plan.direction(direction)
    program = directed.programs[0]
    meter = TrafficMeter(plan.problem, program.buffer_table())
    received_bytes = sum(
        meter.traffic(op, directed.members[op.group][0], len(directed.groups[op.group])).token_bytes
        for op in program.operations
        if isinstance(op, Communication)
    )
    return received_bytes / unit_bytes(plan.problem, plan.num_ranks)


def row(ranks: int, heads: int, kv_heads: int) -> str:
    problem = problem_of(ranks, heads, kv_heads)
    cells = [f"{heads}:{kv_heads}", f"{ranks:,}", numbers(bounds(problem, ranks))]
    of_heads = {"method": "mesh-usp", "ulysses": min(ranks, kv_heads)}
    for how, keeps in ((of_heads, KEEPS), ({"method": "mesh"}, KEEPS[::2])):
        plans = [make_plan(problem, ranks, keep=keep, **how) for keep in keeps]
        setting = plans[0].direction(Direction.FORWARD).setting
        degree = setting.get("ulysses")
        name = f"U {degree}, {setting['tile']}" if degree else setting["tile"]
        forward = received_units(plans[0], Direction.FORWARD)
        moved = [forward, *(received_units(plan, Direction.BACKWARD) for plan in plans)]
        cells += [name, numbers(moved)]
    return f"| {' | '.join(cells)} |\n"


def bounds(problem: Problem, ranks: int) -> tuple[float, ...]:
    """Forward; backward with all rows kept that the forward pass received; and with shards."""
    unit = unit_bytes(problem, ranks)
    passes = ((Direction.FORWARD, True), (Direction.BACKWARD, True), (Direction.BACKWARD, False))
    return tuple(least_bytes(problem, ranks, d, keeps=keeps) / unit for d, keeps in passes)


def numbers(units: Sequence[float]) -> str:
    return " / ".join(f"{x:.2f}" for x in units)


def table(ranks: tuple[int, ...] = RANKS) -> str:
    head = (
        "| heads | ranks | bound | heads first, tile | moves | tile alone | moves |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(row(n, 64, kv) for kv in (64, 8) for n in ranks)


def main() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
