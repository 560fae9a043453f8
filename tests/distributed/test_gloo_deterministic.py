"""Need 35: a deterministic mode, in which two runs give the same bits, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mesh_attention import ContextParallel, Mask, MeshAttentionError, mesh_attention
from mesh_attention.kernels import MaskKind, register, unregister
from mesh_attention.kernels.blockwise import Blockwise
from support.cases import Case
from support.document_case import HEADS, make, tensors
from support.gloo_case import context
from support.pool import WorkerPool

CAUSAL = Mask(causal=True)
CASES = [
    Case(4, 45, 45, heads=(8, 4), mask=CAUSAL, dtype=torch.float32, options={"method": method})
    for method in ("mesh", "ring", "usp", "seen")
]
# Sums in flight: by collectives of gloo, and where parts arrive.
CASES += [
    Case(4, 45, 45, mask=CAUSAL, dtype=torch.float32, options={"tile": (2, 2), "combine": combine})
    for combine in ("reduce-scatter", "exchange")
]


class Loose(Blockwise):
    """Gives the same bits or not, as it comes: it does not promise any."""

    name = "loose"
    deterministic = False


def both_passes(cp: ContextParallel, whole: tuple[Tensor, ...], docs: Any = None) -> list[Tensor]:
    """Of this rank: outputs, and gradients of sinks too."""
    q, k, v, grad = (cp.shard(x, 1, documents=docs) for x in whole)
    sinks = torch.linspace(-1, 1, q.shape[2])
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, lse = cp.attention(*leaves[:3], sinks=sinks, documents=docs, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def chosen(cp: ContextParallel) -> list[tuple[str, str]]:
    """The kernels of both passes, and what is said of them."""
    kinds = tuple(
        f"{direction} {kind}" for direction in ("forward", "backward") for kind in MaskKind
    )
    return [reasons[-1] for name, reasons in cp.kernels().items() if name in kinds]


def two_runs(rank: int, world_size: int) -> list[tuple[bool, set[str]]]:
    """Each with an object of its own, the first of which made everything anew."""
    results = []
    for case in CASES:
        runs, said = [], set[str]()
        for times in (2, 1):
            with context(case, deterministic=True) as cp:
                runs += [both_passes(cp, case.tensors()) for _ in range(times)]
                said |= {what for _, what in chosen(cp)}
        same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
        results.append((same, said))
    with make(deterministic=True) as cp:
        for starts in ([0, 5, 64], [0, 1, 1, 30, 57]):
            whole = tensors(starts, 1)
            first, again = (both_passes(cp, whole, cp.documents(starts)) for _ in range(2))
            same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            results.append((same, {"chosen, deterministic"}))
    return results


def test_two_runs_give_the_same_bits_in_both_passes_with_documents_too(pool: WorkerPool) -> None:
    """Need 35: bit-equal, for several methods, with sinks, and for documents of a batch."""
    for result in pool.run(two_runs, 4):
        assert result == [(True, {"chosen, deterministic"})] * (len(CASES) + 2)


@contextmanager
def loose() -> Iterator[None]:
    register(Loose(), before="cpu_flash")
    try:
        yield
    finally:
        unregister("loose")


def refusals(rank: int, world_size: int) -> tuple[list[str], list[set[str]]]:
    """Where a kernel that cannot is forced, in both passes; and who is taken where it is not."""
    said, taken = list[str](), list[set[str]]()

    def attend(cp: ContextParallel, **changes: Any) -> None:
        whole = tensors([0, 32], 1)
        q, k, v = (cp.shard(x, 1).requires_grad_() for x in whole[:3])
        try:
            cp.attention(q, k, v, **changes)
        except MeshAttentionError as error:
            said.append(str(error))

    def function() -> None:
        q, k, v = (torch.zeros(1, 8, h, 8) for h in (HEADS, 3, 3))
        try:
            mesh_attention(q, k, v, causal=True, kernel="loose", deterministic=True)
        except MeshAttentionError as error:
            said.append(str(error))

    sizes: dict[str, Any] = {"seq_len": 32, "method": "mesh", "chunks": (1, 1)}
    with loose():
        with make(**sizes, deterministic=True, kernel="loose") as cp:
            attend(cp)
        function()
        with make(**sizes) as cp:  # asked of PyTorch after the object was made
            attend(cp)
            taken.append({name for name, _ in chosen(cp)})
            torch.use_deterministic_algorithms(True)
            try:
                attend(cp)
                taken.append({name for name, _ in chosen(cp)})
            finally:
                torch.use_deterministic_algorithms(False)
        with make(**sizes) as cp:  # on one rank alone
            if rank == 1:
                torch.use_deterministic_algorithms(True)
            try:
                attend(cp)
            finally:
                torch.use_deterministic_algorithms(False)
        try:
            make(**sizes, deterministic="yes")
        except MeshAttentionError as error:
            said.append(str(error))
    return said, taken


def test_a_kernel_that_promises_nothing_is_refused_by_name_on_all_ranks(pool: WorkerPool) -> None:
    """Need 35: forced, it is an error; left to choose, another takes its place."""
    for said, taken in pool.run(refusals, 2):
        forced, by_function, one_rank, no_flag = said
        for message in (forced, by_function):
            assert "kernel 'loose' cannot do" in message
            assert "forward pass is not deterministic" in message
        assert "loose" in taken[0]
        assert "loose" not in taken[1]
        assert "deterministic" in one_rank
        assert "required" in one_rank
        assert "deterministic='yes': must be True or False" in no_flag
