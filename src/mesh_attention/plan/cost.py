"""Rough costs that order tasks while planning.

The schedulers need ratios, not truth: how long a transfer lasts beside a piece of attention. The
defaults are assumed round numbers (40 GB/s a rank for collectives, 500 TFLOP/s of attention);
a described cluster gives better ones.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    bytes_per_second: float = 40e9
    flops_per_second: float = 500e12
    latency_seconds: float = 20e-6

    def communication_seconds(self, num_bytes: float, num_operations: int = 1) -> float:
        return num_operations * self.latency_seconds + num_bytes / self.bytes_per_second

    def compute_seconds(self, flops: float) -> float:
        return flops / self.flops_per_second
