"""Which calls leave multiprocessors to transfers, and for how long."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from mesh_attention import Mask, Problem, make_plan
from mesh_attention.machine.cluster import Links
from mesh_attention.machine.kernel_facts import KernelRates, library_facts
from mesh_attention.machine.rates import usual_links
from mesh_attention.machine.seconds import rounds_of_parts
from mesh_attention.machine.target import SMS_OF_TRANSFERS, Target
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attention, Call, CallKind, Program
from mesh_attention.plan.passes.compile import PassCompiler, compile_pass, compile_plan
from mesh_attention.plan.passes.split_calls import TILE_ROWS
from mesh_attention.plan.read.verify import verify
from mesh_attention.testing import run_local
from support.targets import target_with

LINKS = usual_links()
# Of the forward pass; kernels of the backward pass have no SMs to leave.
TARGET = target_with("flash_attn3", "flash_attn3", None, own_stream=True)
SMS = TARGET.gpu.sms
ROOM_FOR_PAIRS = 24  # by the facts of FlashAttention 3
K = 1024


def links(
    *, gb_per_second: float | None = None, latency: float = 10.0, ranks_per_node: int = 8
) -> Links:
    """As usual but for these: of point-to-point flows in a node."""
    peer = LINKS.node.peer
    peer = replace(
        peer,
        gb_per_second=gb_per_second or peer.gb_per_second,
        latency_microseconds=latency,
    )
    node = replace(LINKS.node, ranks=ranks_per_node, peer=peer)
    return Links(node, replace(LINKS.network, nics=ranks_per_node))


def compiled(plan: Plan, of_links: Links = LINKS, target: Target = TARGET) -> Program:
    return compile_pass(plan, plan.forward, replace(target, links=of_links)).programs[0]


def calls_of(program: Program) -> list[tuple[Call, ...]]:
    return [op.calls for op in program.operations if isinstance(op, Attention)]


def leaves(calls: tuple[Call, ...]) -> tuple[bool, ...]:
    assert {call.leave_sms for call in calls} <= {0, SMS_OF_TRANSFERS, ROOM_FOR_PAIRS}
    return tuple(call.leave_sms > 0 for call in calls)


def ring(tokens: int, heads: int = 8, *, causal: bool = False) -> Plan:
    return make_plan(Problem(tokens, heads, 128, mask=Mask(causal=causal)), 4, method="ring")


def test_a_long_call_leaves_sms_at_its_end_for_as_long_as_a_transfer_lasts() -> None:
    plan = ring(256 * K)
    *beside, last = calls_of(compiled(plan))
    for calls in beside:
        first, rest = calls
        assert leaves(calls) == (False, True)
        assert first.q_stop == rest.q_start
        tiles = (rest.q_stop - rest.q_start) // TILE_ROWS * 8
        assert -tiles % (SMS - SMS_OF_TRANSFERS) < 8  # whole rounds, but for a tile of each head
        # 64K rows of K and V on NVLink, 8 heads: 0.9 ms of the 25 that a call lasts.
        assert rest.q_stop - rest.q_start < 0.06 * rest.q_stop
    assert leaves(last) == (False,)  # nothing is in flight beside it
    (_, part), *_ = beside
    (_, of_slower), *_ = calls_of(compiled(plan, links(gb_per_second=37)))
    assert of_slower.q_start < part.q_start  # longer transfers, more rows
    (_, of_far), *_ = calls_of(compiled(plan, links(ranks_per_node=1)))
    assert of_far.q_start < part.q_start  # between nodes


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_split_is_still_proven(causal: bool) -> None:
    plan = ring(256 * K, causal=causal)
    forward = compile_pass(plan, plan.forward, TARGET)
    assert any(leaves(calls)[:2] == (False, True) for calls in calls_of(forward.programs[0]))
    assert verify(replace(plan, passes=(forward, plan.backward))) == []


def test_what_is_split_computes_the_same() -> None:
    plan = make_plan(Problem(4 * K, 1, 8, element_bytes=8), 2, method="ring")
    facts = library_facts()
    reference = KernelRates(facts["flash_attn3"].forward, facts["reference"].backward)
    target = target_with(
        *("reference", "reference", None),
        kernels={"reference": reference},
        gpu=replace(TARGET.gpu, sms=SMS_OF_TRANSFERS + 2),
        links=links(latency=100.0),
        own_stream=True,
        element_bytes=8,
    )
    split = compile_plan(plan, target)
    for program in split.forward.programs:
        assert (False, True) in map(leaves, calls_of(program))
    q, k, v, grad = torch.randn(4, 1, 4 * K, 1, 8, dtype=torch.float64).unbind()
    result, wanted = (
        run_local(variant, q, k, v, grad, kernel="reference") for variant in (split, plan)
    )
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v"):
        torch.testing.assert_close(getattr(result, name), getattr(wanted, name))


def test_a_call_beside_a_transfer_that_lasts_as_long_leaves_sms_from_its_begin() -> None:
    *beside, _ = calls_of(compiled(ring(256 * K), links(gb_per_second=1)))
    assert {leaves(calls) for calls in beside} == {(True,)}
    # A ring of two: the second attention waits for the only transfer.
    two = make_plan(Problem(128 * K, 8, 128), 2, method="ring")
    assert [*map(leaves, calls_of(compiled(two, links(gb_per_second=1))))] == [(True,), (False,)]


def test_calls_that_a_slow_ring_waits_for_leave_room_for_pairs_of_programs() -> None:
    """The GPU is idle when the next transfer begins, and 1,024 tiles of 128 rows would leave 18
    SMs, beside which pairs find no place. The first call waits for nothing; nothing is beside the
    last."""
    plan = ring(4 * 16 * K)
    first, *rest, last = calls_of(compiled(plan, links(gb_per_second=1)))
    assert [call.leave_sms for call in first] == [SMS_OF_TRANSFERS]
    assert {call.leave_sms for calls in rest for call in calls} == {ROOM_FOR_PAIRS}
    assert [call.leave_sms for call in last] == [0]
    fast = calls_of(compiled(plan, links(gb_per_second=1e6)))
    assert ROOM_FOR_PAIRS not in {call.leave_sms for calls in fast for call in calls}


def test_an_exchange_lasts_as_long_as_the_slower_of_its_two_directions() -> None:
    """Of two nodes of two, ranks 1 and 3 receive from their own node and send to the other."""
    plan = ring(4 * 16 * K)
    program = compile_pass(plan, plan.forward, replace(TARGET, links=links(ranks_per_node=2)))
    assert calls_of(program.programs[0]) == calls_of(program.programs[1])


def rounds_by_hand(first: int, leaving: int, sms: int) -> int:
    """Every SM by itself: when it has done its tiles of the first part, and those of the other on
    what transfers leave of them, the first that are free first."""
    free = sorted(first // sms + (sm < first % sms) for sm in range(sms))
    fewer = sms - SMS_OF_TRANSFERS
    tiles = [leaving // fewer + (program < leaving % fewer) for program in range(fewer)]
    ends = [at + n for at, n in zip(free[SMS_OF_TRANSFERS:], tiles, strict=True) if n]
    return max(free[-1], *ends)


def test_rounds_of_two_parts_are_counted_sm_by_sm() -> None:
    random = Random(0)
    for _ in range(2000):
        case = random.randint(1, 800), random.randint(1, 800), random.randint(18, 140)
        assert rounds_of_parts(*case, SMS_OF_TRANSFERS) == rounds_by_hand(*case), case
    # In place of five: of the last round only four tiles.
    assert rounds_of_parts(400, 112, SMS, SMS_OF_TRANSFERS) == 4


def test_a_call_of_four_rounds_is_split_though_its_heads_do_not_fill_the_last() -> None:
    """8 heads of 64 tiles: 112 of them leave SMs, and the rest has three rounds and four tiles."""
    calls, *_ = calls_of(compiled(ring(4 * 64 * 128), links(gb_per_second=1e6, latency=50.0)))
    assert leaves(calls) == (False, True)
    assert [call.q_stop - call.q_start for call in calls] == [50 * 128, 14 * 128]


def test_a_slice_of_a_gpu_has_none_to_leave() -> None:
    slice_of_one = replace(TARGET, gpu=replace(TARGET.gpu, sms=SMS_OF_TRANSFERS))
    attention_calls = calls_of(compiled(ring(256 * K), target=slice_of_one))
    assert {leaves(calls) for calls in attention_calls} == {(False,)}


def test_a_call_of_a_round_stays_whole() -> None:
    *beside, _ = calls_of(compiled(ring(8 * K)))
    assert {leaves(calls) for calls in beside} == {(True,)}


def test_causal_calls_leave_sms_where_a_transfer_lasts_half_as_long() -> None:
    plan = ring(256 * K, causal=True)
    for of_links, expected in ((LINKS, False), (links(gb_per_second=5), True)):
        calls, *_ = calls_of(compiled(plan, of_links))
        causal = [call for call in calls if call.kind is CallKind.CAUSAL]
        assert causal
        assert leaves((causal[-1],)) == (expected,)


@pytest.mark.parametrize("direction", list(Direction))
def test_calls_on_kernels_that_leave_nothing_stay_whole(direction: Direction) -> None:
    plan = ring(256 * K)
    triton = target_with("triton", "triton", None, own_stream=True)
    program = compile_pass(plan, plan.direction(direction), triton).programs[0]
    assert {leaves(calls) for calls in calls_of(program)} == {(False,)}


def test_gathers_and_exchanges_are_timed_by_the_links_that_they_take() -> None:
    """Where all ranks are nodes of their own, more rows leave SMs than inside one node."""
    problem = Problem(256 * K, 32, 128)
    for plan in (
        make_plan(problem, 8, method="mesh", tile=(2, 4), head_slices=(8, 8)),
        make_plan(problem, 8, method="usp"),
    ):
        inside, between = (
            sum(
                call.q_stop - call.q_start
                for calls in calls_of(compiled(plan, links(ranks_per_node=ranks)))
                for call in calls
                if call.leave_sms
            )
            for ranks in (8, 1)
        )
        assert 0 < inside < between, plan.method


def test_a_program_compiled_for_no_mask_leaves_sms_as_a_mask_wants() -> None:
    """Where each task is one call, masks share all else of a program."""
    mask = Mask(causal=True, documents=(0, 20 * K, 64 * K))
    plan = make_plan(
        Problem(64 * K, 8, 128, mask=mask),
        4,
        method="mesh",
        tile=(2, 2),
        chunks=(2, 4),
        layout="zigzag",
        one_call=True,
    )
    base = replace(plan, problem=plan.problem.of_any_mask)
    target = target_with("flash_attn3", "flash_attn3", "cudnn_ranges", own_stream=True)
    compiler = PassCompiler(base, plan.forward, target)
    of_base, _ = compiler.compiled(0)
    expected, _ = PassCompiler(plan, plan.forward, target).compiled(0)
    assert compiler.leaving_sms(0, plan) == expected
    assert calls_of(expected) != calls_of(of_base)
