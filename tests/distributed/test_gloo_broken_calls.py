"""A call that ends in the middle, by whatever exception, breaks the context of its process group.

What it left in flight could otherwise be taken for the data of the next call, which would be wrong
without an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, mesh_attention, register_kernel
from mesh_attention.kernels import BackwardInputs, Block
from mesh_attention.kernels.reference import Reference
from support.cases import Case
from support.gloo_case import attend, context, whole
from support.pool import WorkerPool
from support.raised import leave_with_all
from support.reference import attention, errors, tolerance

RANKS, ODD = 4, 1
TIMEOUT_SECONDS = 6.0  # longer than a busy machine takes to bring all ranks to a call
CASE = Case(RANKS, 48, 48, heads=(4, 4), mask=Mask(causal=True), dtype=torch.float32)
BROKEN = "everything on this group is refused, also for other ContextParallel objects"
FOREIGN = {"error": RuntimeError("out of memory, say"), "interrupt": KeyboardInterrupt("enough")}


class Failing(Reference):
    """Raises in the middle of a call, when `left` more calls of the kernel have been made."""

    name = "failing"

    def __init__(self) -> None:
        self.left = 10**9
        self.how = ""

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise FOREIGN[self.how]

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        self._count()
        return super().forward(block)

    def backward(self, block: Block, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        self._count()
        return super().backward(block, inputs)


def said(action: Any) -> str:
    """What kind of error, and its words."""
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail(rank: int, world_size: int, method: str, how: str, when: str, folder: str) -> None:
    """What is in flight stays so, so the process ends when it has written what it was told."""
    kernel = Failing()
    register_kernel(kernel)
    case = Case(**{**vars(CASE), "options": {"method": method}})
    cp, other = context(case, kernel="failing"), context(case)
    attend(cp, case)
    leaves = [cp.shard(x, 1).requires_grad_() for x in case.tensors()[:3]]

    def call() -> Tensor:
        out = cp.attention(*leaves)
        assert isinstance(out, Tensor)
        return out

    def arm() -> None:
        if rank == ODD:
            # A mesh makes one call of the kernel, when what it gathers is there; others several.
            kernel.left, kernel.how = 0 if method == "mesh" else 1, how

    if when == "forward":
        arm()
        first = said(call)
    else:
        out = call()
        arm()
        first = said(lambda: out.sum().backward())  # type: ignore[no-untyped-call]
    kernel.left = 10**9
    if first == "nothing":  # it needed nothing more of the odd rank
        leave_with_all(folder, rank, world_size, first)
    messages = [
        first,
        said(call),
        said(lambda: attend(other, case)),
        said(lambda: mesh_attention(*leaves, causal=True)),
        said(lambda: context(case)),
        said(lambda: cp.unshard(leaves[0], 1)),
    ]
    leave_with_all(folder, rank, world_size, "\n".join(messages))


@pytest.mark.parametrize(
    ("method", "how", "when"),
    [
        ("ring", "error", "forward"),
        ("ring-q", "error", "backward"),
        ("mesh", "interrupt", "forward"),
        ("mesh", "error", "backward"),
    ],
)
def test_a_foreign_exception_in_the_middle_of_a_call_breaks_the_context(
    pool: WorkerPool, tmp_path: Path, method: str, how: str, when: str
) -> None:
    everyone = tuple(range(RANKS))
    pool.run(
        *(fail, RANKS, method, how, when, str(tmp_path)),
        group_seconds=TIMEOUT_SECONDS,
        may_end=everyone,
    )
    for rank in everyone:
        first, *later = (tmp_path / str(rank)).read_text().split("\n")
        foreign = f"{type(FOREIGN[how]).__name__}: {FOREIGN[how]}"
        if rank == ODD:
            assert first == foreign
        elif first == "nothing":
            continue
        else:
            assert first.startswith(f"CommunicationError: rank {ODD} broke off a call: {foreign};")
        assert all(BROKEN in call for call in later), later


def interrupted_planning(rank: int, world_size: int) -> list[str]:
    """A rank that is interrupted before it speaks is out of step with the others."""
    cp = context(CASE)
    leaves = [cp.shard(x, 1) for x in CASE.tensors()[:3]]
    results = []
    if rank == ODD:
        refuses = Reference.refuses

        def interrupt(*inputs: Any) -> None:
            raise KeyboardInterrupt

        Reference.refuses = interrupt  # type: ignore[method-assign,assignment]
        results.append(said(lambda: context(CASE, kernel="reference").attention(*leaves)))
        Reference.refuses = refuses  # type: ignore[method-assign]
    else:
        results.append(said(lambda: context(CASE, kernel="reference").attention(*leaves)))
    results.append(said(lambda: cp.attention(*leaves)))
    return results


def test_a_rank_that_is_interrupted_before_the_agreement_refuses_what_follows(
    pool: WorkerPool,
) -> None:
    results = pool.run(interrupted_planning, RANKS, group_seconds=TIMEOUT_SECONDS)
    for rank, (first, second) in enumerate(results):
        if rank == ODD:
            assert first.startswith("KeyboardInterrupt")
            assert BROKEN in second
        else:
            assert first == f"DisagreementError: rank {ODD} broke off a call: KeyboardInterrupt()"
            assert f"rank {ODD} broke off a call" in second


def inference_first(rank: int, world_size: int, way: str) -> Any:
    """The first call of a kind in inference mode, then training with the same tensors' shapes."""
    cp = context(CASE)
    tensors = CASE.tensors()
    with torch.inference_mode():
        inferred = [cp.shard(x, 1) for x in tensors[:3]]
        if way == "function":
            out = mesh_attention(*inferred, causal=True, method="mesh")
        else:
            out = cp.attention(*inferred)
        assert isinstance(out, Tensor)
        assert not out.requires_grad
    part = attend(cp, CASE)
    with torch.inference_mode():
        again = cp.attention(*inferred)
    assert isinstance(again, Tensor)
    assert torch.equal(out, part.tensors["out"])
    assert torch.equal(again, out)
    cp.close()
    return part


@pytest.mark.parametrize("way", ["object", "function"])
def test_training_after_a_first_call_in_inference_mode_is_exact(pool: WorkerPool, way: str) -> None:
    parts = pool.run(inference_first, RANKS, way)
    distances = errors(whole(parts, CASE), attention(*CASE.tensors(), CASE.mask))
    assert max(distances.values()) <= tolerance(CASE.dtype)
