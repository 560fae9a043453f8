"""What contestants of `against_peers.py` compute, where they run, and how they are called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mesh_attention.errors import PlanError
from mesh_attention.machine.cluster import Cluster
from mesh_attention.measure.ranks import Ranks
from mesh_attention.plan.problem.mask import Mask
from mesh_attention.plan.problem.problem import Problem

MASKS = ("causal", "full", "window", "packed")


@dataclass(frozen=True)
class Cell:
    """What is computed: all contestants of a cell get the same tensors."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    mask_name: str  # of MASKS
    dtype: torch.dtype

    @property
    def problem(self) -> Problem:
        return Problem(
            self.tokens,
            self.heads,
            self.dim,
            num_kv_heads=self.kv_heads,
            element_bytes=self.dtype.itemsize,
            mask=self.mask,
        )

    @property
    def mask(self) -> Mask:
        """A window of an eighth of the tokens; documents of four lengths, each a multiple of a
        sixteenth of the tokens, because peers want them to divide."""
        if self.mask_name == "window":
            return Mask(causal=True, window=self.window)
        if self.mask_name == "packed":
            documents = tuple(self.tokens * x // 16 for x in (0, 1, 6, 8, 16))
            return Mask(causal=True, documents=documents)
        return Mask(causal=self.causal)

    @property
    def causal(self) -> bool:
        return self.mask_name != "full"

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and after a query's own, as flash-attn counts; -1: all."""
        return (self.tokens // 8 - 1, 0) if self.mask_name == "window" else (-1, -1)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def name(self) -> str:
        return f"{self.tokens}-{self.heads}x{self.kv_heads}x{self.dim}-{self.mask_name}"

    def refuse(self, *masks: str, because: str) -> None:
        if self.mask_name in masks:
            raise PlanError(because)


@dataclass(frozen=True)
class Surroundings:
    """Where a contestant runs: `cluster` was profiled on these ranks, `folder` has the truth."""

    ranks: Ranks
    cluster: Cluster
    folder: Path


class Contestant:
    """One that takes part, on one rank. Tensors come as (1, tokens, heads, head_dim) and are cut by
    `shard`: into contiguous parts, unless a contestant cuts them in another way."""

    setting = ""  # in words
    # Bytes, forward and backward, once both have run and where they can be counted.
    received: tuple[float, float] | None = None
    predicted: float | None = None  # seconds of both passes, by the simulator

    def __init__(self, cell: Cell, here: Surroundings) -> None:
        self._cell, self._n, self._rank = cell, here.ranks.size, here.ranks.rank

    def shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._n, 1)[self._rank].clone()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self) -> AbstractContextManager[None]:
        """Entered before a call is timed, left after its backward pass."""
        return nullcontext()

    def key(self) -> str:
        """Contestants with the same do the same; empty: like nobody else."""
        return ""

    def check(self) -> None:
        """Raises if a call went wrong, and counts the bytes of one where it can."""

    def close(self) -> None:
        pass
