"""Which calls an attention becomes: its rectangles, or one call for any mask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Attention, Program
from mesh_attention.plan.passes.choose_calls import CallSummary
from support.targets import target_with, with_calls


def full_attention(kernel: str) -> tuple[Program, Program, CallSummary]:
    """Before and after calls are chosen, where one kernel has all kinds of them."""
    plan = make_plan(Problem(64, 4, 8), 4, method="mesh")
    before = plan.program(0, Direction.FORWARD)
    target = target_with(kernel, kernel, kernel)
    return before, *with_calls(before, plan, Direction.FORWARD, target)


def on_kernel(program: Program, kernel: str) -> Program:
    operations = [
        replace(op, calls=tuple(replace(call, kernel=kernel) for call in op.calls))
        if isinstance(op, Attention)
        else op
        for op in program.operations
    ]
    return replace(program, operations=tuple(operations))


def test_rectangles_stay_where_the_kernel_for_any_mask_is_slow() -> None:
    before, after, chosen = full_attention("reference")
    assert after == on_kernel(before, "reference")
    assert "no kernel takes any mask" in str(chosen)
    assert chosen == CallSummary()


def test_a_dense_call_is_not_given_up_for_one_of_the_same_rate() -> None:
    before, after, chosen = full_attention("any_mask")
    assert after == on_kernel(before, "any_mask")
    assert not chosen.whole


@pytest.mark.parametrize(("starts", "in_one"), [((0, 2000), True), ((0,), False)])
def test_several_calls_must_be_worth_it(starts: tuple[int, ...], in_one: bool) -> None:
    """Two calls of a kernel with a higher rate are predicted to be 0.3 % faster than one; where a
    document is all there is, its one dense call is chosen for 3 %."""
    problem = Problem(16384, 16, 128, mask=Mask(causal=True, documents=(*starts, 16384)))
    plan = make_plan(problem, 1, method="mesh", chunks=(1, 1))
    target = target_with("flash_attn3", "flash_attn3", "cudnn_ranges")
    program = plan.program(0, Direction.FORWARD)
    _, summary = with_calls(program, plan, Direction.FORWARD, target)
    assert summary.seconds_cut < summary.seconds_whole
    assert (summary.whole, summary.cut) == ((1, 0) if in_one else (0, 1))
    assert ("several calls must be 2% faster than one" in str(summary)) is in_one


def test_what_is_said_of_a_kernel_that_takes_some_rectangles_is_true() -> None:
    plan = make_plan(Problem(16384, 16, 128, mask=Mask(causal=True)), 4, method="ring")
    target = target_with("flash_attn3", None, "cudnn_ranges")
    program = plan.program(3, Direction.FORWARD)
    _, summary = with_calls(program, plan, Direction.FORWARD, target)
    assert summary.whole
    assert summary.cut
    assert f"{summary.whole} of {summary.whole + summary.cut} attentions" in str(summary)
    assert str(summary).endswith("the kernel asked for does not take the rectangles of all")
