"""Plans that are broken on purpose: `verify` catches each, and names the rank and the operation.

A proven plan is changed in one place, chosen at random among all places where the change means
something. A few changes are harmless; the tests that meet them say why, and check that they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from dense_oracle import pairs_of_calls
from plan_cases import random_plan

from mesh_attention.plan.buffers import Piece, Role
from mesh_attention.plan.home import Combine
from mesh_attention.plan.layout import LayoutKind
from mesh_attention.plan.mask import Mask
from mesh_attention.plan.methods.mesh import MeshSetting, plan_mesh
from mesh_attention.plan.plan import Direction, Pass, Plan
from mesh_attention.plan.problem import Problem
from mesh_attention.plan.program import (
    AllGather,
    AllToAll,
    Attend,
    AttendBackward,
    Call,
    CallKind,
    Free,
    Merge,
    MergeRule,
    Move,
    Operation,
    Program,
    ReduceScatter,
)
from mesh_attention.plan.verify import Finding, verify

MUTANTS = 120  # of each kind
Collective = AllGather | ReduceScatter | AllToAll
Compute = Attend | AttendBackward


class Place:
    """One operation of one rank in one pass of a plan, and what a plan without it looks like."""

    def __init__(self, plan: Plan, one: Pass, rank: int, at: int) -> None:
        self.plan, self.one, self.rank, self.at = plan, one, rank, at

    @property
    def program(self) -> Program:
        return self.one.programs[self.rank]

    @property
    def op(self) -> Operation:
        return self.program.operations[self.at]

    def with_operations(self, operations: tuple[Operation, ...]) -> Plan:
        programs = list(self.one.programs)
        programs[self.rank] = replace(self.program, operations=operations)
        changed = replace(self.one, programs=tuple(programs))
        passes = tuple(changed if one is self.one else one for one in self.plan.passes)
        return replace(self.plan, passes=passes)

    def put(self, *new: Operation) -> Plan:
        """The plan with other operations (or none) in place of this one."""
        ops = self.program.operations
        return self.with_operations((*ops[: self.at], *new, *ops[self.at + 1 :]))


def places(plan: Plan, wanted: Callable[[Operation], bool]) -> list[Place]:
    return [
        Place(plan, one, program.rank, at)
        for one in plan.passes
        for program in one.programs
        for at, op in enumerate(program.operations)
        if wanted(op)
    ]


def random_places(seed: int, wanted: Callable[[Operation], bool]) -> Iterator[tuple[Random, Place]]:
    """Places in many random plans, a few from each."""
    rng = Random(seed)
    found = 0
    while found < MUTANTS:
        plan = random_plan(rng, most_ranks=9)
        if plan.problem.q_tokens > 500 or plan.problem.keys > 500:
            continue
        here = places(plan, wanted)
        for place in rng.sample(here, min(8, len(here))):
            yield rng, place
            found += 1


def caught(place: Place, mutant: Plan) -> Finding:
    findings = verify(mutant)
    assert findings, f"not caught: {place.one.direction}, rank {place.rank}, {place.op}"
    assert findings[0].direction == place.one.direction
    return findings[0]


def is_compute(op: Operation) -> bool:
    return isinstance(op, Attend | AttendBackward)


def is_collective(op: Operation) -> bool:
    return isinstance(op, AllGather | ReduceScatter | AllToAll)


def test_the_plans_are_proven_before_they_are_broken() -> None:
    rng = Random(0)
    for _ in range(60):
        assert verify(random_plan(rng, most_ranks=9)) == []


def test_a_dropped_compute_task_is_caught() -> None:
    """At the owner of what it would have computed: only there is it known that nobody else did."""
    for _, place in random_places(1, is_compute):
        caught(place, place.put())


def test_a_duplicated_compute_task_is_caught_at_that_rank_and_task() -> None:
    """Also where its accumulator is fresh: the second one would lose what the first computed."""
    for _, place in random_places(2, is_compute):
        finding = caught(place, place.put(place.op, place.op))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def test_a_dropped_collective_is_caught() -> None:
    """Its group waits for ever, or a reader finds nothing; which comes first is left open."""
    for _, place in random_places(3, is_collective):
        caught(place, place.put())


def test_a_duplicated_collective_is_caught_at_that_rank_and_operation() -> None:
    for _, place in random_places(4, is_collective):
        finding = caught(place, place.put(place.op, place.op))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def swapped(place: Place, other: int) -> Plan:
    ops = list(place.program.operations)
    ops[place.at], ops[other] = ops[other], ops[place.at]
    return place.with_operations(tuple(ops))


def test_two_collectives_of_one_group_swapped_on_one_rank_are_caught() -> None:
    """By the schedule at that rank, or, inside one task, because its group waits for ever."""
    tried = 0
    for rng, place in random_places(5, is_collective):
        assert isinstance(place.op, Collective)
        group, ops = place.op.group, place.program.operations
        others = [
            at
            for at, op in enumerate(ops)
            if isinstance(op, Collective) and op.group == group and at != place.at
        ]
        if others:
            other = rng.choice(others)
            finding = caught(place, swapped(place, other))
            names = (place.op.name, ops[other].name)
            assert finding.rank == place.rank or finding.operation in names
            tried += 1
    assert tried > MUTANTS // 2


def test_swapped_halves_of_one_task_leave_the_group_waiting_and_every_rank_is_named() -> None:
    setting = MeshSetting(tile=(2, 2), combine=Combine.REDUCE_SCATTER)
    plan = plan_mesh(Problem(32, 1, 4), 4, setting)
    for place in places(plan, lambda op: op.name == "RS-Q-0.lse"):
        names = [op.name for op in place.program.operations]
        findings = verify(swapped(place, names.index("RS-Q-0.lse-all")))
        waiting = {f.rank: f.operation for f in findings if "waits for ever" in f.message}
        assert waiting[place.rank] == "RS-Q-0.lse-all"
        group = next(
            g for name, g in place.one.groups.items() if name[0] == "Q" and place.rank in g
        )
        assert {waiting[other] for other in group if other != place.rank} == {"RS-Q-0.lse"}


def test_collectives_of_two_groups_swapped_are_caught_by_the_schedule_where_none_would_hang() -> (
    None
):
    """A Q group and a KV group share one rank at most, so such a swap alone cannot deadlock; but
    the program is then not the schedule that people see, and the finding says so."""
    setting = MeshSetting(tile=(2, 2))
    plan = plan_mesh(Problem(32, 1, 4), 4, setting)
    for place in places(plan, lambda op: op.name == "AG-Q-0"):
        names = [op.name for op in place.program.operations]
        finding = caught(place, swapped(place, names.index("AG-KV-0")))
        assert finding.rank == place.rank
        assert finding.operation in ("AG-Q-0", "AG-KV-0")
        assert "schedule" in finding.message


def test_a_buffer_freed_early_is_caught_at_that_rank_where_it_is_used_or_freed() -> None:
    for rng, place in random_places(6, lambda op: isinstance(op, Free)):
        assert isinstance(place.op, Free)
        ops = place.program.operations
        name = rng.choice(place.op.buffers)
        rest = tuple(n for n in place.op.buffers if n != name)
        later = (Free(rest),) if rest else ()
        # Frees stand right after the last use, so any earlier place is too early.
        last_use = max(i for i in range(place.at) if not isinstance(ops[i], Free))
        early = rng.randint(0, last_use)
        moved = (*ops[:early], Free((name,)), *ops[early : place.at], *later, *ops[place.at + 1 :])
        finding = caught(place, place.with_operations(moved))
        assert finding.rank == place.rank
        assert name in finding.message


def test_a_buffer_that_is_never_freed_is_caught_at_that_rank() -> None:
    for _, place in random_places(7, lambda op: isinstance(op, Free)):
        finding = caught(place, place.put())
        assert finding.rank == place.rank
        assert "never frees" in finding.message


def test_pieces_sent_to_the_wrong_owner_are_caught_at_that_exchange() -> None:
    tried = 0
    for rng, place in random_places(8, lambda op: isinstance(op, AllToAll)):
        op = place.op
        assert isinstance(op, AllToAll)
        filled = [m for m, pieces in enumerate(op.sends) if pieces]
        if len(filled) < 2 or op.name.startswith("AG-KV"):
            continue
        i, j = rng.sample(filled, 2)
        sends = list(op.sends)
        sends[i], sends[j] = sends[j], sends[i]
        finding = caught(place, place.put(replace(op, sends=tuple(sends))))
        assert finding.operation == op.name
        assert finding.rank in {place.one.groups[op.group][m] for m in (i, j)}
        assert f"rank {place.rank}" in finding.message
        tried += 1
    assert tried > MUTANTS // 3


def test_kv_sent_to_a_rank_that_does_not_expect_it_is_caught_there() -> None:
    """Without rotation the fetch of KV is an all-to-all; every user gets the same pieces."""
    setting = MeshSetting(tile=(3, 3), rotation=False)
    plan = plan_mesh(Problem(54, 1, 4), 9, setting)
    for place in places(plan, lambda op: op.name == "AG-KV-0"):
        op = place.op
        assert isinstance(op, AllToAll)
        users = [m for m, pieces in enumerate(op.sends) if pieces]
        other = next(m for m in range(9) if m not in users)
        sends = list(op.sends)
        sends[users[0]], sends[other] = (), sends[users[0]]
        finding = caught(place, place.put(replace(op, sends=tuple(sends))))
        assert finding.operation == "AG-KV-0"
        assert finding.rank in (users[0], other)


def test_two_copies_that_change_places_in_a_stack_are_harmless() -> None:
    """An owner merges the partials of all members, in whatever order they lie."""
    plan = plan_mesh(Problem(32, 1, 4), 4, MeshSetting(tile=(4, 1), combine=Combine.EXCHANGE))
    place = places(plan, lambda op: op.name == "RS-Q-0")[0]
    op = place.op
    assert isinstance(op, AllToAll)
    receives = (op.receives[1], op.receives[0], *op.receives[2:])
    assert verify(place.put(replace(op, receives=receives))) == []


def computed(place: Place, op: Compute) -> bool:
    """Do these calls compute exactly the visible pairs of the task, each once?"""
    table, plan = place.program.buffer_table(), place.plan
    q = plan.q_layout.positions_of(op.q.spans(table[op.q.buffer]))
    k = plan.kv_layout.positions_of(op.k.spans(table[op.k.buffer]))
    rows = plan.problem.rows
    lo, hi = rows.bounds(q)
    visible = (k[None, :] >= lo[:, None]) & (k[None, :] < hi[:, None])
    return bool((pairs_of_calls(op.calls, q, k, rows) == visible).all())


def resized(rng: Random, call: Call, rows: int, columns: int) -> Call | None:
    """One side of a call moved by one row, where that leaves a call inside the task."""
    field = rng.choice(("q_start", "q_stop", "k_start", "k_stop"))
    new = replace(call, **{field: getattr(call, field) + rng.choice((-1, 1))})
    inside = 0 <= new.q_start < new.q_stop <= rows and 0 <= new.k_start < new.k_stop <= columns
    return new if inside else None


def test_a_call_enlarged_or_shrunk_is_caught_at_that_task_unless_it_computes_the_same_pairs() -> (
    None
):
    """A row range computes what the mask shows, so rows that see nothing may come or go."""
    broken = 0
    for rng, place in random_places(9, is_compute):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        at = rng.randrange(len(op.calls))
        new = resized(rng, op.calls[at], op.q.num_rows, op.k.num_rows)
        if new is None:
            continue
        changed = replace(op, calls=(*op.calls[:at], new, *op.calls[at + 1 :]))
        mutant = place.put(changed)
        square = new.kind is not CallKind.CAUSAL or (
            new.q_stop - new.q_start == new.k_stop - new.k_start
        )
        if square and computed(place, changed):
            assert verify(mutant) == []
            continue
        finding = caught(place, mutant)
        assert (finding.rank, finding.operation) == (place.rank, op.name)
        assert "call" in finding.message
        broken += 1
    assert broken > MUTANTS // 4


def test_a_row_range_without_its_padding_row_computes_the_same_and_is_proven() -> None:
    problem = Problem(599, 1, 4, mask=Mask(causal=True))
    plan = plan_mesh(problem, 2, MeshSetting(tile=(1, 2), layout=LayoutKind.STRIPED))
    place = next(p for p in places(plan, is_compute) if p.rank == 1)
    assert isinstance(place.op, Attend)
    (call,) = place.op.calls
    assert call == Call(CallKind.RANGE, 0, 300, 0, 600)
    shorter, too_short = (replace(call, q_stop=stop) for stop in (299, 298))
    assert verify(place.put(replace(place.op, calls=(shorter,)))) == []
    finding = caught(place, place.put(replace(place.op, calls=(too_short,))))
    assert (finding.rank, finding.operation) == (1, place.op.name)


def test_a_dropped_or_doubled_call_is_caught_at_that_task() -> None:
    for rng, place in random_places(10, is_compute):
        op = place.op
        assert isinstance(op, Attend | AttendBackward)
        at = rng.randrange(len(op.calls))
        for calls in ((*op.calls[:at], *op.calls[at + 1 :]), (*op.calls, op.calls[at])):
            finding = caught(place, place.put(replace(op, calls=calls)))
            assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_a_dropped_merge_is_caught_in_a_group_of_that_rank() -> None:
    """In the operation that misses the result, or at the end in an output that lacks it."""
    for _, place in random_places(11, lambda op: isinstance(op, Merge)):
        finding = caught(place, place.put())
        members = {place.rank}
        for op in place.program.operations[place.at + 1 :]:
            if isinstance(op, Collective):
                members |= set(place.one.groups[op.group])
        assert finding.rank in members


def is_rescale(op: Operation) -> bool:
    return isinstance(op, Merge) and op.rule is MergeRule.RESCALE


def test_a_reduce_scatter_of_outputs_that_were_not_rescaled_is_caught() -> None:
    plan = plan_mesh(
        Problem(48, 2, 8, mask=Mask(causal=True)),
        6,
        MeshSetting(tile=(3, 2), chunks=(2, 1), combine=Combine.REDUCE_SCATTER),
    )
    found = places(plan, is_rescale)
    assert found
    for place in found:
        assert isinstance(place.op, Merge)
        copy = Merge(place.op.name, MergeRule.SUM, place.op.inputs[:1], place.op.outputs)
        finding = caught(place, place.put(copy))
        name = place.op.name.removesuffix(".rescale")
        assert finding.operation == name
        group = next(
            op.group for op in place.program.operations
            if isinstance(op, ReduceScatter) and op.name == name
        )  # fmt: skip
        assert finding.rank in place.one.groups[group]


def test_rescaling_to_the_local_lse_instead_of_the_global_one_is_caught() -> None:
    plan = plan_mesh(Problem(48, 2, 8), 6, MeshSetting(tile=(3, 2), combine=Combine.REDUCE_SCATTER))
    for place in places(plan, is_rescale):
        assert isinstance(place.op, Merge)
        out, own, _ = place.op.inputs
        finding = caught(place, place.put(replace(place.op, inputs=(out, own, own))))
        assert finding.operation == "RS-Q-0"


def test_a_wrong_fresh_flag_is_caught_at_that_rank_and_task() -> None:
    """Set, it loses what was there; cleared, it adds to what was never written."""
    for rng, place in random_places(12, is_compute):
        op = place.op
        wrong: Operation
        if isinstance(op, Attend):
            wrong = replace(op, fresh=not op.fresh)
        elif isinstance(op, AttendBackward) and rng.random() < 0.5:
            wrong = replace(op, fresh_q=not op.fresh_q)
        else:
            assert isinstance(op, AttendBackward)
            wrong = replace(op, fresh_kv=not op.fresh_kv)
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, op.name)


def test_a_gather_of_the_wrong_rows_is_caught_at_that_gather() -> None:
    tried = 0
    for rng, place in random_places(13, lambda op: isinstance(op, AllGather)):
        op = place.op
        assert isinstance(op, AllGather)
        at = rng.randrange(len(op.moves))
        part = op.moves[at].part
        shift = rng.choice((-part.num_rows, -1, 1, part.num_rows))
        wrong = Piece(part.buffer, part.start + shift, part.stop + shift, part.heads)
        moves = (*op.moves[:at], replace(op.moves[at], part=wrong), *op.moves[at + 1 :])
        finding = caught(place, place.put(replace(op, moves=moves)))
        assert finding.operation == op.name
        # Rows that the buffer has not are this rank's fault; a gather that delivers other rows
        # than its wholes declare shows at its first member.
        assert finding.rank in place.one.groups[op.group]
        tried += 1
    assert tried >= MUTANTS


def with_moves_everywhere(plan: Plan, name: str, change: Callable[[Move], Move]) -> Plan:
    """The same wrong moves on all ranks, so that sizes still match."""

    def altered(op: Operation) -> Operation:
        if isinstance(op, AllGather | ReduceScatter) and op.name == name:
            return replace(op, moves=tuple(map(change, op.moves)))
        return op

    one = plan.forward
    programs = tuple(
        replace(program, operations=tuple(map(altered, program.operations)))
        for program in one.programs
    )
    passes = tuple(replace(p, programs=programs) if p is one else p for p in plan.passes)
    return replace(plan, passes=passes)


@pytest.mark.parametrize("cuts", [(0, 8), (0, 3, 8), (0, 5, 8), (0, 2, 4, 8)])
def test_wrong_cuts_of_a_gather_are_caught_even_where_all_members_agree_on_them(
    cuts: tuple[int, ...],
) -> None:
    """Zigzag halves of 4 rows each: any other cut lays the gathered rows out otherwise."""
    setting = MeshSetting(tile=(2, 2), layout=LayoutKind.ZIGZAG)
    plan = plan_mesh(Problem(32, 1, 4), 4, setting)
    assert verify(with_moves_everywhere(plan, "AG-Q-0", lambda m: m)) == []
    mutant = with_moves_everywhere(plan, "AG-Q-0", lambda m: replace(m, cuts=cuts))
    findings = verify(mutant)
    assert findings
    assert findings[0].operation == "AG-Q-0"


def test_a_gather_into_a_buffer_of_another_kind_is_caught_at_that_gather() -> None:
    plan = plan_mesh(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2)))
    mutant = with_moves_everywhere(
        plan,
        "AG-KV-0",
        lambda m: replace(m, part=replace(m.part, buffer="v" if m.part.buffer == "k" else "k")),
    )
    assert verify(mutant)[0].operation == "AG-KV-0"


def test_gradients_of_k_that_come_home_as_gradients_of_v_are_caught() -> None:
    plan = plan_mesh(Problem(32, 1, 4), 4, MeshSetting(tile=(4, 1)))
    for place in places(plan, lambda op: op.name == "RS-dKV-0.copy"):
        assert isinstance(place.op, Merge)
        swap = {"grad_k": "grad_v", "grad_v": "grad_k"}
        (end,) = place.op.outputs
        wrong = replace(place.op, outputs=(replace(end, buffer=swap[end.buffer]),))
        finding = caught(place, place.put(wrong))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def test_adding_lses_instead_of_combining_them_is_caught() -> None:
    plan = plan_mesh(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2), combine=Combine.REDUCE_SCATTER))
    for place in places(plan, lambda op: isinstance(op, Merge) and op.rule is MergeRule.LSE):
        assert isinstance(place.op, Merge)
        finding = caught(place, place.put(replace(place.op, rule=MergeRule.SUM)))
        assert (finding.rank, finding.operation) == (place.rank, place.op.name)


def test_a_query_that_lies_twice_in_a_task_is_caught_at_that_task() -> None:
    """Else one copy could be computed and the other, which is not, be taken for the result."""
    plan = plan_mesh(Problem(8, 1, 4), 1, MeshSetting(), directions=(Direction.FORWARD,))
    (place,) = places(plan, is_compute)
    op, end = place.op, place.program.operations[place.at + 1]
    assert isinstance(op, Attend)
    assert isinstance(end, Merge)
    twice = ((0, 8), (0, 8))
    accumulators = (op.out.buffer, op.lse.buffer)
    buffers = [
        replace(b, rows=twice) if b.name in accumulators else b for b in place.program.buffers
    ]
    own = next(b for b in buffers if b.name == "q")
    buffers.append(replace(own, name="qq", rows=twice, role=Role.WORKSPACE))
    copies = ((Piece("q", 0, 8), Piece("q", 0, 8)),)
    into = ((Piece("qq", 0, 8), Piece("qq", 8, 16)),)
    operations = (
        AllToAll("AG-Q-0", "all", copies, into),
        replace(
            op, q=Piece("qq", 0, 16), out=replace(op.out, stop=16), lse=replace(op.lse, stop=16)
        ),
        replace(end, inputs=tuple(replace(piece, start=8, stop=16) for piece in end.inputs)),
        Free(("qq", *accumulators)),
    )
    program = Program(0, tuple(buffers), operations)
    one = replace(place.one, programs=(program,), groups={"all": (0,)})
    (finding,) = verify(replace(plan, passes=(one,)))
    assert (finding.operation, "same query twice" in finding.message) == (op.name, True)


def test_the_total_of_a_pass_is_checked_against_the_mask_and_not_against_the_programs() -> None:
    """Programs of a plan for one mask do not pass for another."""
    causal, full = (
        plan_mesh(Problem(32, 1, 4, mask=Mask(causal=c)), 4, MeshSetting(tile=(2, 2), layout=kind))
        for c, kind in ((True, LayoutKind.CONTIGUOUS), (False, LayoutKind.CONTIGUOUS))
    )
    assert verify(replace(full, passes=causal.passes))
    assert verify(replace(causal, passes=full.passes))


def test_findings_say_pass_rank_and_operation_in_words_and_in_json() -> None:
    plan = plan_mesh(Problem(32, 1, 4), 4, MeshSetting(tile=(2, 2)))
    place = next(p for p in places(plan, is_compute) if p.rank == 2)
    finding = caught(place, place.put(place.op, place.op))
    assert str(finding).startswith("forward, rank 2, C-0-0: ")
    assert finding.to_json() == {
        "pass": "forward",
        "rank": 2,
        "operation": "C-0-0",
        "message": finding.message,
    }
