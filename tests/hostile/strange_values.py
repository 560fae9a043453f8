"""Values that people hand to arguments by mistake, made anew each time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from mesh_attention import Mask, Problem

__all__ = ["random_value"]

_PLAIN: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 4, 7, -1, -2, 12, 10**9, 10**30, 0.0, 0.5, 1.5, 2.0, -1.0,
    float("nan"), float("inf"), 1e308, 1e-320, 1j, "", "3", "auto", "2x2", "nonsense", "\x1b[31m\n",
    "é" * 50, b"4", (), (1,), (1, 2), (0, 5), (-1, -1), (2, 0), (None, None), ("a", "b"), (1, 2, 3),
    range(3), object, len, Ellipsis, NotImplemented, np.int64(4), np.float32(0.5), np.bool_(True),
    torch.float32, torch.int64, torch.device("cpu"), torch.device("meta"), Fraction(1, 2),
    Decimal("0.5"), timedelta(seconds=5), timedelta(0), timedelta(-1), timedelta.max, Mask(),
    Mask(causal=True), Path("/no/such/file"), Problem(12, 4, 8), "ring", "zigzag", "sum", "q", "kv",
)  # fmt: skip
_MADE: tuple[Callable[[], Any], ...] = (
    list, dict, set, object,
    lambda: [1, 2],
    lambda: [0, 5, 12],
    lambda: [[0, 3], [0, 4]],
    lambda: {1: 2},
    lambda: (x for x in (0, 12)),
    lambda: iter([1, 2]),
    lambda: np.array([0, 12]),
    lambda: np.array(3),
    lambda: np.array([[1.0]]),
    lambda: torch.tensor(4),
    lambda: torch.tensor([0, 12]),
    lambda: torch.tensor([0, 5, 12], dtype=torch.int32),
    lambda: torch.randn(2, 12, 4, 8),
    lambda: torch.randn(2, 12, 4, 8, dtype=torch.float64).transpose(1, 2),
    lambda: torch.randint(9, (2, 12, 4, 8)),
    lambda: torch.randn(2, 12, 8, dtype=torch.float64),
    lambda: torch.randn(2, 12, 4, 8, dtype=torch.float64, device="meta"),
    lambda: torch.randn(2, 12, 4, 8, dtype=torch.complex128),
    lambda: torch.randn(3, 3).to_sparse(),
    lambda: torch.zeros(0),
    lambda: torch.ones(2, 12, dtype=torch.bool),
    lambda: torch.ones(2, 12, dtype=torch.int64),
    lambda: torch.ones(2, 5, dtype=torch.int64),
    lambda: torch.full((4,), float("nan"), dtype=torch.float64),
)  # fmt: skip


def random_value(draw: Random) -> Any:
    at = draw.randrange(len(_PLAIN) + len(_MADE))
    return _PLAIN[at] if at < len(_PLAIN) else _MADE[at - len(_PLAIN)]()
