"""`relayout`: contiguous shards outside, the method's own layout inside, the exchange in the plan.

That every method is exact with it, and proven, the settings that other tests deal out show too: it
is a switch like others. Here is what it adds: who has what, how many bytes, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from method_cases import cases
from method_settings import Setting

from mesh_attention import Mask, Plan, Problem, count, make_plan, verify
from mesh_attention.choose.ask import ask
from mesh_attention.choose.pack import Layer, Pack, Packer
from mesh_attention.errors import PlanError
from mesh_attention.plan.language.buffers import Kind, Piece
from mesh_attention.plan.language.plan import Direction, Pass
from mesh_attention.plan.language.program import AllToAll, Merge
from mesh_attention.plan.language.text import digest, parse_plan, plan_text
from mesh_attention.plan.language.traffic import TrafficMeter
from mesh_attention.plan.methods.parts.exchange import TO_HEADS, TO_TOKENS
from mesh_attention.plan.methods.parts.head_group import head_shares
from mesh_attention.plan.methods.table import METHODS
from mesh_attention.testing import run_local
from support.cases import Case
from support.listed import stretches_for
from support.reference import NAMES, attention, errors

CAUSAL = Mask(causal=True)
FORWARD = ((Kind.Q, Kind.K, Kind.V), (Kind.OUT, Kind.LSE))
BACKWARD = (
    (Kind.Q, Kind.K, Kind.V, Kind.GRAD_OUT, Kind.LSE, Kind.DELTA),
    (Kind.GRAD_Q, Kind.GRAD_K, Kind.GRAD_V),
)


def check(case: Case) -> Plan:
    """Exact, proven, counted, contiguous outside, and the same when parsed back."""
    plan, tensors = case.plan(), case.tensors()
    assert not verify(plan), case
    for shards, tokens in zip(plan.shards, (case.q_tokens, case.kv_tokens), strict=True):
        slots = -(-tokens // case.ranks)
        for device in plan.devices:
            own = [p for p in shards.tokens(device) if p is not None]
            assert own == [*range(tokens)][device * slots : (device + 1) * slots], case
    assert parse_plan(plan_text(plan)) == plan
    result = run_local(plan, *tensors)
    outputs = {name: getattr(result, name) for name in NAMES}
    distances = errors(outputs, attention(*tensors, case.mask))
    assert max(distances.values()) <= 1e-10, (distances, case)
    for direction, counted in count(plan).items():
        for of_rank in counted.ranks:
            handed = result.traffic[direction.value][of_rank.rank].total
            wanted = of_rank.total
            assert handed.sent_bytes == case.batch * wanted.sent_bytes, case
            assert handed.received_bytes == case.batch * wanted.received_bytes, case
    return plan


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_exact_on_contiguous_shards_of_an_odd_length(name: str) -> None:
    """37 tokens on 3 ranks: 13 slots outside, 14 inside, so some rows inside are nobody's."""
    case = Case(3, 37, 37, heads=(6, 3), mask=CAUSAL, options={"method": name, "relayout": True})
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 6, 7, 8, 9, 12])
def test_every_method_in_many_settings_is_exact_on_contiguous_shards(name: str, ranks: int) -> None:
    for case in cases(name, ranks, at_least=12):
        check(replace(case, options=case.options | {"relayout": True}))


def test_the_rank_of_the_group_counts_where_partitions_are_mapped_to_nodes() -> None:
    """With patches a rank plays another partition than its own number; it still has the shard of
    its number."""
    options = {"tile": (4, 2), "ranks_per_node": 4, "alpha": 2, "relayout": True}
    plan = check(Case(8, 43, 43, heads=(2, 1), mask=CAUSAL, options=options))
    assert plan.devices != tuple(range(8))
    assert [shards.kind.value for shards in plan.shards] == ["contiguous"] * 2


def test_keys_of_another_length_have_contiguous_shards_of_their_own() -> None:
    for method, window in (("mesh", None), ("seen", (5, None))):
        mask = Mask(causal=True, window=window)
        options = {"method": method, "relayout": True, "layout": "zigzag"}
        check(Case(5, 23, 41, heads=(4, 2), batch=2, mask=mask, options=options))


# Bytes.


def moved_bytes(plan: Plan, pass_: Pass, rank: int) -> tuple[int, int]:
    """Received in the exchange before, and in the one after."""
    program = pass_.programs[rank]
    meter = TrafficMeter(plan.problem, program.buffer_table())
    received = {
        op.task: meter.traffic(op, rank, plan.num_ranks).received_bytes
        for op in program.operations
        if isinstance(op, AllToAll) and op.task in (TO_HEADS, TO_TOKENS)
    }
    return received[TO_HEADS], received[TO_TOKENS]


