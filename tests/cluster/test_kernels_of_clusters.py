"""The simulator knows kernels: which one does an attention, and what a transfer beside it finds."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from fixed_costs import undisturbed
from simulated_cases import compiled_rank, timed_calls

from mesh_attention import Mask, Problem
from mesh_attention.choose.ask import make_plan
from mesh_attention.choose.auto import find_best
from mesh_attention.cli.main import main
from mesh_attention.cost import Cluster, load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.kernels import KernelRefusedError, MaskKind, Request, choose
from mesh_attention.machine.kernel_facts import (
    KernelRate,
    KernelRates,
    PassRates,
    library_kernels,
)
from mesh_attention.machine.load import ClusterError, parse_cluster
from mesh_attention.machine.seconds import CallSize, kernel_seconds, lost_by_leaving
from mesh_attention.plan.language.plan import Direction, Plan
from mesh_attention.plan.language.program import Attend

CAUSAL = Problem(1 << 16, 64, 128, mask=Mask(causal=True))
PACKED = replace(CAUSAL, mask=Mask(causal=True, documents=(0, 9000, 30000, 1 << 16)))
RATE = KernelRate(1e-3, 0.0, 0.0)  # a FLOP a nanosecond
DENSE = PassRates(False, True, 0, 0.0, RATE, RATE, RATE)
KEYS_IN_RUNS = {
    name
    for name, rates in library_kernels().items()
    if rates.backward and rates.backward.keys_in_runs
}
RANGES = PassRates(True, True, 0, 0.0, RATE, None, RATE)


def having(cluster: Cluster, **kernels: PassRates) -> Cluster:
    both = {name: KernelRates(rates, rates) for name, rates in kernels.items()}
    return replace(cluster, kernels=both)


def without(cluster: Cluster, *names: str) -> Cluster:
    kept = {name: rates for name, rates in cluster.kernels.items() if name not in names}
    return replace(cluster, kernels=kept)


def slow_memory() -> Cluster:
    """A byte a nanosecond, and nothing else costs anything."""
    base = undisturbed()
    return replace(base, gpu=replace(base.gpu, memory_gb_per_second=1.0, gap_microseconds=0.0))


def zigzag() -> Plan:
    """Two ranks, 32 rows each in two halves, four heads of 8 on two KV heads: a rank's own block is
    two causal squares of 16 and a full one."""
    problem = Problem(64, 4, 8, num_kv_heads=2, mask=Mask(causal=True))
    return make_plan(problem, 2, method="ring", layout="zigzag")


PAIRS = 2 * (16 * 17 // 2) + 16 * 16
FORWARD_FLOPS = 4 * PAIRS * 4 * 8


def test_rectangles_are_merged_and_one_call_for_all_stores_what_is_fresh() -> None:
    """Both take the same FLOP; rectangles read and write 48 rows, all but the last 16 beside the
    next call where there is a stream for it, and one call writes 32."""
    dense = having(slow_memory(), dense=DENSE)
    for host_driven, rows in ((False, 16), (True, 48)):
        where = replace(dense, host_driven=host_driven)
        (cut,) = timed_calls(zigzag(), where, Direction.FORWARD)
        assert cut.seconds * 1e9 == pytest.approx(FORWARD_FLOPS + rows * 4 * 8 * (2 + 4 + 4))
    (whole,) = timed_calls(zigzag(), having(slow_memory(), ranges=RANGES), Direction.FORWARD)
    assert whole.seconds * 1e9 == pytest.approx(FORWARD_FLOPS + 32 * 4 * 8 * (2 + 4))
    both = having(slow_memory(), dense=DENSE, ranges=RANGES)
    assert timed_calls(zigzag(), both, Direction.FORWARD) == (whole,)
    assert whole.kernel == "ranges"
    faster = replace(DENSE, full=replace(RATE, tflops=1.0), causal=replace(RATE, tflops=1.0))
    cheap = replace(both, gpu=replace(both.gpu, memory_gb_per_second=1e3))
    quick = having(cheap, dense=faster, ranges=RANGES)
    assert [call.kernel for call in timed_calls(zigzag(), quick, Direction.FORWARD)] == ["dense"]


def test_backward_in_one_call_stores_three_gradients() -> None:
    (whole,) = timed_calls(zigzag(), having(slow_memory(), ranges=RANGES), Direction.BACKWARD)
    stored = 32 * (4 * 8 + 2 * 16) * (2 + 4)
    assert whole.seconds * 1e9 == pytest.approx(2.5 * FORWARD_FLOPS + stored)


def test_a_row_range_counts_columns_by_what_rows_see() -> None:
    """As a causal square of as many pairs: 2 * 528 / 32 = 33 columns."""
    curve = KernelRate(1e-3, 0.0, 33.0)
    (plain,) = timed_calls(zigzag(), having(slow_memory(), ranges=RANGES), Direction.FORWARD)
    slow = having(slow_memory(), ranges=replace(RANGES, range=curve))
    (half,) = timed_calls(zigzag(), slow, Direction.FORWARD)
    assert (half.seconds - plain.seconds) * 1e9 == pytest.approx(FORWARD_FLOPS)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("problem", [CAUSAL, PACKED], ids=["causal", "packed"])
def test_time_falls_when_a_kernel_that_takes_any_mask_is_added(
    problem: Problem, direction: Direction
) -> None:
    """As fast as the other for rectangles, but without merges, and nothing unseen is computed."""
    hgx = load_cluster("hgx-h100")
    square, slow = KernelRate(600.0, 60.0, 500.0), KernelRate(300.0, 60.0, 500.0)
    dense = PassRates(False, True, 0, 40.0, square, square, slow)
    ranges = PassRates(True, True, 0, 40.0, square, None, square)
    plan = plan_on(hgx, problem, 16, method="mesh", tile=(4, 4), directions=(direction,))
    before = simulate(plan, having(hgx, dense=dense), direction)
    after = simulate(plan, having(hgx, dense=dense, ranges=ranges), direction)
    assert after.runtime_seconds < 0.97 * before.runtime_seconds
    assert after.kernels["ranges"] > 0.9
    assert set(before.kernels) == {"dense"}


def test_a_kernel_that_lets_transfers_begin_hides_what_another_exposes() -> None:
    hgx = load_cluster("hgx-h100")
    plan = plan_on(hgx, CAUSAL, 16, method="mesh", tile=(4, 4), directions=(Direction.FORWARD,))
    rate = KernelRate(700.0, 60.0, 400.0)
    lets = PassRates(False, True, 0, 40.0, rate, rate, rate)
    holds = replace(lets, lets_transfers_begin=False)
    hidden, exposed = (simulate(plan, having(hgx, only=rates)) for rates in (lets, holds))
    assert hidden.exposed_communication_seconds < 0.8 * exposed.exposed_communication_seconds
    assert hidden.runtime_seconds < exposed.runtime_seconds


def test_one_call_that_holds_the_gpu_must_be_half_as_fast_again_as_rectangles() -> None:
    """Where there are communications: one rank alone takes the faster way."""
    holds = replace(RANGES, lets_transfers_begin=False)
    base = undisturbed()
    where = replace(base, gpu=replace(base.gpu, gap_microseconds=0.0))

    def chosen(times: float, plan: Plan) -> str:
        rate = replace(RATE, tflops=times * RATE.tflops)
        fast = replace(holds, full=rate, range=rate)
        return timed_calls(plan, having(where, dense=DENSE, holds=fast), Direction.FORWARD)[
            0
        ].kernel

    assert [chosen(times, zigzag()) for times in (1.4, 1.6)] == ["dense", "holds"]
    alone = make_plan(Problem(64, 4, 8, mask=Mask(causal=True)), 1, method="mesh")
    assert chosen(1.1, alone) == "holds"


def test_beside_a_transfer_a_call_loses_the_sms_that_it_leaves_and_no_call_does_otherwise() -> None:
    """16 of 132, and nothing else."""
    hgx = load_cluster("hgx-h100")
    plan = plan_on(hgx, CAUSAL, 2, method="ring", directions=(Direction.FORWARD,))
    slow = replace(hgx, node=replace(hgx.node, peer=replace(hgx.node.peer, gb_per_second=0.001)))
    fast = KernelRate(500.0, 0.0, 0.0)
    kernel = PassRates(False, True, 0, 0.0, fast, fast, fast)

    def first(cluster: Cluster, margin: int) -> float:
        """Of rank 0's first attention, beside which the next block is on its way all the time."""
        timeline = simulate(plan, having(cluster, only=replace(kernel, sm_margin=margin)))
        event = next(e for e in timeline.events(0) if e.kind == "Attend")
        return event.end - event.start

    alone = replace(slow, disturbance=replace(slow.disturbance, compute_slowdown=0.0))
    assert first(slow, 16) == pytest.approx(first(alone, 0) * 132 / 116)
    single_rank_plan = make_plan(Problem(4096, 4, 8), 1, method="mesh")
    margins = [
        simulate(single_rank_plan, having(hgx, only=replace(kernel, sm_margin=m))).runtime_seconds
        for m in (0, 16)
    ]
    assert margins[0] == margins[1]


