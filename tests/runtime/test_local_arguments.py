"""What `run_local` cannot run is refused by name, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_attention import MeshAttentionError, Problem, make_plan
from mesh_attention.plan.language.plan import Direction
from mesh_attention.request.tensor_checks import fault_of_tensors
from mesh_attention.testing import run_local

PROBLEM = Problem(16, 2, 8, element_bytes=4)
PLAN = make_plan(PROBLEM, 2, method="mesh")
X = torch.zeros(1, 16, 2, 8)


@pytest.mark.parametrize("nonsense", [None, 5, PROBLEM])
def test_what_is_not_a_plan_is_refused(nonsense: Any) -> None:
    with pytest.raises(MeshAttentionError, match=f"{type(nonsense).__name__} is not a Plan"):
        run_local(nonsense, X, X, X)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((None, X, X), "q is NoneType; it must be a torch.Tensor"),
        ((X, 3, X), "k is int"),
        ((X, X, [1.0]), "v is list"),
        ((X, X, X, "ones"), "grad_out is str"),
        ((torch.tensor(1.0), X, X), "q has shape \\(\\)"),
        ((X[0], X, X), "q has shape \\(16, 2, 8\\)"),
        ((X, X, X[:, 1:]), "v has shape \\(1, 15, 2, 8\\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MeshAttentionError, match=message):
        run_local(PLAN, *inputs)


@pytest.mark.parametrize(
    ("q", "way_out"),
    [
        (X, "cut the whole tensor with ContextParallel.shard(x, 1)"),
        (X[:, :8].transpose(1, 2), "heads come after tokens: give x.transpose(1, 2)"),
        (X.transpose(1, 2), "give x.transpose(1, 2), and cut the whole tensor"),
        (X[:, :8, :1], "this ContextParallel was made for 2 such heads of 8"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_what_is_wrong_in_it(
    q: torch.Tensor, way_out: str
) -> None:
    assert way_out in str(fault_of_tensors(PLAN, q, X[:, :8], X[:, :8]))


@pytest.mark.parametrize("scale", ["1", float("nan"), 0, True])
def test_a_scale_that_is_no_number_is_refused(scale: Any) -> None:
    with pytest.raises(MeshAttentionError, match="softmax_scale="):
        run_local(PLAN, X, X, X, softmax_scale=scale)


def test_gradients_of_a_plan_without_a_backward_pass_are_refused() -> None:
    forward = make_plan(PROBLEM, 2, method="mesh", directions=(Direction.FORWARD,))
    assert run_local(forward, X, X, X).grad_q is None
    with pytest.raises(
        MeshAttentionError, match="has no backward pass; it has: forward; make_plan"
    ):
        run_local(forward, X, X, X, X)