def rows_that_change(plan: Plan, rank: int, degree: int, *, keys: bool) -> tuple[int, int]:
    """Token by token: rows of this rank's unit that lie in other shards, and rows of its own shard
    times the ranks of the units that work on them, itself not counted."""
    shards, layout = plan.shards[keys], (plan.q_layout, plan.kv_layout)[keys]
    first = rank - rank % degree
    unit = {p for r in range(first, first + degree) for p in layout.positions(r).tolist()}
    own = set(shards.positions(rank).tolist())
    known = {p for r in range(plan.num_ranks) for p in shards.positions(r).tolist()}
    return len((unit & known) - own), len(own - unit)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, {"method": "mesh"}),
        (5, {"method": "ring"}),
        (4, {"method": "seen", "layout": "striped", "stripe_block": 3}),
        (6, {"method": "startrail", "layout": "listed"}),
        (3, {"method": "ring-q", "layout": "zigzag"}),
    ],
    ids=str,
)
def test_a_row_that_changes_its_rank_travels_once_and_the_others_not(
    ranks: int, options: Setting
) -> None:
    tokens = 10 * ranks + 3
    if options.get("layout") == "listed":
        options = options | {"stretches": stretches_for("listed", Random(1), tokens, ranks)}
    problem = Problem(tokens, 4, 8, num_kv_heads=2, v_head_dim=6, mask=CAUSAL)
    plan = make_plan(problem, ranks, relayout=True, keep="shards", **options)
    plain = make_plan(problem, ranks, **options)
    assert plan.q_layout == plain.q_layout  # the method works as ever
    width = {kind: kind.width(problem) * kind.precision.num_bytes(problem) for kind in Kind}
    for direction, kinds in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        pass_, inside = plan.direction(direction), count(plain)[direction]
        for rank in range(ranks):
            wanted = []
            for at, side in enumerate(kinds):
                rows = {k: rows_that_change(plan, rank, 1, keys=k)[at] for k in (False, True)}
                heads = {False: problem.num_heads, True: problem.kv_heads}
                keys = [(kind, kind.is_key_side) for kind in side]
                wanted.append(sum(rows[key] * heads[key] * width[kind] for kind, key in keys))
            assert moved_bytes(plan, pass_, rank) == tuple(wanted)
            total = count(plan)[direction].ranks[rank].total.received_bytes
            assert total == inside.ranks[rank].total.received_bytes + sum(wanted)


def test_with_heads_exchanged_too_a_row_goes_to_each_holder_of_its_heads_once() -> None:
    """One exchange for both: not first to the layout and then for heads."""
    ranks, degree, heads = 6, 2, 4
    problem = Problem(66, heads, 8, mask=CAUSAL)
    plan = make_plan(problem, ranks, method="usp", ulysses=degree, relayout=True)
    row = 8 * problem.element_bytes
    for rank in range(ranks):
        (first, last) = head_shares(heads, heads, degree)[rank % degree]
        here, _ = rows_that_change(plan, rank, degree, keys=False)
        before, _ = moved_bytes(plan, plan.forward, rank)
        assert before == 3 * here * (last - first) * row
        names = [op.name for op in plan.program(rank, "forward").operations]
        assert names.count("EX-IN-0") == names.count("EX-OUT-0") == 1


def test_where_the_method_works_on_contiguous_shards_it_is_the_same_plan() -> None:
    problem, full = Problem(37, 12, 8, mask=CAUSAL), Problem(37, 12, 8)
    window = Problem(37, 12, 8, mask=Mask(causal=True, window=(4, 0)))
    settings: list[tuple[Problem, Setting]] = [
        (full, {"method": "mesh"}),
        (problem, {"method": "ring", "layout": "contiguous"}),
        (window, {"method": "seen"}),
    ]
    for asked, options in settings:
        plain = make_plan(asked, 6, **options)
        assert digest(make_plan(asked, 6, relayout=True, **options)) == digest(plain)
    # Every rank has all tokens of its heads: the layout is whatever costs nothing.
    of_heads: Setting = {"method": "ulysses"}
    for ranks, options in ((6, of_heads), (5, of_heads), (1, {})):
        plain = make_plan(problem, ranks, layout="contiguous", **options)
        for layout in (None, "zigzag"):
            same = make_plan(problem, ranks, layout=layout, relayout=True, **options)
            assert digest(same) == digest(plain)


# Proofs.


def with_program(plan: Plan, change: Any) -> Plan:
    """The same with one operation of rank 0 forward changed."""
    forward = plan.forward
    programs = list(forward.programs)
    operations = tuple(change(op) for op in programs[0].operations)
    programs[0] = replace(programs[0], operations=operations)
    changed = replace(forward, programs=tuple(programs))
    return replace(plan, passes=(changed, plan.backward))


def test_what_nobody_has_is_made_up_for_padding_only() -> None:
    plan = make_plan(Problem(13, 2, 8, mask=CAUSAL), 3, method="ring", relayout=True)
    empties = [
        (program.rank, op)
        for program in plan.forward.programs
        for op in program.operations
        if isinstance(op, Merge) and op.name == "EX-IN-0.empty"
    ]
    assert {rank for rank, _ in empties} == {0}  # zigzag: the end of the sequence is there
    assert not verify(plan)

    def elsewhere(op: Any) -> Any:
        if not (isinstance(op, Merge) and op.name == "EX-IN-0.empty"):
            return op
        return replace(op, outputs=(Piece(op.outputs[0].buffer, 0, 1),))

    (finding,) = verify(with_program(plan, elsewhere))[:1]
    assert finding.operation == "EX-IN-0.empty"
    assert "makes up rows of q.u that hold tokens" in finding.message


