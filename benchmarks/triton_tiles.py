"""Which tiles make our Triton attention kernels fastest on this GPU: for the table `tiles_for`.

    python benchmarks/triton_tiles.py --head-dim 128 --pass forward

One pass after another, causal, bf16, with every candidate in the place of the tile that the table
has: TFLOP/s by the pairs that the mask shows, the fastest first. One that does not compile or needs
more than the GPU has is left out, and said. Results are held against those of the table's own tile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
from device_times import milliseconds, need_cuda
from torch import Tensor

from mesh_attention.kernels import BackwardInputs, Block, Causal
from mesh_attention.kernels.launches import KernelTile
from mesh_attention.kernels.rows import delta
from mesh_attention.kernels.triton_ranges import KernelTiles, TritonRanges, tiles_for

PASSES = ("forward", "backward_queries", "backward_keys")


def candidates(name: str, stages: tuple[int, ...]) -> Iterator[KernelTile]:
    """In the inner loop are keys, and for dK and dV rows."""
    flags = list(product((False, True), repeat=2))
    for outer, inner in ((128, 128), (128, 64), (64, 128), (64, 64)):
        rows, keys = (inner, outer) if name == "backward_keys" else (outer, inner)
        for warps, stage, (described, ahead) in product((4, 8), stages, flags):
            if outer >= 16 * warps:  # the rows of a warp's matrix products
                yield KernelTile(rows, keys, warps, stage, described, ahead)


def work(
    kernel: TritonRanges, tensors: list[Tensor], name: str
) -> Callable[[], tuple[Tensor, ...]]:
    q, k, v, grad_out = tensors
    block = Block(q, k, v, Causal(), q.shape[3] ** -0.5)
    if name == "forward":
        return lambda: kernel.forward(block)
    out, lse = TritonRanges().forward(block)
    given = BackwardInputs(grad_out, None, lse, delta(out, grad_out))
    return lambda: kernel.backward(block, given)


def measure(tiles: KernelTiles, name: str, tensors: list[Tensor], repeats: int) -> float | str:
    """Milliseconds, or why there are none."""
    run = work(TritonRanges(tiles=tiles), tensors, name)
    try:
        found = run()
    except (
        Exception
    ) as error:  # Triton's errors of resources and of compilation have no common kind
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for x, expected in zip(found, work(TritonRanges(), tensors, name)(), strict=True):
        off = float((x.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not off < 2e-2:
            return f"wrong by {off:.1e}"
    return milliseconds(run, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int)
    parser.add_argument("--pass", dest="name", choices=PASSES, default="forward")
    parser.add_argument("--stages", type=int, nargs="+", default=(2, 3))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    need_cuda()
    D, E = given.head_dim, given.v_head_dim or given.head_dim
    tensors = [
        torch.randn(1, given.tokens, heads, width, device="cuda", dtype=torch.bfloat16)
        for heads, width in (
            *((given.heads, D), (given.kv_heads, D)),
            *((given.kv_heads, E), (given.heads, E)),
        )
    ]
    now = tiles_for(torch.cuda.get_device_capability(), torch.bfloat16, D, E)
    pairs = given.heads * given.tokens * (given.tokens + 1) / 2
    flops = pairs * (2 * (D + E) if given.name == "forward" else 2 * (3 * D + 2 * E))
    found = []
    for tile in (getattr(now, given.name), *candidates(given.name, tuple(given.stages))):
        time = measure(now._replace(**{given.name: tile}), given.name, tensors, given.repeats)
        if isinstance(time, str):
            print(f"{tuple(tile)}: {time}", flush=True)
        else:
            found.append((time, tile))
            print(f"{tuple(tile)}: {flops / time / 1e9:.0f}", flush=True)
    print(f"fastest of {given.name}, milliseconds; the table has {tuple(getattr(now, given.name))}")
    for time, tile in sorted(found)[:10]:
        print(f"{time:8.3f}  {flops / time / 1e9:5.0f} TFLOP/s  {tile}")


if __name__ == "__main__":
    main()
