"""Errors of half precision against float64, as tests/runtime/test_local_bf16.py says they count."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor

__all__ = ["TENSORS", "Errors"]

TENSORS = ("out", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class Errors:
    """Of one tensor, or their ratios to those of one device."""

    rows: float  # root mean square over rows of the relative error
    median: float  # of the same
    elements: float  # root mean square over elements, absolute
    largest: float  # of an element, absolute

    @staticmethod
    def of(result: Tensor, true: Tensor) -> Errors:
        wrong = result.double() - true
        size = true.norm(dim=-1)
        by_row = wrong.norm(dim=-1)[size > 0] / size[size > 0]
        return Errors(
            root_mean_square(by_row),
            by_row.median().item(),
            root_mean_square(wrong),
            wrong.abs().max().item(),
        )

    def over(self, other: Errors) -> Errors:
        return Errors(*(a / b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @staticmethod
    def worst(several: list[Errors]) -> Errors:
        """The largest of each."""
        return Errors(*map(max, zip(*map(astuple, several), strict=True)))


def root_mean_square(x: Tensor) -> float:
    return x.pow(2).mean().sqrt().item()
