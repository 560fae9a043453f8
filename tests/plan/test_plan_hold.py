"""Where buffers are freed: right after their last use, or some attentions later."""

from __future__ import annotations

import pytest

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.language.program import Attend, Attention, Free
from mesh_attention.plan.methods.parts.assemble import Assembler
from mesh_attention.plan.problem.problem import Problem


@pytest.mark.parametrize("hold", [0, 1, 2])
def test_a_buffer_is_freed_right_after_its_last_use_or_so_many_attentions_later(hold: int) -> None:
    made = make_plan(Problem(96, 2, 8), 6, method="ring").forward.programs[0]
    operations = [op for op in made.operations if not isinstance(op, Free)]
    held = Assembler(hold).program(0, operations, made.buffer_table()).operations
    assert [op for op in held if not isinstance(op, Free)] == operations
    freed = 0
    for at, free in enumerate(held):
        for name in free.buffers if isinstance(free, Free) else ():
            last = max(i for i, op in enumerate(held[:at]) if name in op.touched)
            after = [op for op in held[last + 1 : at] if not isinstance(op, Free)]
            attentions = sum(isinstance(op, Attend) for op in after)
            at_the_end = all(isinstance(op, Free) for op in held[at:])
            assert attentions == hold or (at_the_end and attentions < hold)
            assert at_the_end or not after or isinstance(after[-1], Attend)
            freed += 1
    assert freed > 6


def test_a_rank_that_is_alone_frees_each_buffer_right_after_its_last_use() -> None:
    """No transfer runs beside its attentions, so nothing is gained by holding memory."""
    plan = make_plan(Problem(96, 2, 8), 1, method="mesh", chunks=(2, 2))
    for pass_ in plan.passes:
        operations = pass_.programs[0].operations
        assert sum(isinstance(op, Attention) for op in operations) > 1
        frees = [at for at, op in enumerate(operations) if isinstance(op, Free)]
        assert frees
        for at in frees:
            free = operations[at]
            assert isinstance(free, Free)
            assert all(name in operations[at - 1].touched for name in free.buffers)
