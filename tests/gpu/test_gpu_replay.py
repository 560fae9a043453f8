"""Stand-ins on a real GPU: what they write, how long they last, which SMs they take; a small replay
and its memory.

Other tests use the GPU too, so that times have a lower bound only: a stand-in that is over early,
or leaves SMs that it should take, would flatter a replay. On an idle GPU: docs/replay.md.
"""

from __future__ import annotations

import time

import pytest
import torch
from one_rank import timing_events
from replay.measure import measure, with_kernels_here
from replay.rank import rank_to_replay
from replay.stand_in_data import STOCK_BYTES

from mesh_attention import Mask, Problem
from mesh_attention.cost import load_cluster, simulate
from mesh_attention.cost.planning import plan_on
from mesh_attention.kernels import Block, Full
from mesh_attention.kernels.torch_ops import Cudnn
from mesh_attention.plan.language.buffers import Buffer, Kind, Precision
from mesh_attention.plan.language.plan import Direction

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def buffer(kind: Kind = Kind.K, precision: Precision = Precision.ELEMENT) -> Buffer:
    return Buffer("there", kind, ((0, 1),), (0, 1), precision)


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


@pytest.mark.parametrize("sms", [0, 1, 16])
@pytest.mark.parametrize("lasts", [1e-4, 1e-3, 2e-2])
def test_a_stand_in_is_not_over_before_its_time(sms: int, lasts: float) -> None:
    from replay.hold import CudaHolder

    holder = CudaHolder(DEVICE, sms)
    start = holder.prepare(
        [(buffer(), torch.empty(64, 1, 64, 128, device=DEVICE).bfloat16())], lasts
    )
    start(())  # compiles the kernel
    holder.prepare([], 0.02)(())  # or the host, not the stand-in, would be timed
    begin, end = timing_events()
    begin.record(holder.stream)
    for _ in range(5):
        start(())
    end.record(holder.stream)
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) * 1e-3 / 5 >= 0.98 * lasts


def test_attention_waits_for_a_stand_in_on_every_sm() -> None:
    from replay.hold import CudaHolder

    lasts = 0.02
    q, k, v = (torch.randn(1, 2048, 64, 128, device=DEVICE).bfloat16() for _ in range(3))
    block = Block(q, k, v, Full(), 0.1)
    Cudnn().forward(block)
    every = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    ended = {}
    for sms in (every, 16):
        holder = CudaHolder(DEVICE, sms)
        start = holder.prepare([], lasts)
        start(())
        torch.cuda.synchronize()
        begin, end = timing_events()
        begin.record(holder.stream)
        start(())
        time.sleep(0.002)  # by now its programs lie on their SMs
        Cudnn().forward(block)
        end.record()
        torch.cuda.synchronize()
        ended[sms] = begin.elapsed_time(end) * 1e-3
    assert ended[every] >= 0.98 * lasts
    assert ended[16] < ended[every]


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
    replay = measure(rank_to_replay(simulate(plan, cluster, direction)), sms=sms, repeats=3)
    report = replay.to_json()
    assert report["predicted_seconds"] > 0
    assert replay.seconds > 0
    assert replay.peak_bytes - replay.stand_in_bytes <= 1.03 * replay.needed_bytes + 2**20
    assert replay.peak_bytes >= 0.9 * replay.needed_bytes
    assert replay.needed_bytes <= replay.planned_bytes
