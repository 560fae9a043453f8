"""Stand-ins on a real GPU: how long they last, what they take, what they write; a small replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from replay.measure import measure, with_kernels_here
from replay.rank import rank_to_replay
from replay.stand_in_data import STOCK_BYTES
from torch import Tensor

from mesh_attention import Mask, Problem
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.kernels import Block, Full
from mesh_attention.kernels.torch_ops import Cudnn
from mesh_attention.plan.language.buffers import Buffer, Kind, Precision
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import Communication, writes
from mesh_attention.runtime.transport.interface import Start

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def seconds_of(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    events[0].record(stream)
    work()
    events[1].record(stream)
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) * 1e-3


def buffer(kind: Kind = Kind.K, precision: Precision = Precision.ELEMENT) -> Buffer:
    return Buffer("there", kind, ((0, 1),), (0, 1), precision)


def landing(megabytes: int) -> list[tuple[Buffer, Tensor]]:
    rows = megabytes * 2**20 // (64 * 128 * 2)
    return [(buffer(), torch.empty(rows, 1, 64, 128, dtype=torch.bfloat16, device=DEVICE))]


@pytest.mark.alone
@pytest.mark.parametrize("sms", [0, 1, 16])
@pytest.mark.parametrize("microseconds", [100, 1000, 20000])
def test_stand_ins_last_as_long_as_they_should(sms: int, microseconds: int) -> None:
    from replay.hold import CudaHolder

    holder = CudaHolder(DEVICE, sms)
    wanted, count = microseconds * 1e-6, max(5, 20000 // microseconds)
    start = holder.prepare(landing(1), wanted)
    head_start = holder.prepare([], 0.02)  # or the host, not the stand-in, would be timed
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    for one in (start, head_start):
        one(())
    events[0].record(holder.stream)
    for _ in range(count):
        start(())
    events[1].record(holder.stream)
    torch.cuda.synchronize()
    found = float(events[0].elapsed_time(events[1])) * 1e-3 / count
    print(f"\n{sms} SMs: wanted {wanted * 1e6:.0f} us, found {found * 1e6:.2f} us")
    assert found == pytest.approx(wanted, rel=0.02)


def exchanged(megabytes: int) -> list[tuple[Buffer, Tensor]]:
    """What exchanges of heads bring back: two of 64 heads of every row, and their LSE."""
    rows = megabytes * 2**20 // (16 * 128 * 2)
    out = torch.empty(rows, 1, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(rows, 1, 64, 1, device=DEVICE)
    statistics_buffer = buffer(Kind.LSE, Precision.ACCUMULATE)
    found = []
    for head in range(0, 64, 8):
        found.append((buffer(Kind.OUT), out[:, :, head : head + 2]))
        found.append((statistics_buffer, lse[:, :, head : head + 2]))
    return found


@pytest.mark.alone
@pytest.mark.parametrize("what", [landing, exchanged])
def test_bytes_are_written_at_the_speed_of_memory(
    what: Callable[[int], list[tuple[Buffer, Tensor]]],
) -> None:
    from replay.hold import CudaHolder

    megabytes = 64
    for sms in (0, 16) if what is landing else (16,):
        holder = CudaHolder(DEVICE, sms)
        start = holder.prepare(what(megabytes), 0.0)
        start(())
        times = [seconds_of(lambda s=start: s(()), holder.stream) for _ in range(5)]  # type: ignore[misc]
        rate = megabytes * 2**20 / statistics.median(times) / 1e9
        print(f"\n{sms} SMs write {rate:.0f} GB/s")
        assert rate > 320, "slower than the fastest link that is modelled"


def attention(rows: int = 8192) -> Callable[[], object]:
    q, k, v = (torch.randn(1, rows, 64, 128, device=DEVICE).bfloat16() for _ in range(3))
    return lambda: Cudnn().forward(Block(q, k, v, Full(), 0.1))


def beside(start: Start, work: Callable[[], object]) -> float:
    """Seconds of work that is issued after a stand-in began."""
    torch.cuda.synchronize()
    start(())
    time.sleep(0.0005)  # by now its programs lie on their SMs
    return seconds_alone(work)


def seconds_alone(work: Callable[[], object]) -> float:
    stream = torch.cuda.current_stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record(stream)
    work()
    events[1].record(stream)
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) * 1e-3


@pytest.mark.alone
def test_attention_beside_a_stand_in_loses_its_sms() -> None:
    from replay.hold import CudaHolder

    work = attention()
    work()
    alone = statistics.median(seconds_alone(work) for _ in range(7))
    there = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for sms, least, most in ((0, 0.97, 1.05), (16, 1.06, 1.35), (32, 1.2, 1.8)):
        holder = CudaHolder(DEVICE, sms)
        start = holder.prepare(landing(1), 4 * alone)
        start(())
        found = statistics.median(beside(start, work) for _ in range(7))
        ratio = found / alone
        print(
            f"\nattention {alone * 1e3:.3f} ms alone, {found * 1e3:.3f} beside {sms} SMs: "
            f"{ratio:.3f}, by SMs {there / (there - sms):.3f}"
        )
        assert least <= ratio <= most


@pytest.mark.alone
def test_no_program_of_attention_fits_beside_a_stand_in_on_its_sm() -> None:
    """With a stand-in on every SM nothing that begins after it ends before it."""
    from replay.hold import CudaHolder

    there = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    lasts = 0.02
    for pieces in ([], landing(1)):
        holder = CudaHolder(DEVICE, there)
        start = holder.prepare(pieces, lasts)
        start(())
        work = attention(2048)
        work()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(holder.stream)
        start(())
        time.sleep(0.002)  # by now its programs lie on their SMs
        work()
        end.record()
        torch.cuda.synchronize()
        found = float(begin.elapsed_time(end)) * 1e-3
        print(f"\nattention ended {found * 1e3:.2f} ms after a stand-in of 20 ms began")
        assert found > lasts


@pytest.mark.parametrize("sms", [0, 3, 16])
@pytest.mark.parametrize("heads", [None, (8, 24), (1, 2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_byte_of_a_landing_is_written_and_no_other(
    sms: int, heads: tuple[int, int] | None, batch: int
) -> None:
    from replay.hold import CudaHolder

    holder = CudaHolder(DEVICE, sms)
    shapes = [
        (Kind.K, torch.bfloat16, (999, batch, 64, 128)),
        (Kind.LSE, torch.float32, (777, batch, 32, 1)),
        (Kind.DELTA, torch.float32, (50, batch, 27, 1)),
        (Kind.V, torch.bfloat16, (3, batch, 25, 80)),
        (Kind.GRAD_Q, torch.float32, (4100, batch, 32, 64)),
    ]
    for together in (shapes[:1], shapes[1:2], shapes):
        wholes = [torch.full(s, torch.nan, dtype=d, device=DEVICE) for _, d, s in together]
        torch.cuda.synchronize()  # what is written on the holder's stream waits for nothing else
        cuts = [w if heads is None else w[:, :, heads[0] : heads[1]] for w in wholes]
        landings = [(buffer(k), cut) for (k, _, _), cut in zip(together, cuts, strict=True)]
        holder.prepare(landings, 1e-5)(()).wait()
        torch.cuda.synchronize()
        for (kind, _, _), whole, cut in zip(together, wholes, cuts, strict=True):
            assert not cut.isnan().any()
            assert whole.isnan().sum() == whole.numel() - cut.numel()
            mean, spread = cut.float().mean().item(), cut.float().std().item()
            wide = 10 / min(cut.numel(), STOCK_BYTES // cut.element_size()) ** 0.5
            assert mean == pytest.approx(13.0 if kind is Kind.LSE else 0.0, abs=wide)
            assert 0.5 * (0.1 if kind.is_statistic else 1.0) < spread


@pytest.mark.alone
@pytest.mark.parametrize("sms", [0, 16])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("method", "options"),
    [("mesh", {"chunks": (2, 2)}), ("usp", {"ulysses": 4}), ("ring", {}), ("ulysses", {})],
)
def test_a_small_replay(
    method: str, options: dict[str, object], direction: Direction, sms: int
) -> None:
    problem = Problem(65536, 16, 128, mask=Mask(causal=True))
    cluster = with_kernels_here(load_cluster("hgx-h100"))
    plan = plan_on(cluster, problem, 16, method=method, directions=(direction,), **options)
    given = rank_to_replay(simulate(plan, cluster, direction))
    found = measure(given, sms=sms, repeats=3)
    one = found.to_json()
    print(
        f"\n{method} {direction} sms={sms}: {found.seconds * 1e3:.3f} ms, "
        f"alone {found.compute_seconds * 1e3:.3f}, predicted {one['predicted_seconds'] * 1e3:.3f}, "
        f"communication {one['communication_seconds'] * 1e3:.3f}, "
        f"peak {found.peak_bytes / 2**20:.1f} planned {found.planned_bytes / 2**20:.1f} MiB"
    )
    assert found.seconds > 0.98 * sum(given.seconds)
    assert found.seconds > 0.95 * found.compute_seconds
    # Small kernels leave the host too little time: each stand-in costs it some launches.
    launches = [
        len(list(writes(op))) for op in given.program.operations if isinstance(op, Communication)
    ]
    host = 20e-6 * (5 * len(launches) + sum(launches))
    assert found.seconds < 1.2 * (found.compute_seconds + sum(given.seconds)) + host
    assert found.peak_bytes - found.stand_in_bytes <= 1.03 * found.needed_bytes + 2**20
    assert found.peak_bytes >= 0.9 * found.needed_bytes
    assert found.needed_bytes <= found.planned_bytes