def test_shards_that_are_not_contiguous_are_no_proof_of_relayout() -> None:
    plan = make_plan(Problem(16, 2, 8, mask=CAUSAL), 4, method="ring", relayout=True)
    (finding, *_) = verify(replace(plan, relayout=False))
    assert "is not the whole q partition" in finding.message

    def swapped(op: Any) -> Any:
        if not (isinstance(op, AllToAll) and op.task == TO_HEADS):
            return op
        return replace(op, receives=(op.receives[1], op.receives[0], *op.receives[2:]))

    assert any("EX-IN-0" in str(f) for f in verify(with_program(plan, swapped)))


# Refusals.


def test_layouts_in_too_many_stretches_are_refused_with_a_way_out() -> None:
    problem = Problem(1 << 17, 8, 128, mask=CAUSAL)
    with pytest.raises(PlanError, match="stripe_block of at least 32, or layout=zigzag"):
        make_plan(problem, 8, method="mesh", relayout=True, layout="striped").program(0, "forward")
    make_plan(problem, 8, method="mesh", relayout=True, layout="striped", stripe_block=32).program(
        0, "forward"
    )


def test_a_cap_on_memory_does_not_count_what_is_exchanged() -> None:
    problem = Problem(4096, 8, 128, mask=CAUSAL)
    with pytest.raises(PlanError, match="max_memory_bytes is not supported together with relayout"):
        make_plan(problem, 4, method="mesh", relayout=True, max_memory_bytes=1 << 30)
    make_plan(
        problem, 4, method="mesh", relayout=True, max_memory_bytes=1 << 30, layout="contiguous"
    )


def test_relayout_is_true_or_false() -> None:
    with pytest.raises(PlanError, match="relayout='yes': must be True or False"):
        make_plan(Problem(16, 2, 8), 2, method="mesh", relayout="yes")


# Documents.


def packed(layers: tuple[Layer, ...], ranks: int, starts: list[int]) -> Pack:
    pack = Packer(layers, ranks)(starts)
    for layer in layers:
        plan = pack.question(layer).plan()
        assert plan.shards == pack.shards
        assert not verify(plan)
    return pack


def test_documents_of_a_batch_are_cut_into_contiguous_shards() -> None:
    problem = Problem(64, 4, 8, mask=CAUSAL, element_bytes=8)
    free = Layer(problem, relayout=True)
    asked = ask(problem, 4, relayout=True, method="ring")
    for ranks, starts in ((3, [0, 9, 10, 44]), (4, [0, 64]), (5, [0, 1, 2, 30, 47])):
        pack = packed((free,), ranks, starts)
        wanted = -(-starts[-1] // ranks)
        assert [layout.slots for layout in pack.shards] == [wanted] * 2
        ring_layer = Layer(problem, question=replace(asked, num_ranks=ranks), relayout=True)
        assert packed((ring_layer,), ranks, starts).layout.kind == "zigzag"
        assert pack.words != packed((Layer(problem),), ranks, starts).words
    with pytest.raises(PlanError, match="made with relayout=True, and this attention has relayout"):
        pack.question(Layer(problem))


def test_a_way_in_another_layout_must_be_worth_the_exchange() -> None:
    """A long causal document is; short ones, of which a shard has many, are not."""
    problem, tokens = Problem(64, 8, 128, mask=CAUSAL), 1 << 19
    layouts = {}
    for size in (tokens, tokens >> 9):
        starts = [*range(0, tokens, size), tokens]
        chosen, plain = (Packer((Layer(problem, relayout=r),), 16)(starts) for r in (True, False))
        layouts[size] = (chosen.layout_kind.value, plain.layout_kind.value)
        assert "inside contiguous shards" in chosen.reason
        assert "inside" not in plain.reason
    assert layouts == {tokens: ("zigzag", "zigzag"), tokens >> 9: ("contiguous", "contiguous")}


def test_documents_with_relayout_equal_the_truth_in_every_layout() -> None:
    draw = Random(5)
    starts = (0, 7, 8, 31, 46)
    mask = Mask(causal=True, documents=starts)
    for layout in ("zigzag", "listed"):
        stretches = stretches_for(layout, draw, 46, 4)
        for method in ("seen", "mesh"):
            options: Setting = {"method": method, "layout": layout, "stretches": stretches}
            options |= {"relayout": True, "one_call": True}
            check(Case(4, 46, 46, heads=(4, 2), mask=mask, options=options))


def test_bf16_shards_travel_in_bf16() -> None:
    case = Case(3, 29, 29, mask=CAUSAL, dtype=torch.bfloat16, options={"relayout": True})
    result = run_local(case.plan(), *case.tensors())
    outputs = {name: getattr(result, name) for name in NAMES}
    distances = errors(outputs, attention(*case.tensors(), case.mask))
    assert max(distances.values()) <= 0.02