def test_a_kernel_can_be_asked_for_and_others_do_what_it_cannot() -> None:
    hgx = load_cluster("hgx-h100")
    plan = plan_on(hgx, PACKED, 8, method="mesh")
    assert set(simulate(plan, hgx, "forward", kernel="triton").kernels) == {"triton"}
    others = simulate(plan, hgx, "backward", kernel="flash_attn3").kernels
    assert others
    assert "flash_attn3" not in others
    best = find_best(CAUSAL, 4, hgx, method="mesh", kernel="cudnn", options={"chunks": (1, 1)})
    for setting in best.chosen.values():
        assert setting.timeline is not None
        assert set(setting.timeline.kernels) == {"cudnn"}
    with pytest.raises(ClusterError, match="kernel=fast: hgx-h100 has curves of cuda_flash, cudnn"):
        simulate(plan, hgx, kernel="fast")


def test_the_summary_and_json_name_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--method", "mesh", "--ranks", "8", "--tokens", "65536", "--heads", "64"]
    command += ["--causal"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for direction in Direction:
        used = simulate(
            plan_on("hgx-h100", CAUSAL, 8, method="mesh"), "hgx-h100", direction
        ).kernels
        line = next(x for x in text.splitlines() if x.startswith(f"{direction}: kernel"))
        assert used
        assert all(name in line for name in used)
    assert main([*command, "--kernel", "cudnn", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["forward"]["kernels"] == answer["backward"]["kernels"] == {"cudnn": 1.0}
    assert main([*command, "--kernel", "fast"]) == 2
    assert "--kernel fast: hgx-h100 has curves of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ('[more_kernels.mine]\n', "kernels.mine has neither forward nor backward"),
        (
            "[more_kernels.mine.forward]\nranges = false\nlets_transfers_begin = true\n"
            "sm_margin = 0\nlaunch_microseconds = 1\n",
            "kernels.mine.forward has no curve",
        ),
        ('[more_kernels.""]\n', "is not the name of a kernel"),
        ('[more_kernels."a\\nb"]\n', "is not the name of a kernel"),
    ],
)  # fmt: skip
def test_a_kernel_that_can_do_nothing_is_refused(kernels: str, message: str) -> None:
    text = files("mesh_attention.machine").joinpath("clusters/hgx-h100.toml").read_text()
    with pytest.raises(ClusterError, match=message):
        parse_cluster(f"{text}\n{kernels}", "mine")


def test_a_kernel_may_be_as_fast_as_the_gpu_and_no_faster() -> None:
    text = files("mesh_attention.machine").joinpath("clusters/a100-roce.toml").read_text()
    assert parse_cluster(text.replace("tflops = 228 ", "tflops = 312 "), "mine")
    with pytest.raises(ClusterError, match=r"is faster than gpu\.peak_tflops = 312"):
        parse_cluster(text.replace("tflops = 228 ", "tflops = 313 "), "mine")


@pytest.mark.parametrize("direction", list(Direction))
def test_keys_one_by_one_and_padded_rows_go_to_the_kernels_that_the_runtime_would_use(
    direction: Direction,
) -> None:
    cluster = load_cluster("hgx-h100")
    refusing = {}
    for tokens, layout in ((1 << 16, "zigzag"), (1 << 16, "striped"), ((1 << 16) - 3, "zigzag")):
        problem = replace(CAUSAL, q_tokens=tokens, kv_tokens=tokens)
        plan = make_plan(problem, 8, method="ring", layout=layout, directions=(direction,))
        used = simulate(plan, cluster, direction).kernel_seconds
        request = Request(
            *(direction, "cuda", (9, 0), torch.bfloat16, 128, 128, 64, 64, MaskKind.RANGE),
            scattered=layout == "striped",
            padded=plan.q_layout.padded_tokens > tokens,
        )
        for name in KEYS_IN_RUNS:
            with pytest.raises(KernelRefusedError) as refused:  # there is no GPU, or no package
                choose(request, force=name)
            message = str(refused.value)
            refusing[tokens, layout] = "in runs" in message or "reads padded rows" in message
            assert not refusing[tokens, layout] or name not in used
    assert [*refusing.values()] == [False, True, True]
    alone = without(cluster, *(name for name in cluster.kernels if name not in KEYS_IN_RUNS))
    # With nothing else to be had, it is counted with.
    assert set(simulate(plan, alone, direction).kernel_seconds) == KEYS_IN_RUNS


def few_sms(sms: int) -> Cluster:
    base = undisturbed()
    return replace(base, gpu=replace(base.gpu, sms=sms, gap_microseconds=0.0))


@pytest.mark.parametrize(
    ("tiles", "rounds", "lost"),
    [
        (4, 1, 1 / 2),  # as many tiles as SMs: a second round without the one that is left
        (3, 1, 1 / 4),
        (6, 2, 1 / 4),
        (8, 2, 1 / 3),
        (12, 3, 1 / 4),  # the next call fills the rounds of long ones
        (14, 3.75, 1 / 4),  # by half
    ],
)
def test_full_calls_last_rounds_of_tiles_and_short_ones_another_beside_a_transfer(
    tiles: int, rounds: float, lost: float
) -> None:
    """A tile takes a second on an SM of four, of which one is left to transfers."""
    rates = PassRates(False, True, 1, 0.0, RATE, RATE, RATE, tile_rows=128)
    size = CallSize("full", 128 * tiles, 128, 128 * 128 * tiles, 1, 1)
    for pass_rates, seconds, part in (
        (rates, rounds, lost),
        (replace(rates, tile_rows=None), tiles / 4, 1 / 4),
    ):
        call_seconds = kernel_seconds(pass_rates, few_sms(4).gpu, size, tiles / 4 * 1e9)
        assert call_seconds == pytest.approx(seconds)
        assert lost_by_leaving(pass_rates, 4, size, 1) == pytest.approx(part)


@pytest.mark.parametrize("rows", [16 * 128, 17 * 128, 60 * 128])
def test_a_call_in_two_parts_of_which_one_leaves_sms_takes_no_longer_than_in_one(rows: int) -> None:
    rates = PassRates(False, True, 16, 0.0, RATE, RATE, RATE, tile_rows=128)
    where = having(few_sms(20), only=rates)
    plan = make_plan(Problem(rows, 1, 128), 1, method="mesh", chunks=(1, 1))
    program, costs = compiled_rank(plan, where, Direction.FORWARD)
    op = next(op for op in program.operations if isinstance(op, Attend))
    (call,) = op.calls
    parts = replace(call, q_stop=9 * 128), replace(call, q_start=9 * 128, leave_sms=16)
    whole, split = (
        sum(
            call.seconds for call in costs.compute(replace(op, calls=calls), program.buffer_table())
        )
        for calls in (op.calls, parts)
    )
    assert split == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("rows", "longer"), [(2 * 128, 4.0), (4 * 128, 2.0), (16 * 128, 1.0)])
def test_no_causal_square_takes_less_time_than_its_last_tile(rows: int, longer: float) -> None:
    rates = PassRates(False, True, 0, 0.0, RATE, RATE, RATE, tile_rows=128)
    problem = Problem(rows, 1, 128, mask=Mask(causal=True))
    plan = make_plan(problem, 1, method="mesh", chunks=(1, 1), directions=(Direction.FORWARD,))
    tiled, untiled = (
        timed_calls(plan, having(few_sms(4), only=pass_rates), Direction.FORWARD)[0].seconds
        for pass_rates in (rates, replace(rates, tile_rows=None))
    )
    assert tiled / untiled == pytest.approx(longer, rel=1e-3)
