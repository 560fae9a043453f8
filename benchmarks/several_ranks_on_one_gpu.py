"""Ranks that share one GPU: does a real multi-process plan give the right answer, and how fast?

    python benchmarks/several_ranks_on_one_gpu.py --ranks 4 --transport symmetric --json out.json

Relative errors of the output and the gradients against float64 for each setting, and then the time
of a warm call, forward and backward. Processes on one GPU take turns, and no link is crossed: the
times compare transports with each other and say nothing about several GPUs. NCCL refuses two ranks
on one GPU, so it is tried with one. The last line is JSON; a wrong answer is not timed and ends
with an error.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_rank import need_cuda
from script import host, provenance, save, script_parser
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

HEADS, KV_HEADS, DIM = 8, 2, 64
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 2e-6}
REPEATS = 5
TRANSPORTS = {"gloo": "distributed", "symmetric": "symmetric"}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1023)
    parser.add_argument("--transport", choices=TRANSPORTS, default="gloo")
    parser.add_argument("--output", type=Path, dest="json", help="another name of --json")
    args = parser.parse_args()
    need_cuda()
    # Read by PyTorch when ranks on one device show each other their memory.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    result = provenance() | {
        "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {host()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
        "columns": "errors: relative, against float64, of out, grad_q, grad_k, grad_v; "
        f"ms: a warm forward and backward, median of {REPEATS}, processes taking turns on one GPU; "
        "host_ms: the part of it until the call returns",
    }
    for backend, size, transport, name in (
        ("gloo", args.ranks, TRANSPORTS[args.transport], args.transport),
        ("nccl", 1, "auto", "nccl"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            spawn(_rank, (size, backend, transport, args.tokens, folder), size)  # type: ignore[no-untyped-call]
            result[f"{name} x {size}"] = json.loads((Path(folder) / "rows.json").read_text())
    save(args.json, result)
    print(json.dumps(result))


def _rank(rank: int, size: int, backend: str, transport: str, tokens: int, folder: str) -> None:
    torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(folder) / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    rows: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for causal in (False, True):
            row = _measure(dtype, causal, transport, tokens)
            name = f"{str(dtype).removeprefix('torch.')} {'causal' if causal else 'full'}"
            rows[name] = row
            if rank == 0:
                errors = " ".join(f"{e:.1e}" for e in row["errors"])
                times = f"{row['ms']} ms, {row['host_ms']} ms of the host"
                print(f"{backend} {size} {name}  {errors}  {times}", flush=True)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure(dtype: torch.dtype, causal: bool, transport: str, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, tokens, heads, DIM, device="cuda").to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    with ContextParallel(
        seq_len=tokens,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        causal=causal,
        method="mesh",
        chunks="2x2",
        dtype=dtype,
        transport=transport,  # type: ignore[arg-type]
    ) as cp:
        local = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
        local_grad = cp.shard(grad, 1)

        def call() -> tuple[Tensor, ...]:
            out = cp.attention(*local)
            assert isinstance(out, Tensor)
            return (out.detach(), *torch.autograd.grad(out, local, local_grad))

        errors = _errors([cp.unshard(x, 1) for x in call()], [q, k, v], grad, causal)
        if max(errors) > LIMIT[dtype]:
            raise SystemExit(f"wrong: {errors} for {dtype}, causal={causal}, over {transport}")
        times, host_times = [], []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            dist.barrier()
            begun = time.perf_counter()
            call()
            host_times.append(1000 * (time.perf_counter() - begun))
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begun))
        chosen = sorted({name for name, _ in cp.transports().values()})
    return {
        "errors": errors,
        "ms": round(statistics.median(times), 2),
        "host_ms": round(statistics.median(host_times), 2),
        "transports": chosen,
    }


def _errors(results: list[Tensor], inputs: list[Tensor], grad: Tensor, causal: bool) -> list[float]:
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in inputs]
    q, k, v = leaves
    truth = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    gradients = torch.autograd.grad(truth, leaves, grad.double().transpose(1, 2))
    return [
        float((a.double() - b.transpose(1, 2)).norm() / b.norm())
        for a, b in zip(results, [truth.detach(), *gradients], strict=True)
    ]


if __name__ == "__main__":
    main()
