"""The report of `count` on plans that are counted by hand: two and four ranks of a ring."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attend, AttendBackward
from mesh_attention.plan.language.traffic import Traffic
from mesh_attention.plan.methods.box_methods import RingSetting, box_plan
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.plan.read.count import count


def report(
    n: int, *, causal: bool = False, group: int = 1, ranks_per_node: int | None = None
) -> dict[Direction, dict[str, Any]]:
    """A ring over 16 tokens a rank, two KV heads of 8 numbers, two bytes each, with `group` query
    heads to each of them."""
    problem = Problem(16 * n, 2 * group, 8, num_kv_heads=2, mask=Mask(causal=causal))
    setting = RingSetting(layout=LayoutKind.CONTIGUOUS, ranks_per_node=ranks_per_node)
    return {
        d: pass_count.to_json()
        for d, pass_count in count(box_plan(problem, n, setting, tuple(Direction))).items()
    }


@pytest.mark.parametrize("direction", list(Direction))
def test_without_a_mask_a_ring_has_a_kernel_call_for_each_block(direction: Direction) -> None:
    for n in (1, 2, 3, 5):
        assert report(n)[direction]["kernel_calls_per_rank"] == {"mean": n, "max": n}


@pytest.mark.parametrize("direction", list(Direction))
def test_under_a_causal_mask_a_contiguous_ring_calls_for_the_blocks_up_to_its_own(
    direction: Direction,
) -> None:
    """1 + 2 + ... + n calls over n ranks."""
    for n in (1, 2, 3, 4):
        calls_per_rank = report(n, causal=True)[direction]["kernel_calls_per_rank"]
        assert calls_per_rank == {"mean": (n + 1) / 2, "max": n}


def test_kernel_calls_of_a_rank_are_those_in_its_program() -> None:
    problem = Problem(96, 2, 8, mask=Mask(causal=True))
    plan = box_plan(problem, 4, RingSetting(), tuple(Direction))
    for direction, pass_count in count(plan).items():
        programs = next(each for each in plan.passes if each.direction is direction).programs
        for rank, program in zip(pass_count.ranks, programs, strict=True):
            attends = [op for op in program.operations if isinstance(op, Attend | AttendBackward)]
            assert rank.num_kernel_calls == sum(len(op.calls) for op in attends) > 0


def test_a_mean_is_a_float_whole_or_not_and_a_maximum_an_integer() -> None:
    calls = {n: report(n, causal=True)[Direction.FORWARD]["kernel_calls_per_rank"] for n in (2, 3)}
    assert repr(calls[2]) == "{'mean': 1.5, 'max': 2}"
    assert repr(calls[3]) == "{'mean': 2.0, 'max': 3}"


def test_units_are_a_float_whole_or_not() -> None:
    """One step of a ring of two moves K and V twice: a unit each, or an eighth of one."""
    assert repr(report(2)[Direction.FORWARD]["units_total"]) == "4.0"
    assert repr(report(2, group=8)[Direction.FORWARD]["units_total"]) == "0.5"


def test_every_number_of_the_report_of_a_ring_of_four_on_two_nodes_is_as_counted_by_hand() -> None:
    """K and V of a partition are 16 * 2 * 8 * 2 * 2 bytes = 1 KiB; each of three steps brings one.

    A node's first rank gets each of its three from the other node, its second none.
    """
    forward = report(4, ranks_per_node=2)[Direction.FORWARD]
    assert forward["bytes_per_rank"] == {"mean": 3072, "max": 3072}
    assert forward["inter_node_bytes_per_rank"] == {"mean": 1536, "max": 1536}
    assert forward["statistics_bytes_per_rank"] == {"mean": 0, "max": 0}
    assert forward["bytes_per_rank_by_operation"] == {"SendRecv": {"mean": 3072, "max": 3072}}
    assert forward["communications_per_rank"] == {"mean": 3, "max": 3}
    assert forward["kernel_calls_per_rank"] == {"mean": 4, "max": 4}
    assert forward["units_total"] == 24
    assert isinstance(forward["inter_node_bytes_per_rank"]["mean"], float)


def test_what_an_operation_moves_is_all_of_it_tokens_in_a_ring() -> None:
    plan = box_plan(Problem(64, 2, 8), 4, RingSetting(), (Direction.FORWARD,))
    for rank in count(plan)[Direction.FORWARD].ranks:
        assert rank.total == rank.by_operation["SendRecv"] == Traffic(3072, 3072, 3072)
