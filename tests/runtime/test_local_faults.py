"""Faults put in on purpose must be found, and documents must not leak into each other.

A comparison that would also pass with stale keys or a missing tile proves nothing; here each such
fault is made, and the same comparison that the other tests use has to fail.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from mesh_attention import Mask, Plan, verify
from mesh_attention.plan.language.buffers import Piece
from mesh_attention.plan.language.plan import Direction
from mesh_attention.plan.language.program import AllGather, Attend, AttendBackward, Communication
from mesh_attention.plan.problem.layout import LayoutKind
from mesh_attention.runtime.device import Marks
from mesh_attention.runtime.execute.attentions import Attentions, Work
from mesh_attention.runtime.execute.binding import Views
from mesh_attention.runtime.transport.interface import Handle, View
from mesh_attention.runtime.transport.local import LocalTransport
from mesh_attention.testing import run_local
from support.cases import Case
from support.listed import stretches_for
from support.reference import NAMES, attention, errors, tolerance

CASE = Case(
    6, 61, 61, mask=Mask(causal=True), dtype=torch.float32,
    options={"tile": (2, 3), "layout": "zigzag", "chunks": (2, 2)},
)  # fmt: skip


def distances(case: Case, plan: Plan | None = None) -> dict[str, float]:
    q, k, v, grad_out = case.tensors()
    result = run_local(plan or case.plan(), q, k, v, grad_out)
    results = {name: getattr(result, name) for name in NAMES}
    return errors(results, attention(q, k, v, grad_out, case.mask))


def test_without_a_fault_the_comparison_holds() -> None:
    assert max(distances(CASE).values()) <= tolerance(CASE.dtype)


def test_keys_of_the_wrong_place_in_backward_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a buffer still held the keys of the step before."""
    bind = Attentions.bind
    stale: dict[str, Tensor] = {}

    def with_stale_keys(self: Attentions, at: int, views: Views) -> Work:
        op = self.operations[at]
        if not isinstance(op, AttendBackward):
            return bind(self, at, views)
        keys = (op.k, op.v)

        class Stale(Views):
            def tokens(self, piece: Piece) -> Tensor:
                rows = views.tokens(piece)
                if piece not in keys:
                    return rows
                before = stale.setdefault(piece.buffer, rows.roll(1, 1).clone())
                return before if before.shape == rows.shape else rows

            def statistics(self, piece: Piece) -> Tensor:
                return views.statistics(piece)

        return lambda: bind(self, at, Stale({}))()  # bound when the keys are there

    monkeypatch.setattr(Attentions, "bind", with_stale_keys)
    results = distances(CASE)
    assert max(results["out"], results["lse"]) <= tolerance(CASE.dtype)
    assert min(results["grad_q"], results["grad_k"]) > 100 * tolerance(CASE.dtype)


def without_one_call(plan: Plan, direction: Direction) -> Plan:
    """The plan with one kernel call left out of one rank's program: a tile nobody computes."""
    pass_ = plan.direction(direction)
    program = pass_.programs[3]
    at = next(
        i
        for i, op in enumerate(program.operations)
        if isinstance(op, Attend | AttendBackward) and op.calls
    )
    op = program.operations[at]
    assert isinstance(op, Attend | AttendBackward)
    operations = list(program.operations)
    operations[at] = replace(op, calls=op.calls[1:])
    programs = list(pass_.programs)
    programs[3] = replace(program, operations=tuple(operations))
    broken = replace(pass_, programs=tuple(programs))
    return replace(plan, passes=tuple(broken if p is pass_ else p for p in plan.passes))


@pytest.mark.parametrize("direction", list(Direction))
def test_one_dropped_tile_is_found(direction: Direction) -> None:
    plan = without_one_call(CASE.plan(), direction)
    results = distances(CASE, plan)
    wrong = ("out", "lse") if direction is Direction.FORWARD else ("grad_q", "grad_k", "grad_v")
    assert min(results[name] for name in wrong) > 100 * tolerance(CASE.dtype)
    assert verify(plan)


def test_a_gather_that_never_arrives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers begin as NaN, so what was not received cannot look like a result."""
    start = LocalTransport.start

    class Done:
        ready = True

        def wait(self) -> None: ...

    def lose(self: LocalTransport, op: Communication, view: View, after: Marks) -> Handle:
        if isinstance(op, AllGather) and "Q" in op.name:
            return Done()
        return start(self, op, view, after)

    monkeypatch.setattr(LocalTransport, "start", lose)
    operations = CASE.plan().forward.programs[0].operations
    assert any(isinstance(op, AllGather) and "Q" in op.name for op in operations)
    assert distances(CASE)["out"] == torch.inf


@pytest.mark.parametrize(("layout", "causal"), [*zip(LayoutKind, (True, False) * 2, strict=True)])
def test_noise_in_one_document_leaves_the_others_bit_identical(
    layout: LayoutKind, causal: bool
) -> None:
    cuts = (0, 19, 50, 83)
    stretches = stretches_for(layout, Random(0), 83, 6)
    case = Case(
        6, 83, 83, mask=Mask(causal=causal, documents=cuts), dtype=torch.float32,
        options={"layout": layout, "chunks": (2, 2), "tile": (3, 2), "stretches": stretches},
    )  # fmt: skip
    plan = case.plan()
    tensors = case.tensors()
    quiet = run_local(plan, *tensors)
    noisy_inputs = [x.clone() for x in tensors]
    for x in noisy_inputs:
        x[:, cuts[1] : cuts[2]] += 50 * torch.randn_like(x[:, cuts[1] : cuts[2]])
    noisy = run_local(plan, *noisy_inputs)
    for name in NAMES:
        dim = 2 if name == "lse" else 1
        before, after = (getattr(result, name).movedim(dim, 0) for result in (quiet, noisy))
        for start, stop in (cuts[0:2], cuts[2:4]):
            assert torch.equal(before[start:stop], after[start:stop]), name
        assert not torch.equal(before[cuts[1] : cuts[2]], after[cuts[1] : cuts[2]]), name


@pytest.mark.parametrize("poisonous", [torch.nan, torch.inf])
def test_not_even_nan_leaks_out_of_a_document(poisonous: float) -> None:
    cuts = (0, 19, 50, 83)
    mask = Mask(causal=True, documents=cuts)
    case = Case(4, 83, 83, mask=mask, dtype=torch.float32, options={"layout": "zigzag"})
    q, k, v, grad_out = case.tensors()
    quiet = run_local(case.plan(), q, k, v, grad_out)
    v = v.clone()
    v[:, cuts[1] : cuts[2]] = poisonous
    noisy = run_local(case.plan(), q, k, v, grad_out)
    for name in ("out", "lse"):
        dim = 2 if name == "lse" else 1
        before, after = (getattr(result, name).movedim(dim, 0) for result in (quiet, noisy))
        assert torch.equal(before[: cuts[1]], after[: cuts[1]])
        assert torch.equal(before[cuts[2] :], after[cuts[2] :])
