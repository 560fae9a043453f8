"""Several gloo ranks that share one GPU: does a real multi-process plan give the right answer?

    python benchmarks/several_ranks_on_one_gpu.py --ranks 4

Prints the relative errors of the output and the gradients against float64 for each setting; the
last line is JSON. NCCL refuses two ranks on one GPU, so it is tried with one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import ContextParallel

TOKENS, HEADS, KV_HEADS, DIM = 1023, 8, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for backend, size in (("gloo", ranks), ("nccl", 1)):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            store = str(Path(folder) / "store")
            spawn(_rank, (size, backend, store, str(report)), size)  # type: ignore[no-untyped-call]
            results[f"{backend} x {size}"] = json.loads(report.read_text())
    print(json.dumps(results))


def _rank(rank: int, size: int, backend: str, store: str, report: str) -> None:
    torch.cuda.set_device(0)
    file_store = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=file_store, rank=rank, world_size=size)
    rows = {}
    for dtype in (torch.bfloat16, torch.float32):
        for causal in (False, True):
            errors = _errors(dtype, causal)
            name = f"{str(dtype).removeprefix('torch.')} {'causal' if causal else 'full'}"
            rows[name] = errors
            if rank == 0:
                print(backend, size, name, " ".join(f"{e:.1e}" for e in errors), flush=True)
    if rank == 0:
        Path(report).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _errors(dtype: torch.dtype, causal: bool) -> list[float]:
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, TOKENS, heads, DIM, device="cuda").to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    with ContextParallel(
        seq_len=TOKENS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        causal=causal,
        chunks="2x2",
        dtype=dtype,
    ) as cp:
        local = [cp.shard(x, 1).requires_grad_() for x in (q, k, v)]
        out = cp.attention(*local)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, local, cp.shard(grad, 1))
        found = [cp.unshard(x, 1) for x in (out.detach(), *grads)]
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    truth = scaled_dot_product_attention(
        leaves[0], leaves[1], leaves[2], is_causal=causal, enable_gqa=True
    )
    grad_truth = torch.autograd.grad(truth, leaves, grad.double().transpose(1, 2))
    wanted = [truth.detach(), *grad_truth]
    return [
        float((a.double() - b.transpose(1, 2)).norm() / b.norm())
        for a, b in zip(found, wanted, strict=True)
    ]


if __name__ == "__main__":
    main()
