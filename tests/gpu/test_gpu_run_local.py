"""Plans on a CUDA device with all ranks in one process: real kernels, real workspace."""

import pytest
import torch

from mesh_attention.choose.ask import make_plan
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem
from mesh_attention.testing import LocalResult, run_local

pytestmark = pytest.mark.gpu

N, HEADS, KV_HEADS, DIM = 1024, 8, 2, 64


def _inputs(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(2, N, h, DIM, device=device).to(dtype) for h in heads]


def _errors(result: LocalResult, truth: LocalResult) -> list[float]:
    pairs = [
        (result.out, truth.out),
        (result.grad_q, truth.grad_q),
        (result.grad_k, truth.grad_k),
        (result.grad_v, truth.grad_v),
    ]
    errors = []
    for results, true in pairs:
        assert results is not None
        assert true is not None
        difference = results.double() - true.double().to(results.device)
        errors.append(float(difference.norm() / true.double().norm()))
    return errors


def _run(ranks: int, dtype: torch.dtype, device: str, mask: Mask, tensors: list[torch.Tensor]):  # type: ignore[no-untyped-def]
    problem = Problem(N, HEADS, DIM, num_kv_heads=KV_HEADS, element_bytes=dtype.itemsize, mask=mask)
    plan = make_plan(problem, ranks, method="mesh", chunks=(2, 2))
    return run_local(plan, *(x.to(device, dtype) for x in tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=(200, 0))])
def test_cuda_plans_are_as_exact_as_one_device(dtype: torch.dtype, mask: Mask) -> None:
    tensors = _inputs(dtype, "cuda")
    truth = _run(1, torch.float64, "cpu", mask, tensors)
    single = _errors(_run(1, dtype, "cuda", mask, tensors), truth)
    floor = 1e-6 if dtype == torch.float32 else 1e-4
    for ranks in (2, 4, 9, 16):
        for alone, many in zip(
            single, _errors(_run(ranks, dtype, "cuda", mask, tensors), truth), strict=True
        ):
            assert many <= 2 * alone + floor, (ranks, single, many)
