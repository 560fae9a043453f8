"""How long a call of FlashAttention 3 takes beside a transfer, by the SMs that it leaves.

    python benchmarks/pairs_beside_transfers.py

A call without a mask whose heads have an even number of tiles runs in pairs of programs, and a pair
needs two SMs that lie together. Milliseconds of one head by tiles and SMs left: alone, beside a
stand-in of 16 SMs that began on an idle GPU, and beside one that began as another call ended.
Needs `fa3-fwd`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from device_times import need_cuda
from provenance import taken
from replay.measure import check_device
from torch import Tensor

SMS = 16
KEYS = 65536
TILE_ROWS = 128
TILES = (512, 511, 232, 231, 348, 345)  # 232 and 348 are two and three rounds of 116
LEFT = (SMS, 18, 20, 24, 28)
HOLD_SECONDS = 0.012
_TICKS = 200_000  # of the GPU's clock, so that what is queued begins at once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    need_cuda()
    device = check_device(SMS)
    import fa3_fwd._C  # type: ignore[import-not-found]  # noqa: F401  (registers the operator)
    from replay.hold import CudaHolder  # Triton comes with CUDA builds only

    def tokens(rows: int) -> Tensor:
        return torch.randn(1, rows, 1, 128, device=device, dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, margin: int) -> None:
        torch.ops.fa3_fwd.fwd(
            q, k, k, softmax_scale=0.088, is_causal=False, num_splits=1, sm_margin=margin
        )

    start = CudaHolder(device, SMS).prepare([], HOLD_SECONDS)
    other = partial(attend, tokens(KEYS), tokens(KEYS // 4), 0)

    def milliseconds(q: Tensor, k: Tensor, margin: int, beside: str) -> float:
        found = []
        for _ in range(given.repeats + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            if beside == "idle":
                start(())
            torch.cuda._sleep(_TICKS)  # type: ignore[no-untyped-call]
            if beside == "behind":
                mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
                mark.record()
                other()
                start((mark,))
            begin.record()
            attend(q, k, margin)
            end.record()
            torch.cuda.synchronize()
            found.append(float(begin.elapsed_time(end)))
        return statistics.median(found[1:])

    keys, rows = tokens(KEYS), []
    for tiles in TILES:
        q = tokens(tiles * TILE_ROWS)
        for beside in ("alone", "idle", "behind"):
            left = (0, *LEFT) if beside == "alone" else LEFT
            times = {str(margin): milliseconds(q, keys, margin, beside) for margin in left}
            rows.append({"tiles": tiles, "beside": beside, "ms_by_sms_left": times})
            said = ", ".join(f"{margin}: {ms:.3f}" for margin, ms in times.items())
            print(f"{tiles} tiles, {beside}: {said}", flush=True)
    if given.json:
        report = {**taken(), "machine": torch.cuda.get_device_name(device), "rows": rows}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
